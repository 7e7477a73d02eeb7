// Command scale measures the extender's start and memory in a large cluster: it creates nodes and bound pods on a real
// etcd and kube-apiserver, starts the extender, and reports the time until it was ready and its resident memory.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// options configure the measurement.
type options struct {
	nodes, cards, pods, plain, turns int
	settle                           time.Duration
	extender                         string
	args                             []string
}

func main() { os.Exit(run()) }

func run() int {
	var o options
	flag.IntVar(&o.nodes, "nodes", 5000, "number of nodes")
	flag.IntVar(&o.cards, "cards", 8, "cards on each node, of 16276 MiB")
	flag.IntVar(&o.pods, "pods", 50_000, "bound pods, including those without GPU memory")
	flag.IntVar(&o.plain, "plain", 0, "number of those pods that request no GPU memory")
	flag.IntVar(&o.turns, "turns", 3, "number of starts of the extender")
	flag.DurationVar(&o.settle, "settle", time.Minute, "time from ready until the steady memory is read")
	flag.StringVar(&o.extender, "extender", "bin/gpushare-extender", "`path` of the extender's binary")
	flag.Parse()
	o.args = flag.Args()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := measure(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		return 1
	}
	return 0
}
