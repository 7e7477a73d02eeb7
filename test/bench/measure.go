package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

const cardMemory gpu.Memory = 16276

// result is the result of one run of the pods with one kind.
type result struct {
	// rate is the number of pods bound per second, from the first creation to the last binding.
	rate float64
	// p50 and p99 are percentiles of a pod's time from its creation to its binding.
	p50, p99 time.Duration
	// cycle is the mean time of kube-scheduler's scheduling cycles that found a node.
	cycle time.Duration
	// cards is the number of cards in use at the end, packing the used part of their memory; only for our extender.
	cards   int
	packing float64
	// cpu is the extender's processor time, memory its resident memory at the end, summed over all replicas; only for
	// our extender.
	cpu    time.Duration
	memory int64
	// ready is the time from the extender's start until it is ready; of the slowest replica.
	ready time.Duration
	// everything is the processor time of the control plane and the benchmark by process, all its sum.
	everything spending
	all        time.Duration
	// gates and expired are the numbers of gates that were opened, and of charges that ended without a bind; only with fair
	// sharing.
	gates, expired int
	// useless is the number of pods and groups that got no room although pods were evicted for them.
	useless int
	// conflicts is the number of binds that failed because the card was taken.
	conflicts int
}

// kind is a scheduler configuration to compare.
type kind struct {
	name string
	// waiting is true if pods of many tenants wait meanwhile.
	waiting bool
	// gate is the scheduling gate of the waiting pods; empty if they have none.
	gate string
	// start starts an extender; nil means none.
	start func(ctx context.Context) (running, error)
	// edits change the shipped configuration of kube-scheduler.
	edits   []controlplane.ConfigEdit
	results []result
}

// measuredGate is the scheduling gate of the measured pods: only that of fair sharing is ever removed.
func (k *kind) measuredGate() string {
	if k.gate == protocol.GateFairShare {
		return k.gate
	}
	return ""
}

// running is a started extender.
type running struct {
	// url is its address for kube-scheduler.
	url string
	// schedulerConfig is kube-scheduler's configuration file to start from; if it is empty, the repository's own.
	schedulerConfig string
	// ready is the time from the extender's start until it was ready.
	ready time.Duration
	// finish adds the extender's metrics to the result and stops the extender.
	finish func(ctx context.Context, t *result) error
}

// kinds returns the named kinds, in the order of the command line.
func (s *bench) kinds(named []string) ([]*kind, error) {
	var chosen []*kind
	for _, name := range named {
		base, args, _ := strings.Cut(name, ":")
		if strings.Contains(args, "--set=") && !slices.Contains([]string{"shipped", "gated", "held", "queued"}, base) {
			return nil, fmt.Errorf("-kinds: %q isn't installed with the chart, so it takes no values", base)
		}
		every := s.allKinds(strings.Fields(args))
		at := slices.IndexFunc(every, func(k *kind) bool { return k.name == base })
		if at < 0 {
			return nil, fmt.Errorf("-kinds: unknown kind %q", base)
		}
		every[at].name = name
		chosen = append(chosen, every[at])
	}
	return chosen, nil
}

// allKinds returns every kind. Those with our extender run it with additional arguments. Arguments of the form --set=NAME=VALUE are values of
// the chart instead.
func (s *bench) allKinds(args []string) []*kind {
	var values []string
	args = slices.DeleteFunc(args, func(arg string) bool {
		value, found := strings.CutPrefix(arg, "--set=")
		if found {
			values = append(values, value)
		}
		return found
	})
	return []*kind{
		{name: "none"},
		// kube-scheduler's own percentageOfNodesToScore. "none" has that of config/, 100.
		{name: "stock", edits: []controlplane.ConfigEdit{controlplane.NodesToScore(0)}},
		// A single replica with plain HTTP on the host network, as in deploy/manifests.
		{name: "ours", start: s.startOurs(args...)},
		// Two replicas with leader election and mutual TLS, as the chart installs them.
		{name: "shipped", start: s.startShipped(values, args)},
		// The same with fair sharing, while other tenants' pods wait.
		{name: "gated", start: s.startShipped(append(values, fairShareMode+"dispatch"), args), waiting: true, gate: protocol.GateFairShare},
		// The same pods wait without fair sharing, behind a gate that is never removed.
		{name: "held", start: s.startShipped(values, args), waiting: true, gate: "gpushare.test/never"},
		// The same pods wait without a gate.
		{name: "queued", start: s.startShipped(values, args), waiting: true},
	}
}

func measure(ctx context.Context, o options) (err error) {
	dir, err := os.MkdirTemp("", "gpushare-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	fmt.Printf("%d nodes of %d cards, %d pods, %d runs of each kind, seed %d\n\n", o.nodes, o.cards, o.pods, o.rounds, o.seed)
	plane, err := controlplane.Start(ctx, controlplane.Options{Dir: filepath.Join(dir, "control-plane"), WithoutScheduler: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, plane.Stop()) }()
	var nodes []*corev1.Node
	for i := range o.nodes {
		if o.fairness > 0 {
			nodes = append(nodes, fairnessNode(i, o))
			continue
		}
		node := framework.MakeNode(nodeName(i)).Cards(o.cards, int64(cardMemory))
		if i < o.fullNodes() {
			node.Label(labelPool, poolFull)
		}
		nodes = append(nodes, node.Obj())
	}
	if err := plane.CreateNodes(ctx, nodes...); err != nil {
		return err
	}

	bench := &bench{plane: plane, dir: dir, options: o}
	if o.fairness > 0 {
		return measureFairness(ctx, bench)
	}
	kinds, err := bench.kinds(o.kindNames)
	if err != nil {
		return err
	}
	if o.freed > 0 {
		return measureFreed(ctx, bench, kinds)
	}
	if len(o.rates) > 0 {
		return measureLatency(ctx, bench, kinds, o)
	}
	for round := range o.rounds {
		// All kinds get the same pods in a round; the next round has others.
		memory := sizes(o.pods, o.seed+int64(round))
		for _, k := range kinds {
			t, err := bench.run(ctx, k, memory, 0)
			if err != nil {
				return fmt.Errorf("%s: %w", k.name, err)
			}
			fmt.Printf("%-12s %7.1f pods/s   p50 %6.2f s   p99 %6.2f s%s\n", k.name, t.rate, t.p50.Seconds(), t.p99.Seconds(), t.extra())
			k.results = append(k.results, t)
		}
	}
	report(kinds)
	return nil
}

func (t result) extra() string {
	out := fmt.Sprintf("   cycle %.2f ms", t.cycle.Seconds()*1e3)
	if t.all > 0 {
		out += fmt.Sprintf("   all cpu %.1f s (%s)", t.all.Seconds(), t.everything)
	}
	if t.cards == 0 {
		return out
	}
	if t.gates > 0 {
		out += fmt.Sprintf("   %d gates opened, %d charges expired", t.gates, t.expired)
	}
	return out + fmt.Sprintf("   %d cards %.0f%% used   cpu %.1f s   rss %d MB   ready %.1f s   conflicts %d",
		t.cards, 100*t.packing, t.cpu.Seconds(), t.memory>>20, t.ready.Seconds(), t.conflicts)
}

// report prints the medians and their ratios to the first kind.
func report(kinds []*kind) {
	fmt.Printf("\nMedians of %d, and ratio to %q:\n", len(kinds[0].results), kinds[0].name)
	base := kinds[0].middle(func(t result) float64 { return t.rate })
	for _, k := range kinds {
		middle := k.middle
		rate := middle(func(t result) float64 { return t.rate })
		t := result{
			cycle:      time.Duration(middle(func(t result) float64 { return float64(t.cycle) })),
			cards:      int(middle(func(t result) float64 { return float64(t.cards) })),
			packing:    middle(func(t result) float64 { return t.packing }),
			cpu:        time.Duration(middle(func(t result) float64 { return float64(t.cpu) })),
			memory:     int64(middle(func(t result) float64 { return float64(t.memory) })),
			ready:      time.Duration(middle(func(t result) float64 { return float64(t.ready) })),
			all:        time.Duration(middle(func(t result) float64 { return float64(t.all) })),
			everything: spending{},
			conflicts:  int(middle(func(t result) float64 { return float64(t.conflicts) })),
			gates:      int(middle(func(t result) float64 { return float64(t.gates) })),
			expired:    int(middle(func(t result) float64 { return float64(t.expired) })),
		}
		for name := range k.results[0].everything {
			t.everything[name] = time.Duration(middle(func(t result) float64 { return float64(t.everything[name]) }))
		}
		fmt.Printf("%-12s %7.1f pods/s   %.2f   p50 %6.2f s   p99 %6.2f s%s\n", k.name, rate, rate/base,
			middle(func(t result) float64 { return t.p50.Seconds() }), middle(func(t result) float64 { return t.p99.Seconds() }), t.extra())
	}
}

func nodeName(i int) string { return fmt.Sprintf("node-%05d", i) }

// middle returns the median of one figure of the results.
func (k *kind) middle(of func(result) float64) float64 {
	values := make([]float64, len(k.results))
	for i, t := range k.results {
		values[i] = of(t)
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// sizes returns random requests of 512 to 16276 MiB.
func sizes(n int, seed int64) []gpu.Memory {
	random := rand.New(rand.NewPCG(uint64(seed), 0))
	out := make([]gpu.Memory, n)
	for i := range out {
		out[i] = 512 + gpu.Memory(random.Int64N(int64(cardMemory)-512+1))
	}
	return out
}
