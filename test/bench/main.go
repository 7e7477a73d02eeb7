// Command bench measures what the extender costs: the same pods are bound on the same control plane by kube-scheduler
// without any extender, with one that does nothing, and with ours, in turns. Machines are noisy, so what counts is the
// ratio of the medians within one run.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// options say what is measured.
type options struct {
	nodes, cards, pods, rounds int
	seed                       int64
}

func main() { os.Exit(run()) }

func run() int {
	var o options
	flag.IntVar(&o.nodes, "nodes", 1000, "nodes")
	flag.IntVar(&o.cards, "cards", 8, "cards of 16276 MiB on each node")
	flag.IntVar(&o.pods, "pods", 3000, "pods of 512 to 16276 MiB in each turn")
	flag.IntVar(&o.rounds, "rounds", 3, "turns of each kind")
	flag.Int64Var(&o.seed, "seed", 1, "seed of the pods' sizes")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := measure(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}
