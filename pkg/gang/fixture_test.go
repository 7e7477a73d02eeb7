package gang

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/fake"
)

var begin = time.Unix(1_800_000_000, 0)

const (
	testHold     = 10 * time.Second
	testPatience = 30 * time.Second
)

// newManager returns a Manager on an empty ledger. A move that the table doesn't contain fails the test.
func newManager(t *testing.T) *Manager { return newManagerWith(t, nil) }

// newManagerWith is newManager with a ledger that asks fits about CPU; nil if all pods have enough.
func newManagerWith(t *testing.T, fits fake.Resources) (mgr *Manager) {
	l := ledger.New()
	if fits != nil {
		l = ledger.NewWithResources(fits, nil)
	}
	mgr = New(Options{
		Ledger: l, Release: func(uid gpu.PodUID) { mgr.Ledger.Release(uid) },
		View: ledger.View{Card: placement.Binpack, Node: placement.Binpack}, Hold: testHold, Patience: testPatience,
		Failures: &queue.Failures{}, AwaitsTurn: never,
		OnFailure: Evict, Observer: discard{}, IllegalMove: func(move string) { t.Error(move) },
	})
	return mgr
}

func never(gpu.Pod) bool { return false }

// filterAll is Filter if the candidates are all nodes.
func (mgr *Manager) filterAll(uid gpu.PodUID, candidates []string, now time.Time) FilterResult {
	return mgr.Filter(uid, candidates, candidates, now)
}

// fixture is a Manager with a real ledger of four nodes with two cards of 16 each, and the pods that the API server has. Tests make the calls
// of kube-scheduler, with all nodes as candidates, let time pass, and look at what the Manager asks for. It doesn't imitate kube-scheduler or
// controllers: what depends on their queues, back-offs or order belongs to the simulation in package scheduling.
type fixture struct {
	*testing.T
	discard
	now     time.Time
	manager *Manager
	ledger  *ledger.Ledger
	turns   *turns
	// reserver is nil if no memory in use is reserved.
	reserver *queue.Reserver
	nodes    []string
	// pods are the pods in the API server.
	pods map[gpu.PodUID]*pod
	// created holds the pods in the order of their creation. Some of them may be deleted.
	created []*pod
	// held are the held binds, granted those whose permit was granted and that are not sent yet, binds those of newBrokenScene.
	held, granted, binds []bindCall
	serial               int
	// namespace is that of the pods that are created.
	namespace string
	// reservations and failures count what the Manager reports as its Observer.
	reservations int
	failures     map[string]int
	// events, reads, evictions and requeued are what the Manager asked for.
	events    []string
	reads     []gpu.PodUID
	evictions []gpu.PodUID
	requeued  bool
	// answer answers a read; nil while the API server doesn't answer.
	answer func(uid gpu.PodUID)
}

type pod struct{ Member }

type bindCall struct {
	pod    *pod
	node   string
	permit *Permit
}

func newFixture(t *testing.T) *fixture {
	manager, answers := newManager(t), &turns{}
	s := &fixture{
		T: t, now: begin, pods: map[gpu.PodUID]*pod{}, failures: map[string]int{}, namespace: "default", manager: manager, turns: answers,
		ledger: ledger.NewWithResources(nil, answers),
	}
	manager.Ledger, manager.AwaitsTurn = s.ledger, func(gpu.Pod) bool { return answers.awaited }
	s.answer = func(uid gpu.PodUID) {
		if p := s.pods[uid]; p != nil {
			manager.Confirmed(p.Member, s.now)
		} else {
			manager.ConfirmedGone(uid, s.now)
		}
	}
	s.ledger.AddFreedListener(func(string) { manager.MemoryFreed() })
	manager.Observer = s
	manager.EligibleNodes = func(gpu.PodUID) []string { return s.nodes }
	for i := range 4 {
		s.addNode(fmt.Sprintf("n%d", i))
	}
	manager.StartLeading(s.now)
	return s
}

// reserve lets awaited reservations be made.
func (s *fixture) reserve() {
	s.reserver = queue.NewReserver(queue.Options{
		Ledger: s.ledger, MaxIdle: 0.02, MaxAge: time.Hour, Failures: s.manager.Failures,
		Reserved: func() { s.reservations++ },
	})
}

// addNode adds a node, which is a candidate from now on.
func (s *fixture) addNode(name string) {
	s.nodes = append(s.nodes, name)
	s.setNode(name, reasons.Fits, 16, 16)
}

// setNode sets a node's cards, and why it takes no pods with several cards.
func (s *fixture) setNode(name string, several reasons.Reason, cards ...gpu.Memory) {
	spec := ledger.NodeSpec{Unit: gpu.GiB, Support: placement.Support{SeveralCards: several}}
	for i, memory := range cards {
		spec.Cards = append(spec.Cards, gpu.Card{Index: i, Memory: memory})
	}
	s.ledger.SetNode(name, spec)
}

// GangFailed implements Observer.
func (s *fixture) GangFailed(reason reasons.Group) { s.failures[reasons.GroupFailures[reason]]++ }

// add creates a pod with a name of its own.
func (s *fixture) add(m Member, edits ...memberEdit) *pod {
	s.serial++
	m.UID, m.Namespace, m.Name = gpu.PodUID(fmt.Sprintf("uid-%05d", s.serial)), s.namespace, fmt.Sprintf("pod-%05d", s.serial)
	m.Created = s.now.Truncate(time.Second)
	for _, edit := range edits {
		edit(&m)
	}
	m.Shape = cmp.Or(m.Shape, m.Template)
	p := &pod{m}
	s.pods[p.UID] = p
	s.created = append(s.created, p)
	s.report(p)
	return p
}

// create creates a pod, without a group if the name is empty.
func (s *fixture) create(group string, size int, memory gpu.Memory, template string) *pod {
	m := Member{Pod: gpu.Pod{Request: memory}}
	if group != "" {
		m.Gang, m.Size, m.Template = Key{Namespace: s.namespace, Name: group}, size, template
	}
	return s.add(m)
}

func (s *fixture) report(p *pod) {
	if p.Gang.Name != "" {
		s.manager.SetMember(p.Member, s.now)
	}
}

// createMany creates n equal pods.
func (s *fixture) createMany(n int, group string, size int, memory gpu.Memory, template string) {
	for range n {
		s.create(group, size, memory, template)
	}
}

// createCardless creates a member that asks for no cards.
func (s *fixture) createCardless(gangName string, size int) {
	m := Member{Gang: Key{Namespace: "default", Name: gangName}, Size: size, Created: s.now, Cardless: true}
	m.UID, m.Namespace, m.Name = "launcher", "default", "launcher"
	s.manager.SetMember(m, s.now)
}

// delete removes a pod without a grace period.
func (s *fixture) delete(p *pod) {
	delete(s.pods, p.UID)
	s.ledger.Remove(p.UID)
	s.manager.RemoveMember(p.UID, s.now)
}

// try makes the calls of a scheduling attempt: filter, and bind if a node passes.
func (s *fixture) try(p *pod) {
	if p.Gang.Name == "" {
		s.bindSingle(p)
		return
	}
	if node := s.filter(p).node; node != "" {
		s.arrive(p, node)
	}
	s.collectDecided()
}

// passed is an answer to a filter call, with the first node that passes; empty if none does.
type passed struct {
	FilterResult
	node string
}

// filter makes a filter call with all nodes.
func (s *fixture) filter(p *pod) passed {
	result := passed{FilterResult: s.manager.filterAll(p.UID, s.nodes, s.now)}
	nodes := result.Nodes
	if result.Alone {
		nodes = s.fitting(p)
	}
	if len(nodes) > 0 {
		result.node = nodes[0]
	}
	return result
}

// arrive makes the bind call of a member.
func (s *fixture) arrive(p *pod, node string) {
	if permit := s.manager.RequestPermit(p.UID, node, s.now); permit.Rejection == nil {
		s.held = append(s.held, bindCall{p, node, permit})
	}
}

// tryAll tries each pod that isn't bound and whose bind isn't held, in the order of creation.
func (s *fixture) tryAll() {
	for _, p := range s.existing() {
		if p.Node == "" && !s.inBind(p) {
			s.try(p)
		}
	}
	s.collectEffects()
}

// fitting returns the nodes with room for a pod alone.
func (s *fixture) fitting(p *pod) (nodes []string) {
	for _, name := range s.nodes {
		if _, fits := s.ledger.FirstFit(p.Pod, []string{name}); fits {
			nodes = append(nodes, name)
		}
	}
	return nodes
}

// bindSingle binds a pod without a group, if it fits.
func (s *fixture) bindSingle(p *pod) {
	if nodes := s.fitting(p); len(nodes) > 0 {
		s.bind(bindCall{pod: p, node: nodes[0]}, false)
	}
}

// collectDecided moves the binds whose permit was granted from held to granted, and drops rejected ones.
func (s *fixture) collectDecided() {
	s.checkPlans()
	s.held = slices.DeleteFunc(s.held, func(bind bindCall) bool {
		select {
		case <-bind.permit.Decided:
		default:
			return false
		}
		if bind.permit.Rejection == nil {
			s.granted = append(s.granted, bind)
		}
		return true
	})
}

// bind sends a bind, as the caller of the Manager does.
func (s *fixture) bind(bind bindCall, fails bool) {
	current, exists := s.pods[bind.pod.UID]
	ok := exists && current.Node == "" && !fails
	if ok && bind.pod.Request > 0 {
		_, err := s.ledger.Reserve(bind.node, bind.pod.Pod, placement.Binpack, s.now)
		ok = err == nil
	}
	if ok {
		bind.pod.BoundAt = s.now.Truncate(time.Second)
		bind.pod.Node = bind.node
		if bind.permit != nil {
			bind.pod.Run, bind.pod.MarkedWhole = bind.permit.Run, bind.permit.MarkWhole
		}
		if _, allocation, ok := s.ledger.Lookup(bind.pod.UID); ok {
			s.ledger.SetBound(bind.node, allocation.Pod, allocation.Placement, allocation.AssumeTime)
		}
	} else {
		s.ledger.Release(bind.pod.UID)
	}
	if bind.permit != nil {
		s.ended(bind, ok)
	}
	if ok {
		s.report(bind.pod)
	}
}

// ended passes on how a bind has ended.
func (s *fixture) ended(bind bindCall, ok bool) {
	if ok {
		s.manager.Bound(bind.pod.UID, bind.node, bind.permit, s.now)
	} else {
		s.manager.NotBound(bind.pod.UID, s.now)
	}
}

// bindGranted sends all granted binds. They succeed.
func (s *fixture) bindGranted() {
	for len(s.granted) > 0 {
		bind := s.granted[0]
		s.granted = s.granted[1:]
		s.bind(bind, false)
		s.collectEffects()
	}
}

// collectEffects records what the Manager asks for. Its reads are answered.
func (s *fixture) collectEffects() {
	s.collectDecided()
	effects := s.manager.TakeEffects()
	s.requeued = s.requeued || effects.Requeue
	for _, notice := range effects.Events {
		s.events = append(s.events, notice.Reason+": "+notice.Text)
	}
	for _, unclear := range effects.Verify {
		s.reads = append(s.reads, unclear.UID)
		if s.answer != nil {
			s.answer(unclear.UID)
		}
	}
	for _, evicted := range effects.Evict {
		s.evictions = append(s.evictions, evicted.UID)
	}
	s.collectDecided()
}

// inBind reports whether a bind of the pod is held or granted.
func (s *fixture) inBind(p *pod) bool {
	same := func(bind bindCall) bool { return bind.pod == p }
	return slices.ContainsFunc(s.held, same) || slices.ContainsFunc(s.granted, same)
}

// existing returns the pods in the order of their creation, and removes deleted ones from created.
func (s *fixture) existing() []*pod {
	s.created = slices.DeleteFunc(s.created, func(p *pod) bool { return s.pods[p.UID] == nil })
	return slices.Clone(s.created)
}

// advance advances the clock in steps of a Tick.
func (s *fixture) advance(d time.Duration) {
	for end := s.now.Add(d); s.now.Before(end); {
		s.now = s.now.Add(100 * time.Millisecond)
		s.tick()
		s.collectEffects()
	}
}

// tick makes a step of the manager and of the awaited reservations.
func (s *fixture) tick() {
	s.manager.Tick(s.now)
	if s.reserver != nil {
		s.reserver.Pass(s.manager.Waiting(s.now), s.now)
	}
}

// settle tries all pods and binds those that may be, for three minutes.
func (s *fixture) settle() {
	s.Helper()
	for range 360 {
		s.bindGranted()
		s.tryAll()
		s.advance(500 * time.Millisecond)
	}
	if len(s.held) > 0 {
		s.Fatalf("%d binds are still held", len(s.held))
	}
}

// memberCounts counts the bound and the pending members of each group.
func (s *fixture) memberCounts() map[string][2]int {
	out := map[string][2]int{}
	for _, p := range s.pods {
		if p.Gang.Name == "" {
			continue
		}
		count := out[p.Gang.Name]
		if p.Node != "" {
			count[0]++
		} else {
			count[1]++
		}
		out[p.Gang.Name] = count
	}
	return out
}
