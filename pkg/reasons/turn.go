package reasons

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// AwaitsTurn is the text on the wire for a pod that fair sharing holds back. It must not change while a pod is pending: a change of its
// condition makes kube-scheduler retry it.
const AwaitsTurn = "fair share: the pod waits for its turn"

// Obstacle is why pods that wait for their turn aren't granted.
type Obstacle int

// The obstacles.
const (
	// ObstacleUntried means that nothing is known yet.
	ObstacleUntried Obstacle = iota
	// ObstacleNoRoom means that they fit nowhere now.
	ObstacleNoRoom
	// ObstacleNeverFits means that they wouldn't fit even if all cards were free, beside the pods without GPU memory, which are expected to
	// stay. They don't count for their tenant's demand.
	ObstacleNeverFits
	// ObstaclePaused means that they, or pods of the same shape, were placed and not bound in time (queue.Failures). They don't count for their
	// tenant's demand.
	ObstaclePaused
	// ObstacleBehindFailed means that others of their namespace were placed and not bound in time. They don't count for their tenant's demand.
	ObstacleBehindFailed
	// ObstacleMakingRoom means that they have no room yet, and pods of other tenants are evicted for them.
	ObstacleMakingRoom
	// ObstacleIncomplete means that too few members of their group exist.
	ObstacleIncomplete
	// ObstacleGateStuck means that they are granted, and a scheduling gate could not be removed yet.
	ObstacleGateStuck
)

var obstacles = [...]string{
	ObstacleUntried:      "",
	ObstacleNoRoom:       "no card has room for it now",
	ObstacleMakingRoom:   "pods of other tenants are evicted for it",
	ObstacleNeverFits:    "no node that it can use has enough cards, CPU or memory for it, even if all pods with GPU memory ended",
	ObstaclePaused:       "it, or a pod like it, was not scheduled after its last turn, and gets the next one after a pause",
	ObstacleBehindFailed: "other pods of its namespace were not scheduled after their last turns, so its pods get their turns one at a time",
	ObstacleIncomplete:   "its group isn't complete: it gets its turn when all members exist",
	ObstacleGateStuck:    "it is its turn, but its scheduling gate could not be removed: the extender's log has the error",
}

// Obstacles returns all obstacles.
func Obstacles() []Obstacle {
	all := make([]Obstacle, len(obstacles))
	for i := range all {
		all[i] = Obstacle(i)
	}
	return all
}

// String returns the obstacle in words, as a part of a sentence about the pod; empty if nothing is known.
func (o Obstacle) String() string { return obstacles[o] }

// Infeasible reports whether pods with this obstacle don't count for their tenant's demand.
func (o Obstacle) Infeasible() bool {
	return o == ObstacleNeverFits || o == ObstaclePaused || o == ObstacleBehindFailed
}

// Turn is the position of a waiting pod in the queue, and why it isn't granted.
type Turn struct {
	Tenant           string
	Share, Allocated gpu.Memory
	// Before counts the tenants with waiting pods that come before the pod's tenant in the queue.
	Before   int
	Obstacle Obstacle
}

// String returns the sentence that is shown to users.
func (t Turn) String() string {
	if t.Obstacle == ObstacleIncomplete || t.Obstacle == ObstacleGateStuck {
		return t.Obstacle.String()
	}
	text := fmt.Sprintf("waits for its turn: tenant %s has %d of its share of %d", TenantName(t.Tenant), t.Allocated, t.Share)
	return strings.Join(append([]string{text}, t.waits()...), "; ")
}

// TenantName returns a tenant's name for users: that of the namespaces without the label of --fair-share-by is empty.
func TenantName(name string) string { return cmp.Or(name, "<none>") }

// Brief returns why the pod waits without its tenant.
func (t Turn) Brief() string { return cmp.Or(strings.Join(t.waits(), "; "), "its turn is next") }

// waits returns the number of tenants before the pod's own, and the obstacle.
func (t Turn) waits() (why []string) {
	switch {
	case t.Obstacle.Infeasible(): // Then the order of the tenants doesn't matter.
	case t.Before == 1:
		why = []string{"1 tenant is ahead of it"}
	case t.Before > 1:
		why = []string{fmt.Sprintf("%d tenants are ahead of it", t.Before)}
	}
	if text := t.Obstacle.String(); text != "" {
		why = append(why, text)
	}
	return why
}
