package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

// A file descriptor shows what a mount shows: the deleted directory.
func TestDeletedMount(t *testing.T) {
	b := newFixture(t)
	dir := filepath.Join(b.dir, "mounted")
	check.Must(t, os.Mkdir(dir, 0o700))
	mount, err := os.Open(dir)
	check.Must(t, err)
	defer mount.Close()
	path := fmt.Sprintf("/proc/self/fd/%d", mount.Fd())
	if deleted(path) {
		t.Error("an existing directory counts as deleted")
	}
	p, err := New(Options{
		Client: fakeClient(b.client), Events: b.events, NodeName: testNode, Directory: b.dir,
		PodResourcesSocket: filepath.Join(path, "kubelet.sock"),
	})
	check.Must(t, err)
	check.Must(t, os.Remove(dir))
	check.Must(t, os.Mkdir(dir, 0o700))
	if err := p.Run(context.Background()); !errors.Is(err, errMountDeleted) {
		t.Errorf("got %v, want %v", err, errMountDeleted)
	}
	if deleted(filepath.Join(b.dir, "nowhere")) {
		t.Error("a directory that may be created counts as deleted")
	}
}
