// Command packing replays a public trace of pods that share GPUs, and compares how much of the GPUs the extender allocates with the best
// published policy. It runs no control plane: the extender's own packages choose nodes and cards, and kube-scheduler's default rule places pods
// that ask for no GPU.
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"

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
	// nodes is the number of nodes that are taken at random if pods end; all if 0.
	nodes int
}

func main() { os.Exit(run()) }

func run() int {
	var o options
	flag.StringVar(&o.dir, "openb", "", "directory with the trace. The public data is at "+source)
	policy := flag.String("policy", placement.Policies()[0].String(), "node policy: "+placement.Choices(placement.NodePolicies()))
	flag.IntVar(&o.seeds, "seeds", 10, "number of runs of each workload, from the first seed of the published experiments on")
	flag.IntVar(&o.at, "at", 130, "percent of the cards that the pods that have arrived ask for, up to 130")
	flag.BoolVar(&o.allNodes, "all-nodes", false, "with the 310 nodes that have no cards too. Then it is compared what it brings if pods without GPU prefer these")
	flag.BoolVar(&o.churn, "churn", false, "pods end, and those that fit nowhere wait. Then it is compared with binpack and with the published policy")
	flag.BoolVar(&o.lost, "lost", false, "with -churn: pods that fit nowhere are lost instead")
	flag.IntVar(&o.nodes, "nodes", 0, "with -churn: how many of the nodes there are, taken at random; 0 for all")
	workloads := flag.String("workloads", "", "names of workloads, such as default,cpu250; all in the directory if empty")
	flag.Parse()
	if *workloads != "" {
		o.workloads = strings.Split(*workloads, ",")
	}
	var err error
	if o.policy, err = placement.ParsePolicy(*policy, placement.NodePolicies()); err == nil {
		err = compare(os.Stdout, o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "packing:", err)
		return 1
	}
	return 0
}
