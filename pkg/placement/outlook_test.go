package placement

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unique"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

// asks returns the shape of a pod that asks for that much memory of each of the cards, and for CPU in thousandths.
func asks(cards int, memory gpu.Memory, cpu int64) Shape {
	return Shape{Demand: gpu.Demand{Cards: cards, Memory: memory, Containers: 1}, NodeResources: NodeResources{CPU: cpu}}
}

// kindsOf returns equally frequent kinds.
func kindsOf(shapes ...Shape) (kinds []Kind) {
	for _, shape := range shapes {
		kinds = append(kinds, Kind{Shape: shape, Frequency: 1})
	}
	return kinds
}

// roomWith returns a node with that much CPU, all free, in thousandths, and cards of 16 units with these amounts free.
func roomWith(cpu int64, memory ...int) NodeRoom {
	n := NodeRoom{NodeResources: NodeResources{CPU: cpu, NodeMemory: 1 << 40}, All: NodeResources{CPU: cpu, NodeMemory: 1 << 40}}
	for i, amount := range memory {
		n.Cards = append(n.Cards, Card{Index: i, Memory: 16, Used: gpu.Memory(16 - amount)})
	}
	return n
}

// TestOutlookAdapters: there is room for pods that need a card near an adapter only on such cards, so others avoid these. A pod that prefers such a card
// costs a little less where it gets one.
func TestOutlookAdapters(t *testing.T) {
	needs, prefers, other := asks(1, 8, 0), asks(1, 8, 0), asks(1, 8, 0)
	needs.RDMA, prefers.RDMA = gpu.RDMARequired, gpu.RDMAPreferred
	near, far := roomWith(8000, 16), roomWith(8000, 16)
	near.Cards[0].NearAdapter = true
	o := NewOutlook(kindsOf(needs), 0, Binpack, []NodeRoom{near, far})
	if on, beside := o.Cost(&near, &other), o.Cost(&far, &other); on <= beside || beside != 0 {
		t.Errorf("the card near an adapter costs %v, the other one %v, want more, and nothing", on, beside)
	}
	o = NewOutlook(kindsOf(other), 0, Binpack, []NodeRoom{near, far})
	if on, beside := o.Cost(&near, &prefers), o.Cost(&far, &prefers); on >= beside || beside-on > 1e-6 {
		t.Errorf("the card near an adapter costs %v, the other one %v, want a little less", on, beside)
	}
	if on, beside := o.Cost(&near, &other), o.Cost(&far, &other); on != beside {
		t.Errorf("the card near an adapter costs %v, the other one %v, want the same", on, beside)
	}
}

// TestOutlookChoice: on which node a pod costs the least.
func TestOutlookChoice(t *testing.T) {
	whole, part, cpuOnly := asks(1, 16, 4000), asks(1, 4, 4000), Shape{NodeResources: NodeResources{CPU: 4000}}
	lean := asks(1, 4, 1000)
	node := func(cpu int64, memory ...int) NodeRoom { return roomWith(cpu, memory...) }
	large := node(8000, 16)
	large.Cards[0].Memory, large.Cards[0].Used = 64, 0
	cores := asks(1, 4, 4000)
	cores.Cores = 50
	busy := node(8000, 16)
	busy.Cards[0].UsedCores = 60
	for name, tc := range map[string]struct {
		kinds []Kind
		pod   Shape
		nodes []NodeRoom
		want  int
	}{
		"the card that is in use already":                     {kindsOf(whole, part), part, []NodeRoom{node(64000, 16), node(64000, 8)}, 1},
		"a node whose CPU is gone, for a pod that needs none": {kindsOf(whole, part), asks(1, 4, 0), []NodeRoom{node(64000, 8), node(1000, 16)}, 1},
		"CPU where no memory is left":                         {kindsOf(whole, part), cpuOnly, []NodeRoom{node(8000, 16), node(8000, 0)}, 1},
		"CPU where the rest is enough for the memory":         {kindsOf(part), cpuOnly, []NodeRoom{node(8000, 8), node(64000, 8)}, 1},
		"few CPUs go where few are left":                      {kindsOf(part, lean), lean, []NodeRoom{node(16000, 16), node(3000, 16)}, 1},
		"no kind fits, nothing is lost":                       {kindsOf(whole), part, []NodeRoom{node(64000, 16), node(64000, 4)}, 1},
		"a kind that was never seen, by the most similar one": {kindsOf(whole, part), asks(1, 3, 3000), []NodeRoom{node(64000, 16), node(64000, 8)}, 1},
		"all CPU is gone: equal, the first":                   {kindsOf(whole, part), asks(1, 4, 0), []NodeRoom{node(0, 16), node(0, 8)}, 0},
		"a small card before a large one":                     {kindsOf(asks(1, 64, 4000), part), part, []NodeRoom{large, node(8000, 16)}, 1},
		"cores: the card that others can't use":               {kindsOf(cores), part, []NodeRoom{node(8000, 16), busy}, 1},
		"several cards stay together":                         {kindsOf(asks(2, 16, 4000), part), part, []NodeRoom{node(64000, 16, 16), node(64000, 16, 4)}, 1},
	} {
		o := NewOutlook(tc.kinds, 0, Binpack, tc.nodes)
		best, least := -1, math.Inf(1)
		for i := range tc.nodes {
			if cost := o.Cost(&tc.nodes[i], &tc.pod); cost < least-1e-12 {
				best, least = i, cost
			}
		}
		if best != tc.want {
			t.Errorf("%s: node %d, want %d", name, best, tc.want)
		}
	}
}

// randomWorld returns random kinds and nodes with unequal cards.
func randomWorld(random *rand.Rand) (kinds []Kind, nodes []NodeRoom) {
	for range 1 + random.IntN(8) {
		shape := asks(1+random.IntN(2)*random.IntN(3), gpu.Memory(1+random.IntN(12)), 1000*random.Int64N(6))
		shape.NodeMemory, shape.Cores = random.Int64N(3)<<30, gpu.Cores(25*random.IntN(3))
		shape.Containers, shape.RDMA = 1+random.Int32N(6), []gpu.RDMA{0, gpu.RDMARequired}[random.IntN(2)]
		kinds = append(kinds, Kind{shape, random.Float64() + 0.1, random.IntN(20)})
	}
	for range 1 + random.IntN(6) {
		n := NodeRoom{
			NodeResources: NodeResources{CPU: 1000 * random.Int64N(20), NodeMemory: random.Int64N(8) << 30}, All: NodeResources{CPU: 1000 * random.Int64N(20), NodeMemory: 8 << 30},
			Excluded: random.Uint64() & random.Uint64() & random.Uint64(),
		}
		for i := range 1 + random.IntN(5) {
			n.Cards = append(n.Cards, Card{
				Index: i, Memory: gpu.Memory(8 + 8*random.IntN(2)), Used: gpu.Memory(random.IntN(10)), UsedCores: gpu.Cores(25 * random.IntN(5)),
				Unhealthy: random.IntN(9) == 0, Containers: random.Int32N(3), MaxContainers: 4 * random.Int32N(2),
				NearAdapter: random.IntN(2) == 0,
			})
		}
		nodes = append(nodes, n)
	}
	return kinds, nodes
}

// sharesOf returns how often the card has room for the kind's share.
func sharesOf(card *Card, kind *Shape) (shares int) {
	one := kind.Demand
	one.Cards = 1
	for c := *card; c.Fits(&one); shares++ {
		c.Add(gpu.Share{Memory: kind.Memory, Cores: kind.Cores, Containers: kind.Containers})
	}
	return shares
}

// fill returns how many pods of the kind fit the node, one after the other, and the memory of the cards that such a pod could use.
func fill(n NodeRoom, kind *Shape) (pods int, memory gpu.Memory) {
	n.Cards = slices.Clone(n.Cards)
	usable := kind.Demand
	usable.Cards = 1
	for i := range n.Cards {
		if n.Cards[i].Fits(&usable) {
			memory += n.Cards[i].Free()
		}
	}
	for ; n.CPU >= kind.CPU && n.NodeMemory >= kind.NodeMemory; pods++ {
		// The cards with the most shares left, so that as many pods as possible find different cards.
		slices.SortStableFunc(n.Cards, func(a, b Card) int { return sharesOf(&b, kind) - sharesOf(&a, kind) })
		if len(n.Cards) < kind.Cards || !n.Cards[kind.Cards-1].Fits(&usable) {
			break
		}
		for i := range kind.Cards {
			n.Cards[i].Add(gpu.Share{Memory: kind.Memory, Cores: kind.Cores, Containers: kind.Containers})
		}
		n.CPU, n.NodeMemory = n.CPU-kind.CPU, n.NodeMemory-kind.NodeMemory
	}
	if pods == 0 {
		memory = 0
	}
	return pods, memory
}

// emptiness returns the square of what the node has free by what it has, for each kind that could use the node once it is empty: by what all such
// nodes have free, and by the kind's part of the memory that is asked for. Which kinds could use the node is as before.
func emptiness(n, before NodeRoom, kinds []Kind, nodes []NodeRoom) (sum float64) {
	memory := func(n NodeRoom) (free, all float64) {
		for _, card := range n.Cards {
			if !card.Unhealthy {
				free, all = free+float64(card.Free()), all+float64(card.Memory)
			}
		}
		return free, all
	}
	usable := func(n NodeRoom, i int) bool {
		fitting := slices.DeleteFunc(slices.Clone(n.Cards), func(c Card) bool {
			c.Used, c.UsedCores, c.Containers = 0, 0, 0
			return !c.Fits(&kinds[i].Demand)
		})
		enough := kinds[i].CPU <= n.All.CPU && kinds[i].NodeMemory <= n.All.NodeMemory
		return n.Excluded&(1<<i) == 0 && len(fitting) >= kinds[i].Cards && enough
	}
	frequencies, asked := 0.0, 0.0
	for _, kind := range kinds {
		frequencies += kind.Frequency
	}
	asks := func(kind Kind) float64 {
		return (kind.Frequency/frequencies + float64(kind.Waiting)/horizon) * kind.size(meanCard(nodes))
	}
	for i, kind := range kinds {
		if slices.ContainsFunc(nodes, func(n NodeRoom) bool { return usable(n, i) }) {
			asked += asks(kind)
		}
	}
	free, all := memory(n)
	for i, kind := range kinds {
		everywhere := 1.0
		for _, node := range nodes {
			if free, all := memory(node); usable(node, i) && all > 0 {
				everywhere += free * free / all
			}
		}
		if usable(before, i) && all > 0 {
			sum += asks(kind) / asked * free * free / all / everywhere
		}
	}
	return emptinessWeight * sum
}

// TestOutlookEmptiness: where pods end, pods stay away from nodes that others can use once these are empty.
func TestOutlookEmptiness(t *testing.T) {
	one, two := asks(1, 16, 4000), asks(2, 16, 32000)
	near, many := two, two // They need an adapter near their cards, and many containers.
	near.RDMA, many.Containers = gpu.RDMARequired, 3
	able, limited := roomWith(64000, 16, 0), roomWith(64000, 16, 0)
	for i := range able.Cards {
		able.Cards[i].NearAdapter, limited.Cards[i].MaxContainers = true, 2
	}
	busy := roomWith(64000, 16, 16)
	busy.CPU = 16000
	for name, tc := range map[string]struct {
		kinds    []Kind
		nodes    []NodeRoom
		turnover float64
		want     int
	}{
		"the fuller node":                       {kindsOf(one, two), []NodeRoom{roomWith(64000, 16, 0, 0, 16), roomWith(64000, 16, 0, 0, 0)}, 1, 1},
		"a node that is too small for two":      {kindsOf(one, two), []NodeRoom{roomWith(64000, 16, 0, 0), roomWith(64000, 16)}, 1, 1},
		"no pod ends: not the smaller node":     {kindsOf(one, two), []NodeRoom{roomWith(64000, 16, 0, 0), roomWith(64000, 16)}, 0, 0},
		"a node whose CPU isn't enough for two": {kindsOf(one, two), []NodeRoom{roomWith(64000, 16, 0), roomWith(4000, 16, 0)}, 1, 1},
		"a node without adapters":               {kindsOf(one, near), []NodeRoom{able, limited}, 1, 1},
		"a node with a limit of containers":     {kindsOf(one, many), []NodeRoom{able, limited}, 1, 1},
		"pods without cards end too":            {kindsOf(two), []NodeRoom{busy, roomWith(16000, 16, 16)}, 1, 1},
	} {
		o := NewOutlook(tc.kinds, tc.turnover, Binpack, tc.nodes)
		costs := []float64{o.Cost(&tc.nodes[0], &one), o.Cost(&tc.nodes[1], &one)}
		if best := map[bool]int{false: 0, true: 1}[costs[1] < costs[0]-1e-12]; best != tc.want {
			t.Errorf("%s: node %d, want %d; costs %v", name, best, tc.want, costs)
		}
	}
}

// TestOutlookBruteForce compares room, value and costs with those that follow from placing pods one after the other.
func TestOutlookBruteForce(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		kinds, nodes := randomWorld(random)
		turnover := float64(random.IntN(2))
		o := NewOutlook(kinds, turnover, Binpack, nodes)
		n := nodes[random.IntN(len(nodes))]
		value := func(now NodeRoom) (sum float64) {
			weights := 0.0
			for _, kind := range kinds {
				weights += math.Pow(kind.Frequency/kind.size(meanCard(nodes)), weightExponent)
			}
			for i, kind := range kinds {
				allPods, allMemory, pods, memory := 0, gpu.Memory(0), 0, gpu.Memory(0)
				for _, node := range nodes {
					if node.Excluded&(1<<i) == 0 {
						p, m := fill(node, &kind.Shape)
						allPods, allMemory = allPods+p, allMemory+m
					}
				}
				if now.Excluded&(1<<i) == 0 {
					pods, memory = fill(now, &kind.Shape)
				}
				size := kind.size(meanCard(nodes))
				weight := math.Pow(kind.Frequency/size, weightExponent) / weights
				sum += weight * (float64(pods)/(float64(allPods)+ample) + float64(memory)/(float64(allMemory)+ample*size))
			}
			return sum + turnover*emptiness(now, n, kinds, nodes)
		}
		if got, want := o.value(&n), value(n); math.Abs(got-want) > 1e-9 {
			t.Fatalf("value %v, want %v of %+v for %+v", got, want, n, kinds)
		}
		costs := o.Costs(&n)
		for i := range kinds {
			where, reason := Place(Binpack, n.Cards, kinds[i].Demand)
			got := costs[i]
			if reason != reasons.Fits {
				continue
			}
			after := n
			after.Cards = slices.Clone(n.Cards)
			after.CPU, after.NodeMemory = max(n.CPU-kinds[i].CPU, 0), max(n.NodeMemory-kinds[i].NodeMemory, 0)
			for _, share := range where {
				after.Cards[share.Card].Add(share)
			}
			if want := value(n) - value(after); math.Abs(got-want) > 1e-9 || got < 0 {
				t.Fatalf("kind %d costs %v, want %v on %+v with %+v", i, got, want, n, kinds)
			}
			if other := o.CostOf(&n, i); other != got {
				t.Fatalf("CostOf is %v, Costs are %v", other, got)
			}
		}
	}
}

// TestOutlookNotFitting: of a kind that doesn't fit, so much counts as there is room for. So a pod that asks for a little less and fits is rated
// like one that takes the whole rest.
func TestOutlookNotFitting(t *testing.T) {
	n := roomWith(64000, 7, 4)
	o := NewOutlook(kindsOf(asks(1, 8, 1000), asks(1, 1, 1000)), 0, Binpack, []NodeRoom{n})
	rest, all := asks(1, 7, 1000), o.CostOf(&n, 0)
	if want := o.Cost(&n, &rest); all != want || all == 0 {
		t.Errorf("cost %v, want that of the whole card, %v", all, want)
	}
}

// TestKindOf: a shape that isn't a kind is rated like the most similar kind.
func TestKindOf(t *testing.T) {
	pinned := asks(1, 4, 1000)
	pinned.Constraints = unique.Make("pinned")
	kinds := kindsOf(asks(1, 4, 1000), asks(1, 4, 32000), asks(1, 16, 4000), asks(2, 16, 4000), pinned)
	o := NewOutlook(kinds, 0, Binpack, nil)
	other := asks(1, 5, 1500)
	other.Constraints = unique.Make("pinned")
	for name, tc := range map[string]struct {
		shape Shape
		want  int
	}{
		"a kind":                       {kinds[3].Shape, 3},
		"more memory, less CPU":        {asks(1, 5, 900), 0},
		"much CPU":                     {asks(1, 3, 20000), 1},
		"more cards than any kind":     {asks(4, 16, 4000), 3},
		"constraints":                  {other, 4},
		"constraints that no kind has": {Shape{Demand: pinned.Demand, NodeResources: pinned.NodeResources, Constraints: unique.Make("other")}, 0},
	} {
		if got, exact := o.KindOf(&tc.shape); got != tc.want || exact != (name == "a kind") {
			t.Errorf("%s: kind %d, want %d", name, got, tc.want)
		}
	}
}

// TestScale: of the candidates, the best ones and no others get the best score, however little they differ.
func TestScale(t *testing.T) {
	for name, tc := range map[string]struct {
		suits []Suitability
		want  []int
	}{
		"none":            {nil, nil},
		"one":             {[]Suitability{-0.3}, []int{10}},
		"equal":           {[]Suitability{-0.3, -0.3}, []int{10, 10}},
		"a little better": {[]Suitability{-0.3, -0.3000001, -0.4}, []int{10, 8, 0}},
		"free of cost":    {[]Suitability{0, -0.1, -0.2}, []int{10, 4, 0}},
	} {
		var candidates []Candidate
		for i, suits := range tc.suits {
			candidates = append(candidates, Candidate{i, suits})
		}
		LeastWaste.Scale(candidates)
		var got []int
		for _, c := range candidates {
			got = append(got, c.Suits.Score())
		}
		check.Equal(t, name, tc.want, got)
	}
}

// value returns what the node's room is worth to the pods that are expected.
func (o *Outlook) value(n *NodeRoom) (value float64) {
	b := o.baselineOf(n)
	for _, r := range b.rooms {
		value += r.kind.worth(r.pods, r.memory)
	}
	return value + b.perEmptiness*b.free*b.free/max(b.all, 1)
}
