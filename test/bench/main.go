// Command bench measures the cost of the extender: kube-scheduler binds the same pods on the same control plane without
// an extender, with one that does nothing, with ours, and with ours as the chart installs it, alternately. Absolute
// figures depend on the machine; the result is the ratio of the medians within one run.
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

// options configure the benchmark.
type options struct {
	nodes, cards, pods, rounds int
	seed                       int64
	kinds                      []string
	// full are the fill levels at which conflicts are counted. If it is empty, the kinds are compared.
	full []float64
}

func main() { os.Exit(run()) }

func run() int {
	var o options
	flag.IntVar(&o.nodes, "nodes", 1000, "number of nodes")
	flag.IntVar(&o.cards, "cards", 8, "cards on each node, of 16276 MiB")
	flag.IntVar(&o.pods, "pods", 3000, "pods in each run, of 512 to 16276 MiB")
	flag.IntVar(&o.rounds, "rounds", 3, "runs of each kind")
	flag.Int64Var(&o.seed, "seed", 1, "seed of the pods' sizes")
	kinds := flag.String("kinds", "none,noop,ours,shipped", "kinds to compare, each with the first; also: several (a fifth of the pods have two or four cards), least, some, some-unscored, all, all-unscored")
	full := flag.String("full", "", "count binds that fail because the card was taken, at these fill levels of all cards, such as 0.8,0.9,0.95; use it with -kinds ours")
	flag.Parse()
	if *full != "" {
		for text := range strings.SplitSeq(*full, ",") {
			level, err := strconv.ParseFloat(text, 64)
			if err != nil || level <= 0 || level > 1 {
				fmt.Fprintf(os.Stderr, "bench: -full: must be above 0 and at most 1, got %q\n", text)
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
