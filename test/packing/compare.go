package main

import (
	"context"
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

// compare prints the comparison for each rule of pods without GPU.
func compare(ctx context.Context, out io.Writer, o options) error {
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
	switch {
	case o.controlPlane:
		return onControlPlane(ctx, out, o, o.someOf(nodes, firstSeed), workloads)
	case o.churn:
		return churning(out, o, o.someOf(nodes, firstSeed), workloads)
	case o.nodes > 0:
		return filling(out, o, nodes, workloads)
	}
	for _, rule := range rules(o.allNodes) {
		var sum summary
		for _, workload := range workloads {
			pods, err := readPods(o.dir, workload)
			if err != nil {
				return err
			}
			ours, fgd, err := o.means(rule, workload, nodes, pods, published)
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "%s %s %.2f %.2f %+.2f\n", rule, strings.TrimPrefix(workload, podList), ours, fgd, ours-fgd)
			sum.add(ours - fgd)
		}
		fmt.Fprintf(out, "%s mean %+.2f worst %+.2f wins %d of %d\n", rule, sum.total/float64(sum.count), sum.worst, sum.wins, sum.count)
	}
	return nil
}

// someOf returns as many of the nodes as are wanted, taken at random.
func (o *options) someOf(nodes []traceNode, seed int64) []traceNode {
	if o.nodes == 0 || o.nodes >= len(nodes) {
		return nodes
	}
	nodes = slices.Clone(nodes)
	random := rand.New(rand.NewPCG(uint64(seed), 3))
	random.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
	return nodes[:o.nodes]
}

// filling prints a line for each rule and workload, with what is allocated by us and by binpack of the cards of a cluster with a part of the nodes,
// other ones in each run, when pods that ask for more than all cards have come and none has ended.
func filling(out io.Writer, o options, nodes []traceNode, workloads []string) error {
	for _, rule := range rules(o.allNodes) {
		for _, workload := range workloads {
			pods, err := readPods(o.dir, workload)
			if err != nil {
				return err
			}
			with := func(policy placement.Policy) float64 {
				return o.mean(func(seed int64) float64 {
					some := o.someOf(nodes, seed)
					arriving, nodeOrder := order(pods, some, multiple, seed)
					c := newCluster(some, nodeOrder, policy, rule, rand.New(rand.NewPCG(uint64(seed), 0)))
					for i := range arriving {
						c.arrive(&arriving[i], i)
					}
					return 100 * c.used()
				})
			}
			ours, binpack := with(o.policy), with(placement.Binpack)
			fmt.Fprintf(out, "%s %s %.2f %.2f %+.2f\n", rule, strings.TrimPrefix(workload, podList), ours, binpack, ours-binpack)
		}
	}
	return nil
}

// means returns what is allocated of the cards, in percent, by us and by the published policy with the same seeds.
func (o *options) means(rule rule, workload string, nodes []traceNode, pods []tracePod, published map[publishedKey]float64) (ours, fgd float64, err error) {
	results := make([]float64, o.seeds)
	var group errgroup.Group
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i := range results {
		seed := int64(firstSeed + i)
		figure, known := published[publishedKey{workload, seed}]
		if !known {
			return 0, 0, fmt.Errorf("nothing is published of %s with seed %d", workload, seed)
		}
		fgd += figure / float64(o.seeds)
		group.Go(func() error {
			results[i] = o.replay(rule, nodes, pods, seed)
			return nil
		})
	}
	err = group.Wait()
	for _, result := range results {
		ours += result / float64(o.seeds)
	}
	return ours, fgd, err
}

// replay returns the mean of what is allocated of the cards, in percent, over the arrivals up to which that percent of the cards was asked for.
func (o *options) replay(rule rule, nodes []traceNode, pods []tracePod, seed int64) float64 {
	arriving, nodeOrder := order(pods, nodes, multiple, seed)
	ties := rand.New(rand.NewPCG(uint64(seed), 0))
	c := newCluster(nodes, nodeOrder, o.policy, rule, ties)
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

// summary is the comparison over all workloads.
type summary struct {
	total, worst float64
	wins, count  int
}

func (s *summary) add(difference float64) {
	if s.count == 0 || difference < s.worst {
		s.worst = difference
	}
	if difference > 0 {
		s.wins++
	}
	s.total += difference
	s.count++
}
