package isolation

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestMPSReady(t *testing.T) {
	ready := MPSStatus{State: MPSReady, At: time.Now()}
	for name, test := range map[string]struct {
		status *MPSStatus
		card   Card
		want   string
	}{
		"everything is there": {&ready, Card{}, ""},
		"the driver fails":    {&ready, Card{Unreadable: errors.New("unknown error")}, "unknown error"},
		"before Volta":        {&ready, Card{Compute: Compute{6, 1, exclusive}}, "its compute capability is 6.1, and 7.0 (Volta) is needed"},
		"another mode":        {&ready, Card{Compute: Compute{8, 0, "DEFAULT"}}, "its compute mode is DEFAULT, not EXCLUSIVE_PROCESS"},
		"no daemon":           {nil, Card{}, "it has no MPS daemon"},
		"a daemon that hangs": {&MPSStatus{State: "silent", Reason: "no answer", At: time.Now()}, Card{}, "its MPS daemon is silent: no answer"},
		"an old status":       {&MPSStatus{State: MPSReady, At: time.Now().Add(-time.Minute)}, Card{}, "the supervisor of its MPS daemon doesn't run"},
		"a clock set back":    {&MPSStatus{State: MPSReady, At: time.Now().Add(time.Hour)}, Card{}, "the supervisor of its MPS daemon doesn't run"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := MPSDirectory(t.TempDir())
			test.card.UUID = "GPU-a"
			if test.card.Compute.Major == 0 {
				test.card.Compute = Compute{8, 0, exclusive}
			}
			if test.status != nil {
				if err := errors.Join(os.Mkdir(filepath.Join(string(dir), "GPU-a"), 0o755), dir.WriteStatus("GPU-a", *test.status)); err != nil {
					t.Fatal(err)
				}
			}
			err := Backends(Options{MPS: dir})[MPS].Ready(Node{}, test.card)
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

func TestMPSApply(t *testing.T) {
	backend := Backends(Options{MPS: "/run/mps"})[MPS]
	share := Share{Card: Card{UUID: "GPU-a"}, Limit: 2 << 30}
	edits, err := backend.Apply([]Share{share})
	want := Edits{
		Env:    map[string]string{"CUDA_MPS_PIPE_DIRECTORY": "/run/mps/GPU-a/pipe", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "GPU-a=2048M"},
		Mounts: []Mount{{"/run/mps/GPU-a/pipe", "/run/mps/GPU-a/pipe"}, {"/run/mps/shm", "/dev/shm"}},
	}
	if diff := cmp.Diff(want, edits); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
	for name, shares := range map[string][]Share{"several cards": {share, share}, "no whole MiB": {{Card: share.Card, Limit: 1}}} {
		if _, err := backend.Apply(shares); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestMPSMaxContainers(t *testing.T) {
	backend := Backends(Options{})[MPS]
	for capability, want := range map[Compute]int{{Major: 7}: 16, {Major: 7, Minor: 2}: 16, {Major: 7, Minor: 5}: 48, {Major: 9}: 48} {
		if got := backend.MaxContainers(Card{Compute: capability}); got != want {
			t.Errorf("%+v: %d containers, want %d", capability, got, want)
		}
	}
}
