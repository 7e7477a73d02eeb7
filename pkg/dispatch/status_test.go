package dispatch

import (
	"testing"
	"unique"

	"github.com/gpushare/gpushare/pkg/gpu"
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
			"waits for its turn: tenant vision has 40 of its share of 32; 2 tenants are ahead of it", "vision/a: 2 tenants are ahead of it",
		},
		"its turn is next": {
			reasons.Turn{Tenant: "vision", Allocated: 1, Share: 32}, "waits for its turn: tenant vision has 1 of its share of 32", "vision/a: its turn is next",
		},
		"it has no room": {
			reasons.Turn{Tenant: "", Allocated: 1, Share: 32, Before: 1, Obstacle: reasons.ObstacleNoRoom},
			"waits for its turn: tenant <none> has 1 of its share of 32; 1 tenant is ahead of it; no card has room for it now",
			"vision/a: 1 tenant is ahead of it; no card has room for it now",
		},
		"it never fits": {
			reasons.Turn{Tenant: "vision", Share: 32, Before: 1, Obstacle: reasons.ObstacleNeverFits},
			"waits for its turn: tenant vision has 0 of its share of 32; no node that it can use has enough cards, CPU or memory for it, even if all pods with GPU memory ended",
			"vision/a: no node that it can use has enough cards, CPU or memory for it, even if all pods with GPU memory ended",
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

// TestDemanded has pods that wait alone, and a group whose members have different constraints. What waits is counted by constraints.
func TestDemanded(t *testing.T) {
	f := newFixture(t, []gpu.Memory{1}, nil)
	constrained := func(constraints string) edit {
		return func(p *Pod) { p.Constraints = unique.Make(constraints) }
	}
	f.groups.sizes["g"] = 2
	f.pod("alice/1", 2, constrained("x"), inGroup("g"), priority(1))
	f.pod("alice/2", 3, constrained("y"), inGroup("g"), priority(1))
	f.pod("alice/3", 4, constrained("x"))
	f.pod("alice/4", 5, constrained("x"))
	f.pod("alice/5", 6, constrained("y"))
	f.pod("bob/1", 7, constrained("x"))
	f.gatherGroups()
	got := map[string]gpu.Memory{}
	s := f.takeStandings()
	for of, amount := range s.demanded {
		got[s.tenants[of.tenant].Name+" "+of.constraints.Value()] = amount
	}
	want(t, "what waits", map[string]gpu.Memory{"alice x": 11, "alice y": 9, "bob x": 7}, got)
}
