// Command packing replays a public trace of pods that share GPUs, and compares how much of the GPUs the extender allocates with the best
// published policy. The extender's own packages choose nodes and cards, and kube-scheduler's default rule places pods that ask for no GPU. A control
// plane runs only with -control-plane.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/gpushare/gpushare/pkg/placement"
)

type options struct {
	dir       string
	policy    placement.Policy
	workloads []string
	seeds, at int
	// allNodes is true if the nodes without cards are there too.
	allNodes bool
	// churn is true if pods end, and lost if those that fit nowhere don't wait then.
	churn, lost bool
	// controlPlane is true if pods come to a real control plane.
	controlPlane bool
	// nodes is the number of nodes that are taken at random; all if 0.
	nodes int
}

func main() { os.Exit(run()) }

func run() int {
	var o options
	flag.StringVar(&o.dir, "openb", "", "directory with the trace. The public data is at "+source)
	policy := flag.String("policy", placement.NodePolicies()[0].String(), "node policy: "+placement.Choices(placement.NodePolicies()))
	flag.IntVar(&o.seeds, "seeds", 10, "number of runs of each workload, from the first seed of the published experiments on")
	flag.IntVar(&o.at, "at", 130, "percent of the cards that the pods that have arrived ask for, up to 130")
	flag.BoolVar(&o.allNodes, "all-nodes", false, "with the 310 nodes that have no cards too. Then it is compared what it brings if pods without GPU prefer these")
	flag.BoolVar(&o.churn, "churn", false, "pods end, and those that fit nowhere wait. Then it is compared with binpack and with the published policy")
	flag.BoolVar(&o.lost, "lost", false, "with -churn: pods that fit nowhere are lost instead")
	flag.BoolVar(&o.controlPlane, "control-plane", false, "pods come to a real kube-scheduler and extender (make build kube). Then it is compared with the replay, and with how many pods are tried in a second with binpack; use it with -nodes 120 -seeds 5 -workloads default")
	flag.IntVar(&o.nodes, "nodes", 0, "how many of the nodes there are, taken at random; 0 for all. Without -churn and -control-plane it is then compared with binpack, on other nodes in each run")
	workloads := flag.String("workloads", "", "names of workloads, such as default,cpu250; all in the directory if empty")
	flag.Parse()
	if *workloads != "" {
		o.workloads = strings.Split(*workloads, ",")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if o.policy, err = placement.ParsePolicy(*policy, placement.NodePolicies()); err == nil {
		err = compare(ctx, os.Stdout, o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "packing:", err)
		return 1
	}
	return 0
}
