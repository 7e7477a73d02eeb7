package dispatch

import (
	"testing"

	"github.com/gpushare/gpushare/pkg/reasons"
)

// What is said of pods that wait for their turn, and of tenants with such pods.
func TestWords(t *testing.T) {
	for name, test := range map[string]struct {
		turn        reasons.Turn
		pod, tenant string
	}{
		"its turn comes": {
			reasons.Turn{Tenant: "vision", Allocated: 40, Share: 32, Before: 2},
			"waits for its turn: tenant vision has 40 of its share of 32; 2 tenants are before it", "vision/a: 2 tenants are before it",
		},
		"its turn is next": {
			reasons.Turn{Tenant: "vision", Allocated: 1, Share: 32}, "waits for its turn: tenant vision has 1 of its share of 32", "vision/a: its turn is next",
		},
		"it has no room": {
			reasons.Turn{Tenant: "", Allocated: 1, Share: 32, Before: 1, Obstacle: reasons.ObstacleNoRoom},
			"waits for its turn: tenant <none> has 1 of its share of 32; 1 tenant is before it; no card has room for it now",
			"vision/a: 1 tenant is before it; no card has room for it now",
		},
		"it never fits": {
			reasons.Turn{Tenant: "vision", Share: 32, Before: 1, Obstacle: reasons.ObstacleNeverFits},
			"waits for its turn: tenant vision has 0 of its share of 32; no node that it can use is large enough for it",
			"vision/a: no node that it can use is large enough for it",
		},
		"others wait for the first": {
			reasons.Turn{Tenant: "vision", Share: 32, Obstacle: reasons.ObstacleBehind},
			"waits for its turn: tenant vision has 0 of its share of 32; a pod before it in its tenant's queue has no room and may no longer be overtaken",
			"vision/a: a pod before it in its tenant's queue has no room and may no longer be overtaken",
		},
		"a member is missing": {
			reasons.Turn{Tenant: "vision", Obstacle: reasons.ObstacleIncomplete}, "its group isn't complete: it gets its turn when all members exist", "",
		},
	} {
		want(t, name, test.pod, test.turn.String())
		tenant := Tenant{Waiting: 1, Before: test.turn.Before, Obstacle: test.turn.Obstacle}
		if test.tenant == "" {
			continue // Pods of incomplete groups aren't among those that wait.
		}
		tenant.Next.Namespace, tenant.Next.Name = "vision", "a"
		want(t, name, test.tenant, tenant.Reason())
	}
	want(t, "nothing waits", "", Tenant{}.Reason())
}
