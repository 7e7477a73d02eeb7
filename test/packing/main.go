// Command packing replays a public trace of pods that share GPUs, and compares how much of the GPUs the extender allocates with the best
// published policy. The extender's own packages choose nodes and cards, and kube-scheduler's default rule places pods that ask for no GPU. No
// control plane runs.
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
	flag.BoolVar(&o.allNodes, "all-nodes", false, "with the 310 nodes that have no cards too")
	flag.IntVar(&o.nodes, "nodes", 0, "how many of the nodes there are, taken at random; 0 for all. Then it is compared with binpack, on other nodes in each run")
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
