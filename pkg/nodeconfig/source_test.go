package nodeconfig

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

func TestSourceRead(t *testing.T) {
	dir := t.TempDir()
	// As the kubelet mounts a ConfigMap (k8s.io/kubernetes pkg/volume/util/atomic_writer.go).
	versions := filepath.Join(dir, "..2026")
	check.Must(t, os.Mkdir(versions, 0o755))
	for name, text := range map[string]string{"mib": header + "memoryUnit: MiB", "big": header + "memoryUnit: 4GiB", "broken": header + "unit: MiB"} {
		check.Must(t, os.WriteFile(filepath.Join(versions, name), []byte(text), 0o644))
		check.Must(t, os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)))
	}
	check.Must(t, os.Symlink("..2026", filepath.Join(dir, "..data")))
	file := filepath.Join(dir, "big")
	for name, test := range map[string]struct {
		path, byDefault, label string
		unit                   gpu.Unit
		from, err              string
	}{
		"no file":                  {unit: gpu.GiB},
		"no file, but a label":     {label: "mib", unit: gpu.GiB},
		"one file for all nodes":   {path: file, label: "mib", unit: 4 * gpu.GiB, from: "big"},
		"the label selects":        {path: dir, byDefault: "big", label: "mib", unit: gpu.MiB, from: "mib"},
		"the default":              {path: dir, byDefault: "big", unit: 4 * gpu.GiB, from: "big"},
		"no label and no default":  {path: dir, unit: gpu.GiB},
		"an unknown label":         {path: dir, byDefault: "big", label: "gib", err: "label gpushare.aliyun.com/config=gib: " + dir + " has no such configuration, only big, broken, mib"},
		"an unknown default":       {path: dir, byDefault: "gib", err: "--default-config=gib: " + dir + " has no such configuration"},
		"the kubelet's entries":    {path: dir, label: "..data", err: "has no such configuration"},
		"a label that is a path":   {path: dir, label: "../" + filepath.Base(dir) + "/big", err: "has no such configuration"},
		"a file that isn't there":  {path: filepath.Join(dir, "none"), err: "open " + dir + "/none: no such file"},
		"a mistake names the file": {path: dir, label: "broken", err: dir + "/broken: unit: unknown key; the keys are"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Source{Path: test.path, Default: test.byDefault}.Read(test.label)
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Errorf("got %v, want %s", err, test.err)
				}
				return
			}
			if err != nil || got.Name != test.from || got.Settings.Unit != test.unit || (got.Hash != "") != (test.from != "") {
				t.Errorf("got %+v, %v", got, err)
			}
		})
	}
}
