package main

import (
	"container/heap"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"runtime"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/gpushare/gpushare/pkg/placement"
)

// world is a cluster on which pods come and end.
type world interface {
	// arrive places a new pod, and returns its node; false if it has to wait.
	arrive(pod *tracePod, number int) (node string, ok bool)
	// placeOn places a pod that has waited on the node if it fits there.
	placeOn(node string, pod *tracePod, number int) bool
	// end removes a pod from its node.
	end(node string, pod *tracePod, number int)
	// used returns which part of the cards is allocated.
	used() float64
	// wait is called for a pod that didn't find a node and waits for one.
	wait(pod *tracePod, number int)
	// foretell tells a policy that knows in advance which pods come that they are of this workload from now on.
	foretell(workload []tracePod)
}

const (
	// demand is what the pods that run at one moment would ask for of all cards if none had to wait.
	demand = 1.15
	// warmUp and measured are the length of a run's beginning, and of what is measured then, in mean run times of pods.
	warmUp, measured = 1.5, 2.0
)

// runTimes are distributions with the mean 1.
var runTimes = []struct {
	name string
	next func(*rand.Rand) float64
}{
	{"exponential", (*rand.Rand).ExpFloat64},
	// A Pareto distribution with the exponent 1.5: a tenth of the pods take more than half of the time.
	{"heavy-tailed", func(random *rand.Rand) float64 { return math.Pow(1-random.Float64(), -1/1.5) / 3 }},
}

// churning prints a line for each rule, workload and distribution of run times, with what is allocated of the cards by us, by binpack and by the
// published policy. Then the same follows for a cluster whose pods change from one workload to the next. The published policy knows each
// workload from its first pod on, but not before: no cluster knows what its users will do.
func churning(out io.Writer, o options, nodes []traceNode, workloads []string) error {
	pods := make([][]tracePod, len(workloads))
	for i, workload := range workloads {
		var err error
		if pods[i], err = readPods(o.dir, workload); err != nil {
			return err
		}
	}
	name := func(i int) string { return strings.TrimPrefix(workloads[i], podList) }
	for _, rule := range rules(o.allNodes) {
		for _, times := range runTimes {
			var sum summary
			line := func(name string, first, then []tracePod) {
				r := churnRun{rule: rule, nodes: nodes, first: first, then: then, next: times.next, lost: o.lost}
				ours, binpack, published := o.mean(r.with(o.policy)), o.mean(r.with(placement.Binpack)), o.mean(r.withFGD())
				better := max(binpack, published)
				fmt.Fprintf(out, "%s %s %s %.2f %.2f %.2f %+.2f\n", rule, times.name, name, ours, binpack, published, ours-better)
				sum.add(ours - better)
			}
			for i := range workloads {
				line(name(i), pods[i], pods[i])
			}
			for i := 1; i < len(workloads); i++ {
				line(name(i-1)+"-"+name(i), pods[i-1], pods[i])
			}
			fmt.Fprintf(out, "%s %s mean %+.2f worst %+.2f wins %d of %d\n", rule, times.name, sum.total/float64(sum.count), sum.worst, sum.wins, sum.count)
		}
	}
	return nil
}

// mean returns the mean of the runs with all seeds.
func (o *options) mean(run func(seed int64) float64) (mean float64) {
	results := make([]float64, o.seeds)
	var group errgroup.Group
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i := range results {
		group.Go(func() error {
			results[i] = run(int64(firstSeed + i))
			return nil
		})
	}
	_ = group.Wait() // No run returns an error.
	for _, result := range results {
		mean += result / float64(o.seeds)
	}
	return mean
}

// churnRun is a cluster whose pods end.
type churnRun struct {
	rule  rule
	nodes []traceNode
	// first are the pods of the first half of what is measured and before, and then those of the rest.
	first, then []tracePod
	next        func(*rand.Rand) float64
	// lost is true if pods that fit nowhere don't wait.
	lost bool
}

func (r *churnRun) with(policy placement.Policy) func(seed int64) float64 {
	return func(seed int64) float64 {
		random := rand.New(rand.NewPCG(uint64(seed), 1))
		return r.run(newCluster(r.nodes, random.Perm(len(r.nodes)), policy, r.rule, random), seed)
	}
}

func (r *churnRun) withFGD() func(seed int64) float64 {
	return func(seed int64) float64 {
		random := rand.New(rand.NewPCG(uint64(seed), 1))
		return r.run(newFGD(r.nodes, random.Perm(len(r.nodes)), r.first, r.rule, random), seed)
	}
}

// run returns the mean of what is allocated of the cards, in percent. Pods come at random times.
func (r *churnRun) run(w world, seed int64) float64 {
	random := rand.New(rand.NewPCG(uint64(seed), 2))
	c := churn{world: w, waiting: map[tracePod]*[]waiter{}}
	each, pods, changed := r.runTime(r.first), r.first, false
	for now, last := 0.0, (warmUp+measured)*each; now < last; {
		if !changed && now > (warmUp+measured/2)*each {
			pods, changed = r.then, true
			w.foretell(pods)
		}
		arriving, runs := pods[random.IntN(len(pods))], r.runTime(pods)*r.next(random)
		c.endUntil(now)
		if now > warmUp*each {
			c.sum += w.used()
			c.samples++
		}
		c.number++
		if node, ok := w.arrive(&arriving, c.number); ok {
			heap.Push(&c.running, running{now + runs, node, arriving, c.number})
		} else if !r.lost {
			c.enqueue(waiter{arriving, c.number, runs})
		}
		now += random.ExpFloat64()
	}
	return 100 * c.sum / float64(c.samples)
}

// runTime returns the mean run time that leads to the demand if a pod comes each second.
func (r *churnRun) runTime(pods []tracePod) float64 {
	asked := 0
	for i := range pods {
		asked += pods[i].gpu()
	}
	return demand * float64(allCards(r.nodes)*cardMemory) * float64(len(pods)) / float64(asked)
}

// churn is the state of a run.
type churn struct {
	world
	running runningPods
	// waiting are the pods that wait, by what they ask for, the oldest first. None of them fits any node.
	waiting map[tracePod]*[]waiter
	number  int
	sum     float64
	samples int
}

type waiter struct {
	pod    tracePod
	number int
	runs   float64
}

func (c *churn) enqueue(w waiter) {
	c.wait(&w.pod, w.number)
	key := w.pod
	key.name = ""
	if c.waiting[key] == nil {
		c.waiting[key] = &[]waiter{}
	}
	*c.waiting[key] = append(*c.waiting[key], w)
}

// endUntil ends the pods whose time is over. Pods that wait take what comes free, the oldest first.
func (c *churn) endUntil(now float64) {
	for len(c.running) > 0 && c.running[0].until <= now {
		ended := heap.Pop(&c.running).(running)
		c.end(ended.node, &ended.pod, ended.number)
		for tried := map[tracePod]bool{}; ; {
			oldest := c.oldest(tried)
			if oldest == nil {
				break
			}
			first := (*oldest)[0]
			if !c.placeOn(ended.node, &first.pod, first.number) {
				key := first.pod
				key.name = ""
				tried[key] = true
				continue
			}
			*oldest = (*oldest)[1:]
			heap.Push(&c.running, running{ended.until + first.runs, ended.node, first.pod, first.number})
		}
	}
}

// oldest returns the queue whose first pod has waited the longest, but none of those that were tried.
func (c *churn) oldest(tried map[tracePod]bool) (oldest *[]waiter) {
	for key, queue := range c.waiting {
		if len(*queue) > 0 && !tried[key] && (oldest == nil || (*queue)[0].number < (*oldest)[0].number) {
			oldest = queue
		}
	}
	return oldest
}

// running is a pod that runs until that time.
type running struct {
	until  float64
	node   string
	pod    tracePod
	number int
}

// runningPods is a heap.
type runningPods []running

func (r runningPods) Len() int           { return len(r) }
func (r runningPods) Less(i, j int) bool { return r[i].until < r[j].until }
func (r runningPods) Swap(i, j int)      { r[i], r[j] = r[j], r[i] }
func (r *runningPods) Push(x any)        { *r = append(*r, x.(running)) }
func (r *runningPods) Pop() any {
	last := (*r)[len(*r)-1]
	*r = (*r)[:len(*r)-1]
	return last
}
