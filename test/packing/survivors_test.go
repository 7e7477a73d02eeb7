package main

import (
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/arrivals"
	"github.com/gpushare/gpushare/pkg/placement"
)

// restarting is a cluster whose extender restarts after each number of pods: it then knows of those pods only that exist.
type restarting struct {
	*cluster
	after int
	exist map[int]tracePod
	// waiting are those of them that have no node.
	waiting map[int]bool
	number  int
}

func (r *restarting) arrive(pod *tracePod, number int) (node string, ok bool) {
	if r.number++; r.after > 0 && r.number%r.after == 0 {
		r.arrivals = r.survivors()
		r.expect()
	}
	r.now = r.now.Add(-time.Second) // At one time all pods count the same, so that sums don't depend on their order.
	node, ok = r.cluster.arrive(pod, number)
	r.exist[number] = *pod
	return node, ok
}

func (r *restarting) wait(pod *tracePod, number int) {
	r.waiting[number] = true
	r.cluster.wait(pod, number)
}

func (r *restarting) placeOn(node string, pod *tracePod, number int) bool {
	placed := r.cluster.placeOn(node, pod, number)
	if placed {
		delete(r.waiting, number)
	}
	return placed
}

func (r *restarting) end(node string, pod *tracePod, number int) {
	delete(r.exist, number)
	r.cluster.end(node, pod, number)
}

// survivors returns what a new process learns from the pods that exist, also from those that wait.
func (r *restarting) survivors() *arrivals.Counter {
	counter := arrivals.NewCounter()
	for number, pod := range r.exist {
		use := r.use(&pod, number)
		counter.Add(use.Shape(), sourceOf(&use), r.now)
		if r.waiting[number] {
			counter.Wait(use.Shape(), sourceOf(&use), 1)
		}
	}
	return counter
}

// parts returns each kind's part of all pods that were counted.
func parts(counter *arrivals.Counter) map[placement.Shape]float64 {
	out, sum := map[placement.Shape]float64{}, 0.0
	for _, kind := range counter.Kinds() {
		sum += kind.Frequency
	}
	for _, kind := range counter.Kinds() {
		out[kind.Shape] = kind.Frequency / sum
	}
	return out
}

// runsFor is how long a kind of pods runs, in seconds, and how often it comes compared with others.
type runsFor struct {
	pod         tracePod
	runs, often float64
}

// randomKinds returns kinds of which some run sixteen times as long as others.
func randomKinds(random *rand.Rand) (kinds []runsFor) {
	for i := range 12 {
		pod := tracePod{name: fmt.Sprint("kind-", i), cpu: 500 * (1 + random.Int64N(16)), memory: 1024, cards: 1, milli: 100 * (1 + random.IntN(10))}
		kinds = append(kinds, runsFor{pod, math.Exp2(float64(i % 5)), 1 + random.Float64()})
	}
	return kinds
}

// replay lets pods of random kinds come to a cluster of 24 nodes, one each second, and returns the mean of what is allocated of the cards, in
// percent. If none had to wait, they would ask for a little more than all cards. The extender restarts after each number of pods; never if that
// is 0.
func replay(after int, seed uint64) (allocated float64, r *restarting) {
	random, order := rand.New(rand.NewPCG(seed, 5)), make([]int, 24)
	kinds, nodes := randomKinds(random), make([]traceNode, len(order))
	for i := range nodes {
		order[i], nodes[i] = i, traceNode{fmt.Sprint("n", i), "T4", 4, 16000 + 16000*int64(i%3), 1 << 20}
	}
	pods, asked := []int(nil), 0.0
	for i, kind := range kinds {
		for range int(10 * kind.often) {
			pods = append(pods, i)
			asked += kind.runs * float64(kind.pod.gpu())
		}
	}
	each := demand * float64(allCards(nodes)*cardMemory) * float64(len(pods)) / asked
	r = &restarting{cluster: newCluster(nodes, order, placement.LeastWaste, byScheduler, random), after: after, exist: map[int]tracePod{}, waiting: map[int]bool{}}
	c := churn{world: r, waiting: map[tracePod]*[]waiter{}}
	const warm, last = 1000, 3000
	for number := range last {
		now, kind := float64(number), kinds[pods[random.IntN(len(pods))]]
		runs := kind.runs * each * random.ExpFloat64()
		c.endUntil(now)
		if number >= warm {
			c.sum += r.used()
		}
		if node, ok := r.arrive(&kind.pod, number); ok {
			heap.Push(&c.running, running{now + runs, node, kind.pod, number})
		} else {
			c.enqueue(waiter{kind.pod, number, runs})
		}
	}
	return 100 * c.sum / (last - warm), r
}

// TestSurvivors: kinds that run for a short time are fewer among the pods that exist than among those that came. An extender that restarts again
// and again, and so knows little more than these, uses hardly less of the cards.
func TestSurvivors(t *testing.T) {
	const seeds = 3
	var lost float64
	for seed := range uint64(seeds) {
		allocated, r := replay(0, seed)
		restarted, _ := replay(250, seed)
		came, left := parts(r.arrivals), parts(r.survivors())
		difference, short := 0.0, [2]float64{}
		for shape, part := range came {
			difference += max(part-left[shape], 0)
		}
		for _, kind := range randomKinds(rand.New(rand.NewPCG(seed, 5))) {
			if kind.runs == 1 {
				use := r.use(&kind.pod, 0)
				short[0], short[1] = short[0]+came[use.Shape()], short[1]+left[use.Shape()]
			}
		}
		t.Logf("seed %d: %.0f%% of the survivors would have to be of another kind; those that run shortest are %.0f%%, and %.0f%% of all that came; allocated %.2f%%, with restarts %.2f%%",
			seed, 100*difference, 100*short[1], 100*short[0], allocated, restarted)
		if short[1] >= short[0] || difference < 0.1 || difference > 0.5 {
			t.Errorf("seed %d: the survivors' kinds differ by %.2f; those that run shortest are %.2f of them, and %.2f of all", seed, difference, short[1], short[0])
		}
		lost += (allocated - restarted) / seeds
	}
	if lost > 1 {
		t.Errorf("restarts cost %.2f points", lost)
	}
}
