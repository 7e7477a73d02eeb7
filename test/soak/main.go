// Command soak runs gpushare for a simulated week under a realistic load and reports whether anything grows: a real control plane,
// two replicas of the extender, and simulated GPU nodes with the real device plugin. Pods arrive by day and by night, in bursts,
// groups and deployments; every few minutes something fails, and every simulated hour a program is updated. Exit status 0 means that
// no card was ever over its size, nothing was left behind, and nothing grew: by a percent a day in a run of forty minutes or more,
// to the double in a shorter one.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// options configure a run.
type options struct {
	calendar
	nodes, cards int
	// rate is the mean number of pods that are created per second.
	rate float64
	seed uint64
}

// The default rate.
const (
	podsPerWeek = 103_000
	// maxRate is about what two cores sustain without other load; by day the rate is half as much again. On a machine that binds
	// fewer, arrivals are held back, see maxWaiting.
	maxRate = 20
)

// cardMemory is the memory of each card in units of a GiB, of 16276 MiB.
const cardMemory = 15

func main() { os.Exit(run()) }

func run() int {
	var o options
	var length time.Duration
	flag.DurationVar(&length, "for", 3*time.Hour, "how long the simulated week takes; slopes are judged from 40 minutes on")
	flag.IntVar(&o.nodes, "nodes", 16, "number of nodes, at least two")
	flag.IntVar(&o.cards, "cards", 4, "cards on each node, of 16276 MiB")
	flag.Float64Var(&o.rate, "rate", 0, "mean number of pods per second; by default there are 103,000 in the week, and 20 per second at most")
	flag.Uint64Var(&o.seed, "seed", 1, "seed of the load and of the faults")
	flag.Parse()
	o.calendar = newCalendar(length)
	if o.rate == 0 {
		o.rate = min(podsPerWeek/o.length.Seconds(), maxRate)
	}
	if o.length < 105*time.Second || o.nodes < 2 || o.cards < 2 || o.rate <= 0 || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "soak: wants at least 105 seconds, two nodes, two cards, a rate above 0, and no other arguments")
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := soak(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		return 1
	}
	return 0
}

// soak starts the cluster, runs the week, and prints the report. It keeps the logs of a run that failed.
func soak(ctx context.Context, o options) (err error) {
	dir, err := os.MkdirTemp("", "gpushare-soak-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			fmt.Fprintln(os.Stderr, "The logs are in", dir)
			return
		}
		err = os.RemoveAll(dir)
	}()
	cluster, err := framework.Start(ctx, framework.Options{
		Dir: dir, MemoryUnit: "GiB", Replicas: 2, ThroughProxy: true,
		ControlPlane: controlplane.Options{Scheduler: controlplane.SchedulerOptions{Edits: []controlplane.ConfigEdit{controlplane.ClientLimits(500, 1000)}}},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cluster.Stop()) }()

	if cluster.Client, err = protobufClient(cluster.Config); err != nil {
		return err
	}
	w := newWeek(o, cluster)
	if err := w.addNodes(ctx); err != nil {
		return err
	}
	fmt.Printf("A simulated week in %v: %d nodes of %d cards, %.1f pods per second\n", o.length, o.nodes, o.cards, o.rate)
	result := w.run(ctx)
	r := w.report()
	fmt.Print(r.text())
	fmt.Println(r.judged())
	return result
}

// protobufClient returns a client for the kubelets and the load. The cores are for the programs under test.
func protobufClient(config *rest.Config) (kubernetes.Interface, error) {
	config = rest.CopyConfig(config)
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	return kubernetes.NewForConfig(config)
}
