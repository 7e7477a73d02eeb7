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
