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

// lookAgain is the interval at which the directory is checked without a notification. Notifications can be lost, and they
// end if the directory itself is deleted and created again.
const lookAgain = 5 * time.Second

// errMountDeleted means that a mounted directory was deleted on the node. The mount shows the deleted directory, even if
// a new one is created in its place, until the container is restarted.
var errMountDeleted = errors.New("a mounted directory has been deleted on the node, only a restart of the container brings it back")

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

// watchDirectory calls on with the name of each file of dir that changes, and with "" every few seconds. It makes one
// call at a time. It blocks until ctx ends.
func watchDirectory(ctx context.Context, dir string, on func(name string)) {
	logger := klog.FromContext(ctx)
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		logger.Error(err, "The directory can't be watched: looking at it every few seconds instead", "directory", dir)
		watcher = &fsnotify.Watcher{} // Its channels are nil, so they never deliver.
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
			_ = watcher.Remove(dir) // The old directory of this name is usually gone.
			if err := watcher.Add(dir); err != nil {
				logger.Error(err, "The directory can't be watched: looking at it every few seconds instead", "directory", dir)
				return
			}
			watched = info
		}
	}
	follow()
	on("") // Covers changes before the watch.
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
