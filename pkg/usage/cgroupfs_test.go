package usage

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/test/check"
)

func TestCgroupTree(t *testing.T) {
	root := t.TempDir()
	folder := func(path string) string {
		t.Helper()
		path = filepath.Join(root, path)
		check.Must(t, os.MkdirAll(path, 0o755))
		return path
	}
	tree := cgroupTree{root: root}
	if tree.Available() {
		t.Error("a folder without cgroup.controllers is no hierarchy")
	}
	check.Must(t, os.WriteFile(filepath.Join(root, "cgroup.controllers"), nil, 0o600))
	if !tree.Available() {
		t.Error("the hierarchy isn't available")
	}
	a := folder("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + underscored + ".slice/cri-containerd-" + idA + ".scope")
	folder(strings.TrimPrefix(a, root) + "/inner/docker-" + idB + ".scope") // Another container's name in the container isn't it.
	c := folder("kubepods/pod" + string(hash) + "/" + strings.Repeat("c", 64))
	if diff := cmp.Diff(map[string]string{idA: a, strings.Repeat("c", 64): c}, tree.Find([]string{idA, idB, strings.Repeat("c", 64), ""})); diff != "" {
		t.Error(diff)
	}
	check.Must(t, os.RemoveAll(a))
	moved := folder("other/" + idA)
	if diff := cmp.Diff(map[string]string{idA: moved}, tree.Find([]string{idA})); diff != "" {
		t.Error("a cgroup that was made again elsewhere:", diff)
	}
}
