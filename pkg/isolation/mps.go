package isolation

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/gpushare/gpushare/pkg/file"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Variables of MPS clients (NVIDIA, Multi-Process Service, "Environment Variables").
const (
	// EnvMPSPipeDirectory is the directory of the sockets of the client's daemon.
	EnvMPSPipeDirectory = "CUDA_MPS_PIPE_DIRECTORY"
	// EnvMPSMemoryLimit has entries CARD=SIZE. One that names a card that the process doesn't see makes MPS ignore all of them, so the
	// card is named by its UUID: an index would be that of another card if the runtime shows more than one.
	EnvMPSMemoryLimit = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
	// EnvMPSThreads is the part of the card's threads, in percent, that a client can use at most.
	EnvMPSThreads = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
)

// MPSDirectory is the directory of a node's MPS daemons. It has the same path on the machine, in the containers of gpushare, and
// (the pipe directories alone) in those of clients.
type MPSDirectory string

// Pipe returns the directory with the sockets of a card's daemon.
func (d MPSDirectory) Pipe(uuid string) string { return filepath.Join(string(d), uuid, "pipe") }

// Log returns the directory with the log files of a card's daemon.
func (d MPSDirectory) Log(uuid string) string { return filepath.Join(string(d), uuid, "log") }

// SharedMemory returns the directory that daemons and clients have as /dev/shm.
func (d MPSDirectory) SharedMemory() string { return filepath.Join(string(d), "shm") }

func (d MPSDirectory) status(uuid string) string {
	return filepath.Join(string(d), uuid, "status.json")
}

// cards is in a directory of its own, the only one here that the device plugin's container can write.
func (d MPSDirectory) cards() string { return filepath.Join(string(d), "shared", "cards.json") }

// WriteCards sets which cards the node shares, by UUID. Others get no daemon.
func (d MPSDirectory) WriteCards(uuids []string) error {
	if before, err := d.ReadCards(); err == nil && slices.Equal(before, uuids) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(d.cards()), 0o755); err != nil {
		return err
	}
	return replaceJSON(d.cards(), uuids)
}

// ReadCards returns the cards that the node shares. It returns fs.ErrNotExist as long as the device plugin has not set them.
func (d MPSDirectory) ReadCards() (uuids []string, err error) {
	data, err := os.ReadFile(d.cards())
	if err == nil {
		err = json.Unmarshal(data, &uuids)
	}
	return uuids, err
}

// MPSStatus is what the supervisor knows of a card's daemon. Clients can't write it.
type MPSStatus struct {
	// State is the daemon's state, and Reason why it isn't MPSReady.
	State  string `json:"state"`
	Reason string `json:"reason,omitempty"`
	// At is when the daemon was asked last.
	At time.Time `json:"at"`
	// Servers are the process IDs of its servers on the machine. The driver attributes the memory of all clients to them.
	Servers []int `json:"servers,omitempty"`
	// FormerMode is the compute mode (NVML's number) to which the card is set back when it is no longer needed for MPS. Served is true
	// once a daemon has taken clients since.
	FormerMode int  `json:"formerMode"`
	Served     bool `json:"served"`
}

// The states of a daemon that matter to others: one that takes clients, and one that the supervisor has ended.
const (
	MPSReady   = "ready"
	MPSStopped = "stopped"
)

// WriteStatus replaces the status of a card's daemon, whose directory must exist.
func (d MPSDirectory) WriteStatus(uuid string, status MPSStatus) error {
	return replaceJSON(d.status(uuid), status)
}

// replaceJSON replaces a file at once.
func replaceJSON(path string, content any) error {
	data, err := json.Marshal(content)
	if err != nil {
		return err
	}
	return file.Replace(path, data)
}

// RemoveStatus removes the status of a card without a daemon.
func (d MPSDirectory) RemoveStatus(uuid string) error {
	if err := os.Remove(d.status(uuid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// WithStatus returns the cards of which there is a status, by UUID.
func (d MPSDirectory) WithStatus() (uuids []string) {
	paths, _ := filepath.Glob(d.status("*")) // The pattern is valid.
	for _, path := range paths {
		uuids = append(uuids, filepath.Base(filepath.Dir(path)))
	}
	return uuids
}

// ReadStatus returns the status of a card's daemon. It returns fs.ErrNotExist if there is none.
func (d MPSDirectory) ReadStatus(uuid string) (status MPSStatus, err error) {
	if d == "" {
		return status, fs.ErrNotExist
	}
	data, err := os.ReadFile(d.status(uuid))
	if err == nil {
		err = json.Unmarshal(data, &status)
	}
	return status, err
}

// statusLifetime is how long a status counts that isn't renewed: the supervisor renews it every few seconds.
const statusLifetime = 15 * time.Second

var errNoSupervisor = errors.New("the supervisor of its MPS daemon doesn't run")

// currentStatus returns the status of a card's daemon, or why it isn't known. That of a daemon that the supervisor has ended stays. A step of the clock
// can make a status seem old until it is renewed.
func (d MPSDirectory) currentStatus(uuid string) (MPSStatus, error) {
	status, err := d.ReadStatus(uuid)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return MPSStatus{}, fmt.Errorf("it has no MPS daemon: %s has no status of one", d)
	case err != nil:
		return MPSStatus{}, fmt.Errorf("reading the status of its MPS daemon: %w", err)
	case time.Since(status.At).Abs() > statusLifetime && status.State != MPSStopped:
		return MPSStatus{}, errNoSupervisor
	}
	return status, nil
}

// NVML's names of compute modes.
const (
	// prohibited lets no program use the card.
	prohibited = "PROHIBITED"
	// exclusive lets only one use it, the MPS server. In other modes, a process that doesn't find the daemon uses the card without a limit.
	exclusive = "EXCLUSIVE_PROCESS"
)

// leftoverComputeMode returns why containers can't share the card outside of mode mps: its compute mode is still that of mode mps; nil if they can. The
// compute mode EXCLUSIVE_PROCESS without a status of a supervisor suits MPS daemons of the administrator's own.
func (d MPSDirectory) leftoverComputeMode(card Card) error {
	programs := "no program"
	switch card.Compute.Mode {
	case prohibited:
	case exclusive:
		if _, err := d.ReadStatus(card.UUID); errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		programs = "only one program"
	default:
		return nil
	}
	return fmt.Errorf("its compute mode is %s, as mode mps can leave it, and %s can use it: nvidia-smi -i %s -c DEFAULT, on the node, resets it",
		card.Compute.Mode, programs, card.UUID)
}

// mps has a container use the MPS daemon of its card.
type mps struct {
	daemons MPSDirectory
}

// MPSCapable returns why MPS can't limit memory on a card with this compute capability: it can since Volta.
func MPSCapable(major, minor int) error {
	if major < 7 {
		return fmt.Errorf("its compute capability is %d.%d, and 7.0 (Volta) is needed", major, minor)
	}
	return nil
}

// Ready implements Backend.
func (m mps) Ready(card Card) error {
	switch {
	case card.Unreadable != nil:
		return card.Unreadable
	case card.UUID == "":
		return errors.New("its UUID is unknown")
	}
	if err := MPSCapable(card.Compute.Major, card.Compute.Minor); err != nil {
		return err
	}
	status, err := m.daemons.currentStatus(card.UUID)
	switch {
	case err != nil:
		return err
	case status.State != MPSReady:
		return fmt.Errorf("its MPS daemon is %s: %s", status.State, status.Reason)
	case card.Compute.Mode != exclusive:
		return fmt.Errorf("its compute mode is %s, not %s", card.Compute.Mode, exclusive)
	}
	return nil
}

// Apply implements Backend. A client has one daemon, and so one card. A client and its daemon need the same shared memory, so no pod can have
// its own.
func (m mps) Apply(shares []Share) (Edits, error) {
	if len(shares) != 1 {
		return Edits{}, fmt.Errorf("a container can have one card, not %d", len(shares))
	}
	share := shares[0]
	if share.Limit == 0 || share.Limit%mebibyte != 0 {
		return Edits{}, fmt.Errorf("a limit of %d bytes is no positive number of MiB", share.Limit)
	}
	pipe := m.daemons.Pipe(share.Card.UUID)
	env := map[string]string{
		EnvMPSPipeDirectory: pipe,
		EnvMPSMemoryLimit:   share.Card.UUID + "=" + strconv.FormatUint(share.Limit/mebibyte, 10) + "M",
	}
	if share.Cores > 0 {
		env[EnvMPSThreads] = strconv.Itoa(share.Cores)
	}
	return Edits{Env: env, Mounts: []Mount{{pipe, pipe}, {m.daemons.SharedMemory(), protocol.SharedMemory}}}, nil
}

// LimitOf implements Backend.
func (m mps) LimitOf(edits Edits) (limit uint64, limited bool) {
	return 0, edits.Env[EnvMPSPipeDirectory] != ""
}

// CheckInForce implements Backend. The daemon keeps the limits: it is only known whether programs can use the card without it.
func (m mps) CheckInForce(card Card) error {
	switch {
	case card.Unreadable != nil || card.Compute.Mode == prohibited:
		return nil
	case card.Compute.Mode != exclusive:
		return fmt.Errorf("the compute mode of its card is %s, in which programs need no MPS daemon", card.Compute.Mode)
	}
	if _, err := m.daemons.currentStatus(card.UUID); err != nil {
		return fmt.Errorf("its card: %w", err)
	}
	return nil
}

// SetShared implements Backend: others get no daemon.
func (m mps) SetShared(uuids []string) error { return m.daemons.WriteCards(uuids) }

// MaxContainers implements Backend. MPS counts processes (NVIDIA, Multi-Process Service, "Client-Server Connection Limits"), so a
// container with several can still be refused by the daemon.
func (m mps) MaxContainers(card Card) int {
	if c := card.Compute; c.Major < 7 || c.Major == 7 && c.Minor < 5 {
		return 16
	}
	return 48
}
