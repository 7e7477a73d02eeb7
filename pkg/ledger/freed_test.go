package ledger_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// A change by which a pod fits a node calls the freed listeners: rejected pods depend on that.
func TestFreed(t *testing.T) {
	old := spec(16, 16)
	old.SeveralCards, old.Cores = reasons.OldForCards, reasons.OldForCores
	heldFor := func(uids ...gpu.PodUID) (places []heldPlace) {
		for card, uid := range uids {
			places = append(places, heldPlace{UID: uid, Node: "n1", On: gpu.On(card, 16), Item: 1})
		}
		return places
	}
	await := func(f *fixture, name, node string) {
		f.await([]ledger.Request{{Pod: pod(name, 16), Nodes: []string{node}}, {Pod: pod(name+"2", 16), Nodes: []string{node}}}, 9, longAgo)
	}
	large := pod("p", 16, 5)
	for name, test := range map[string]struct {
		pod            gpu.Pod
		before, change func(f *fixture)
	}{
		"the device plugin understands several cards": {
			gpu.Pod{UID: "p", Request: 20, Cards: 2}, func(f *fixture) { f.SetNode("n1", old) }, func(f *fixture) { f.SetNode("n1", spec(16, 16)) },
		},
		"the device plugin understands cores": {
			gpu.Pod{UID: "p", Request: 10, Cores: 50}, func(f *fixture) { f.SetNode("n1", old) }, func(f *fixture) { f.SetNode("n1", spec(16, 16)) },
		},
		"a nominated pod is bound to another node": {
			large, func(f *fixture) { f.Nominate("n1", pod("x", 16, 5)); f.Nominate("n1", pod("y", 16, 5)) },
			func(f *fixture) { f.bind("n2", 0, pod("x", 16, 5)); f.End(ledger.Nominated, "x") },
		},
		"a pod with a held place is bound to another node": {
			large, func(f *fixture) { f.hold(heldFor("x", "y"), 9) }, func(f *fixture) { f.bind("n2", 0, pod("x", 16)) },
		},
		"a pod with a held place gets an allocation on another node": {
			large, func(f *fixture) { f.hold(heldFor("x", "y"), 9) }, func(f *fixture) { f.reserve("n2", pod("x", 16)) },
		},
		"a pod with a held place gets a place on another node, with others": {
			large, func(f *fixture) { f.hold(heldFor("x", "y"), 9) },
			func(f *fixture) {
				f.ReserveAll([]ledger.Request{{Pod: pod("x", 16), Nodes: []string{"n2"}}}, nil, binpack, at)
			},
		},
		"places are held for a lower priority": {
			large, func(f *fixture) { f.hold(heldFor("x", "y"), 9) }, func(f *fixture) { f.hold(heldFor("x", "y"), 4) },
		},
		"an awaited reservation replaces another one": {
			large, func(f *fixture) { await(f, "x", "n1") }, func(f *fixture) { await(f, "y", "n2") },
		},
		"an awaited reservation ends, and the next one fails": {
			large, func(f *fixture) { await(f, "x", "n1") }, func(f *fixture) { await(f, "y", "n9") },
		},
		"by a deletion, a nominated pod is likely to get another card": {
			pod("p", 8, 5), func(f *fixture) {
				f.bind("n1", 1, pod("victim", 8))
				f.bind("n1", 0, pod("other", 16))
				f.Nominate("n1", pod("preemptor", 16, 5), "victim")
			}, func(f *fixture) {
				f.bind("n1", 0, terminating(pod("other", 16)))
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, spec(16, 16), spec(16, 16))
			test.before(f)
			f.takeFreed()
			expect(t, "before: fits", false, f.check(test.pod, "n1")[0] == reasons.Fits)
			test.change(f)
			expect(t, "after: fits", true, f.check(test.pod, "n1")[0] == reasons.Fits)
			expect(t, "freed n1", true, slices.Contains(f.takeFreed(), "n1"))
		})
	}
}

// What happens to most pods frees nothing until they end, so rejected pods aren't checked then.
func TestNothingFreed(t *testing.T) {
	f := newFixture(t, spec(16, 16))
	f.takeFreed()
	p := pod("p", 8)
	f.reserve("n1", p)
	f.bind("n1", 0, p)
	f.bind("n1", 0, p)
	expect(t, "freed", []string(nil), f.takeFreed())
	f.Remove(p.UID)
	expect(t, "freed at the end", []string{"n1"}, f.takeFreed())
}

// After each of many random changes, the freed listeners were called for each node that a pod fits now and didn't fit before. A pod that has
// an allocation doesn't count, nor do the pods that are the subject of the change, nor nodes with nominated pods: what these are likely to get
// can move with each change of the node, until kube-scheduler tries them again.
func TestFreedAfterEachChange(t *testing.T) {
	seeds := uint64(300)
	if testing.Short() {
		seeds = 60
	}
	became := 0
	for seed := range seeds {
		s := &simulation{random: rand.New(rand.NewPCG(seed, 2)), fixture: newFixture(t), nodes: []string{"n0", "n1"}, clock: at}
		for _, node := range s.nodes {
			s.fixture.SetNode(node, s.nodeSpec())
		}
		for i := range 12 {
			p := s.pod(fmt.Sprintf("p%02d", i))
			p.Priority = int32(s.random.IntN(3))
			s.pods = append(s.pods, p)
		}
		fits := func() map[string]bool {
			out := map[string]bool{}
			for _, p := range s.pods {
				if s.fixture.nodeOf(p.UID) == "" {
					for i, reason := range s.fixture.check(p, s.nodes...) {
						out[p.Name+" on "+s.nodes[i]] = reason == reasons.Fits
					}
				}
			}
			return out
		}
		for range 100 {
			before := fits()
			s.fixture.takeFreed()
			operation, subjects := s.change()
			freed, after := s.fixture.takeFreed(), fits()
			nominated := map[string]bool{}
			for _, node := range s.fixture.NodeCards() {
				nominated[node.Name] = len(node.Nominees) > 0
			}
			for _, p := range s.pods {
				for _, node := range s.nodes {
					key := p.Name + " on " + node
					did, waited := before[key]
					if !waited || did || !after[key] || nominated[node] || slices.Contains(subjects, p.UID) {
						continue
					}
					became++
					if !slices.Contains(freed, node) {
						t.Fatalf("seed %d: after %s, %v fits %s; freed %v", seed, operation, p, node, freed)
					}
				}
			}
		}
	}
	if became < int(seeds) {
		t.Errorf("only %d times a pod fits that didn't fit before", became)
	}
}

// change makes a random change of the ledger alone. It returns a description, and the pods that are its subject.
func (s *simulation) change() (operation string, subjects []gpu.PodUID) {
	p, node := s.pods[s.random.IntN(len(s.pods))], s.nodes[s.random.IntN(len(s.nodes))]
	some := slices.Clone(s.pods[:1+s.random.IntN(4)])
	var requests []ledger.Request
	for _, member := range some {
		requests = append(requests, ledger.Request{Pod: member, Nodes: s.nodes})
		subjects = append(subjects, member.UID)
	}
	one := []gpu.PodUID{p.UID}
	switch n := s.random.IntN(13); n {
	case 0:
		_, _ = s.fixture.Reserve(node, p, placement.Spread, at) // There may be no room.
		return fmt.Sprintf("Reserve(%s, %v)", node, p), one
	case 1, 2:
		p.Leaving = s.random.IntN(2) == 0
		s.fixture.SetBound(node, p, s.where(p), at)
		return fmt.Sprintf("SetBound(%s, %v)", node, p), one
	case 3:
		s.fixture.Release(p.UID)
		return fmt.Sprintf("Release(%v)", p), one
	case 4:
		s.fixture.Remove(p.UID)
		return fmt.Sprintf("Remove(%v)", p), one
	case 5, 6:
		s.fixture.Nominate(node, p, subjects...)
		return fmt.Sprintf("Nominate(%s, %v, %v)", node, p, subjects), one
	case 7:
		s.fixture.End(ledger.Nominated, string(p.UID))
		return fmt.Sprintf("End(Nominated, %v)", p), one
	case 8:
		var places []heldPlace
		for i, member := range some {
			share, _ := each(member)
			places = append(places, heldPlace{UID: member.UID, Node: node, On: on([]int{s.random.IntN(3)}, share), Item: 1 + i/2})
		}
		priority := int32(s.random.IntN(3))
		s.fixture.hold(places, priority)
		return fmt.Sprintf("Hold(%v, %d)", places, priority), subjects
	case 9:
		priority := int32(s.random.IntN(3))
		s.fixture.await(requests, priority, longAgo)
		return fmt.Sprintf("Await(%v, %d)", some, priority), subjects
	case 10:
		yielding := [][]gpu.PodUID{one}
		s.fixture.ReserveAll(requests, yielding, binpack, at)
		return fmt.Sprintf("ReserveAll(%v, %v)", some, yielding), append(subjects, p.UID)
	case 11:
		s.fixture.NominateAll(requests, binpack)
		return fmt.Sprintf("NominateAll(%v)", some), subjects
	}
	nodeSpec := s.nodeSpec()
	s.fixture.SetNode(node, nodeSpec)
	return fmt.Sprintf("SetNode(%s, %v)", node, nodeSpec), nil
}
