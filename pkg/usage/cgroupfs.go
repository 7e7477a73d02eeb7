package usage

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// maxDepth is the depth below the root at which a container's cgroup can be. The usual depth is four.
const maxDepth = 8

// cgroupTree finds the cgroups of containers in a mounted hierarchy of cgroup v2. Only one goroutine may use it at a time.
type cgroupTree struct {
	root string
	// paths are the directories of the containers that were asked for last, by ID.
	paths map[string]string
}

// Available reports whether the root is a hierarchy of cgroup v2.
func (t *cgroupTree) Available() bool {
	_, err := os.Stat(filepath.Join(t.root, "cgroup.controllers"))
	return t.root != "" && err == nil
}

// Find returns the directories of the containers' cgroups by ID. It omits those that don't exist. It reads the hierarchy only
// for IDs that it has not found before.
func (t *cgroupTree) Find(ids []string) map[string]string {
	found, missing := map[string]string{}, map[string]bool{}
	for _, id := range ids {
		if path, ok := t.paths[id]; ok && isDirectory(path) {
			found[id] = path
		} else if id != "" {
			missing[id] = true
		}
	}
	if len(missing) > 0 {
		t.search(missing, found)
	}
	t.paths = found
	return found
}

// search adds the missing containers to found. Errors of single directories mean that these have gone meanwhile.
func (t *cgroupTree) search(missing map[string]bool, found map[string]string) {
	depth := strings.Count(filepath.Clean(t.root), "/")
	_ = filepath.WalkDir(t.root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case len(missing) == 0:
			return filepath.SkipAll
		case err != nil || !entry.IsDir():
			return nil
		}
		id := containerID(entry.Name())
		switch {
		case missing[id]:
			found[id] = path
			delete(missing, id)
			return filepath.SkipDir
		case strings.Count(path, "/")-depth >= maxDepth:
			return filepath.SkipDir
		}
		return nil
	})
}

func isDirectory(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}
