package reclaim

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

var begin = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

// scene builds a need of the tenant alice, and the cluster.
type scene struct {
	Need
	Cluster
	cpu map[string]int
}

// newScene returns nodes n0, n1 … with cards of 8, as many as the numbers say.
func newScene(cards ...int) *scene {
	s := &scene{
		Need:    Need{Tenant: "alice", Tenants: map[string]Standing{}},
		Cluster: Cluster{Cards: map[string][]placement.Card{}, Places: map[gpu.PodUID]Place{}, Budgets: map[gpu.PodUID][]int{}},
	}
	for i, n := range cards {
		for index := range n {
			s.Cards[node(i)] = append(s.Cards[node(i)], placement.NewCard(gpu.Card{Index: index, Memory: 8}, 0))
		}
	}
	return s
}

func node(i int) string { return fmt.Sprint("n", i) }

// wants adds a pod that gets room, on any node.
func (s *scene) wants(memory gpu.Memory, cards int) *scene {
	pod := Pod{Pod: gpu.Pod{UID: gpu.PodUID(fmt.Sprint("new-", len(s.Pods))), Request: memory, Cards: cards}}
	for i := range len(s.Cards) {
		pod.Nodes = append(pod.Nodes, node(i))
	}
	s.Pods = append(s.Pods, pod)
	return s
}

// has adds a candidate, older than the former ones. places are its pods, each as node, card and memory.
func (s *scene) has(tenant string, places ...[3]int) *scene {
	v := Victim{Tenant: tenant, Started: begin.Add(-time.Duration(len(s.Victims)) * time.Minute)}
	for i, at := range places {
		pod := gpu.Pod{UID: gpu.PodUID(fmt.Sprintf("%s-%d.%d", tenant, len(s.Victims), i)), Request: gpu.Memory(at[2])}
		s.Places[pod.UID] = Place{node(at[0]), pod.Demand().On(at[1])}
		s.used(at)
		v.Pods = append(v.Pods, pod)
	}
	s.Victims = append(s.Victims, v)
	return s
}

// used adds a pod that is no candidate.
func (s *scene) used(at [3]int) *scene {
	s.Cards[node(at[0])][at[1]].Add(gpu.Share{Card: at[1], Memory: gpu.Memory(at[2]), Containers: 1})
	return s
}

func (s *scene) excess(tenant string, amount gpu.Memory) *scene {
	s.Tenants[tenant] = Standing{Excess: amount}
	return s
}

func (s *scene) budget(victim int, allowed int) *scene {
	for _, p := range s.Victims[victim].Pods {
		s.Budgets[p.UID] = []int{len(s.Allowed)}
	}
	s.Allowed = append(s.Allowed, allowed)
	return s
}

// names returns the first pods of the victims.
func names(victims []Victim) (out []gpu.PodUID) {
	for _, v := range victims {
		out = append(out, v.Pods[0].UID)
	}
	return out
}

func TestChoose(t *testing.T) {
	type at = [3]int
	for name, tc := range map[string]struct {
		scene  *scene
		want   []gpu.PodUID
		beyond gpu.Memory
		none   bool
	}{
		"the newest of equal ones":                   {newScene(2).has("bob", at{0, 0, 8}).has("bob", at{0, 1, 8}).wants(8, 1).excess("bob", 8), []gpu.PodUID{"bob-0.0"}, 0, false},
		"the least memory, although it is older":     {newScene(2).has("bob", at{0, 0, 8}).has("bob", at{0, 1, 4}).used(at{0, 1, 4}).wants(4, 1).excess("bob", 8), []gpu.PodUID{"bob-1.0"}, 0, false},
		"what is free already isn't evicted":         {newScene(1).has("bob", at{0, 0, 2}).has("bob", at{0, 0, 4}).wants(4, 1).excess("bob", 8), []gpu.PodUID{"bob-0.0"}, 0, false},
		"never below the share":                      {newScene(1).has("bob", at{0, 0, 8}).wants(4, 1).excess("bob", 7), nil, 0, true},
		"more than is missing":                       {newScene(1).has("bob", at{0, 0, 8}).wants(5, 1).excess("bob", 8), []gpu.PodUID{"bob-0.0"}, 3, false},
		"two tenants, since one has too little":      {newScene(1).has("bob", at{0, 0, 4}).has("carol", at{0, 0, 4}).wants(8, 1).excess("bob", 4).excess("carol", 4), []gpu.PodUID{"bob-0.0", "carol-1.0"}, 0, false},
		"a group goes as a whole":                    {newScene(1, 1).has("bob", at{0, 0, 8}, at{1, 0, 2}).used(at{1, 0, 6}).wants(8, 1).excess("bob", 10), []gpu.PodUID{"bob-0.0"}, 2, false},
		"a group that has more than the excess":      {newScene(1, 1).has("bob", at{0, 0, 8}, at{1, 0, 2}).used(at{1, 0, 6}).wants(8, 1).excess("bob", 9), nil, 0, true},
		"a group costs what all its members have":    {newScene(1, 1).has("bob", at{0, 0, 4}, at{1, 0, 4}).has("bob", at{0, 0, 4}).used(at{1, 0, 4}).wants(4, 1).excess("bob", 12), []gpu.PodUID{"bob-1.0"}, 0, false},
		"the budget allows none":                     {newScene(1).has("bob", at{0, 0, 8}).budget(0, 0).wants(8, 1).excess("bob", 8), nil, 0, true},
		"the budget allows one of two members":       {newScene(1, 1).has("bob", at{0, 0, 8}, at{1, 0, 8}).budget(0, 1).wants(8, 1).excess("bob", 16), nil, 0, true},
		"several cards become free at once":          {newScene(3).has("bob", at{0, 0, 8}).has("bob", at{0, 1, 4}).has("bob", at{0, 2, 4}).used(at{0, 1, 4}).used(at{0, 2, 4}).wants(8, 2).excess("bob", 16), []gpu.PodUID{"bob-1.0", "bob-2.0"}, 0, false},
		"room for all members of a group, or none":   {newScene(1, 1).has("bob", at{0, 0, 8}).used(at{1, 0, 8}).wants(8, 1).wants(8, 1).excess("bob", 16), nil, 0, true},
		"a member that fits without victims":         {newScene(1, 1).has("bob", at{0, 0, 8}).wants(8, 1).wants(8, 1).excess("bob", 16), []gpu.PodUID{"bob-0.0"}, 0, false},
		"pods that are being deleted make room":      {newScene(1).wants(8, 1), nil, 0, false},
		"the first victim turns out to be unneeded":  {newScene(1, 1).has("bob", at{0, 0, 4}).has("bob", at{0, 0, 4}, at{1, 0, 8}).used(at{0, 0, 4}).wants(8, 1).excess("bob", 16), []gpu.PodUID{"bob-1.0"}, 4, false},
		"a member frees what a second pod can use":   {newScene(1, 1).has("bob", at{0, 0, 8}, at{1, 0, 8}).wants(8, 1).wants(8, 1).excess("bob", 16), []gpu.PodUID{"bob-0.0"}, 0, false},
		"a node that the pod can't use stays":        {newScene(1, 1).has("bob", at{1, 0, 8}).used(at{0, 0, 8}).wants(8, 1).only("n0").excess("bob", 8), nil, 0, true},
		"the node whose CPU is taken by others":      {newScene(1, 1).has("bob", at{0, 0, 8}).has("bob", at{1, 0, 8}).wants(8, 1).excess("bob", 16).cpuFor("n1", 1), []gpu.PodUID{"bob-1.0"}, 0, false},
		"CPU is missing for one of two members":      {newScene(2).has("bob", at{0, 0, 8}).has("bob", at{0, 1, 8}).wants(8, 1).wants(8, 1).excess("bob", 16).cpuFor("n0", -1), nil, 0, true},
		"a pod whose place is unknown is no victim":  {newScene(1).has("bob", at{0, 0, 8}).wants(8, 1).excess("bob", 8).unknown("bob-0.0"), nil, 0, true},
		"a card on which others leave too little":    {newScene(1).has("bob", at{0, 0, 4}).used(at{0, 0, 4}).wants(8, 1).excess("bob", 8), nil, 0, true},
		"the smallest set, though the newest is big": {newScene(1).has("bob", at{0, 0, 3}).has("bob", at{0, 0, 2}).has("bob", at{0, 0, 2}).used(at{0, 0, 1}).wants(4, 1).excess("bob", 4), []gpu.PodUID{"bob-1.0", "bob-2.0"}, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			plan, ok := Choose(tc.scene.Need, tc.scene.Cluster)
			if ok == tc.none || !cmp.Equal(tc.want, names(plan.Victims)) || plan.Beyond != tc.beyond {
				t.Errorf("%v, %v, %d beyond the need; want %v, %d", names(plan.Victims), ok, plan.Beyond, tc.want, tc.beyond)
			}
			tc.scene.checkRestored(t)
		})
	}
}

func (s *scene) only(nodes ...string) *scene {
	s.Pods[0].Nodes = nodes
	return s
}

func (s *scene) unknown(uid gpu.PodUID) *scene {
	delete(s.Places, uid)
	return s
}

// cpuFor makes each pod need one CPU, of which the node has as many free, and the others none.
func (s *scene) cpuFor(node string, free int) *scene {
	s.cpu, s.Capacity = map[string]int{node: free}, fakeCapacity{s}
	for name := range s.Cards {
		if name != node {
			s.cpu[name] = -1
		}
	}
	return s
}

type fakeCapacity struct{ *scene }

func (c fakeCapacity) Take(node string, _ gpu.PodUID) bool {
	if c.cpu[node] < 1 {
		return false
	}
	c.cpu[node]--
	return true
}
func (c fakeCapacity) Return(node string, _ gpu.PodUID)  { c.cpu[node]++ }
func (c fakeCapacity) Evict(node string, _ gpu.PodUID)   { c.cpu[node]++ }
func (c fakeCapacity) Restore(node string, _ gpu.PodUID) { c.cpu[node]-- }

// checkRestored checks that a decision leaves the capacity as it was.
func (s *scene) checkRestored(t *testing.T) {
	t.Helper()
	for name, free := range s.cpu {
		if free != 1 && free != -1 {
			t.Errorf("node %s has %d CPUs free after the decision", name, free)
		}
	}
}

// TestRandom compares decisions for random clusters with all possible ones.
func TestRandom(t *testing.T) {
	found, none := 0, 0
	for seed := range uint64(3000) {
		random := rand.New(rand.NewPCG(seed, 7))
		s := randomScene(random)
		plan, ok := Choose(s.Need, s.Cluster)
		again, _ := Choose(s.Need, s.Cluster)
		if diff := cmp.Diff(plan, again); diff != "" {
			t.Fatalf("seed %d: another decision for the same input:\n%s", seed, diff)
		}
		least, possible := s.least()
		if ok {
			found++
			s.check(t, seed, plan)
		} else {
			none++
		}
		if single := len(s.Pods) == 1; single && (ok != possible || ok && sum(plan.Victims) != least) {
			t.Fatalf("seed %d: %v, %v with %d; the least is %d, %v", seed, names(plan.Victims), ok, sum(plan.Victims), least, possible)
		} else if ok && !possible {
			t.Fatalf("seed %d: %v is not possible", seed, names(plan.Victims))
		}
	}
	if found < 500 || none < 500 {
		t.Errorf("%d decisions, and %d times none", found, none)
	}
}

// randomScene returns up to three nodes, up to eight candidates of two tenants, some of which are groups or have a budget, and a pod
// or a group of equal pods that wants room.
func randomScene(random *rand.Rand) *scene {
	s := newScene(slices.Repeat([]int{1 + random.IntN(2)}, 1+random.IntN(3))...)
	place := func() (at [3]int, ok bool) {
		name := random.IntN(len(s.Cards))
		card := random.IntN(len(s.Cards[node(name)]))
		memory := 1 + random.IntN(6)
		return [3]int{name, card, memory}, int(s.Cards[node(name)][card].Free()) >= memory
	}
	for range random.IntN(9) {
		tenant, members := []string{"bob", "carol"}[random.IntN(2)], 1
		if random.IntN(4) == 0 {
			members = 2
		}
		var places [][3]int
		used := map[[2]int]int{}
		for range members {
			at, _ := place()
			key := [2]int{at[0], at[1]}
			if used[key]+at[2] <= int(s.Cards[node(at[0])][at[1]].Free()) {
				places = append(places, at)
				used[key] += at[2]
			}
		}
		if len(places) > 0 {
			s.has(tenant, places...)
			if random.IntN(5) == 0 {
				s.budget(len(s.Victims)-1, random.IntN(2))
			}
		}
	}
	for range random.IntN(3) {
		if at, ok := place(); ok {
			s.used(at)
		}
	}
	s.excess("bob", gpu.Memory(random.IntN(16))).excess("carol", gpu.Memory(random.IntN(16)))
	memory := gpu.Memory(1 + random.IntN(8))
	for range 1 + max(random.IntN(5)-2, 0) {
		s.wants(memory, 1)
	}
	return s
}

func sum(victims []Victim) (memory gpu.Memory) {
	for _, v := range victims {
		memory += v.Memory()
	}
	return memory
}

// check checks a plan: no tenant gets below its share, no budget is violated, the places exist, no victim is unneeded.
func (s *scene) check(t *testing.T, seed uint64, plan Plan) {
	t.Helper()
	if !s.allowed(plan.Victims) {
		t.Fatalf("seed %d: %v may not be evicted", seed, names(plan.Victims))
	}
	cards := s.without(plan.Victims)
	for _, place := range plan.Places {
		for _, share := range place.On {
			if c := &cards[place.Node][share.Card]; !c.Has(share) {
				t.Fatalf("seed %d: %v has no room for %v", seed, place.Node, share)
			}
			cards[place.Node][share.Card].Add(share)
		}
	}
	for i := range plan.Victims {
		if s.fit(slices.Delete(slices.Clone(plan.Victims), i, i+1)) {
			t.Fatalf("seed %d: of %v, %v is unneeded", seed, names(plan.Victims), plan.Victims[i].Pods[0].UID)
		}
	}
}

func (s *scene) allowed(victims []Victim) bool {
	evicted, uses := map[string]gpu.Memory{}, map[int]int{}
	for _, v := range victims {
		if evicted[v.Tenant] += v.Memory(); evicted[v.Tenant] > s.Tenants[v.Tenant].Excess {
			return false
		}
		for _, p := range v.Pods {
			for _, budget := range s.Budgets[p.UID] {
				if uses[budget]++; uses[budget] > s.Allowed[budget] {
					return false
				}
			}
		}
	}
	return true
}

// without returns the cards without the victims.
func (s *scene) without(victims []Victim) map[string][]placement.Card {
	cards := map[string][]placement.Card{}
	for name := range s.Cards {
		cards[name] = slices.Clone(s.Cards[name])
	}
	for _, v := range victims {
		for _, p := range v.Pods {
			for _, share := range s.Places[p.UID].On {
				cards[s.Places[p.UID].Node][share.Card].Subtract(share)
			}
		}
	}
	return cards
}

// fit reports whether the pods, which are alike, fit without the victims.
func (s *scene) fit(victims []Victim) bool {
	room := 0
	for _, cards := range s.without(victims) {
		for _, c := range cards {
			room += int(c.Free() / s.Pods[0].Request)
		}
	}
	return room >= len(s.Pods)
}

// least returns the least memory whose eviction makes room, of all sets of candidates that may be evicted.
func (s *scene) least() (least gpu.Memory, possible bool) {
	for set := range 1 << len(s.Victims) {
		var victims []Victim
		for i, v := range s.Victims {
			if set&(1<<i) != 0 {
				victims = append(victims, v)
			}
		}
		if memory := sum(victims); s.allowed(victims) && s.fit(victims) && (!possible || memory < least) {
			least, possible = memory, true
		}
	}
	return least, possible
}
