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

// simulation is a cluster whose scheduler behaves like kube-scheduler except for its pace: it schedules pods one by one
// in any order, binds some in parallel, abandons calls, and parks rejected pods until a requeue. It drives a Manager
// with a real ledger, and keeps the true state of the pods itself.
type simulation struct {
	*testing.T
	random  *rand.Rand
	now     time.Time
	manager *gang.Manager
	ledger  *ledger.Ledger
	nodes   []string
	// pods are the pods in the API server.
	pods map[gpu.PodUID]*pod
	// created holds the pods in the order of their creation. Some of them may be deleted.
	created []*pod
	// held are the held binds, granted those whose permit was granted and that are not sent yet.
	held    []bindCall
	granted []bindCall
	serial  int
	// whole are the gangs of which all members were bound at some time, and some have been since. Replacements join
	// them when there is room.
	whole map[string]bool
	// ambiguous are the partial gangs that lost a member: a new process can't distinguish them from whole gangs, and
	// doesn't evict them.
	ambiguous    map[string]bool
	evicted      int
	bound        int
	reservations int
	// starvationAfter is the Manager's StarvationAfter.
	starvationAfter time.Duration
	failures        map[string]int
	// memory is the Manager's Memory.
	memory func() gpu.Memory
	// events are the recorded Events.
	events []string
	// freed is true if memory was freed. The caller of the Manager requeues single pods for that.
	freed bool
}

type pod struct {
	gang.Member
	// queued is true if the scheduler will schedule the pod. Otherwise the pod is parked, or its bind is held.
	queued bool
	// unfitNode is a node that is never a candidate for the pod.
	unfitNode string
}

type bindCall struct {
	pod    *pod
	node   string
	key    gang.Key
	permit *gang.Permit
}

const (
	testHold     = 10 * time.Second
	testPatience = 30 * time.Second
)

func newSimulation(t *testing.T, seed uint64) *simulation {
	s := &simulation{
		T: t, random: rand.New(rand.NewPCG(seed, 3)), now: time.Unix(1_800_000_000, 0), pods: map[gpu.PodUID]*pod{},
		starvationAfter: 20 * time.Second, failures: map[string]int{}, whole: map[string]bool{}, ambiguous: map[string]bool{},
	}
	s.ledger = ledger.New()
	s.ledger.AddFreedListener(func(string) {
		s.manager.MemoryFreed()
		s.freed = true
	})
	s.manager = gang.New(gang.Options{Observer: s})
	s.restart()
	for i := range 4 {
		name := fmt.Sprintf("n%d", i)
		s.nodes = append(s.nodes, name)
		s.addNode(name)
	}
	return s
}

func (s *simulation) addNode(name string) {
	s.ledger.SetNode(name, ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{{Index: 0, Memory: 16}, {Index: 1, Memory: 16}}})
}

// restartWith restarts with another Options.StarvationAfter; 0 means no starvation reservations, whose end requeues all pods.
func (s *simulation) restartWith(starvationAfter time.Duration) {
	s.starvationAfter = starvationAfter
	s.restart()
}

// restart replaces the Manager by a new one, with a ledger that contains the bound pods.
func (s *simulation) restart() {
	// The old process was killed after it had sent some of the granted binds.
	for _, bind := range s.held {
		bind.pod.queued = true
	}
	for _, bind := range s.granted {
		s.bind(bind, s.random.IntN(2) == 0)
	}
	s.held, s.granted = nil, nil
	for _, p := range s.pods {
		if p.Node == "" {
			s.ledger.Release(p.UID)
		}
	}
	maps.Copy(s.whole, s.ambiguous)
	s.manager = gang.New(gang.Options{
		Ledger: s.ledger, Release: func(uid gpu.PodUID) { s.ledger.Release(uid) },
		View:            ledger.View{Card: placement.Binpack, Node: placement.Binpack},
		StarvationAfter: s.starvationAfter, Hold: testHold, Patience: testPatience, OnFailure: gang.Evict, Observer: s, Memory: s.memory,
		EligibleNodes: func(uid gpu.PodUID) []string { return s.eligibleNodes(s.pods[uid]) },
	})
	s.manager.FailOnIllegalMove(s.T)
	for _, p := range s.pods {
		if p.Gang.Name != "" {
			s.manager.SetMember(p.Member, s.now)
		}
	}
	s.manager.StartLeading(s.now)
}

// GangHeld implements gang.Observer.
func (s *simulation) GangHeld(wait time.Duration) {
	if wait > testPatience {
		s.Errorf("a barrier opened after %v", wait)
	}
}

// GangBound implements gang.Observer.
func (s *simulation) GangBound() { s.bound++ }

// GangFailed implements gang.Observer.
func (s *simulation) GangFailed(reason string) { s.failures[reason]++ }

// GangStarving implements gang.Observer.
func (s *simulation) GangStarving() { s.reservations++ }

// GangEvicted implements gang.Observer.
func (s *simulation) GangEvicted() {}

func (s *simulation) create(gangName string, size int, memory gpu.Memory, template string) {
	s.serial++
	p := &pod{queued: true}
	if n, ok := strings.CutPrefix(template, "not on "); ok {
		p.unfitNode = n
	}
	p.UID, p.Namespace, p.Name = gpu.PodUID(fmt.Sprintf("uid-%05d", s.serial)), "default", fmt.Sprintf("pod-%05d", s.serial)
	p.Request, p.Created = memory, s.now.Truncate(time.Second)
	if gangName != "" {
		p.Gang, p.Size, p.Template = gang.Key{Namespace: "default", Name: gangName}, size, template
	}
	s.pods[p.UID] = p
	s.created = append(s.created, p)
	s.report(p)
}

func (s *simulation) report(p *pod) {
	if p.Gang.Name != "" {
		s.manager.SetMember(p.Member, s.now)
	}
}

// createMany creates n equal pods.
func (s *simulation) createMany(n int, gangName string, size int, memory gpu.Memory, template string) {
	for range n {
		s.create(gangName, size, memory, template)
	}
}

// createCardless creates a member that asks for no cards.
func (s *simulation) createCardless(gangName string, size int) {
	m := gang.Member{Gang: gang.Key{Namespace: "default", Name: gangName}, Size: size, Created: s.now, Cardless: true}
	m.UID, m.Namespace, m.Name = "launcher", "default", "launcher"
	s.manager.SetMember(m, s.now)
}

// delete removes a pod without a grace period.
func (s *simulation) delete(p *pod) {
	if name := p.Gang.Name; s.memberCounts()[name][0] > 0 && !s.whole[name] {
		s.ambiguous[name] = true
	}
	delete(s.pods, p.UID)
	s.ledger.Remove(p.UID)
	s.manager.RemoveMember(p.UID, s.now)
}

// scheduleOne schedules a random queued pod.
func (s *simulation) scheduleOne() {
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
func (s *simulation) scheduleAll() {
	for _, p := range s.existing() {
		if p.queued {
			s.schedule(p)
		}
	}
	s.performEffects()
}

// schedule runs one scheduling attempt of the pod.
func (s *simulation) schedule(p *pod) {
	p.queued = false
	candidates := s.candidates(p)
	if len(candidates) == 0 {
		// kube-scheduler doesn't call the extender without candidates. It says what the nodes lack.
		if p.ShortOfMemory = true; s.pods[p.UID] == p {
			s.report(p)
		}
		return
	}
	if p.Gang.Name == "" {
		s.scheduleSingle(p, candidates)
		return
	}
	result := s.manager.Filter(p.UID, candidates, s.now)
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
func (s *simulation) candidates(p *pod) (names []string) {
	taken := map[string]gpu.Memory{}
	for _, other := range s.pods {
		taken[other.Node] += other.Request
	}
	for _, bind := range slices.Concat(s.held, s.granted) {
		taken[bind.node] += bind.pod.Request
	}
	for _, name := range s.eligibleNodes(p) {
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

// eligibleNodes returns the nodes that the pod can run on regardless of free memory.
func (s *simulation) eligibleNodes(p *pod) []string {
	return slices.DeleteFunc(slices.Clone(s.nodes), func(name string) bool { return name == p.unfitNode })
}

func (s *simulation) fitting(p *pod, candidates []string) (nodes []string) {
	s.ledger.Check(p.Pod, candidates, func(name string, reason placement.Reason) {
		if reason == placement.Fits {
			nodes = append(nodes, name)
		}
	})
	return nodes
}

func (s *simulation) scheduleSingle(p *pod, candidates []string) {
	if nodes := s.fitting(p, candidates); len(nodes) > 0 {
		s.bind(bindCall{pod: p, node: nodes[0]}, false)
	}
}

// collectDecided moves held binds whose permit was decided: granted ones to s.granted, rejected pods back into the
// queue.
func (s *simulation) collectDecided() {
	s.held = slices.DeleteFunc(s.held, func(bind bindCall) bool {
		select {
		case <-bind.permit.Decided:
		default:
			return false
		}
		if bind.permit.Rejection() != nil {
			bind.pod.queued, s.freed = true, true // kube-scheduler removes the assumed pod from its cache.
		} else {
			s.granted = append(s.granted, bind)
		}
		return true
	})
}

// bind sends a bind, as the caller of the Manager does.
func (s *simulation) bind(bind bindCall, fails bool) {
	current, exists := s.pods[bind.pod.UID]
	ok := exists && current.Node == "" && !fails
	if ok && bind.pod.Request > 0 {
		if _, err := s.ledger.Reserve(bind.node, bind.pod.Pod, placement.Binpack, s.now); err != nil {
			ok = false
		}
	}
	if ok {
		bind.pod.BoundAt = s.now.Truncate(time.Second)
		bind.pod.Node, bind.pod.MarkedWhole = bind.node, bind.permit != nil && bind.permit.MarkWhole()
		s.ledger.Confirm(bind.pod.UID)
		if bind.pod.MarkedWhole {
			s.whole[bind.pod.Gang.Name] = true // Here and not in checkInvariants, since another member may be deleted at once.
		}
	} else {
		s.ledger.Release(bind.pod.UID)
		bind.pod.queued = exists
	}
	if bind.permit != nil {
		result := gang.BindFailed
		if ok {
			result = gang.BindSucceeded
		}
		s.manager.BindDone(bind.key, bind.pod.UID, bind.node, result, bind.permit.MarkWhole(), s.now)
	}
	if ok {
		s.report(bind.pod)
	}
}

// bindGranted sends all granted binds. They succeed.
func (s *simulation) bindGranted() {
	for len(s.granted) > 0 {
		bind := s.granted[0]
		s.granted = s.granted[1:]
		s.bind(bind, false)
		s.performEffects()
	}
}

// performEffects performs the Manager's effects.
func (s *simulation) performEffects() {
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
			s.evicted++
			s.delete(p)
			s.create(p.Gang.Name, p.Size, p.Request, p.Template) // Its controller creates a replacement.
		}
	}
}

// inBind reports whether a bind of the pod is held or granted.
func (s *simulation) inBind(p *pod) bool {
	same := func(bind bindCall) bool { return bind.pod == p }
	return slices.ContainsFunc(s.held, same) || slices.ContainsFunc(s.granted, same)
}

func (s *simulation) existing() []*pod {
	var out []*pod
	s.created = slices.DeleteFunc(s.created, func(p *pod) bool { return s.pods[p.UID] == nil })
	return append(out, s.created...)
}

// advance advances the clock in steps of a Tick.
func (s *simulation) advance(d time.Duration) {
	for end := s.now.Add(d); s.now.Before(end); {
		s.now = s.now.Add(100 * time.Millisecond)
		s.manager.Tick(s.now)
		s.performEffects()
	}
}

// checkInvariants checks what must hold at any time.
func (s *simulation) checkInvariants() {
	s.Helper()
	sizes := map[string]int{}
	for _, p := range s.pods {
		sizes[p.Gang.Name] = p.Size
	}
	for name, count := range s.memberCounts() {
		if count[0] >= sizes[name] {
			s.whole[name] = true
		} else if count[0] == 0 {
			delete(s.whole, name)
			delete(s.ambiguous, name)
		}
	}
	for _, name := range s.nodes {
		node, known := s.ledger.Node(name)
		if !known {
			continue
		}
		for i, c := range node.Cards {
			if node.Used[i] > c.Memory {
				s.Fatalf("card %d of %s has %d of %d allocated", c.Index, name, node.Used[i], c.Memory)
			}
		}
	}
}

// runUntilIdle lets all granted binds succeed and schedules pods until nothing changes any more.
func (s *simulation) runUntilIdle() {
	s.Helper()
	for range 400 {
		s.bindGranted()
		for range 30 {
			s.scheduleOne()
			s.performEffects()
		}
		s.advance(500 * time.Millisecond)
		s.checkInvariants()
	}
	if len(s.held) > 0 {
		s.Fatalf("%d binds are still held", len(s.held))
	}
}

// memberCounts counts the bound and the pending members of each gang.
func (s *simulation) memberCounts() map[string][2]int {
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

// TestRandom simulates clusters with gangs, single pods, abandoned calls, failing binds, deletions, vanishing nodes and
// restarts. No card is ever over-allocated, and no barrier opens for less than a complete gang. After the disturbances
// each gang is whole or has no bound member, nothing remains reserved, and each gang that fits runs.
func TestRandom(t *testing.T) {
	worlds := uint64(30)
	if os.Getenv("GPUSHARE_TEST_LONG") != "" {
		worlds = 1000
	}
	for seed := range worlds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { simulate(t, seed) })
	}
}

func simulate(t *testing.T, seed uint64) {
	s := newSimulation(t, seed)
	reliable := seed%3 == 0 // In a third of the simulations no binds fail.
	for round := range 200 {
		switch s.random.IntN(14) {
		case 0:
			size := 1 + s.random.IntN(6)
			memory := []gpu.Memory{4, 8, 16, 0}[s.random.IntN(4)]
			for i := range size {
				template := fmt.Sprint("t", i%(1+s.random.IntN(2)))
				if s.random.IntN(8) == 0 {
					template = "not on " + s.nodes[s.random.IntN(len(s.nodes))]
				}
				s.create(fmt.Sprintf("g%d", round), size, memory, template)
			}
		case 1:
			s.create("", 0, 1+gpu.Memory(s.random.IntN(16)), "")
		case 2: // A job or a single pod ends, or a pod is deleted.
			if all := s.existing(); len(all) > 0 {
				victim := all[s.random.IntN(len(all))]
				for _, p := range all {
					if p == victim || p.Gang == victim.Gang && victim.Gang.Name != "" && s.random.IntN(10) > 0 {
						s.delete(p)
					}
				}
			}
		case 3: // A member is deleted and created again.
			if all := s.existing(); len(all) > 0 {
				p := all[s.random.IntN(len(all))]
				s.delete(p)
				s.create(p.Gang.Name, p.Size, p.Request, p.Template)
			}
		case 4: // The scheduler abandons a bind call.
			if len(s.held) > 0 {
				i := s.random.IntN(len(s.held))
				bind := s.held[i]
				if s.manager.CancelPermit(bind.pod.UID, bind.permit) {
					s.held = slices.Delete(s.held, i, i+1)
					bind.pod.queued = true
				}
			}
		case 5:
			s.advance(time.Duration(s.random.IntN(15_000)) * time.Millisecond)
		case 6:
			if s.random.IntN(5) == 0 {
				s.restart()
			}
		case 7:
			if len(s.granted) > 0 {
				i := s.random.IntN(len(s.granted))
				bind := s.granted[i]
				s.granted = slices.Delete(s.granted, i, i+1)
				s.bind(bind, !reliable && s.random.IntN(4) == 0)
			}
		case 8:
			name := s.nodes[s.random.IntN(len(s.nodes))]
			s.ledger.DeleteNode(name)
			s.advance(200 * time.Millisecond)
			s.addNode(name)
		default:
			s.scheduleOne()
		}
		s.performEffects()
		s.checkInvariants()
	}
	s.runUntilIdle()

	for name, count := range s.memberCounts() {
		if count[0] > 0 && count[1] > 0 && !s.whole[name] {
			t.Errorf("gang %s is partial: %d members bound, %d pending", name, count[0], count[1])
		}
	}
	for _, node := range s.ledger.Nodes() {
		for _, h := range node.Allocations {
			if p := s.pods[h.UID]; h.State == ledger.Assumed {
				t.Errorf("%s has a reservation on %s and is not bound: %v", h.Name, node.Name, p)
			}
		}
	}
	s.checkNoFittingGangPending()
	t.Logf("%d gangs bound, %d pods evicted, failures %v", s.bound, s.evicted, s.failures)
}

// checkNoFittingGangPending fails the test if a complete gang is pending although it fits.
func (s *simulation) checkNoFittingGangPending() {
	waiting := map[gang.Key][]*pod{}
	for _, p := range s.existing() {
		if p.Node == "" && p.Gang.Name != "" {
			waiting[p.Gang] = append(waiting[p.Gang], p)
		}
	}
	for key, members := range waiting {
		if len(members) < members[0].Size {
			continue
		}
		var requests []ledger.Request
		for _, p := range members {
			if p.Request > 0 {
				requests = append(requests, ledger.Request{Pod: p.Pod, Nodes: s.eligibleNodes(p)})
			}
		}
		if reservations, _ := s.ledger.ReserveAll(requests, nil, ledger.View{Card: placement.Binpack, Node: placement.Binpack}, nil, s.now); reservations != nil || len(requests) == 0 {
			s.Errorf("gang %v of %d is pending although it fits: %v", key, len(members), s.manager.Phases())
			for _, request := range requests {
				s.ledger.Release(request.Pod.UID)
			}
		}
	}
}
