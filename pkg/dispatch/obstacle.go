package dispatch

// Obstacle is why a unit isn't granted.
type Obstacle int

// The obstacles.
const (
	// Untried means that nothing is known yet.
	Untried Obstacle = iota
	// NoRoom means that it fits nowhere now.
	NoRoom
	// NeverFits means that it wouldn't fit even if all cards were free. It doesn't count for its tenant's demand.
	NeverFits
	// Paused means that an earlier charge ended without a bind. It doesn't count for its tenant's demand.
	Paused
	// Behind means that it waits for a pod of its own tenant that was overtaken for too long.
	Behind
	// MakingRoom means that it has no room yet, and pods of other tenants are evicted for it.
	MakingRoom
	// Incomplete means that too few members of its group exist.
	Incomplete
	// GateStuck means that it is granted, and its scheduling gate could not be removed yet.
	GateStuck
)

// String returns the obstacle in words, as a part of a sentence about the pod; empty if nothing is known.
func (o Obstacle) String() string {
	switch o {
	case NoRoom:
		return "no card has room for it now"
	case MakingRoom:
		return "pods of other tenants are evicted for it"
	case NeverFits:
		return "no node that it can use is large enough for it"
	case Paused:
		return "it was not scheduled after its last turn, and gets the next one after a pause"
	case Behind:
		return "a pod before it in its tenant's queue has no room and may no longer be overtaken"
	}
	return ""
}

// infeasible reports whether a unit with this obstacle doesn't count for its tenant's demand.
func (o Obstacle) infeasible() bool { return o == NeverFits || o == Paused }

// obstacle returns why the unit was not granted in the latest round.
func (m *Manager) obstacle(u *unit) Obstacle {
	switch {
	case u.paused:
		return Paused
	case u.kind.obstacle == NeverFits:
		return NeverFits
	case m.holding[u.item.Tenant] != nil && m.holding[u.item.Tenant] != u:
		return Behind
	}
	return u.kind.obstacle
}
