package usage

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// errGone means that a process has ended, or that its number belongs to a later process now.
var errGone = errors.New("the process has ended")

// clockTick is the unit of a process's start time in /proc/PID/stat (proc_pid_stat(5)): Linux shows USER_HZ, which is 100 on
// every architecture that NVIDIA's driver supports.
const clockTick = 10 * time.Millisecond

// processes reads processes from /proc.
type processes struct{ proc *os.Root }

// sinceBoot returns the time since the machine's start, in which /proc has the start times of processes.
func sinceBoot() (time.Duration, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return 0, fmt.Errorf("reading the time since boot: %w", err)
	}
	return time.Duration(now.Nano()), nil
}

// Owner returns the owner of a process that existed at the given time since boot. It returns errGone if the process has ended,
// and also if its number was given to a process that began later. Both files are read through one handle of the process's
// directory, which never shows another process.
func (p processes) Owner(pid int, at time.Duration) (Owner, error) {
	dir, err := p.proc.OpenRoot(strconv.Itoa(pid))
	if err != nil {
		return Owner{}, goneOr(err)
	}
	defer dir.Close()
	stat, err := dir.ReadFile("stat")
	if err != nil {
		return Owner{}, goneOr(err)
	}
	start, err := startTime(string(stat))
	switch {
	case err != nil:
		return Owner{}, fmt.Errorf("process %d: %w", pid, err)
	case start+clockTick > at: // The start time is rounded down. A process this young holds no memory of a card yet.
		return Owner{}, errGone
	}
	cgroup, err := dir.ReadFile("cgroup")
	if err != nil {
		return Owner{}, goneOr(err)
	}
	return ParseCgroup(string(cgroup)), nil
}

func goneOr(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
		return errGone
	}
	return err
}

// startTime returns a process's start since boot from the content of /proc/PID/stat. The command's name, in parentheses, can
// contain spaces and parentheses.
func startTime(stat string) (time.Duration, error) {
	const field, afterName = 22, 3
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(fields) <= field-afterName {
		return 0, fmt.Errorf("%d fields in its stat", len(fields))
	}
	ticks, err := strconv.ParseInt(fields[field-afterName], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("its start time: %w", err)
	}
	return time.Duration(ticks) * clockTick, nil
}
