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

// recheckInterval is the interval at which the directory is checked without a notification. Notifications can be lost, and they
// end if the directory itself is deleted and created again.
const recheckInterval = 5 * time.Second

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

// watchDirectory calls changed with the name of each file of dir that changes, and with "" every few seconds. It makes one call at
// a time. It blocks until ctx ends or changed returns an error.
func watchDirectory(ctx context.Context, dir string, changed func(name string) error) error {
	const unwatched = "Could not watch the directory, checking it every few seconds instead"
	logger := klog.FromContext(ctx)
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		logger.Error(err, unwatched, "directory", dir)
		watcher = &fsnotify.Watcher{} // Its channels are nil, so they never deliver.
	} else {
		defer watcher.Close()
	}
	var watched fs.FileInfo
	follow := func() {
		info, err := os.Stat(dir)
		switch {
		case err != nil:
			watched = nil
		case watcher.Events != nil && (watched == nil || !os.SameFile(watched, info)):
			_ = watcher.Remove(dir) // The old directory of this name is usually gone.
			if err := watcher.Add(dir); err != nil {
				logger.Error(err, unwatched, "directory", dir)
				return
			}
			watched = info
		}
	}
	follow()
	err = changed("") // Covers changes before the watch.
	ticker := time.NewTicker(recheckInterval)
	defer ticker.Stop()
	for err == nil {
		select {
		case <-ctx.Done():
			return nil
		case event := <-watcher.Events:
			if filepath.Clean(event.Name) == filepath.Clean(dir) {
				watched = nil
			}
			err = changed(filepath.Base(event.Name))
		case lost := <-watcher.Errors:
			logger.V(2).Info("Notifications of the directory were lost", "directory", dir, "err", lost)
			err = changed("")
		case <-ticker.C:
			follow()
			err = changed("")
		}
	}
	return err
}
