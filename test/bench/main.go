// Command bench measures the cost of the extender: kube-scheduler binds the same pods on the same control plane without
// an extender, with ours, and with ours as the chart installs it, alternately. Absolute
// figures depend on the machine; the result is the ratio of the medians within one run.
package main

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// options configure the benchmark.
type options struct {
	nodes, cards, pods, rounds int
	seed                       int64
	// kindNames are the names of the kinds.
	kindNames []string
	// waiting is the number of pods that wait in the kinds "gated", "held" and "queued". tenants is the number of their tenants, or of those
	// that share the cluster.
	waiting, tenants int
	// freed is the number of cards that are freed one after the other while pods wait for them; 0 means that this isn't measured.
	freed int
	// fairness is how long teams share the cluster; 0 means that this isn't measured. reclaimAfter is the extender's flag then.
	fairness, reclaimAfter time.Duration
	// rates are the pods created per second for which the time until a pod is bound is compared. If it is empty, pods are created as
	// fast as possible, and the rates at which they are bound are compared.
	rates []float64
}

func main() { os.Exit(run()) }

func run() int {
	var o options
	flag.IntVar(&o.nodes, "nodes", 1000, "number of nodes")
	flag.IntVar(&o.cards, "cards", 8, "cards on each node, of 16276 MiB")
	flag.IntVar(&o.pods, "pods", 3000, "pods in each run, of 512 to 16276 MiB")
	flag.IntVar(&o.rounds, "rounds", 3, "runs of each kind")
	flag.Int64Var(&o.seed, "seed", 1, "seed of the pods' sizes")
	kinds := flag.String("kinds", "none,ours,shipped", "kinds to compare, each with the first; also: stock, gated, held, queued. A kind with gpushare takes further arguments of the extender, such as ours:--bind-window=0, and one with the chart values of it, such as shipped:--set=scheduler.percentageOfNodesToScore=4")
	flag.IntVar(&o.waiting, "waiting", 10_000, "pods that wait meanwhile, in the kinds gated, held and queued")
	flag.IntVar(&o.tenants, "tenants", 50, "tenants of the pods that wait, or that share the cluster")
	flag.IntVar(&o.freed, "freed", 0, "fill all cards, free so many of them one after the other, and measure how long each is free until one of the pods that wait is bound; use it with -nodes 100 -kinds queued,gated")
	flag.DurationVar(&o.fairness, "fairness", 0, "measure how evenly tenants share the cluster, for this long; other defaults then: -nodes 100 -pods 2000 -tenants 20 -kinds stock,dispatch,reclaim")
	flag.DurationVar(&o.reclaimAfter, "reclaim-after", 5*time.Second, "the extender's --fair-share-reclaim-after, with -fairness")
	rates := flag.String("rates", "", "create so many pods per second, such as 5,40,100, and compare how long a pod waits until it is bound")
	flag.Parse()
	if o.fairness > 0 {
		defaults := maps.Clone(fairnessDefaults)
		flag.Visit(func(f *flag.Flag) { delete(defaults, f.Name) })
		for name, value := range defaults {
			_ = flag.Set(name, value)
		}
	}
	var err error
	if o.rates, err = numbers(*rates); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 2
	}
	o.kindNames = strings.Split(*kinds, ",")
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := measure(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

// numbers parses the flag -rates.
func numbers(text string) (list []float64, err error) {
	if text == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(text, ",") {
		number, err := strconv.ParseFloat(part, 64)
		if err != nil || number <= 0 || number > 1000 {
			return nil, fmt.Errorf("-rates: must be above 0 and at most 1000, got %q", part)
		}
		list = append(list, number)
	}
	return list, nil
}
