package mps

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/gpushare/gpushare/pkg/isolation"
)

// MountSharedMemory makes the directory that daemons and clients have as /dev/shm: a file system in memory with a size of its own. One that
// is there already stays, with the files of running clients. The caller needs the right to mount, in the machine's mount namespace.
func MountSharedMemory(dir isolation.MPSDirectory, bytes int64) error {
	path := dir.SharedMemory()
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	if mounted("/proc/self/mountinfo", path) {
		return nil
	}
	options := fmt.Sprintf("mode=1777,size=%d", bytes)
	if err := unix.Mount("gpushare-mps", path, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, options); err != nil {
		return fmt.Errorf("mounting the shared memory of MPS at %s: %w", path, err)
	}
	return nil
}
