package ledger

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// ErrNoRoom is wrapped by NoRoomError.
var ErrNoRoom = errors.New("no room")

// NoRoomError says why a pod can't be placed on a node. errors.Is(err, ErrNoRoom) holds for it.
type NoRoomError struct {
	Node   string
	Reason placement.Reason
}

func (e *NoRoomError) Error() string { return fmt.Sprintf("node %s: %s", e.Node, e.Reason) }

// Unwrap returns ErrNoRoom.
func (e *NoRoomError) Unwrap() error { return ErrNoRoom }

// State is how firm a hold is.
type State int

const (
	// Reserved says that a bind is in flight, or that its outcome isn't known yet.
	Reserved State = iota
	// Bound says that the API server has the pod on its node.
	Bound
)

// String returns the state's name.
func (s State) String() string {
	if s == Reserved {
		return "reserved"
	}
	return "bound"
}

// Holder is a pod that holds memory of a node. Values handed out are copies.
type Holder struct {
	gpu.Pod
	State State
	// Placement is where the pod sits. It is empty for a presumed one that no card has room for.
	Placement gpu.Placement
	// Presumed says that nobody has told the pod's card: it was bound without one, and the ledger keeps room where the
	// node is likely to put it, or to have put it. The place stays while there is room for it, and yields to what is
	// told.
	Presumed bool
	// AssumeTime is when the card was chosen, zero where it isn't known.
	AssumeTime time.Time
}

// NodeSpec is what a node offers.
type NodeSpec struct {
	Unit gpu.Unit
	// Cards in the order of their index, each index once.
	Cards []gpu.Card
	// WholeCards says that the node gives out whole cards too: nothing is placed on it.
	WholeCards bool
	// Closed is why no pod can go there for the time being, whatever is free: for people. Who may go to which node is
	// kube-scheduler's to decide, so nothing here follows from it.
	Closed string
}

// Node is a node as it stands. Values handed out are copies.
type Node struct {
	Name string
	NodeSpec
	// Used is what is held of each card, in the order of Cards. It can pass the card's memory where others placed pods.
	Used []gpu.Memory
	// Holders are the pods that hold memory, in order of namespace and name; also those whose card has vanished.
	Holders []Holder
}

// Ledger is the book of a cluster. Its methods may be called from many goroutines: one lock guards everything but the
// roll, which has its own. It is held for in-memory work only, and never while the caller's code runs, but for the visits of
// Check and Rank.
type Ledger struct {
	freed func(node string)

	mu    sync.RWMutex
	nodes map[string]*node
	// membership counts the changes of which nodes there are.
	membership uint64
	roll       roll
	// homes is the node that each holder is on: a pod holds memory of one node at most.
	homes map[gpu.PodUID]string
	// claim is nil without one.
	claim *claim
	// nominations is the node that each nominated pod waits for.
	nominations map[gpu.PodUID]string
	promises    promises
	// revision counts the changes of nodes, see Since; forgotten is the last one that left nothing to know of a node.
	revision, forgotten uint64
}

// New returns an empty ledger. freed is called, without the lock and from the goroutine that made the change, after
// more than before can be placed on a card of a node (a holder left, a card came, grew or got well); it may be nil.
func New(freed func(node string)) *Ledger {
	if freed == nil {
		freed = func(string) {}
	}
	return &Ledger{
		freed: freed, nodes: map[string]*node{},
		homes: map[gpu.PodUID]string{}, nominations: map[gpu.PodUID]string{},
	}
}

// SetNode records what a node offers, in place: holders stay, also those on cards that are no longer there.
func (l *Ledger) SetNode(name string, spec NodeSpec) {
	l.change(name, func(n *node) { n.offer(spec) })
}

// DeleteNode forgets what a node offers. Its holders stay until their pods are gone: a node object that is deleted and
// made anew finds them again.
func (l *Ledger) DeleteNode(name string) {
	l.change(name, (*node).forget)
}

// Check tells for each of the named nodes whether the pod would find a card there. visit is called under the lock, in
// the order of the names, and must not call the ledger. Nothing is reserved.
func (l *Ledger) Check(pod gpu.Pod, names []string, visit func(name string, reason placement.Reason)) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	home, held := l.homes[pod.UID]
	for _, name := range names {
		switch {
		case held && home == name:
			visit(name, placement.Fits)
		case held:
			visit(name, placement.Elsewhere)
		default:
			visit(name, l.fit(l.nodes[name], pod))
		}
	}
}

// AnyFit returns a node on which the pod would find a card, whichever.
func (l *Ledger) AnyFit(pod gpu.Pod) (name string, ok bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if home, held := l.homes[pod.UID]; held {
		return home, true
	}
	for name, n := range l.nodes {
		if l.fit(n, pod) == placement.Fits {
			return name, true
		}
	}
	return "", false
}

// Fitting returns the nodes on which the pod would find a card, in no order.
func (l *Ledger) Fitting(pod gpu.Pod) []string {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if home, held := l.homes[pod.UID]; held {
		return []string{home}
	}
	var names []string
	for name, n := range l.nodes {
		if l.fit(n, pod) == placement.Fits {
			names = append(names, name)
		}
	}
	return names
}

// View is how Rank looks at nodes.
type View struct {
	// Card and Node are the policies that nodes are judged by.
	Card, Node placement.Policy
	// Promised counts what other pods were promised (see Promise), shortly before this time, as taken; zero counts nothing.
	Promised time.Time
}

// Rank is Check with how well each node suits the pod besides; i is the node's position among the names. A pod that holds
// memory already is best off where it is. It says whether there were promises to count. The names are kept and must not
// change.
func (l *Ledger) Rank(view View, pod gpu.Pod, names []string, visit func(i int, suits placement.Suitability, reason placement.Reason)) (promised bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	home, held := l.homes[pod.UID]
	l.each(names, func(i int, n *node) {
		switch {
		case held && home == names[i]:
			visit(i, placement.MaxScore, placement.Fits)
		case held:
			visit(i, 0, placement.Elsewhere)
		default:
			suits, reason := l.suit(n, view, pod)
			visit(i, suits, reason)
		}
	})
	return l.promises.count(view)
}

// Reserve chooses a card of the node for the pod and holds its memory, in one step. A pod that holds memory of this
// node already, reserved or bound, gets what it has: retries change nothing (and a bound one may have no placement, see
// Holder). The error is a *NoRoomError where the pod can't be placed.
func (l *Ledger) Reserve(name string, pod gpu.Pod, policy placement.Policy, at time.Time) (Holder, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.promises.keep(pod.UID)
	n := l.nodes[name]
	if home, held := l.homes[pod.UID]; held {
		if home != name {
			return Holder{}, &NoRoomError{name, placement.Elsewhere}
		}
		return n.holders[pod.UID].copy(), nil
	}
	where, reason := gpu.Placement(nil), n.open()
	if reason == placement.Fits {
		where, reason = placement.Place(policy, l.cardsFor(n, pod), pod.Request)
	}
	if reason != placement.Fits {
		return Holder{}, &NoRoomError{name, reason}
	}
	h := &Holder{Pod: pod, State: Reserved, Placement: where, AssumeTime: at}
	n.holders[pod.UID] = h
	l.homes[pod.UID] = name
	l.touch(n)
	n.take(where) // Nothing else moves: presumed holders keep their places, and this one took free memory only.
	return h.copy(), nil
}

// Commit makes a reservation a bound hold, once the API server has the pod on its node. It says whether the pod was
// held: one that was deleted meanwhile is not, and must not come back.
func (l *Ledger) Commit(uid gpu.PodUID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.holder(uid)
	if h == nil {
		return false
	}
	h.State = Bound
	l.touch(l.nodes[l.homes[uid]])
	return true
}

// Release gives a reservation back, once its bind has surely failed. A bound hold stays. It says whether something was
// given back.
func (l *Ledger) Release(uid gpu.PodUID) bool {
	return l.drop(uid, func(h *Holder) bool { return h.State == Reserved })
}

// Drop removes a holder, once its pod is gone or has ended. It says whether there was one.
func (l *Ledger) Drop(uid gpu.PodUID) bool {
	return l.drop(uid, func(*Holder) bool { return true })
}

// Hold records that a pod is bound to a node, as the API server tells it. It is the truth: it replaces a reservation,
// is never refused, and may make a card hold more than it has. An empty placement says that nobody told the card: room
// is kept for the pod where it was held before on this node, else where the node is likely to put it.
func (l *Ledger) Hold(name string, pod gpu.Pod, where gpu.Placement, assumed time.Time) {
	l.edit(func(alter func(string, func(*node))) {
		if home, held := l.homes[pod.UID]; held && home != name {
			alter(home, func(n *node) { delete(n.holders, pod.UID) })
		}
		alter(name, func(n *node) {
			h := &Holder{Pod: pod, State: Bound, Placement: slices.Clone(where), AssumeTime: assumed}
			if len(where) == 0 {
				h.Presumed = true
				if before := n.holders[pod.UID]; before != nil {
					h.Placement = before.Placement
				}
			}
			n.holders[pod.UID] = h
			l.homes[pod.UID] = name
		})
		l.promises.keep(pod.UID)
	})
}

// Lookup returns the holder of the pod and its node.
func (l *Ledger) Lookup(uid gpu.PodUID) (string, Holder, bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	h := l.holder(uid)
	if h == nil {
		return "", Holder{}, false
	}
	return l.homes[uid], h.copy(), true
}

// Card returns a card of a node, and the unit that its memory is counted in.
func (l *Ledger) Card(name string, index int) (gpu.Card, gpu.Unit, bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	n, ok := l.nodes[name]
	if !ok {
		return gpu.Card{}, 0, false
	}
	i, ok := n.position(index)
	if !ok {
		return gpu.Card{}, 0, false
	}
	return n.offered[i], n.unit, true
}

// Node returns one node as it stands.
func (l *Ledger) Node(name string) (Node, bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	n, ok := l.nodes[name]
	if !ok {
		return Node{}, false
	}
	return n.copy(name), true
}

// Nodes returns every node, in order of their names. They are read one after another, so that nobody who decides waits
// for all of them: each as it stands at one moment, and a pod that changes its node meanwhile may be on neither or both.
func (l *Ledger) Nodes() []Node {
	l.mu.RLock()
	names := slices.AppendSeq(make([]string, 0, len(l.nodes)), maps.Keys(l.nodes))
	l.mu.RUnlock()
	return l.read(names)
}

// read returns those of the nodes that there still are, in order of their names.
func (l *Ledger) read(names []string) []Node {
	slices.Sort(names)
	nodes := make([]Node, 0, len(names))
	for _, name := range names {
		if node, ok := l.Node(name); ok {
			nodes = append(nodes, node)
		}
	}
	return nodes
}

// Offer is a node that shares its cards, without who holds what of them.
type Offer struct {
	Name string
	// Unit is the node's, or as its cards look where it doesn't tell.
	Unit   gpu.Unit
	Closed string
	Cards  []placement.Card
}

// Offers returns the nodes that have cards, in order of their names. It costs much less than Nodes.
func (l *Ledger) Offers() []Offer {
	l.mu.RLock()
	defer l.mu.RUnlock()
	var out []Offer
	for name, n := range l.nodes {
		if len(n.cards) > 0 {
			out = append(out, Offer{name, gpu.UnitOf(n.unit, n.offered), n.closed, slices.Clone(n.cards)})
		}
	}
	slices.SortFunc(out, func(a, b Offer) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// change alters one node.
func (l *Ledger) change(name string, how func(*node)) {
	l.edit(func(alter func(string, func(*node))) { alter(name, how) })
}

// drop removes the pod's hold, if there is one that may go.
func (l *Ledger) drop(uid gpu.PodUID, may func(*Holder) bool) (dropped bool) {
	l.edit(func(alter func(string, func(*node))) {
		l.promises.keep(uid)
		if h := l.holder(uid); h == nil || !may(h) {
			return
		}
		alter(l.homes[uid], func(n *node) { delete(n.holders, uid) })
		delete(l.homes, uid)
		dropped = true
	})
	return dropped
}

// edit runs under the lock what alters nodes, each by a call of alter, which counts the node anew and forgets it if
// there is nothing left to know. Afterwards, without the lock, it tells of the nodes on which memory came free.
func (l *Ledger) edit(what func(alter func(name string, how func(*node)))) {
	for _, name := range l.editLocked(what) {
		l.freed(name)
	}
}

func (l *Ledger) editLocked(what func(alter func(name string, how func(*node)))) (roomier []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	what(func(name string, how func(*node)) {
		n, ok := l.nodes[name]
		if !ok {
			n = &node{holders: map[gpu.PodUID]*Holder{}}
			// A copy, for the names that come in one list lie side by side then, which Rank's look-ups find sooner.
			l.nodes[strings.Clone(name)] = n
			l.membership++
		}
		before := n.room()
		how(n)
		n.recount()
		l.touch(n)
		if !n.known && len(n.holders) == 0 && len(n.nominees) == 0 {
			delete(l.nodes, name)
			l.membership++
			if ok {
				l.forgotten = l.revision
			}
		}
		if n.roomierThan(before) {
			roomier = append(roomier, name)
		}
	})
	return roomier
}

// holder needs the lock.
func (l *Ledger) holder(uid gpu.PodUID) *Holder {
	name, held := l.homes[uid]
	if !held {
		return nil
	}
	return l.nodes[name].holders[uid]
}
