// Command bench measures what the extender costs: the same pods are bound on the same control plane by kube-scheduler
// without any extender, with one that does nothing, with ours, and with ours as the chart installs it, in turns. Machines are noisy, so what counts is the
// ratio of the medians within one run.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
)

// options say what is measured.
type options struct {
	nodes, cards, pods, rounds int
	seed                       int64
	kinds                      []string
	// full are the levels at which to race, none for the comparison with no extender.
	full []float64
}

func main() { os.Exit(run()) }

func run() int {
	var o options
	flag.IntVar(&o.nodes, "nodes", 1000, "nodes")
	flag.IntVar(&o.cards, "cards", 8, "cards of 16276 MiB on each node")
	flag.IntVar(&o.pods, "pods", 3000, "pods of 512 to 16276 MiB in each turn")
	flag.IntVar(&o.rounds, "rounds", 3, "turns of each kind")
	flag.Int64Var(&o.seed, "seed", 1, "seed of the pods' sizes")
	kinds := flag.String("kinds", "none,noop,ours,shipped", "what to compare, the first of them with each of the others; also: least, some, some-unscored, all, all-unscored")
	full := flag.String("full", "", "count binds that find their card gone, with so much of all cards taken, such as 0.8,0.9,0.95; -kinds ours then")
	flag.Parse()
	if *full != "" {
		for text := range strings.SplitSeq(*full, ",") {
			level, err := strconv.ParseFloat(text, 64)
			if err != nil || level <= 0 || level > 1 {
				fmt.Fprintf(os.Stderr, "bench: -full: %q is no part of 1\n", text)
				return 2
			}
			o.full = append(o.full, level)
		}
	}
	o.kinds = strings.Split(*kinds, ",")
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := measure(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}
