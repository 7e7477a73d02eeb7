package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/test/check"
)

func write(t *testing.T, dir, name string, lines ...string) {
	t.Helper()
	check.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(strings.Join(lines, "\n")+"\n"), 0o600))
}

// TestCompare replays two workloads on two nodes of two cards. In one of them the CPU of a node is enough for one pod.
func TestCompare(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "openb_node_list_gpu_node.csv", "sn,cpu_milli,memory_mib,gpu,model", "n1,8000,8192,2,T4", "n2,8000,8192,2,P100")
	write(t, dir, "openb_pod_list_small.csv", "name,cpu_milli,memory_mib,num_gpu,gpu_milli", "p1,1000,1024,1,1000", "p2,1000,1024,1,1000", "p3,0,0,0,0")
	write(t, dir, "openb_pod_list_cpu.csv", "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec", "p1,5000,1024,1,1000,", "p2,5000,1024,1,1000,T4|P100")
	write(t, dir, "allo.csv", "workload,sc_policy,tune,seed,total_gpus,100",
		"openb_pod_list_small,06-FGD,1.3,42,4,90.00", "openb_pod_list_small,06-FGD,1.3,43,4,91.00", "openb_pod_list_small,01-Random,1.3,42,4,1.00",
		"openb_pod_list_cpu,06-FGD,1.3,42,4,60.00", "openb_pod_list_cpu,06-FGD,1.3,43,4,60.00")
	for name, tc := range map[string]struct {
		policy    placement.Policy
		workloads []string
		want      string
	}{
		"all workloads": {placement.Binpack, nil, `cpu 50.00 60.00 -10.00
small 100.00 90.50 +9.50
mean -0.25 worst -10.00
`},
		"one workload, by cost": {placement.LeastWaste, []string{"small"}, `small 100.00 90.50 +9.50
mean +9.50 worst +9.50
`},
	} {
		var out strings.Builder
		if err := compare(&out, options{dir: dir, policy: tc.policy, workloads: tc.workloads, seeds: 2, at: 100}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		check.Equal(t, name, tc.want, out.String())
	}
}

// TestFilling: each run has other nodes, and the pods that come ask for more than their cards.
func TestFilling(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "openb_pod_list_small.csv", "name,cpu_milli,memory_mib,num_gpu,gpu_milli", "p1,1000,1024,1,1000")
	nodes := []traceNode{{"n1", "T4", 1, 8000, 8192}, {"n2", "T4", 1, 500, 8192}}
	var out strings.Builder
	check.Must(t, filling(&out, options{dir: dir, policy: placement.LeastWaste, seeds: 20, nodes: 1}, nodes, []string{podList + "small"}))
	var ours float64
	if _, err := fmt.Sscanf(out.String(), "small %f", &ours); err != nil || ours <= 0 || ours >= 100 || !strings.HasSuffix(out.String(), " +0.00\n") {
		t.Errorf("some runs have the node without enough CPU: %q (%v)", out.String(), err)
	}
}
