package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/controlplane"
)

const cardMemory gpu.Memory = 16276

// turn is one run of the pods through one kind of scheduler.
type turn struct {
	// rate is pods bound a second, from the first creation to the last binding.
	rate float64
	// p50 and p99 are a pod's time from its creation to its binding.
	p50, p99 time.Duration
	// cards are the cards in use at the end, packing the part of their memory that is used; ours alone has them.
	cards   int
	packing float64
	// cpu is the processor time of the extender, memory its resident memory at the end, of all replicas together; ours
	// alone has them.
	cpu    time.Duration
	memory int64
	// everything is the processor time of the whole control plane and the benchmark, all its sum.
	everything spending
	all        time.Duration
	// binds are all binds, conflicts those for which the card was gone.
	binds, conflicts int
}

// kind is a way to schedule.
type kind struct {
	name string
	// start starts an extender; nil for none.
	start func(ctx context.Context) (running, error)
	// edits change the shipped configuration of kube-scheduler.
	edits []controlplane.ConfigEdit
	turns []turn
}

// running is an extender that has been started.
type running struct {
	// url is where it answers.
	url string
	// schedulerConfig is kube-scheduler's configuration file to start from; the repository's own where empty.
	schedulerConfig string
	// finish adds the extender's metrics to the turn, and stops it.
	finish func(ctx context.Context, t *turn) error
}

// kinds are the ways to schedule, by what they are called on the command line.
func (s *stage) kinds(named []string) ([]*kind, error) {
	every := []*kind{
		{name: "none"},
		{name: "noop", start: s.startNoop(everyNode)},
		{name: "least", start: s.startNoop(inTurn())},
		// A single one, in plain HTTP on the host's network, as deploy/manifests has it.
		{name: "ours", start: s.startOurs()},
		// Two replicas with leader election and mutual TLS, as the chart installs it.
		{name: "shipped", start: s.startShipped},
		// Some of the best nodes, for kube-scheduler's own scorers to choose from, with a call of prioritize for them or without.
		{name: "some", start: s.startOurs("--filter-best=32")},
		{name: "some-unscored", start: s.startOurs("--filter-best=32"), edits: []controlplane.ConfigEdit{prioritizeVerb("")}},
		// Every node that fits, prioritized by us, or by kube-scheduler's own scores alone.
		{name: "all", start: s.startOurs("--filter-best=0")},
		{name: "all-unscored", start: s.startOurs("--filter-best=0"), edits: []controlplane.ConfigEdit{prioritizeVerb("")}},
	}
	var chosen []*kind
	for _, name := range named {
		at := slices.IndexFunc(every, func(k *kind) bool { return k.name == name })
		if at < 0 {
			return nil, fmt.Errorf("-kinds: unknown kind %q", name)
		}
		chosen = append(chosen, every[at])
	}
	return chosen, nil
}

func prioritizeVerb(verb string) controlplane.ConfigEdit {
	return func(config map[string]any) error {
		extenders, _ := config["extenders"].([]any)
		for _, entry := range extenders {
			if err := unstructured.SetNestedField(entry.(map[string]any), verb, "prioritizeVerb"); err != nil {
				return err
			}
		}
		return nil
	}
}

func measure(ctx context.Context, o options) (err error) {
	dir, err := os.MkdirTemp("", "gpushare-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	fmt.Printf("%d nodes of %d cards of %d MiB, %d pods, %d turns of each kind\n\n", o.nodes, o.cards, cardMemory, o.pods, o.rounds)
	plane, err := controlplane.Start(ctx, controlplane.Options{Dir: filepath.Join(dir, "control-plane"), WithoutScheduler: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, plane.Stop()) }()
	var nodes []controlplane.Node
	for i := range o.nodes {
		nodes = append(nodes, controlplane.Node{
			Name: fmt.Sprintf("node-%05d", i), Unit: gpu.MiB, Cards: controlplane.EqualCards(o.cards, cardMemory),
		})
	}
	if err := plane.CreateNodes(ctx, nodes...); err != nil {
		return err
	}

	stage := &stage{plane: plane, dir: dir}
	kinds, err := stage.kinds(o.kinds)
	if err != nil {
		return err
	}
	if len(o.full) > 0 {
		return measureRaces(ctx, stage, kinds, o)
	}
	for round := range o.rounds {
		// The same pods for each kind, other ones in each round.
		requests := sizes(o.pods, o.seed+int64(round))
		for _, k := range kinds {
			t, err := stage.run(ctx, k, requests)
			if err != nil {
				return fmt.Errorf("%s: %w", k.name, err)
			}
			fmt.Printf("%-12s %7.1f pods/s   p50 %6.2f s   p99 %6.2f s%s\n", k.name, t.rate, t.p50.Seconds(), t.p99.Seconds(), t.extra())
			k.turns = append(k.turns, t)
		}
	}
	report(kinds)
	return nil
}

func (t turn) extra() string {
	var out string
	if t.all > 0 {
		out = fmt.Sprintf("   all cpu %.1f s (%s)", t.all.Seconds(), t.everything)
	}
	if t.cards == 0 {
		return out
	}
	return out + fmt.Sprintf("   %d cards %.0f%% used   cpu %.1f s   rss %d MB   conflicts %d",
		t.cards, 100*t.packing, t.cpu.Seconds(), t.memory>>20, t.conflicts)
}

// report prints the medians, and their ratios to the first kind.
func report(kinds []*kind) {
	fmt.Printf("\nMedians of %d, and ratio to %q:\n", len(kinds[0].turns), kinds[0].name)
	base := median(kinds[0].turns, func(t turn) float64 { return t.rate })
	for _, k := range kinds {
		middle := func(of func(turn) float64) float64 { return median(k.turns, of) }
		rate := middle(func(t turn) float64 { return t.rate })
		t := turn{
			cards:      int(middle(func(t turn) float64 { return float64(t.cards) })),
			packing:    middle(func(t turn) float64 { return t.packing }),
			cpu:        time.Duration(middle(func(t turn) float64 { return float64(t.cpu) })),
			memory:     int64(middle(func(t turn) float64 { return float64(t.memory) })),
			all:        time.Duration(middle(func(t turn) float64 { return float64(t.all) })),
			everything: spending{},
			conflicts:  int(middle(func(t turn) float64 { return float64(t.conflicts) })),
		}
		for name := range k.turns[0].everything {
			t.everything[name] = time.Duration(middle(func(t turn) float64 { return float64(t.everything[name]) }))
		}
		fmt.Printf("%-12s %7.1f pods/s   %.2f   p50 %6.2f s   p99 %6.2f s%s\n", k.name, rate, rate/base,
			middle(func(t turn) float64 { return t.p50.Seconds() }), middle(func(t turn) float64 { return t.p99.Seconds() }), t.extra())
	}
}

func median(turns []turn, of func(turn) float64) float64 {
	values := make([]float64, len(turns))
	for i, t := range turns {
		values[i] = of(t)
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// sizes are pods of 512 to 16276 MiB.
func sizes(n int, seed int64) []gpu.Memory {
	random := rand.New(rand.NewPCG(uint64(seed), 0))
	out := make([]gpu.Memory, n)
	for i := range out {
		out[i] = 512 + gpu.Memory(random.Int64N(int64(cardMemory)-512+1))
	}
	return out
}
