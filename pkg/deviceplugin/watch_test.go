package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// A file descriptor shows what a mount shows: the deleted directory.
func TestDeletedMount(t *testing.T) {
	b := newFixture(t)
	dir := filepath.Join(b.dir, "mounted")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	mount, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer mount.Close()
	path := fmt.Sprintf("/proc/self/fd/%d", mount.Fd())
	if deleted(path) {
		t.Error("an existing directory counts as deleted")
	}
	p, err := New(Options{
		Client: fakeClient(b.client), Events: b.events, NodeName: testNode, Directory: b.dir,
		PodResourcesSocket: filepath.Join(path, "kubelet.sock"),
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := p.Run(context.Background()); !errors.Is(err, errMountDeleted) {
		t.Errorf("got %v, want %v", err, errMountDeleted)
	}
	if deleted(filepath.Join(b.dir, "nowhere")) {
		t.Error("a directory that may be created counts as deleted")
	}
}
