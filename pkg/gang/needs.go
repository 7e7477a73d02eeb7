package gang

import (
	"cmp"
	"hash/maphash"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
)

// needs are the members that a run must place, and what their plan depends on. They are computed on demand (needed; profile and build for shape and
// requests), and again after a change of a member (run.add). The requests also depend on the candidate nodes (offer, fail).
type needs struct {
	// members are the oldest pending ones.
	members    []*member
	wholeCards bool
	// profile is what Failures is asked about the run; nil until it is needed.
	profile *queue.Profile
	// requests are those of requesters, the members that the ledger places; nil if they must be built again.
	requests   []ledger.Request
	requesters []*member
	// requestsKey is equal for runs whose requests are alike, with the same candidate nodes.
	requestsKey uint64
	// mixed is true if not all requests are alike.
	mixed bool
	// since is when the last of the members was created, or the oldest if members are missing; zero if there are none. All replicas and later leaders
	// know it.
	since time.Time
	// unclear is true if the members are of several controllers, of which none has enough for the run: it is unknown which belong together.
	unclear bool
}

// needed returns the needs of the run: the oldest members that it must place together. Further members are placed once the run is running.
// Members for which fair sharing has opened the gate come first: it opens the gates of the same number of members.
func (r *run) needed() *needs {
	if r.needs != nil {
		return r.needs
	}
	n := &needs{}
	controller, several := r.completeController()
	n.unclear = several && controller == ""
	for _, gated := range [...]bool{false, true} {
		for _, m := range r.ordered() {
			if len(n.members) >= r.lacking() {
				break
			}
			if m.counted == pending && m.Gated == gated && (controller == "" || m.Controller == controller) && r.mayComplete(m) {
				n.members = append(n.members, m)
				n.wholeCards = n.wholeCards || m.Request == 0
			}
		}
	}
	complete := len(n.members) == r.lacking()
	for _, m := range n.members {
		if n.since.IsZero() || complete && m.Created.After(n.since) || !complete && m.Created.Before(n.since) {
			n.since = m.Created
		}
	}
	r.needs = n
	return n
}

// completeController returns the controller that was the first to have all members that the run needs: so it stays the same when others have theirs.
// If two jobs have the same group name, one of them starts, and not half of each. It returns no controller if the members needn't be of one, and
// whether several have members that can be placed.
func (r *run) completeController() (controller string, several bool) {
	if !r.mayMixJobs() || r.counts[bound] > 0 {
		return "", false
	}
	active := 0
	for _, c := range r.controllers {
		active += min(c.active, 1)
	}
	if active < 2 {
		return "", false
	}
	members := map[string]int{}
	for _, m := range r.ordered() {
		if c := r.controllers[m.Controller]; m.counted == pending && m.Controller != "" {
			members[m.Controller]++
			if members[m.Controller]+c.succeeded >= r.size() {
				return m.Controller, true
			}
		}
	}
	return "", true
}

// mayMixJobs reports whether users may have given several jobs the group's name, none of which needs the others.
func (r *run) mayMixJobs() bool { return !r.key.Native && !strings.Contains(r.key.Name, "/") }

// mayComplete reports whether the pending member can stand for a missing one: if others are bound, it must name their number, and not be of another
// job, which has enough members for a run of its own.
func (r *run) mayComplete(m *member) bool {
	if r.counts[bound] == 0 {
		return true
	}
	c := r.controllers[m.Controller]
	ofOtherJob := r.mayMixJobs() && m.Controller != "" && !c.accepted && c.active+c.succeeded >= r.size()
	return m.Size == r.size() && !ofOtherJob
}

// enough reports whether the members that must be bound together exist.
func (r *run) enough() bool {
	return r.enoughExist() && (r.counts[bound] == 0 || len(r.needed().members) == r.lacking())
}

// settle is how long a run of which it is unclear which members belong together waits for more members of the same controllers: these
// create pods at the same time, but not at once.
const settle = time.Second

// membershipClear reports whether it is clear which members belong together, or no more came for some time.
func (r *run) membershipClear(now time.Time) bool {
	return !r.needed().unclear || now.Sub(r.since) >= settle
}

// any reports whether is returns true for one of the members.
func (n *needs) any(is func(gpu.Pod) bool) bool {
	return slices.ContainsFunc(n.members, func(m *member) bool { return is(m.Pod) })
}

// allOffered reports whether the candidate nodes of all members are known. kube-scheduler alone places those of native groups that
// request whole cards.
func (n *needs) allOffered(r *run) bool {
	return !slices.ContainsFunc(n.members, func(m *member) bool {
		return !r.offers[m.Template].known() && (!r.key.Native || m.Request > 0)
	})
}

// build sets the requests of what the run needs. Large requests, and those with few candidate nodes, come first, because they fit fewer places.
// Members with the same candidate nodes follow each other, so that the ledger ranks these nodes once.
func (mgr *Manager) build(r *run, n *needs) {
	if n.requests != nil {
		return
	}
	nodes := func(m *member) *candidates { return r.offers[m.Template].nodes }
	n.requesters = slices.DeleteFunc(slices.Clone(n.members), func(m *member) bool { return m.Request == 0 })
	slices.SortStableFunc(n.requesters, func(a, b *member) int {
		x, y := nodes(a), nodes(b)
		return cmp.Or(cmp.Compare(b.Request, a.Request), cmp.Compare(len(x.names), len(y.names)),
			cmp.Compare(x.fingerprint, y.fingerprint), strings.Compare(a.Shape, b.Shape))
	})
	type onNodes struct {
		requirements
		nodes uint64
	}
	n.requests, n.mixed, n.requestsKey = make([]ledger.Request, len(n.requesters)), false, 0
	for i, m := range n.requesters {
		n.requests[i] = ledger.Request{Pod: m.Pod, Nodes: nodes(m).names}
		n.requestsKey += maphash.Comparable(mgr.seed, onNodes{m.requirements(), nodes(m).fingerprint}) // Whatever the order of the members.
		n.mixed = n.mixed || m.requirements() != n.requesters[0].requirements() || nodes(m) != nodes(n.requesters[0])
	}
}

// profile returns what Failures is asked about the run.
func (mgr *Manager) profile(r *run) queue.Profile {
	n := r.needed()
	if n.profile == nil {
		sum, size := uint64(0), queue.Size{} // Whatever the order of the members.
		for _, m := range n.members {
			sum += maphash.Comparable(mgr.seed, m.requirements())
			size.Memory, size.Cards = size.Memory.Add(m.Request), size.Cards+m.NumCards()
		}
		shape := strconv.FormatUint(sum, 36)
		n.profile = &queue.Profile{Namespace: r.key.Namespace, ID: r.key.ItemID(), ShapeKey: shape, Size: size, CompletesGroup: r.counts[bound] > 0}
	}
	return *n.profile
}
