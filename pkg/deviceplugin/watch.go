package deviceplugin

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"
)

// lookAgain is how often the directory is looked at without being told to: notices get lost, and the directory itself
// can be made anew, which ends them.
const lookAgain = 5 * time.Second

// errMountDeleted says that a mounted directory has been deleted on the node. A mount goes on showing the deleted one,
// whatever is made in its place, until the container is started anew.
var errMountDeleted = errors.New("a mounted directory has been deleted on the node, only a restart of the container brings it back")

// deleted says whether a directory, though still to be seen, has been deleted: no directory has it as an entry any more.
func deleted(dir string) bool {
	info, err := os.Stat(dir)
	if err != nil {
		return false // One that isn't there may come back.
	}
	system, ok := info.Sys().(*syscall.Stat_t)
	return ok && system.Nlink == 0
}

// watchDirectory calls on, one call at a time, with the name of each file of dir that changes, and with "" every few
// seconds. It blocks until the context ends.
func watchDirectory(ctx context.Context, dir string, on func(name string)) {
	logger := klog.FromContext(ctx)
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		logger.Error(err, "The directory can't be watched: looking at it every few seconds instead", "directory", dir)
		watcher = &fsnotify.Watcher{} // Its channels are nil: they never deliver.
	} else {
		defer watcher.Close()
	}
	var watched fs.FileInfo
	follow := func() {
		info, err := os.Stat(dir)
		if err != nil {
			watched = nil
			return
		}
		if watcher.Events != nil && (watched == nil || !os.SameFile(watched, info)) {
			_ = watcher.Remove(dir) // The old directory of this name, if any: gone, as a rule.
			if err := watcher.Add(dir); err != nil {
				logger.Error(err, "The directory can't be watched: looking at it every few seconds instead", "directory", dir)
				return
			}
			watched = info
		}
	}
	follow()
	on("") // For what happened before.
	ticker := time.NewTicker(lookAgain)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case event := <-watcher.Events:
			if filepath.Clean(event.Name) == filepath.Clean(dir) {
				watched = nil
			}
			on(filepath.Base(event.Name))
		case err := <-watcher.Errors:
			logger.V(2).Info("Notices of the directory were lost", "directory", dir, "reason", err)
			on("")
		case <-ticker.C:
			follow()
			on("")
		}
	}
}
