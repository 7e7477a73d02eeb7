package diagnosis

import (
	"fmt"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Turn is what a pod waits for that must not be scheduled before its turn.
type Turn struct {
	Tenant           string
	Allocated, Share gpu.Memory
	// Before counts the tenants that are before the pod's and wait for something.
	Before int
	// Incomplete is true if the pod's group isn't complete, so that it has no turn.
	Incomplete bool
	// Obstacle is why the pod would not be scheduled at its turn; empty if nothing is known.
	Obstacle string
}

// String returns the sentence that is shown to users.
func (t *Turn) String() string {
	if t.Incomplete {
		return "its group isn't complete: it gets its turn when all members exist"
	}
	text := fmt.Sprintf("waits for its turn: tenant %s has %d of its share of %d", t.Tenant, t.Allocated, t.Share)
	if t.Before > 0 {
		text += "; " + count(t.Before, "tenant is", "tenants are") + " before it"
	}
	if t.Obstacle != "" {
		text += "; " + t.Obstacle
	}
	return text
}
