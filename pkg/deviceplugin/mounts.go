package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// errMountDeleted means that a mounted directory was deleted on the node. The mount shows the deleted directory, even if
// a new one is created in its place, until the container is restarted.
var errMountDeleted = errors.New("a mounted directory has been deleted on the node, only a restart of the container brings it back")

// checkMounts returns an error once a directory of the kubelet is deleted that is mounted: the plugin can then never reach the kubelet again.
func (p *Plugin) checkMounts(ctx context.Context) error {
	directories := []string{p.options.Directory}
	if p.options.PodResourcesSocket != "" {
		directories = append(directories, filepath.Dir(p.options.PodResourcesSocket))
	}
	for {
		for _, dir := range directories {
			if deleted(dir) {
				return fmt.Errorf("%w: %s", errMountDeleted, dir)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(recheckInterval):
		}
	}
}

// deleted reports whether a directory has been deleted although it is still visible: no directory has it as an entry any
// more, so its link count is zero.
func deleted(dir string) bool {
	info, err := os.Stat(dir)
	if err != nil {
		return false // A missing directory may be created again.
	}
	system, ok := info.Sys().(*syscall.Stat_t)
	return ok && system.Nlink == 0
}
