package isolation

import (
	"testing"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// The extender knows the mode by the name that nodes write.
func TestModeOnTheWire(t *testing.T) {
	if MPS != protocol.IsolationMPS {
		t.Errorf("mode %s is %q for the extender", MPS, protocol.IsolationMPS)
	}
}

// TestUsable: no container starts on a card that no program can use, except in mode mps, where the supervisor sets the compute mode.
func TestUsable(t *testing.T) {
	backend := Backends(Options{})[None]
	for mode, want := range map[string]string{
		"": "", "DEFAULT": "", "EXCLUSIVE_PROCESS": "", // The last suits MPS daemons of the administrator's own.
		"PROHIBITED": "its compute mode is PROHIBITED, as mode mps can leave it, and no program can use it: nvidia-smi -i GPU-a -c DEFAULT, on the node, resets it",
	} {
		got := ""
		if err := backend.Ready(Node{}, Card{UUID: "GPU-a", Compute: Compute{Mode: mode}}); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("compute mode %q: got %q, want %q", mode, got, want)
		}
	}
}
