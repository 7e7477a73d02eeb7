package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/gpushare/gpushare/pkg/placement"
)

// firstSeed is that of the published experiments.
const firstSeed = 42

// multiple is what the pods of a run ask for of all cards.
const multiple = 1.3

// compare prints the comparison for each workload.
func compare(out io.Writer, o options) error {
	if o.dir == "" {
		return errors.New("no directory with the trace; the public data is at " + source)
	}
	if o.seeds < 1 || o.at < 1 || o.at > 130 {
		return errors.New("-seeds must be positive, and -at between 1 and 130")
	}
	nodes, err := readNodes(o.dir, o.allNodes)
	if err != nil {
		return fmt.Errorf("%w; the public data is at %s", err, source)
	}
	published, err := readPublished(o.dir, o.at)
	if err != nil {
		return err
	}
	workloads, err := readWorkloads(o.dir)
	if err != nil {
		return err
	}
	if len(o.workloads) > 0 {
		workloads = slices.DeleteFunc(workloads, func(name string) bool { return !slices.Contains(o.workloads, strings.TrimPrefix(name, podList)) })
		if len(workloads) == 0 {
			return fmt.Errorf("%s has none of the workloads %s", o.dir, strings.Join(o.workloads, ", "))
		}
	}
	if o.nodes > 0 {
		return filling(out, o, nodes, workloads)
	}
	var differences []float64
	for _, workload := range workloads {
		pods, err := readPods(o.dir, workload)
		if err != nil {
			return err
		}
		fgd := 0.0
		for seed := int64(firstSeed); seed < firstSeed+int64(o.seeds); seed++ {
			figure, known := published[publishedKey{workload, seed}]
			if !known {
				return fmt.Errorf("nothing is published of %s with seed %d", workload, seed)
			}
			fgd += figure / float64(o.seeds)
		}
		ours := o.mean(func(seed int64) float64 { return o.replay(nodes, pods, seed) })
		fmt.Fprintf(out, "%s %.2f %.2f %+.2f\n", strings.TrimPrefix(workload, podList), ours, fgd, ours-fgd)
		differences = append(differences, ours-fgd)
	}
	sum := 0.0
	for _, difference := range differences {
		sum += difference
	}
	fmt.Fprintf(out, "mean %+.2f worst %+.2f\n", sum/float64(len(differences)), slices.Min(differences))
	return nil
}

// someOf returns as many of the nodes as are wanted, taken at random.
func (o *options) someOf(nodes []traceNode, seed int64) []traceNode {
	nodes = slices.Clone(nodes)
	random := rand.New(rand.NewPCG(uint64(seed), 3))
	random.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
	return nodes[:min(o.nodes, len(nodes))]
}

// filling prints a line for each workload, with what is allocated by us and by binpack of the cards of a cluster with a part of the nodes,
// other ones in each run, when pods that ask for more than all cards have come and none has ended.
func filling(out io.Writer, o options, nodes []traceNode, workloads []string) error {
	for _, workload := range workloads {
		pods, err := readPods(o.dir, workload)
		if err != nil {
			return err
		}
		with := func(policy placement.Policy) float64 {
			return o.mean(func(seed int64) float64 {
				some := o.someOf(nodes, seed)
				arriving, nodeOrder := order(pods, some, multiple, seed)
				c := newCluster(some, nodeOrder, policy, rand.New(rand.NewPCG(uint64(seed), 0)))
				for i := range arriving {
					c.arrive(&arriving[i], i)
				}
				return 100 * c.used()
			})
		}
		ours, binpack := with(o.policy), with(placement.Binpack)
		fmt.Fprintf(out, "%s %.2f %.2f %+.2f\n", strings.TrimPrefix(workload, podList), ours, binpack, ours-binpack)
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

// replay returns the mean of what is allocated of the cards, in percent, over the arrivals up to which that percent of the cards was asked for.
func (o *options) replay(nodes []traceNode, pods []tracePod, seed int64) float64 {
	arriving, nodeOrder := order(pods, nodes, multiple, seed)
	ties := rand.New(rand.NewPCG(uint64(seed), 0))
	c := newCluster(nodes, nodeOrder, o.policy, ties)
	asked, sum, count := 0, 0.0, 0
	for i := range arriving {
		c.arrive(&arriving[i], i)
		asked += arriving[i].gpu()
		if int(math.Round(100*float64(asked)/float64(c.all))) == o.at {
			sum += 100 * c.used()
			count++
		}
	}
	return sum / float64(count)
}
