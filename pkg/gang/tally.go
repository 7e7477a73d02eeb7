package gang

import (
	"maps"
	"slices"
)

// tally counts the members of a run. The cost of a change doesn't depend on the number of members.
type tally struct {
	counts [categories]int
	// sizes counts the members that exist by the size that they name, boundSizes the bound ones.
	sizes, boundSizes map[int]int
	// priorities counts pending and bound members by priority.
	priorities map[int32]int
	// controllers holds the controllers of all members, and those of former members whose pods the run accepts.
	controllers map[string]*controllerTally
	// succeededCounted counts the members that have succeeded, and whose controller also has a pending or bound member.
	succeededCounted int
	// marked counts the members that mark the run as whole.
	marked int
}

// controllerTally counts a controller's members in a run.
type controllerTally struct {
	active, bound, succeeded int
	// accepted is true if one of them was ever bound, or existed when all members that the run needs were bound.
	accepted bool
	// continues is true if the run goes on even while none of its members is bound: one of the controller's has succeeded, or the controller
	// creates fewer than a run needs.
	continues bool
}

func newTally() tally {
	return tally{sizes: map[int]int{}, boundSizes: map[int]int{}, priorities: map[int32]int{}, controllers: map[string]*controllerTally{}}
}

// add counts a member n times; n is 1, or -1 for a member that counted before.
func (t *tally) add(m *member, n int) {
	what := m.counted
	t.counts[what] += n
	if m.marksWhole() {
		t.marked += n
	}
	if what != other && what != succeeded && m.Size > 0 {
		addTo(t.sizes, m.Size, n)
		if what == bound {
			addTo(t.boundSizes, m.Size, n)
		}
	}
	c := t.controller(m.Controller)
	t.succeededCounted -= c.countSucceeded(m.Controller)
	switch what {
	case pending, bound:
		addTo(t.priorities, m.Priority, n)
		c.active += n
		if what == bound {
			c.bound += n
		}
	case succeeded:
		c.succeeded += n
		c.continues = true
	}
	t.succeededCounted += c.countSucceeded(m.Controller)
	c.accepted = c.accepted || m.Node != "" && n > 0
	if *c == (controllerTally{}) {
		delete(t.controllers, m.Controller)
	}
}

// forget removes a controller that has no pending, bound or succeeded member: the tally of a run that lives for long must not grow.
func (t *tally) forget(controller string) {
	if c := t.controllers[controller]; c != nil && c.active == 0 && c.succeeded == 0 {
		delete(t.controllers, controller)
	}
}

// controller returns the tally of a controller, and adds one if there is none.
func (t *tally) controller(name string) *controllerTally {
	c := t.controllers[name]
	if c == nil {
		c = &controllerTally{}
		t.controllers[name] = c
	}
	return c
}

// acceptSurplus accepts the controllers of all members once those that the run needs are bound, but no controller that has
// enough members for a run of its own: then a job was restarted while its first pods were pending. If one controller has all bound members,
// the others are of other jobs.
func (t *tally) acceptSurplus() {
	several := 0
	for _, c := range t.controllers {
		several += min(c.bound, 1)
	}
	for _, c := range t.controllers {
		c.accepted = c.accepted || several > 1 && c.active < t.size()
	}
}

// countSucceeded counts the succeeded members that count as members of the present run. Pods without a controller aren't
// related to each other.
func (c *controllerTally) countSucceeded(controller string) int {
	if controller == "" || c.active == 0 {
		return 0
	}
	return c.succeeded
}

func addTo[K comparable](counts map[K]int, key K, n int) {
	counts[key] += n
	if counts[key] == 0 {
		delete(counts, key)
	}
}

// size returns how many members must be bound together; 0 if no member says so, or if members disagree. Once members are bound, only they say it: a pod
// that names another number keeps them neither from their last members nor from being evicted.
func (t *tally) size() int {
	sizes := t.sizes
	if len(t.boundSizes) > 0 {
		sizes = t.boundSizes
	}
	if len(sizes) != 1 {
		return 0
	}
	for size := range sizes {
		return size
	}
	return 0
}

// existing counts the members that are pending or bound, and the finished ones that count.
func (t *tally) existing() int { return t.counts[pending] + t.counts[bound] + t.succeededCounted }

// unbound counts the members that could be bound.
func (t *tally) unbound() int { return t.counts[pending] + t.counts[ineligible] }

// lacking is how many pending members must be bound together.
func (t *tally) lacking() int { return t.size() - t.counts[bound] - t.succeededCounted }

// enoughExist reports whether as many members exist as must be bound together.
func (t *tally) enoughExist() bool {
	return t.size() > 0 && t.counts[pending] > 0 && t.existing() >= t.size()
}

// whole reports whether all members are bound, or have been.
func (t *tally) whole() bool {
	return t.marked > 0 || t.size() > 0 && t.lacking() <= 0
}

// priority returns the lowest priority of the members that count.
func (t *tally) priority() int32 {
	if len(t.priorities) == 0 {
		return 0
	}
	return slices.Min(slices.Collect(maps.Keys(t.priorities)))
}

// accepts reports whether a pod of the controller joins the run after the run became whole. It does while the run is alive: another member
// runs, or the controller continues it. A pod without a controller joins only while another one runs.
func (t *tally) accepts(controller string) bool {
	c := t.controllers[controller]
	switch {
	case c == nil || !c.accepted:
		return false
	case controller == "":
		return c.bound > 0
	}
	return t.counts[bound] > 0 || c.continues
}
