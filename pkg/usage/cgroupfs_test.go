package usage

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCgroupTree(t *testing.T) {
	root := t.TempDir()
	folder := func(path string) string {
		t.Helper()
		path = filepath.Join(root, path)
		if err := os.MkdirAll(path, 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	tree := cgroupTree{root: root}
	if tree.Available() {
		t.Error("a folder without cgroup.controllers is no hierarchy")
	}
	if err := os.WriteFile(filepath.Join(root, "cgroup.controllers"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if !tree.Available() {
		t.Error("the hierarchy isn't available")
	}
	a := folder("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + underscored + ".slice/cri-containerd-" + idA + ".scope")
	folder(strings.TrimPrefix(a, root) + "/inner/docker-" + idB + ".scope") // Another container's name in the container isn't it.
	c := folder("kubepods/pod" + string(hash) + "/" + strings.Repeat("c", 64))
	if diff := cmp.Diff(map[string]string{idA: a, strings.Repeat("c", 64): c}, tree.Find([]string{idA, idB, strings.Repeat("c", 64), ""})); diff != "" {
		t.Error(diff)
	}
	if err := os.RemoveAll(a); err != nil {
		t.Fatal(err)
	}
	moved := folder("other/" + idA)
	if diff := cmp.Diff(map[string]string{idA: moved}, tree.Find([]string{idA})); diff != "" {
		t.Error("a cgroup that was made again elsewhere:", diff)
	}
}
