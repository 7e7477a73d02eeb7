package isolation

import (
	"encoding/json"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	cdi "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpushare/gpushare/test/check"
)

// specOf returns the environment of each device in the directory's only file.
func specOf(t *testing.T, dir string) map[string][]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Fatalf("%v, %v", entries, err)
	}
	data, err := os.ReadFile(filepath.Join(dir, entries[0].Name()))
	check.Must(t, err)
	var spec cdi.Spec
	check.Must(t, json.Unmarshal(data, &spec))
	if spec.Kind != limitKind || filepath.Ext(entries[0].Name()) != ".json" {
		t.Errorf("%s of %s", entries[0].Name(), spec.Kind)
	}
	devices := map[string][]string{}
	for _, device := range spec.Devices {
		devices[device.Name] = device.ContainerEdits.Env
		device.ContainerEdits.Env = nil
		if diff := cmp.Diff(cdi.ContainerEdits{}, device.ContainerEdits); diff != "" {
			t.Errorf("a device does more than to set variables: %s", diff)
		}
	}
	return devices
}

var (
	oneGiB = []string{"NVIDIA_GPU_MEMORY_LIMIT=1024", "NVIDIA_GPU_MEMORY_REQUEST=0"}
	twoMiB = []string{"NVIDIA_GPU_MEMORY_LIMIT=2", "NVIDIA_GPU_MEMORY_REQUEST=0"}
)

func TestLimitSpec(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, limitFile)
	add := func(s *limitSpec, limits ...uint64) {
		t.Helper()
		check.Must(t, s.Add(limits...))
	}
	want := func(what string, devices map[string][]string) {
		t.Helper()
		check.Equal(t, what, devices, specOf(t, dir))
	}
	first := &limitSpec{dir: dir}
	add(first)
	if entries, _ := os.ReadDir(dir); len(entries) > 0 {
		t.Errorf("a file without a limit: %v", entries)
	}
	add(first, 1<<30)
	add(first, 1<<30, 1<<30)
	want("one limit", map[string][]string{"1024Mi": oneGiB})
	before, _ := os.Stat(path)
	add(first, 1<<30)
	if after, _ := os.Stat(path); !os.SameFile(before, after) {
		t.Error("the file was written although it has the limit")
	}

	second := &limitSpec{dir: dir}
	add(second, 2*mebibyte)
	want("after a restart the file has what it had", map[string][]string{"1024Mi": oneGiB, "2Mi": twoMiB})
	check.Must(t, os.Remove(path))
	add(second, 2*mebibyte)
	want("a removed file is written again", map[string][]string{"2Mi": twoMiB})
	check.Must(t, os.WriteFile(path, []byte(`{"devices": [`), 0o600))
	add(&limitSpec{dir: dir}, 2*mebibyte)
	want("a broken file is replaced", map[string][]string{"2Mi": twoMiB})

	for _, limit := range []uint64{0, 1, mebibyte + 1} {
		if err := second.Add(limit); err == nil {
			t.Errorf("a limit of %d bytes", limit)
		}
	}
	if err := (&limitSpec{dir: filepath.Join(dir, "nowhere")}).Add(mebibyte); err == nil {
		t.Error("no error without the directory")
	}
}

// TestLimitSpecConcurrent: containers start at the same time, and a reader never finds a part of a file.
func TestLimitSpecConcurrent(t *testing.T) {
	dir := t.TempDir()
	spec := &limitSpec{dir: dir}
	check.Must(t, spec.Add(mebibyte))
	var writers sync.WaitGroup
	for i := range 8 {
		writers.Go(func() {
			for n := range 10 {
				check.NoError(t, spec.Add(uint64(2+i*10+n)*mebibyte))
				data, err := os.ReadFile(filepath.Join(dir, limitFile))
				if err != nil || !json.Valid(data) {
					t.Errorf("%v: %.100s", err, data)
				}
			}
		})
	}
	writers.Wait()
	if got := len(specOf(t, dir)); got != 81 {
		t.Errorf("%d devices", got)
	}
}

func TestLimitDevice(t *testing.T) {
	device, err := limitDevice(3 << 30)
	if limit, ok := limitOf(device); err != nil || device != "gpushare.aliyun.com/memory-limit=3072Mi" || limit != 3<<30 || !ok {
		t.Errorf("%q, %d, %t, %v", device, limit, ok, err)
	}
	for _, name := range []string{"", "nvidia.com/gpu=0", limitKind + "=", limitKind + "=Mi", limitKind + "=5", limitKind + "=0Mi", limitKind + "=05Mi", limitKind + "=-1Mi", limitKind + "=99999999999999999Mi"} {
		if limit, ok := limitOf(name); ok {
			t.Errorf("%q is a limit of %d", name, limit)
		}
	}
}
