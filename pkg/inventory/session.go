package inventory

import (
	"errors"
	"fmt"
	"math"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// ErrUnsupported means that the driver has no such function, or not for this card.
var ErrUnsupported = errors.New("the driver doesn't support it")

// errNoSuchCard means that the driver's last listing doesn't have the card, or could not read it.
var errNoSuchCard = errors.New("the driver doesn't list the card")

// UnknownBytes is the memory of a process for which the driver reports none.
const UnknownBytes = math.MaxUint64

// Process is a process that uses a card.
type Process struct {
	// PID is its number in the PID namespace of the machine, also if the caller runs in another one.
	PID int
	// Bytes is the memory of the card that it uses, or UnknownBytes.
	Bytes uint64
}

// MemoryLimit is what the driver enforces and counts for a cgroup on a card, in bytes.
type MemoryLimit struct {
	// Hard is the limit; NoLimit if there is none.
	Hard uint64
	Used uint64
}

// NoLimit is the limit of a cgroup without a limit (NVML_DEVICE_MEMORY_LIMIT_MAX).
const NoLimit = uint64(nvml.DEVICE_MEMORY_LIMIT_MAX)

// Session gives access to the driver during a call of Options.Visit. Its methods take cards by UUID.
type Session struct {
	driver  *driver
	devices []device
}

// Cards returns the UUIDs of the cards that the driver can read and that aren't divided into MIG devices.
func (s *Session) Cards() []string {
	var uuids []string
	for i := range s.devices {
		if s.devices[i].measurable() {
			uuids = append(uuids, s.devices[i].uuid)
		}
	}
	return uuids
}

// measurable reports whether the card has answered. A card that asks for a reset can still be read.
func (d *device) measurable() bool {
	var answers unusable
	return d.uuid != "" && (d.err == nil || errors.As(d.err, &answers) && !errors.Is(d.err, errMIG))
}

func (s *Session) card(uuid string) (nvml.Device, error) {
	for i := range s.devices {
		if d := &s.devices[i]; d.uuid == uuid && d.measurable() {
			return d.handle, nil
		}
	}
	return nil, errNoSuchCard
}

// Memory returns the memory of a card that is in use, without what the driver reserves for itself if it reports that, and what is free.
func (s *Session) Memory(uuid string) (used, free uint64, err error) {
	handle, err := s.card(uuid)
	if err != nil {
		return 0, 0, err
	}
	if s.driver.hasMemoryInfo {
		if memory, ret := handle.GetMemoryInfo_v2(); ret == nvml.SUCCESS {
			return memory.Used, memory.Free, nil
		}
	}
	memory, ret := handle.GetMemoryInfo()
	return memory.Used, memory.Free, problem("reading its memory", ret)
}

// Processes returns the processes that use a card, clients of MPS too. One that computes and draws is returned once.
func (s *Session) Processes(uuid string) ([]Process, error) {
	handle, err := s.card(uuid)
	if err != nil {
		return nil, err
	}
	var out []Process
	index := map[uint32]int{}
	for _, list := range []struct {
		what string
		call func() ([]nvml.ProcessInfo, nvml.Return)
	}{
		{"listing its compute processes", handle.GetComputeRunningProcesses},
		{"listing its graphics processes", handle.GetGraphicsRunningProcesses},
		{"listing its clients of MPS", handle.GetMPSComputeRunningProcesses},
	} {
		infos, ret := list.call()
		if ret == nvml.ERROR_NOT_SUPPORTED {
			continue
		}
		if err := problem(list.what, ret); err != nil {
			return nil, err
		}
		for _, info := range infos {
			// NVML_VALUE_NOT_AVAILABLE is the largest value, as UnknownBytes is. The lists have the process's whole memory.
			i, twice := index[info.Pid]
			if !twice {
				index[info.Pid] = len(out)
				out = append(out, Process{PID: int(info.Pid), Bytes: info.UsedGpuMemory})
			} else if out[i].Bytes == UnknownBytes || info.UsedGpuMemory != UnknownBytes && info.UsedGpuMemory > out[i].Bytes {
				out[i].Bytes = info.UsedGpuMemory
			}
		}
	}
	return out, nil
}

// Limits reports whether the driver can limit the memory of cgroups.
func (s *Session) Limits() bool { return s.driver.hasLimits }

// Limit returns the limit and the use of a cgroup on a card. cgroup is the path of its directory.
func (s *Session) Limit(uuid, cgroup string) (MemoryLimit, error) {
	if !s.driver.hasLimits {
		return MemoryLimit{}, ErrUnsupported
	}
	handle, err := s.card(uuid)
	if err != nil {
		return MemoryLimit{}, err
	}
	limits, ret := handle.GetMemoryLimits_v1(cgroup)
	if ret == nvml.ERROR_NOT_FOUND { // The driver knows nothing of this cgroup on this card.
		return MemoryLimit{Hard: NoLimit}, nil
	}
	return MemoryLimit{Hard: limits.HardLimit, Used: limits.CurrentUsed}, problem("reading the memory limit of a cgroup", ret)
}

// problem returns the error of a call; nil for success.
func problem(what string, ret nvml.Return) error {
	switch ret {
	case nvml.SUCCESS:
		return nil
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND:
		return fmt.Errorf("%s: %w", what, ErrUnsupported)
	}
	return fmt.Errorf("%s: %w", what, ret)
}
