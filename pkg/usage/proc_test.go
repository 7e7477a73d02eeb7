package usage

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/gpushare/gpushare/test/check"
)

// fakeProc is a folder with files like those of /proc.
type fakeProc struct {
	t   testing.TB
	dir string
}

func newFakeProc(t testing.TB) fakeProc { return fakeProc{t, t.TempDir()} }

// add adds a process with this start since boot, of this cgroup.
func (p fakeProc) add(pid int, name string, start time.Duration, cgroup string) {
	p.t.Helper()
	dir := filepath.Join(p.dir, strconv.Itoa(pid))
	stat := fmt.Sprintf("%d (%s) S 1 1 1 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 %d 1000 100 0 0", pid, name, start/clockTick)
	for file, text := range map[string]string{"stat": stat, "cgroup": cgroup} {
		check.Must(p.t, errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600)))
	}
}

func (p fakeProc) open() processes {
	p.t.Helper()
	root, err := os.OpenRoot(p.dir)
	check.Must(p.t, err)
	p.t.Cleanup(func() { _ = root.Close() })
	return processes{root}
}

func TestOwner(t *testing.T) {
	proc := newFakeProc(t)
	cgroup := "0::/kubepods/pod" + string(uidA) + "/" + idA
	proc.add(10, "python", 5*time.Second, cgroup)
	proc.add(11, "odd) S 1 (name", 5*time.Second, cgroup)
	proc.add(12, "later", 8*time.Second+clockTick, cgroup)
	proc.add(13, "same moment", 8*time.Second, cgroup)
	proc.add(14, "service", 5*time.Second, "0::/system.slice/x.service")
	check.Must(t, os.WriteFile(filepath.Join(proc.dir, "14", "stat"), []byte("14 (x) S"), 0o600))
	for name, test := range map[string]struct {
		pid  int
		want Owner
		gone bool
	}{
		"a process of a container":                  {10, Owner{uidA, idA}, false},
		"a name with parentheses and spaces":        {11, Owner{uidA, idA}, false},
		"the number belongs to a later process now": {12, Owner{}, true},
		"the number may belong to a later process":  {13, Owner{}, true},
		"no such process":                           {99, Owner{}, true},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := proc.open().Owner(test.pid, 8*time.Second)
			if got != test.want || errors.Is(err, errGone) != test.gone || (err != nil) != test.gone {
				t.Errorf("got %+v, %v, want %+v, gone %t", got, err, test.want, test.gone)
			}
		})
	}
	t.Run("an unreadable stat is an error", func(t *testing.T) {
		if _, err := proc.open().Owner(14, 8*time.Second); err == nil || errors.Is(err, errGone) {
			t.Errorf("got %v", err)
		}
	})
}
