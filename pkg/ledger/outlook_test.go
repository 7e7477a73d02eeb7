package ledger_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"unique"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// costScene is a ledger with what a test knows of it: enough to compute every suitability from nothing but the present state.
type costScene struct {
	*fixture
	random *rand.Rand
	names  []string
	// beside is what is free beside the cards, shapes are those of pods, and kinds are the kinds of the outlook.
	beside  map[string]placement.NodeResources
	shapes  shapesOf
	kinds   []placement.Kind
	outlook *placement.Outlook
	// turnover is that of the outlook.
	turnover float64
	// usable are the nodes that pods with constraints can use.
	usable   map[unique.Handle[string]][]string
	excluded map[string]uint64
	pods     []gpu.Pod
}

func newCostScene(t *testing.T, seed uint64) *costScene {
	s := &costScene{
		fixture: &fixture{t: t}, random: rand.New(rand.NewPCG(seed, 0)), beside: map[string]placement.NodeResources{}, shapes: shapesOf{},
		usable: map[unique.Handle[string]][]string{}, excluded: map[string]uint64{},
	}
	s.Ledger = ledger.NewWithResources(s.shapes, nil)
	for i := range 6 {
		name := fmt.Sprint("n", i)
		s.names = append(s.names, name)
		s.SetNode(name, spec(16, 16, gpu.Memory(16+16*s.random.IntN(2)), gpu.Memory(8+8*s.random.IntN(2))))
		s.setBeside(name)
	}
	s.usable[unique.Handle[string]{}] = s.names
	s.usable[unique.Make("some")] = s.names[:3]
	s.expect()
	return s
}

// all is what each node has beside its cards.
var all = placement.NodeResources{CPU: 6000, NodeMemory: 6 << 30}

func (s *costScene) setBeside(name string) {
	s.beside[name] = placement.NodeResources{CPU: 1000 * s.random.Int64N(16), NodeMemory: s.random.Int64N(16) << 30}
	s.SetNodeResources(name, s.beside[name], all)
}

// newPod returns a pod with a random shape, which the scene knows mostly.
func (s *costScene) newPod() gpu.Pod {
	p := pod(fmt.Sprint("p", len(s.pods)), gpu.Memory(1+s.random.IntN(16)))
	p.Cards = 1 + s.random.IntN(2)
	p.Request *= gpu.Memory(p.Cards)
	s.pods = append(s.pods, p)
	if s.random.IntN(5) > 0 {
		shape := placement.Shape{Demand: p.Demand(), NodeResources: placement.NodeResources{CPU: 1000 * s.random.Int64N(8), NodeMemory: s.random.Int64N(8) << 30}}
		if s.random.IntN(3) == 0 {
			shape.Constraints = unique.Make("some")
		}
		s.shapes[p.UID] = shape
	}
	return p
}

// newPodOf returns a pod with this shape.
func (s *costScene) newPodOf(shape placement.Shape) gpu.Pod {
	p := s.newPod()
	s.shapes[p.UID], p.Cards, p.Request = shape, shape.Cards, shape.Memory*gpu.Memory(shape.Cards)
	return p
}

// rooms returns what each node has free.
func (s *costScene) rooms() (rooms []placement.NodeRoom) {
	for _, n := range s.NodeCards() {
		rooms = append(rooms, placement.NodeRoom{Cards: n.Cards, NodeResources: s.beside[n.Name], All: all, Excluded: s.excluded[n.Name]})
	}
	return rooms
}

// expect makes a new outlook of some shapes.
func (s *costScene) expect() {
	s.kinds, s.excluded, s.turnover = nil, map[string]uint64{}, float64(len(s.pods)%2)
	for range 1 + s.random.IntN(8) {
		p := s.newPod()
		s.kinds = append(s.kinds, placement.Kind{Shape: s.shapes[p.UID], Frequency: 1 + s.random.Float64()})
	}
	s.kinds = slices.DeleteFunc(s.kinds, func(k placement.Kind) bool { return k.Cards == 0 }) // Of pods that the scene doesn't know.
	if len(s.kinds) == 0 {
		s.expect()
		return
	}
	for i, kind := range s.kinds {
		for _, name := range s.names {
			if !slices.Contains(s.usable[kind.Constraints], name) {
				s.excluded[name] |= 1 << i
			}
		}
	}
	s.outlook = placement.NewOutlook(s.kinds, s.turnover, placement.Binpack, s.rooms())
	s.Expect(s.kinds, s.turnover, placement.Binpack, func(constraints unique.Handle[string]) []string { return s.usable[constraints] })
}

// change changes the ledger at random.
func (s *costScene) change() {
	name := s.names[s.random.IntN(len(s.names))]
	switch s.random.IntN(6) {
	case 0:
		s.setBeside(name)
	case 1:
		s.Remove(s.pods[s.random.IntN(len(s.pods))].UID)
	case 2:
		s.expect()
	case 3:
		s.Nominate(name, s.newPod())
	default:
		_, _ = s.Reserve(name, s.newPod(), placement.Binpack, at) // There may be no room.
	}
}

// rank ranks all nodes for the pod, and compares each suitability with the cost that is computed from the present state. It returns how many nodes
// the pod fits, and on how many of them memory is reserved against it.
func (s *costScene) rank(what string, p gpu.Pod) (ranked, reservedAgainst int) {
	s.t.Helper()
	shape, known := s.shapes[p.UID]
	if !known {
		shape = placement.Shape{Demand: p.Demand()}
	}
	view := ledger.View{Card: placement.Binpack, Node: placement.LeastWaste}
	fitting, _, _ := s.Rank(view, p, s.names)
	for _, c := range fitting {
		name := s.names[c.Node]
		seen, _ := s.Availability(name, p, nil)
		room := placement.NodeRoom{Cards: seen.Cards, NodeResources: s.beside[name], All: all, Excluded: s.excluded[name]}
		if want := placement.SuitsByCost(s.outlook.Cost(&room, &shape)); c.Suits != want {
			s.t.Fatalf("%s: %s suits %v, want %v", what, name, c.Suits, want)
		}
		if node, _ := s.Node(name); !slices.EqualFunc(node.Used, seen.Cards, func(used gpu.Memory, c placement.Card) bool { return used == c.Used }) {
			reservedAgainst++
		}
	}
	return len(fitting), reservedAgainst
}

// TestRankByCost changes a cluster at random, and compares each suitability with the cost that is computed from the present state.
func TestRankByCost(t *testing.T) {
	ranked, reservedAgainst := 0, 0
	for seed := range uint64(40) {
		s := newCostScene(t, seed)
		for range 60 {
			s.change()
			nodes, against := s.rank(fmt.Sprint("seed ", seed), s.newPod())
			ranked, reservedAgainst = ranked+nodes, reservedAgainst+against
		}
	}
	if ranked < 1000 || reservedAgainst < 100 {
		t.Errorf("only %d nodes ranked, on %d of them memory was reserved", ranked, reservedAgainst)
	}
}

// TestReserveAllByCost: several pods get the nodes that they would get one after the other.
func TestReserveAllByCost(t *testing.T) {
	for seed := range uint64(100) {
		s, reference := newCostScene(t, seed), newCostScene(t, seed)
		view := ledger.View{Card: placement.Binpack, Node: placement.LeastWaste}
		var requests []ledger.Request
		for range min(4, 4*len(s.kinds)) {
			kind := s.kinds[s.random.IntN(len(s.kinds))].Shape
			p := s.newPodOf(kind) // ReserveAll rates other shapes by their kind.
			reference.shapes[p.UID] = kind
			requests = append(requests, ledger.Request{Pod: p, Nodes: s.names})
		}
		places, _ := s.ReserveAll(requests, nil, view, at)
		for i := range places {
			node := reference.best(view, requests[i].Pod, s.names)
			expect(t, fmt.Sprint("seed ", seed, ", node of pod ", i), node, places[i].Node)
			reference.reserve(node, requests[i].Pod)
		}
	}
}

// TestExpectBesideChanges: while an outlook is made, the cluster changes. Pods of its kinds, whose costs it brings along, are rated by the present
// state all the same.
func TestExpectBesideChanges(t *testing.T) {
	for seed := range uint64(40) {
		s := newCostScene(t, seed)
		s.Expect(s.kinds, s.turnover, placement.Binpack, func(constraints unique.Handle[string]) []string {
			_, _ = s.Reserve(s.names[1+s.random.IntN(4)], s.newPod(), placement.Binpack, at) // There may be no room.
			s.setBeside("n0")
			s.DeleteNode("n5")
			return s.usable[constraints]
		})
		for i, kind := range s.kinds {
			s.rank(fmt.Sprintf("seed %d, kind %d", seed, i), s.newPodOf(kind.Shape))
		}
	}
}

// TestNothingExpected: without nodes, and until a pod has come, no outlook can be made, so nodes are rated by binpack until the next one.
func TestNothingExpected(t *testing.T) {
	kind := placement.Kind{Frequency: 1, Shape: placement.Shape{Demand: gpu.Demand{Cards: 1, Memory: 1, Containers: 1}}}
	for what, first := range map[string]bool{"no nodes": true, "no pods": false} {
		f, kinds := newFixture(t), []placement.Kind(nil)
		expectKinds := func() {
			f.Expect(kinds, 1, placement.Binpack, func(unique.Handle[string]) []string { return []string{"n1", "n2"} })
		}
		if first {
			kinds = append(kinds, kind)
			expectKinds()
		}
		f.SetNode("n1", spec(16))
		f.SetNode("n2", spec(16))
		f.bind("n2", 0, pod("p", 8))
		if !first {
			expectKinds()
		}
		expect(t, what, f.scores(placement.Binpack, pod("x", 8), "n1", "n2"), f.scores(placement.LeastWaste, pod("x", 8), "n1", "n2"))
	}
}

// TestStranded: memory counts in bytes, since nodes can have different units, and follows what nodes have free beside their cards.
func TestStranded(t *testing.T) {
	f := newFixture(t)
	f.SetNode("n1", ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{{Index: 0, Memory: 12}}})
	f.SetNode("n2", ledger.NodeSpec{Unit: gpu.MiB, Cards: []gpu.Card{{Index: 0, Memory: 4 << 10}}})
	if got := f.Stranded(); got.Ratios != nil || got.Nodes != nil {
		t.Errorf("nothing is expected yet, got %v", got)
	}
	kind := placement.Kind{Frequency: 1, Shape: placement.Shape{Demand: gpu.Demand{Cards: 1, Memory: 1, Containers: 1}, NodeResources: placement.NodeResources{CPU: 1000, NodeMemory: 1}}}
	f.Expect([]placement.Kind{kind}, 0, placement.Binpack, func(unique.Handle[string]) []string { return []string{"n1", "n2"} })
	want := func(cpu, memory float64, texts ...string) {
		t.Helper()
		var nodes []string
		stranded := f.Stranded()
		for _, node := range stranded.Nodes {
			nodes = append(nodes, node.Name+" has "+node.Text(node.Unit))
		}
		if !slices.Equal(nodes, texts) {
			t.Errorf("got %q, want %q", nodes, texts)
		}
		if got := stranded.Ratios; got[placement.ShortOfCPU] != cpu || got[placement.ShortOfNodeMemory] != memory || got[placement.ShortOfBoth] != 0 {
			t.Errorf("got %v, want %v for CPU and %v for memory", got, cpu, memory)
		}
	}
	want(0, 0)
	f.SetNodeResources("n1", placement.NodeResources{CPU: 500, NodeMemory: 1}, placement.NodeResources{})
	want(0.75, 0, "n1 has 12 GiB free, of no use: the node lacks CPU")
	f.SetNodeResources("n2", placement.NodeResources{CPU: 1000}, placement.NodeResources{})
	want(0.75, 0.25, "n1 has 12 GiB free, of no use: the node lacks CPU", "n2 has 4096 MiB free, of no use: the node lacks node memory")
}
