package isolation

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

// TestUsable: no container starts on a card that a supervisor of MPS has left in a compute mode in which containers can't share it.
func TestUsable(t *testing.T) {
	for name, test := range map[string]struct {
		mode string
		left bool // A supervisor has not removed its status.
		want string
	}{
		"not known":                     {"", false, ""},
		"the default":                   {"DEFAULT", false, ""},
		"set back by the administrator": {"DEFAULT", true, ""},
		"for MPS daemons of the administrator's own": {exclusive, false, ""},
		"the supervisor was killed":                  {exclusive, true, "its compute mode is EXCLUSIVE_PROCESS, as mode mps can leave it, and only one program can use it"},
		"containers still had the card":              {prohibited, true, "its compute mode is PROHIBITED, as mode mps can leave it, and no program can use it"},
		"also without a status":                      {prohibited, false, "its compute mode is PROHIBITED, as mode mps can leave it, and no program can use it"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := MPSDirectory(t.TempDir())
			if test.left {
				if err := errors.Join(os.Mkdir(filepath.Join(string(dir), "GPU-a"), 0o755), dir.WriteStatus("GPU-a", MPSStatus{State: MPSReady})); err != nil {
					t.Fatal(err)
				}
			}
			got := ""
			if err := NewBackends(Options{MPS: dir}).Of(None).Ready(Card{UUID: "GPU-a", Compute: Compute{Mode: test.mode}}); err != nil {
				got = err.Error()
			}
			if test.want != "" {
				test.want += ": nvidia-smi -i GPU-a -c DEFAULT, on the node, resets it"
			}
			if got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// TestModeOf: what a container was given shows the mode that limits it, whatever the mode of the node is later.
func TestModeOf(t *testing.T) {
	type answer struct {
		Mode  Mode
		Limit uint64
	}
	for _, byCDI := range []bool{false, true} {
		backends := NewBackends(Options{SpecDirs: []string{t.TempDir()}, CardsByCDI: byCDI, MPS: "/run/mps"})
		for mode, want := range map[Mode]answer{None: {}, Driver: {Driver, 2 << 30}, MPS: {MPS, 0}} {
			edits, err := backends.Of(mode).Apply([]Share{{Card: Card{UUID: "GPU-a", Device: "GPU-a"}, Limit: 2 << 30}})
			check.Must(t, err)
			edits.Devices = append([]string{CardKind + "=GPU-a"}, edits.Devices...)
			if mode, limit := backends.ModeOf(edits); (answer{mode, limit}) != want {
				t.Errorf("mode %s, cards by CDI %t: got %s and %d, want %+v", mode, byCDI, mode, limit, want)
			}
		}
	}
}
