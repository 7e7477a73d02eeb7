package isolation

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/test/check"
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
		"a daemon that ended": {&MPSStatus{State: MPSStopped, Reason: "containers still have the card", At: time.Now().Add(-time.Hour)}, Card{},
			"its MPS daemon is stopped: containers still have the card"},
		"a clock set back since": {&MPSStatus{State: MPSReady, At: time.Now().Add(time.Hour)}, Card{}, "the supervisor of its MPS daemon doesn't run"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := MPSDirectory(t.TempDir())
			test.card.UUID = "GPU-a"
			if test.card.Compute.Major == 0 {
				test.card.Compute = Compute{8, 0, exclusive}
			}
			if test.status != nil {
				check.Must(t, errors.Join(os.Mkdir(filepath.Join(string(dir), "GPU-a"), 0o755), dir.WriteStatus("GPU-a", *test.status)))
			}
			err := NewBackends(Options{MPS: dir}).Of(MPS).Ready(test.card)
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

func TestMPSCheckInForce(t *testing.T) {
	for name, test := range map[string]struct {
		card   Card
		status *MPSStatus
		want   string
	}{
		"a daemon":                    {Card{Compute: Compute{8, 0, exclusive}}, &MPSStatus{State: MPSReady, At: time.Now()}, ""},
		"a daemon that restarts":      {Card{Compute: Compute{8, 0, prohibited}}, nil, ""},
		"no answer of the driver":     {Card{Unreadable: errors.New("unknown error")}, nil, ""},
		"no daemon, and another mode": {Card{Compute: Compute{8, 0, "DEFAULT"}}, nil, "the compute mode of its card is DEFAULT, in which programs need no MPS daemon"},
		"a dead supervisor":           {Card{Compute: Compute{8, 0, exclusive}}, &MPSStatus{State: MPSReady, At: time.Now().Add(-time.Hour)}, "its card: the supervisor of its MPS daemon doesn't run"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := MPSDirectory(t.TempDir())
			check.Must(t, os.Mkdir(filepath.Join(string(dir), "GPU-a"), 0o755))
			if test.status != nil {
				check.Must(t, dir.WriteStatus("GPU-a", *test.status))
			}
			test.card.UUID = "GPU-a"
			if err := NewBackends(Options{MPS: dir}).Of(MPS).CheckInForce(test.card); (err == nil) != (test.want == "") || err != nil && err.Error() != test.want {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

func TestMPSApply(t *testing.T) {
	backend := NewBackends(Options{MPS: "/run/mps"}).Of(MPS)
	share := Share{Card: Card{UUID: "GPU-a"}, Limit: 2 << 30}
	edits, err := backend.Apply([]Share{share})
	want := Edits{
		Env:    map[string]string{"CUDA_MPS_PIPE_DIRECTORY": "/run/mps/GPU-a/pipe", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "GPU-a=2048M"},
		Mounts: []Mount{{"/run/mps/GPU-a/pipe", "/run/mps/GPU-a/pipe"}, {"/run/mps/shm", "/dev/shm"}},
	}
	if diff := cmp.Diff(want, edits); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
	share.Cores, want.Env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = 30, "30"
	edits, err = backend.Apply([]Share{share})
	if diff := cmp.Diff(want, edits); diff != "" || err != nil {
		t.Errorf("with cores: %v\n%s", err, diff)
	}
	for name, shares := range map[string][]Share{"several cards": {share, share}, "no whole MiB": {{Card: share.Card, Limit: 1}}} {
		if _, err := backend.Apply(shares); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestMPSMaxContainers(t *testing.T) {
	backend := NewBackends(Options{}).Of(MPS)
	for capability, want := range map[Compute]int{{Major: 7}: 16, {Major: 7, Minor: 2}: 16, {Major: 7, Minor: 5}: 48, {Major: 9}: 48} {
		if got := backend.MaxContainers(Card{Compute: capability}); got != want {
			t.Errorf("%+v: %d containers, want %d", capability, got, want)
		}
	}
}
