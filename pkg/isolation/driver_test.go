package isolation

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// toolkitSpec is what nvidia-ctk cdi generate writes, reduced to what matters here.
const toolkitSpec = `cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
  - name: GPU-a
    containerEdits:
      hooks:
        - hookName: createRuntime
          path: /usr/bin/nvidia-cdi-hook
          args: [nvidia-cdi-hook, apply-cuda-memory-limits, --driver-root, /, --gpu-id, GPU-a]
  - name: GPU-other
    containerEdits:
      hooks:
        - hookName: createRuntime
          path: /usr/bin/nvidia-cdi-hook
          args: [nvidia-cdi-hook, apply-cuda-memory-limits, --gpu-id=GPU-x]
  - name: GPU-bare
    containerEdits:
      deviceNodes: [{path: /dev/nvidia0}]
containerEdits:
  env: [NVIDIA_VISIBLE_DEVICES=void]
  hooks:
    - hookName: createContainer
      path: /usr/bin/nvidia-cdi-hook
      args: [nvidia-cdi-hook, update-ldcache]
`

// machine is a node on which every requirement is met.
type machine struct {
	cgroups, etc, run string
	backend           Backend
	card              Card
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{
		cgroups: t.TempDir(), etc: t.TempDir(), run: t.TempDir(),
		card: Card{UUID: "GPU-a", Device: "GPU-a", Runtime: "containerd://2.1.0"},
	}
	m.write(t, filepath.Join(m.cgroups, "cgroup.controllers"), "memory")
	m.write(t, filepath.Join(m.etc, "nvidia.yaml"), toolkitSpec)
	m.backend = NewBackends(Options{CgroupRoot: m.cgroups, SpecDirs: []string{m.etc, m.run}}).Of(Driver)
	return m
}

func (m *machine) write(t *testing.T, path, text string) {
	t.Helper()
	check.Must(t, os.WriteFile(path, []byte(text), 0o600))
}

func TestDriverReady(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*machine)
		want   string
	}{
		"everything is there":           {func(*machine) {}, ""},
		"cgroup v1":                     {func(m *machine) { _ = os.Remove(filepath.Join(m.cgroups, "cgroup.controllers")) }, "is not cgroup v2"},
		"an old driver":                 {func(m *machine) { m.card.Unlimitable = errors.New("R615 is needed") }, "R615 is needed"},
		"a card that mode mps has left": {func(m *machine) { m.card.Compute.Mode = prohibited }, "its compute mode is PROHIBITED"},
		"an old containerd":             {func(m *machine) { m.card.Runtime = "containerd://1.6.20" }, "containerd 1.6.20 takes no CDI devices"},
		"containerd 1.7 can":            {func(m *machine) { m.card.Runtime = "containerd://1.7.27" }, ""},
		"Docker":                        {func(m *machine) { m.card.Runtime = "docker://28.0.1" }, "cri-dockerd takes no CDI devices"},
		"a version of no known form":    {func(m *machine) { m.card.Runtime = "containerd://main" }, ""},
		"no specification":              {func(m *machine) { _ = os.Remove(filepath.Join(m.etc, "nvidia.yaml")) }, "has the device nvidia.com/gpu=GPU-a"},
		"two specifications of one directory": {func(m *machine) { m.write(t, filepath.Join(m.etc, "toolkit.yaml"), toolkitSpec) },
			"conflicting device \"nvidia.com/gpu=GPU-a\" (specs \""},
		"also if a later directory has the device": {func(m *machine) {
			m.write(t, filepath.Join(m.etc, "toolkit.yaml"), toolkitSpec)
			m.write(t, filepath.Join(m.run, "nvidia.yaml"), toolkitSpec)
		}, "conflicting device"},
		"one specification in each directory": {func(m *machine) { m.write(t, filepath.Join(m.run, "nvidia.yaml"), toolkitSpec) }, ""},
		"no device of the card":               {func(m *machine) { m.card = Card{UUID: "GPU-b", Device: "GPU-b"} }, "has the device nvidia.com/gpu=GPU-b"},
		"the toolkit is too old":              {func(m *machine) { m.card = Card{UUID: "GPU-bare", Device: "GPU-bare"} }, "has no hook apply-cuda-memory-limits"},
		"a hook for another card":             {func(m *machine) { m.card = Card{UUID: "GPU-other", Device: "GPU-other"} }, "has no hook apply-cuda-memory-limits"},
		"the directory of limits is away":     {func(m *machine) { _ = os.RemoveAll(m.run) }, "writing the CDI specification of limits"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			test.change(m)
			err := m.backend.Ready(m.card)
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

// TestCardsByCDI: in every mode whose containers get their cards as CDI devices, a card needs exactly one device.
func TestCardsByCDI(t *testing.T) {
	status := MPSStatus{State: MPSReady, At: time.Now()}
	daemons := MPSDirectory(t.TempDir())
	check.Must(t, errors.Join(os.Mkdir(filepath.Join(string(daemons), "GPU-a"), 0o755), daemons.WriteStatus("GPU-a", status)))
	for byCDI, want := range map[bool][]string{
		false: {"", "", ""},
		true:  {"", "conflicting device", "has the device nvidia.com/gpu=GPU-a"},
	} {
		for _, mode := range []Mode{None, MPS} {
			m := newMachine(t)
			if m.card.Compute = (Compute{8, 0, "DEFAULT"}); mode == MPS {
				m.card.Compute.Mode = exclusive
			}
			backend := NewBackends(Options{SpecDirs: []string{m.etc, m.run}, CardsByCDI: byCDI, MPS: daemons}).Of(mode)
			for i, change := range []func(){
				func() {},
				func() { m.write(t, filepath.Join(m.etc, "toolkit.yaml"), toolkitSpec) },
				func() { _ = os.RemoveAll(m.etc) },
			} {
				change()
				await.True(t, fmt.Sprintf("mode %s, cards by CDI %t: %q", mode, byCDI, want[i]), func() bool {
					err := backend.Ready(m.card)
					return (err == nil) == (want[i] == "") && (err == nil || strings.Contains(err.Error(), want[i]))
				})
			}
		}
	}
}

// TestDriverReadyAgain: a change of the specifications counts, and the last directory has precedence.
func TestDriverReadyAgain(t *testing.T) {
	m := newMachine(t)
	ready := func(want bool, what string) {
		t.Helper()
		await.True(t, what, func() bool { return (m.backend.Ready(m.card) == nil) == want })
	}
	ready(true, "at first")
	broken := filepath.Join(m.run, "nvidia.json")
	m.write(t, broken, `{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "GPU-a", "containerEdits": {"env": ["A=b"]}}]}`)
	ready(false, "a later directory has a device without the hook")
	m.write(t, broken, `{"kind": "nvidia.com/gpu", "dev`)
	ready(true, "the later file can't be read, so a runtime ignores it")
	check.Must(t, os.Remove(filepath.Join(m.etc, "nvidia.yaml")))
	link := filepath.Join(m.etc, "link.yaml")
	check.Must(t, os.Symlink("/usr/share/nvidia.yaml", link))
	await.True(t, "a reason that names the files that can't be read", func() bool {
		err := m.backend.Ready(m.card)
		return err != nil && strings.Contains(err.Error(), broken) && strings.Contains(err.Error(), link)
	})
}

func TestApply(t *testing.T) {
	m := newMachine(t)
	share := []Share{{Card: m.card, Limit: 1 << 30}}
	edits, err := m.backend.Apply(share)
	if diff := cmp.Diff(Edits{Devices: []string{"nvidia.com/gpu=GPU-a", "gpushare.aliyun.com/memory-limit=1024Mi"}}, edits); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
	if diff := cmp.Diff(map[string][]string{"1024Mi": oneGiB}, specOf(t, m.run)); diff != "" {
		t.Error(diff)
	}
	edits, err = m.backend.Apply(append(share, Share{Card: Card{Device: "GPU-b"}, Limit: 1 << 30}))
	if diff := cmp.Diff([]string{"nvidia.com/gpu=GPU-a", "gpushare.aliyun.com/memory-limit=1024Mi", "nvidia.com/gpu=GPU-b"}, edits.Devices); diff != "" || err != nil {
		t.Errorf("several cards: %v\n%s", err, diff)
	}
	edits, err = NewBackends(Options{}).Of(None).Apply(share)
	if diff := cmp.Diff(Edits{}, edits); diff != "" || err != nil {
		t.Errorf("mode none gives %v, %s", err, diff)
	}
}

func TestParseMode(t *testing.T) {
	for _, mode := range []Mode{None, Driver, MPS} {
		if got, err := ParseMode(string(mode)); got != mode || err != nil {
			t.Errorf("%q, %v", got, err)
		}
	}
	for _, name := range []string{"", "Driver", "vgpu"} {
		if mode, err := ParseMode(name); err == nil {
			t.Errorf("%q is %q", name, mode)
		}
	}
}
