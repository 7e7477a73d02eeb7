// Command scale measures what the extender needs to know a large cluster: on a real etcd and kube-apiserver it makes the
// nodes and pods, starts the real extender from cold, and reads how long it took until it was ready and how much memory
// it keeps resident.
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

// options say what is measured.
type options struct {
	nodes, cards, pods, plain, turns int
	settle                           time.Duration
	extender                         string
	args                             []string
}

func main() { os.Exit(run()) }

func run() int {
	var o options
	flag.IntVar(&o.nodes, "nodes", 5000, "nodes")
	flag.IntVar(&o.cards, "cards", 8, "cards of 16276 MiB on each node")
	flag.IntVar(&o.pods, "pods", 50_000, "bound pods, plain ones included")
	flag.IntVar(&o.plain, "plain", 0, "how many of the pods ask for no GPU memory")
	flag.IntVar(&o.turns, "turns", 3, "cold starts of the extender")
	flag.DurationVar(&o.settle, "settle", time.Minute, "time from ready to the reading of the steady memory")
	flag.StringVar(&o.extender, "extender", "bin/gpushare-extender", "the extender's `file`")
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
