package gang

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

var begin = time.Unix(1_800_000_000, 0)

const (
	testHold     = 10 * time.Second
	testPatience = 30 * time.Second
)

// newManager returns a Manager on an empty ledger. A move that the table doesn't contain fails the test.
func newManager(t *testing.T) *Manager {
	l := ledger.New()
	return New(Options{
		Ledger: l, Release: func(uid gpu.PodUID) { l.Release(uid) },
		View: ledger.View{Card: placement.Binpack, Node: placement.Binpack}, Hold: testHold, Patience: testPatience,
		OnFailure: Evict, Observer: discard{}, IllegalMove: func(move string) { t.Error(move) },
	})
}

// filterAll is Filter if the candidates are all nodes.
func (mgr *Manager) filterAll(uid gpu.PodUID, candidates []string, now time.Time) FilterResult {
	return mgr.Filter(uid, candidates, candidates, now)
}

// fixture is a cluster of four nodes with two cards of 16 each, whose scheduler behaves like kube-scheduler except for its
// pace: it schedules pods one by one, binds some in parallel, and parks rejected pods until a requeue. It drives a Manager
// with a real ledger, and keeps the true state of the pods itself. It is for single steps of a Manager: what takes hours, or needs a back-off,
// controllers or fair sharing, belongs to the simulation in package scheduling.
type fixture struct {
	*testing.T
	discard
	random  *rand.Rand
	now     time.Time
	manager *Manager
	ledger  *ledger.Ledger
	// awaited is nil if no memory in use is reserved.
	awaited *queue.Awaited
	nodes   []string
	// pods are the pods in the API server.
	pods map[gpu.PodUID]*pod
	// created holds the pods in the order of their creation. Some of them may be deleted.
	created []*pod
	// held are the held binds, granted those whose permit was granted and that are not sent yet.
	held    []bindCall
	granted []bindCall
	serial  int
	// namespace is that of the pods that are created.
	namespace string
	// reservations and failures count what the Manager reports as its Observer.
	reservations int
	failures     map[string]int
	// events are the recorded Events.
	events []string
	// freed is true if memory was freed. The caller of the Manager requeues single pods for that.
	freed bool
}

type pod struct {
	Member
	// queued is true if the scheduler will schedule the pod. Otherwise the pod is parked, or its bind is held.
	queued bool
}

type bindCall struct {
	pod    *pod
	node   string
	key    Key
	permit *Permit
}

func newFixture(t *testing.T) *fixture {
	manager := newManager(t)
	s := &fixture{
		T: t, random: rand.New(rand.NewPCG(1, 3)), now: begin, pods: map[gpu.PodUID]*pod{}, failures: map[string]int{}, namespace: "default",
		manager: manager, ledger: manager.Ledger,
	}
	s.ledger.AddFreedListener(func(string) {
		manager.MemoryFreed()
		s.freed = true
	})
	manager.Observer = s
	s.awaited = queue.NewAwaited(queue.Options{
		Ledger: s.ledger, MaxIdle: 0.02, MaxAge: time.Hour, Failures: manager.Failures, Reserved: func() { s.reservations++ },
	})
	manager.EligibleNodes = func(gpu.PodUID) []string { return s.nodes }
	for i := range 4 {
		s.nodes = append(s.nodes, fmt.Sprintf("n%d", i))
		s.addNode(s.nodes[i])
	}
	manager.StartLeading(s.now)
	return s
}

func (s *fixture) addNode(name string) { s.setNode(name, reasons.Fits, 16, 16) }

// setNode sets a node's cards, and why it takes no pods with several cards.
func (s *fixture) setNode(name string, several reasons.Reason, cards ...gpu.Memory) {
	spec := ledger.NodeSpec{Unit: gpu.GiB, Support: placement.Support{SeveralCards: several}}
	for i, memory := range cards {
		spec.Cards = append(spec.Cards, gpu.Card{Index: i, Memory: memory})
	}
	s.ledger.SetNode(name, spec)
}

// GangFailed implements Observer.
func (s *fixture) GangFailed(reason reasons.Group) { s.failures[reason.Label]++ }

func (s *fixture) create(gangName string, size int, memory gpu.Memory, template string) {
	s.serial++
	p := &pod{queued: true}
	p.UID, p.Namespace, p.Name = gpu.PodUID(fmt.Sprintf("uid-%05d", s.serial)), s.namespace, fmt.Sprintf("pod-%05d", s.serial)
	p.Request, p.Created = memory, s.now.Truncate(time.Second)
	if gangName != "" {
		p.Gang, p.Size, p.Template = Key{Namespace: s.namespace, Name: gangName}, size, template
	}
	s.pods[p.UID] = p
	s.created = append(s.created, p)
	s.report(p)
}

func (s *fixture) report(p *pod) {
	if p.Gang.Name != "" {
		s.manager.SetMember(p.Member, s.now)
	}
}

// createMany creates n equal pods.
func (s *fixture) createMany(n int, gangName string, size int, memory gpu.Memory, template string) {
	for range n {
		s.create(gangName, size, memory, template)
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

// scheduleOne schedules a random queued pod.
func (s *fixture) scheduleOne() {
	var queued []*pod
	for _, p := range s.existing() {
		if p.queued {
			queued = append(queued, p)
		}
	}
	if len(queued) == 0 {
		return
	}
	s.schedule(queued[s.random.IntN(len(queued))])
}

// scheduleAll schedules each queued pod once, in the order of creation.
func (s *fixture) scheduleAll() {
	for _, p := range s.existing() {
		if p.queued {
			s.schedule(p)
		}
	}
	s.performEffects()
}

// schedule runs one scheduling attempt of the pod.
func (s *fixture) schedule(p *pod) {
	p.queued = false
	candidates := s.candidates(p)
	if len(candidates) == 0 {
		// kube-scheduler doesn't call the extender without candidates. It says what the nodes lack.
		if p.ShortOfResources = true; s.pods[p.UID] == p {
			s.report(p)
		}
		return
	}
	if p.Gang.Name == "" {
		s.scheduleSingle(p, candidates)
		return
	}
	result := s.manager.filterAll(p.UID, candidates, s.now)
	nodes := result.Nodes
	if result.AsSingle {
		nodes = s.fitting(p, candidates)
	}
	if len(nodes) == 0 {
		return
	}
	bind := bindCall{pod: p, node: nodes[s.random.IntN(len(nodes))], key: p.Gang}
	permit, reason := s.manager.RequestPermit(p.UID, bind.node, s.now)
	if reason != nil {
		p.queued = true
	} else {
		bind.permit = permit
		s.held = append(s.held, bind)
	}
	s.collectDecided()
}

// candidates returns the nodes whose sum of free memory covers the pod, as kube-scheduler counts: pods that are bound
// or being bound use memory.
func (s *fixture) candidates(p *pod) (names []string) {
	taken := map[string]gpu.Memory{}
	for _, other := range s.pods {
		taken[other.Node] += other.Request
	}
	for _, bind := range slices.Concat(s.held, s.granted) {
		taken[bind.node] += bind.pod.Request
	}
	for _, name := range s.nodes {
		node, _ := s.ledger.Node(name)
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

func (s *fixture) fitting(p *pod, candidates []string) (nodes []string) {
	s.ledger.Check(p.Pod, candidates, func(name string, reason reasons.Reason) {
		if reason == reasons.Fits {
			nodes = append(nodes, name)
		}
	})
	return nodes
}

func (s *fixture) scheduleSingle(p *pod, candidates []string) {
	if nodes := s.fitting(p, candidates); len(nodes) > 0 {
		s.bind(bindCall{pod: p, node: nodes[0]}, false)
	}
}

// collectDecided moves held binds whose permit was decided: granted ones to s.granted, rejected pods back into the
// queue.
func (s *fixture) collectDecided() {
	s.held = slices.DeleteFunc(s.held, func(bind bindCall) bool {
		select {
		case <-bind.permit.Decided:
		default:
			return false
		}
		if bind.permit.Rejection != nil {
			bind.pod.queued, s.freed = true, true // kube-scheduler removes the assumed pod from its cache.
		} else {
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
		if _, err := s.ledger.Reserve(bind.node, bind.pod.Pod, placement.Binpack, s.now); err != nil {
			ok = false
		}
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
		bind.pod.queued = exists
	}
	if bind.permit != nil {
		result := BindFailed
		if ok {
			result = BindSucceeded
		}
		s.manager.BindDone(bind.key, bind.pod.UID, bind.node, result, bind.permit.MarkWhole, s.now)
	}
	if ok {
		s.report(bind.pod)
	}
}

// bindGranted sends all granted binds. They succeed.
func (s *fixture) bindGranted() {
	for len(s.granted) > 0 {
		bind := s.granted[0]
		s.granted = s.granted[1:]
		s.bind(bind, false)
		s.performEffects()
	}
}

// performEffects performs the Manager's effects.
func (s *fixture) performEffects() {
	s.collectDecided()
	effects := s.manager.TakeEffects()
	requeue := effects.Requeue || s.freed
	s.freed = false
	if requeue {
		for _, p := range s.pods {
			if p.Node == "" && !s.inBind(p) {
				p.queued = true
			}
		}
	}
	for _, notice := range effects.Events {
		s.events = append(s.events, notice.Reason+": "+notice.Text)
	}
	for _, unclear := range effects.Verify {
		if p := s.pods[unclear.UID]; p != nil {
			s.manager.Confirmed(p.Member, s.now)
		} else {
			s.manager.ConfirmedGone(unclear.UID, s.now)
		}
	}
	for _, evicted := range effects.Evict {
		if p := s.pods[evicted.UID]; p != nil {
			s.delete(p)
			if p.Gang.Native { // Its controller creates a replacement.
				(&native{s}).add(p.Gang.Name, 1, p.Request, p.Template)
			} else {
				namespace := s.namespace
				s.namespace = p.Namespace
				s.create(p.Gang.Name, p.Size, p.Request, p.Template)
				s.created[len(s.created)-1].Priority = p.Priority
				s.report(s.created[len(s.created)-1])
				s.namespace = namespace
			}
		}
	}
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
		s.performEffects()
	}
}

// tick makes a step of the manager and of the awaited reservations.
func (s *fixture) tick() {
	s.manager.Tick(s.now)
	if s.awaited != nil {
		s.awaited.Pass(s.manager.Waiting(s.now), s.now)
	}
}

// runUntilIdle lets all granted binds succeed and schedules pods until nothing changes any more.
func (s *fixture) runUntilIdle() {
	s.Helper()
	for range 400 {
		s.bindGranted()
		for range 30 {
			s.scheduleOne()
			s.performEffects()
		}
		s.advance(500 * time.Millisecond)
	}
	if len(s.held) > 0 {
		s.Fatalf("%d binds are still held", len(s.held))
	}
}

// memberCounts counts the bound and the pending members of each gang.
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

// scene is a fixture in which time passes without a scheduler, and evictions are not performed. reads and evictions are what
// the Manager asked for.
type scene struct {
	*fixture
	// answer answers a read; nil while the API server doesn't answer.
	answer    func(uid gpu.PodUID)
	reads     []gpu.PodUID
	evictions []gpu.PodUID
}

func newScene(t *testing.T) *scene {
	s := &scene{fixture: newFixture(t)}
	s.answer = func(uid gpu.PodUID) { s.manager.Confirmed(s.pods[uid].Member, s.now) }
	return s
}

func (s *scene) wait(d time.Duration) {
	for end := s.now.Add(d); s.now.Before(end); {
		s.now = s.now.Add(100 * time.Millisecond)
		s.manager.Tick(s.now)
		effects := s.manager.TakeEffects()
		for _, pod := range effects.Verify {
			s.reads = append(s.reads, pod.UID)
			if s.answer != nil {
				s.answer(pod.UID)
			}
		}
		for _, pod := range effects.Evict {
			s.evictions = append(s.evictions, pod.UID)
		}
		s.collectDecided()
	}
}
