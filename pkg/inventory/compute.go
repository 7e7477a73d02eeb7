package inventory

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// ComputeMode is which processes may use a card. It is the driver's, for all processes of the machine, until the driver is loaded
// again (NVML API reference, nvmlComputeMode_t).
type ComputeMode int

// The compute modes. A change doesn't end processes that use the card already.
const (
	// ComputeDefault lets every process use the card.
	ComputeDefault = ComputeMode(nvml.COMPUTEMODE_DEFAULT)
	// ComputeProhibited lets no process begin to use the card.
	ComputeProhibited = ComputeMode(nvml.COMPUTEMODE_PROHIBITED)
	// ComputeExclusiveProcess lets only one process use the card.
	ComputeExclusiveProcess = ComputeMode(nvml.COMPUTEMODE_EXCLUSIVE_PROCESS)
)

// String returns NVML's name of the mode.
func (m ComputeMode) String() string {
	switch m {
	case ComputeDefault:
		return "DEFAULT"
	case ComputeProhibited:
		return "PROHIBITED"
	case ComputeExclusiveProcess:
		return "EXCLUSIVE_PROCESS"
	}
	return fmt.Sprintf("COMPUTE_MODE_%d", int(m))
}

// Compute is what decides whether MPS can run on a card.
type Compute struct {
	// Major and Minor are the card's compute capability.
	Major, Minor int
	Mode         ComputeMode
}

// OpenSession opens the driver and lists its cards. The caller must close the session, and only one goroutine may use it at a time.
// library is as in Options.
func OpenSession(library string) (*Session, error) {
	d, err := openDriver(library)
	if err != nil {
		return nil, err
	}
	s := &Session{driver: d}
	if err := s.Refresh(); err != nil {
		_ = d.close()
		return nil, err
	}
	return s, nil
}

// Refresh lists the cards again.
func (s *Session) Refresh() error {
	devices, err := s.driver.devices()
	if err != nil {
		return err
	}
	s.devices = devices
	return nil
}

// Close ends a session of OpenSession.
func (s *Session) Close() error { return s.driver.close() }

// Compute returns a card's compute capability and mode.
func (s *Session) Compute(uuid string) (Compute, error) {
	handle, err := s.card(uuid)
	if err != nil {
		return Compute{}, err
	}
	major, minor, ret := handle.GetCudaComputeCapability()
	if err := problem("reading its compute capability", ret); err != nil {
		return Compute{}, err
	}
	mode, ret := handle.GetComputeMode()
	return Compute{Major: major, Minor: minor, Mode: ComputeMode(mode)}, problem("reading its compute mode", ret)
}

// SetComputeMode sets a card's compute mode, which only root can do.
func (s *Session) SetComputeMode(uuid string, mode ComputeMode) error {
	handle, err := s.card(uuid)
	if err != nil {
		return err
	}
	return problem(fmt.Sprintf("setting its compute mode to %s", mode), handle.SetComputeMode(nvml.ComputeMode(mode)))
}
