package fakenvml

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Limit is the memory limit of a cgroup on a card, as it was set last. It is read from the library's files, not through
// the library.
type Limit struct {
	// Card is the card's UUID.
	Card string
	// Cgroup is the cgroup's path for the program that set the limit. It stays listed after the cgroup was removed.
	Cgroup string
	// Inode is the inode of the cgroup's folder, by which two cgroups with the same path differ.
	Inode uint64
	// Soft and Hard are in bytes. NoLimit is the hard limit of a cgroup whose limits were cleared.
	Soft, Hard uint64
}

// NoLimit is the hard limit that means none.
const NoLimit = math.MaxUint64

// Limits returns the memory limits of all cgroups that were ever set, in no particular order.
func (m Machine) Limits() (limits []Limit, err error) {
	files, err := filepath.Glob(filepath.Join(m.StateDir, "limits", "*", "*"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		if strings.Contains(filepath.Base(file), ".") {
			continue // It isn't complete.
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		inode, err := strconv.ParseUint(filepath.Base(file), 10, 64)
		if err != nil {
			return nil, err
		}
		limit := Limit{Card: filepath.Base(filepath.Dir(file)), Inode: inode}
		if _, err := fmt.Sscan(string(text), &limit.Soft, &limit.Hard, &limit.Cgroup); err != nil {
			return nil, fmt.Errorf("%s: %q: %w", file, text, err)
		}
		limits = append(limits, limit)
	}
	return limits, nil
}

// Process is a process that uses memory of a card.
type Process struct {
	// Card is the card's UUID.
	Card string
	// PID is the process in the namespace of the machine that runs the driver, whatever the caller's namespace.
	PID      int
	Graphics bool
	// MPS is true for a client of an MPS server.
	MPS bool
	// MiB is the memory that it uses; negative if the driver can't tell.
	MiB int64
	// Cgroup is the path of its cgroup, for the use of limited cgroups; empty if that doesn't matter.
	Cgroup string
}

// SetProcesses replaces the processes on all cards.
func (m Machine) SetProcesses(processes ...Process) error {
	var text bytes.Buffer
	for _, p := range processes {
		kind, memory := "compute", "-"
		if p.Graphics {
			kind = "graphics"
		}
		if p.MPS {
			kind = "mps"
		}
		if p.MiB >= 0 {
			memory = strconv.FormatInt(p.MiB, 10)
		}
		fmt.Fprintf(&text, "%s, %d, %s, %s, %s\n", p.Card, p.PID, kind, memory, p.Cgroup)
	}
	if err := os.MkdirAll(m.StateDir, 0o755); err != nil {
		return fmt.Errorf("making the fake NVML's folder: %w", err)
	}
	return replace(filepath.Join(m.StateDir, "processes"), text.Bytes())
}

// ComputeMode returns a card's compute mode, as NVML numbers them: 0 is the default mode, 3 is EXCLUSIVE_PROCESS.
func (m Machine) ComputeMode(card string) (int, error) {
	text, err := os.ReadFile(filepath.Join(m.StateDir, "modes", card))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}
