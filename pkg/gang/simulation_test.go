package gang_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// world is a cluster with a scheduler that behaves as kube-scheduler does, but for its pace: it looks at pods one by one in
// any order, binds some in parallel, forgets calls, and puts refused pods aside until it is woken. It drives a Book over a
// real ledger, and knows by itself what is true.
type world struct {
	*testing.T
	random *rand.Rand
	now    time.Time
	book   *gang.Book
	ledger *ledger.Ledger
	nodes  []string
	// pods are the API server's.
	pods map[gpu.PodUID]*pod
	// order has them as they were created, and some that are gone.
	order []*pod
	// held are the binds that wait, released those that were let go and haven't been made.
	held     []call
	released []call
	serial   int
	// whole are the groups of which all were bound at some moment, and some have been since: who was made anew joins them
	// when there is room.
	whole map[string]bool
	// blurred are the groups that lost a member while they were bound in part: who starts then can't tell them from groups that
	// were whole, and leaves them alone.
	blurred map[string]bool
	evicted int
	bound   int
	claimed int
	// claimAfter is the Book's.
	claimAfter time.Duration
	failed     map[string]int
	// told are the Events.
	told []string
	// freed says that memory came free: package cluster wakes single pods for it.
	freed bool
}

type pod struct {
	gang.Member
	// queued says that the scheduler will look at it; otherwise it is aside, or held.
	queued bool
	// unfit is a node that the scheduler never offers it.
	unfit string
}

type call struct {
	pod    *pod
	node   string
	key    gang.Key
	ticket *gang.Ticket
}

const (
	worldHold     = 10 * time.Second
	worldPatience = 30 * time.Second
)

func newWorld(t *testing.T, seed uint64) *world {
	w := &world{
		T: t, random: rand.New(rand.NewPCG(seed, 3)), now: time.Unix(1_800_000_000, 0), pods: map[gpu.PodUID]*pod{},
		claimAfter: 20 * time.Second, failed: map[string]int{}, whole: map[string]bool{}, blurred: map[string]bool{},
	}
	w.ledger = ledger.New(func(string) {
		w.book.Freed()
		w.freed = true
	})
	w.book = gang.New(gang.Options{Observer: w})
	w.restart()
	for i := range 4 {
		name := fmt.Sprintf("n%d", i)
		w.nodes = append(w.nodes, name)
		w.offer(name)
	}
	return w
}

func (w *world) offer(name string) {
	w.ledger.SetNode(name, ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{{Index: 0, Memory: 16}, {Index: 1, Memory: 16}}})
}

// restart puts a new Book in the old one's place, over a ledger that knows what is bound.
func (w *world) restart() {
	// The old one was killed: of the binds that it had let go some were made.
	for _, c := range w.held {
		c.pod.queued = true
	}
	for _, c := range w.released {
		w.bind(c, w.random.IntN(2) == 0)
	}
	w.held, w.released = nil, nil
	for _, p := range w.pods {
		if p.Node == "" {
			w.ledger.Release(p.UID)
		}
	}
	maps.Copy(w.whole, w.blurred)
	w.book = gang.New(gang.Options{
		Ledger: w.ledger, Release: func(uid gpu.PodUID) { w.ledger.Release(uid) },
		View:       ledger.View{Card: placement.Binpack, Node: placement.Binpack},
		ClaimAfter: w.claimAfter, Hold: worldHold, Patience: worldPatience, OnFailure: gang.Evict, Observer: w,
		Reach: func(uid gpu.PodUID) []string { return w.enters(w.pods[uid]) },
	})
	for _, p := range w.pods {
		w.book.Seen(p.Member, w.now)
	}
	w.book.Inherit()
}

// GangHeld implements gang.Observer.
func (w *world) GangHeld(wait time.Duration) {
	if wait > worldPatience {
		w.Errorf("a barrier opened after %v", wait)
	}
}

// GangBound implements gang.Observer.
func (w *world) GangBound() { w.bound++ }

// GangFailed implements gang.Observer.
func (w *world) GangFailed(reason string) { w.failed[reason]++ }

// GangClaimed implements gang.Observer.
func (w *world) GangClaimed() { w.claimed++ }

// GangEvicted implements gang.Observer.
func (w *world) GangEvicted() {}

func (w *world) create(group string, size int, memory gpu.Memory, template string) {
	w.serial++
	p := &pod{queued: true}
	if n, ok := strings.CutPrefix(template, "not on "); ok {
		p.unfit = n
	}
	p.UID, p.Namespace, p.Name = gpu.PodUID(fmt.Sprintf("uid-%05d", w.serial)), "default", fmt.Sprintf("pod-%05d", w.serial)
	p.Request, p.Created = memory, w.now.Truncate(time.Second)
	if group != "" {
		p.Group, p.Size, p.Template = gang.Key{Namespace: "default", Name: group}, size, template
	}
	w.pods[p.UID] = p
	w.order = append(w.order, p)
	w.tell(p)
}

func (w *world) tell(p *pod) {
	if p.Group.Name != "" {
		w.book.Seen(p.Member, w.now)
	}
}

// delete removes a pod at once.
func (w *world) delete(p *pod) {
	if name := p.Group.Name; w.groups()[name][0] > 0 && !w.whole[name] {
		w.blurred[name] = true
	}
	delete(w.pods, p.UID)
	w.ledger.Drop(p.UID)
	w.book.Gone(p.UID, w.now)
}

// step lets the scheduler look at one queued pod.
func (w *world) step() {
	var queued []*pod
	for _, p := range w.sorted() {
		if p.queued {
			queued = append(queued, p)
		}
	}
	if len(queued) == 0 {
		return
	}
	w.look(queued[w.random.IntN(len(queued))])
}

// lookAtAll lets the scheduler look once at each pod that is queued, in their order.
func (w *world) lookAtAll() {
	for _, p := range w.sorted() {
		if p.queued {
			w.look(p)
		}
	}
	w.act()
}

// look lets the scheduler look at this pod.
func (w *world) look(p *pod) {
	p.queued = false
	candidates := w.offered(p)
	if len(candidates) == 0 {
		return // The scheduler finds that by itself, and asks nobody.
	}
	if p.Group.Name == "" {
		w.single(p, candidates)
		return
	}
	answer := w.book.Filter(p.UID, candidates, w.now)
	nodes := answer.Nodes
	if answer.Free {
		nodes = w.fitting(p, candidates)
	}
	if len(nodes) == 0 {
		return
	}
	c := call{pod: p, node: nodes[w.random.IntN(len(nodes))], key: p.Group}
	permit, reason := w.book.Arrive(p.UID, c.node, w.now)
	if reason != nil {
		p.queued = true
	} else {
		c.ticket = permit
		w.held = append(w.held, c)
	}
	w.settleHeld()
}

// offered are the nodes on which the scheduler finds room for the pod by their sums, as it counts: what is bound, and whose
// bind is under way.
func (w *world) offered(p *pod) (names []string) {
	taken := map[string]gpu.Memory{}
	for _, other := range w.pods {
		taken[other.Node] += other.Request
	}
	for _, c := range slices.Concat(w.held, w.released) {
		taken[c.node] += c.pod.Request
	}
	for _, name := range w.enters(p) {
		node, _ := w.ledger.Node(name)
		var sum gpu.Memory
		for _, card := range node.Cards {
			sum += card.Memory
		}
		if taken[name]+p.Request <= sum {
			names = append(names, name)
		}
	}
	return names
}

// enters are the nodes that the pod may go to, whatever is taken there.
func (w *world) enters(p *pod) []string {
	return slices.DeleteFunc(slices.Clone(w.nodes), func(name string) bool { return name == p.unfit })
}

func (w *world) fitting(p *pod, candidates []string) (nodes []string) {
	w.ledger.Check(p.Pod, candidates, func(name string, reason placement.Reason) {
		if reason == placement.Fits {
			nodes = append(nodes, name)
		}
	})
	return nodes
}

func (w *world) single(p *pod, candidates []string) {
	if nodes := w.fitting(p, candidates); len(nodes) > 0 {
		w.bind(call{pod: p, node: nodes[0]}, false)
	}
}

// settleHeld sorts held binds into those that may go and those that are queued again.
func (w *world) settleHeld() {
	w.held = slices.DeleteFunc(w.held, func(c call) bool {
		select {
		case <-c.ticket.Ended:
		default:
			return false
		}
		if c.ticket.Refused() != nil {
			c.pod.queued, w.freed = true, true // The scheduler takes back what it had counted.
		} else {
			w.released = append(w.released, c)
		}
		return true
	})
}

// bind makes the write, as package cluster does.
func (w *world) bind(c call, fails bool) {
	current, exists := w.pods[c.pod.UID]
	ok := exists && current.Node == "" && !fails
	if ok && c.pod.Request > 0 {
		if _, err := w.ledger.Reserve(c.node, c.pod.Pod, placement.Binpack, w.now); err != nil {
			ok = false
		}
	}
	if ok {
		c.pod.BoundAt = w.now.Truncate(time.Second)
		c.pod.Node, c.pod.Proof = c.node, c.ticket != nil && c.ticket.Proof()
		w.ledger.Commit(c.pod.UID)
		if c.pod.Proof {
			w.whole[c.pod.Group.Name] = true // Also where one was deleted an instant after its bind.
		}
	} else {
		w.ledger.Release(c.pod.UID)
		c.pod.queued = exists
	}
	if c.ticket != nil {
		w.book.Bound(c.key, c.pod.UID, c.node, ok, c.ticket.Proof(), w.now)
	}
	if ok {
		w.tell(c.pod)
	}
}

// act does what the Book wants done.
func (w *world) act() {
	w.settleHeld()
	effects := w.book.Take()
	woken := effects.Woken || w.freed
	w.freed = false
	if woken {
		for _, p := range w.pods {
			if p.Node == "" && !w.flies(p) {
				p.queued = true
			}
		}
	}
	for _, notice := range effects.Notices {
		w.told = append(w.told, notice.Reason+": "+notice.Text)
	}
	for _, gone := range effects.Evict {
		if p := w.pods[gone.UID]; p != nil {
			w.evicted++
			w.delete(p)
			w.create(p.Group.Name, p.Size, p.Request, p.Template) // Its controller makes a new one.
		}
	}
}

// flies says whether a bind of the pod is under way.
func (w *world) flies(p *pod) bool {
	same := func(c call) bool { return c.pod == p }
	return slices.ContainsFunc(w.held, same) || slices.ContainsFunc(w.released, same)
}

func (w *world) sorted() []*pod {
	var out []*pod
	w.order = slices.DeleteFunc(w.order, func(p *pod) bool { return w.pods[p.UID] == nil })
	return append(out, w.order...)
}

// pass lets time pass, with the Book's ticks.
func (w *world) pass(d time.Duration) {
	for end := w.now.Add(d); w.now.Before(end); {
		w.now = w.now.Add(100 * time.Millisecond)
		w.book.Tick(w.now)
		w.act()
	}
}

// check holds the world to what is always true.
func (w *world) check() {
	w.Helper()
	sizes := map[string]int{}
	for _, p := range w.pods {
		sizes[p.Group.Name] = p.Size
	}
	for name, count := range w.groups() {
		if count[0] >= sizes[name] {
			w.whole[name] = true
		} else if count[0] == 0 {
			delete(w.whole, name)
			delete(w.blurred, name)
		}
	}
	for _, name := range w.nodes {
		node, known := w.ledger.Node(name)
		if !known {
			continue
		}
		for i, c := range node.Cards {
			if node.Used[i] > c.Memory {
				w.Fatalf("card %d of %s holds %d of %d", c.Index, name, node.Used[i], c.Memory)
			}
		}
	}
}

// rest lets everything come to rest: binds under way succeed, and pods are looked at until nobody gets anywhere.
func (w *world) rest() {
	w.Helper()
	for range 400 {
		for len(w.released) > 0 {
			c := w.released[0]
			w.released = w.released[1:]
			w.bind(c, false)
			w.act()
		}
		for range 30 {
			w.step()
			w.act()
		}
		w.pass(500 * time.Millisecond)
		w.check()
	}
	if len(w.held) > 0 {
		w.Fatalf("%d binds are still held", len(w.held))
	}
}

// groups counts the bound and the waiting members of each group.
func (w *world) groups() map[string][2]int {
	out := map[string][2]int{}
	for _, p := range w.pods {
		if p.Group.Name == "" {
			continue
		}
		count := out[p.Group.Name]
		if p.Node != "" {
			count[0]++
		} else {
			count[1]++
		}
		out[p.Group.Name] = count
	}
	return out
}

// TestRandom plays clusters with groups, single pods, lost calls, failing binds, deletions, nodes that vanish and restarts.
// No card is ever over-full, no barrier lets go of less than a whole group; and once the disturbances end, every group is
// whole or has nobody bound, nothing stays reserved, and what fits runs.
func TestRandom(t *testing.T) {
	worlds := uint64(30)
	if os.Getenv("GPUSHARE_TEST_LONG") != "" {
		worlds = 1000
	}
	for seed := range worlds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { playWorld(t, seed) })
	}
}

func playWorld(t *testing.T, seed uint64) {
	w := newWorld(t, seed)
	calm := seed%3 == 0 // A third of the worlds has no failing binds.
	for round := range 200 {
		switch w.random.IntN(14) {
		case 0:
			size := 1 + w.random.IntN(6)
			memory := []gpu.Memory{4, 8, 16, 0}[w.random.IntN(4)]
			for i := range size {
				template := fmt.Sprint("t", i%(1+w.random.IntN(2)))
				if w.random.IntN(8) == 0 {
					template = "not on " + w.nodes[w.random.IntN(len(w.nodes))]
				}
				w.create(fmt.Sprintf("g%d", round), size, memory, template)
			}
		case 1:
			w.create("", 0, 1+gpu.Memory(w.random.IntN(16)), "")
		case 2: // A job or a single pod ends, or a pod is deleted.
			if all := w.sorted(); len(all) > 0 {
				victim := all[w.random.IntN(len(all))]
				for _, p := range all {
					if p == victim || p.Group == victim.Group && victim.Group.Name != "" && w.random.IntN(10) > 0 {
						w.delete(p)
					}
				}
			}
		case 3: // A member is deleted and made anew.
			if all := w.sorted(); len(all) > 0 {
				p := all[w.random.IntN(len(all))]
				w.delete(p)
				w.create(p.Group.Name, p.Size, p.Request, p.Template)
			}
		case 4: // The scheduler drops a call.
			if len(w.held) > 0 {
				i := w.random.IntN(len(w.held))
				c := w.held[i]
				if w.book.Leave(c.pod.UID, c.ticket) {
					w.held = slices.Delete(w.held, i, i+1)
					c.pod.queued = true
				}
			}
		case 5:
			w.pass(time.Duration(w.random.IntN(15_000)) * time.Millisecond)
		case 6:
			if w.random.IntN(5) == 0 {
				w.restart()
			}
		case 7:
			if len(w.released) > 0 {
				i := w.random.IntN(len(w.released))
				c := w.released[i]
				w.released = slices.Delete(w.released, i, i+1)
				w.bind(c, !calm && w.random.IntN(4) == 0)
			}
		case 8:
			name := w.nodes[w.random.IntN(len(w.nodes))]
			w.ledger.DeleteNode(name)
			w.pass(200 * time.Millisecond)
			w.offer(name)
		default:
			w.step()
		}
		w.act()
		w.check()
	}
	w.rest()

	for name, count := range w.groups() {
		if count[0] > 0 && count[1] > 0 && !w.whole[name] {
			t.Errorf("group %s is bound in part: %d are, %d wait", name, count[0], count[1])
		}
	}
	for _, node := range w.ledger.Nodes() {
		for _, h := range node.Holders {
			if p := w.pods[h.UID]; h.State == ledger.Reserved {
				t.Errorf("%s has a place on %s and is not bound: group %v", h.Name, node.Name, p)
			}
		}
	}
	w.allThatFitsRuns()
	t.Logf("%d groups bound, %d pods evicted, failed %v", w.bound, w.evicted, w.failed)
}

// allThatFitsRuns fails the test if a complete group waits that there is room for.
func (w *world) allThatFitsRuns() {
	waiting := map[gang.Key][]*pod{}
	for _, p := range w.sorted() {
		if p.Node == "" && p.Group.Name != "" {
			waiting[p.Group] = append(waiting[p.Group], p)
		}
	}
	for key, members := range waiting {
		if len(members) < members[0].Size {
			continue
		}
		var requests []ledger.Want
		for _, p := range members {
			if p.Request > 0 {
				requests = append(requests, ledger.Want{Pod: p.Pod, Nodes: w.enters(p)})
			}
		}
		if reservations, _ := w.ledger.ReserveTogether(requests, nil, ledger.View{Card: placement.Binpack, Node: placement.Binpack}, w.now); reservations != nil || len(requests) == 0 {
			w.Errorf("group %v of %d waits though there is room: %v", key, len(members), w.book.States())
			for _, want := range requests {
				w.ledger.Release(want.Pod.UID)
			}
		}
	}
}
