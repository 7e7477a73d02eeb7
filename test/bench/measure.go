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
	// cpu is what the extender took, memory its resident memory at the end; ours alone has them.
	cpu    time.Duration
	memory int64
	// conflicts are binds for which the card was gone.
	conflicts int
}

// kind is a way to schedule.
type kind struct {
	name string
	// start brings the extender up and returns where it answers, "" for none. finish adds what it can tell.
	start func(ctx context.Context) (url string, finish func(ctx context.Context, t *turn) error, err error)
	turns []turn
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
	kinds := []*kind{
		{name: "none", start: func(context.Context) (string, func(context.Context, *turn) error, error) {
			return "", func(context.Context, *turn) error { return nil }, nil
		}},
		{name: "noop", start: stage.startNoop},
		{name: "ours", start: stage.startOurs},
	}
	for round := range o.rounds {
		// The same pods for each kind, other ones in each round.
		requests := sizes(o.pods, o.seed+int64(round))
		for _, k := range kinds {
			t, err := stage.run(ctx, k, requests)
			if err != nil {
				return fmt.Errorf("%s: %w", k.name, err)
			}
			fmt.Printf("%-5s %7.1f pods/s   p50 %6.2f s   p99 %6.2f s%s\n", k.name, t.rate, t.p50.Seconds(), t.p99.Seconds(), t.extra())
			k.turns = append(k.turns, t)
		}
	}
	report(kinds)
	return nil
}

func (t turn) extra() string {
	if t.cards == 0 {
		return ""
	}
	return fmt.Sprintf("   %d cards %.0f%% used   cpu %.1f s   rss %d MB   conflicts %d",
		t.cards, 100*t.packing, t.cpu.Seconds(), t.memory>>20, t.conflicts)
}

// report prints the medians, and their ratios to kube-scheduler alone.
func report(kinds []*kind) {
	fmt.Println("\nMedians, and ratio to no extender:")
	base := median(kinds[0].turns)
	for _, k := range kinds {
		rate := median(k.turns)
		fmt.Printf("%-5s %7.1f pods/s   %.2f\n", k.name, rate, rate/base)
	}
}

func median(turns []turn) float64 {
	var rates []float64
	for _, t := range turns {
		rates = append(rates, t.rate)
	}
	slices.Sort(rates)
	return rates[len(rates)/2]
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
