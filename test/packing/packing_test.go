package main

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

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
		"all workloads": {placement.Binpack, nil, `all cpu 50.00 60.00 -10.00
all small 100.00 90.50 +9.50
all mean -0.25 worst -10.00 wins 1 of 2
default cpu 50.00 60.00 -10.00
default small 100.00 90.50 +9.50
default mean -0.25 worst -10.00 wins 1 of 2
`},
		"one workload, by cost": {placement.LeastWaste, []string{"small"}, `all small 100.00 90.50 +9.50
all mean +9.50 worst +9.50 wins 1 of 1
default small 100.00 90.50 +9.50
default mean +9.50 worst +9.50 wins 1 of 1
`},
	} {
		var out strings.Builder
		if err := compare(t.Context(), &out, options{dir: dir, policy: tc.policy, workloads: tc.workloads, seeds: 2, at: 100}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		check.Equal(t, name, tc.want, out.String())
	}
}

// TestCompareErrors: each error says what is missing, and where the data is.
func TestCompareErrors(t *testing.T) {
	for name, dir := range map[string]string{"no directory": "", "an empty directory": t.TempDir()} {
		err := compare(t.Context(), &strings.Builder{}, options{dir: dir, policy: placement.Binpack, seeds: 1, at: 130})
		if err == nil || !strings.Contains(err.Error(), source) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, o := range map[string]options{
		"no seeds":         {seeds: 0, at: 130},
		"beyond the trace": {seeds: 1, at: 131},
	} {
		o.dir = "anywhere"
		if err := compare(t.Context(), &strings.Builder{}, o); err == nil || !strings.Contains(err.Error(), "-seeds must be positive") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestFilling: each run has other nodes, and the pods that come ask for more than their cards.
func TestFilling(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "openb_pod_list_small.csv", "name,cpu_milli,memory_mib,num_gpu,gpu_milli", "p1,1000,1024,1,1000")
	nodes := []traceNode{{"n1", "T4", 1, 8000, 8192}, {"n2", "T4", 1, 500, 8192}}
	var out strings.Builder
	check.Must(t, filling(&out, options{dir: dir, policy: placement.LeastWaste, seeds: 20, nodes: 1}, nodes, []string{podList + "small"}))
	var all, byDefault float64
	if _, err := fmt.Sscanf(out.String(), "all small %f %f +0.00\ndefault small %f", &all, new(float64), &byDefault); err != nil || all <= 0 || all >= 100 || all != byDefault {
		t.Errorf("some runs have the node without enough CPU: %q (%v)", out.String(), err)
	}
}

// TestArrivals: pods are left out or copied until they ask for that multiple of the cards, and a seed determines their order.
func TestArrivals(t *testing.T) {
	nodes := []traceNode{{name: "n1", cards: 10}}
	pods := make([]tracePod, 20)
	for i := range pods {
		pods[i] = tracePod{name: string(rune('a' + i)), cards: 1, milli: 500}
	}
	for multiple, want := range map[float64]int{0.5: 10, 1: 20, 1.5: 30} {
		first, nodeOrder := order(pods, nodes, multiple, 42)
		again, _ := order(pods, nodes, multiple, 42)
		other, _ := order(pods, nodes, multiple, 43)
		if len(first) != want || len(nodeOrder) != 1 || !cmp.Equal(first, again, cmp.AllowUnexported(tracePod{})) || cmp.Equal(first, other, cmp.AllowUnexported(tracePod{})) {
			t.Errorf("%v of the cards: %d pods, want %d, the same for one seed only", multiple, len(first), want)
		}
	}
}

// small is a cluster of two nodes, of which one has little CPU.
func small() (nodes []traceNode, pods []tracePod) {
	nodes = []traceNode{{"n1", "T4", 2, 64000, 65536}, {"n2", "P100", 2, 6000, 65536}}
	pods = []tracePod{
		{"part", 1000, 1024, 1, 500, ""}, {"whole", 4000, 1024, 1, 1000, ""}, {"both", 4000, 1024, 2, 1000, "T4|P100"}, {"none", 1000, 1024, 0, 0, ""},
		{"model", 1000, 1024, 1, 300, "P100"},
	}
	return nodes, pods
}

// worlds are clusters of all policies.
func worlds(nodes []traceNode, pods []tracePod, rule rule) map[string]world {
	order, random := []int{0, 1}, rand.New(rand.NewPCG(1, 2))
	return map[string]world{
		"least-waste": newCluster(nodes, order, placement.LeastWaste, rule, random), "binpack": newCluster(nodes, order, placement.Binpack, rule, random),
		"published": newFGD(nodes, order, pods, rule, random),
	}
}

// TestWorlds places and ends pods at random. No node has more pods than it can have, and what the last pod leaves is empty.
func TestWorlds(t *testing.T) {
	nodes, pods := small()
	for _, rule := range rules(false) {
		for name, w := range worlds(nodes, pods, rule) {
			random := rand.New(rand.NewPCG(3, 4))
			bound, waited := map[int]running{}, 0
			asked := func(node traceNode) (milli int, cpu int64) {
				for _, r := range bound {
					if r.node == node.name {
						milli, cpu = milli+r.pod.gpu(), cpu+r.pod.cpu
					}
				}
				return milli, cpu
			}
			for number := range 300 {
				arriving := pods[random.IntN(len(pods))]
				if node, ok := w.arrive(&arriving, number); ok {
					bound[number] = running{node: node, pod: arriving, number: number}
				} else if waited++; w.placeOn("n1", &arriving, number) || w.placeOn("n2", &arriving, number) {
					t.Fatalf("%s, %s: %+v fits nowhere, and then a node", rule, name, arriving)
				}
				for _, number := range slices.Sorted(maps.Keys(bound)) {
					if r := bound[number]; random.IntN(8) == 0 {
						w.end(r.node, &r.pod, number)
						delete(bound, number)
					}
				}
				all := 0
				for _, node := range nodes {
					milli, cpu := asked(node)
					all += milli
					if milli > node.cards*cardMemory || cpu > node.cpu {
						t.Fatalf("%s, %s: too many pods on %s: %d of its cards, %d of its CPU", rule, name, node.name, milli, cpu)
					}
				}
				if got, want := w.used(), float64(all)/4000; got != want {
					t.Fatalf("%s, %s: %v used, want %v", rule, name, got, want)
				}
			}
			if waited == 0 {
				t.Errorf("%s, %s: no pod had to wait", rule, name)
			}
			for number, r := range bound {
				w.end(r.node, &r.pod, number)
			}
			for i, node := range nodes {
				if last := pods[2]; !w.placeOn(node.name, &last, 1000+i) {
					t.Errorf("%s, %s: %s isn't empty", rule, name, node.name)
				}
			}
		}
	}
}

// TestPublishedPolicy: where the published policy places a pod.
func TestPublishedPolicy(t *testing.T) {
	nodes, pods := small()
	for name, tc := range map[string]struct {
		running []tracePod
		on      []string
		pod     tracePod
		want    string
	}{
		"fragments grow by 0.2 cards, on the other node by 0.3": {nil, nil, pods[0], "n1"},
		"a part beside a part": {[]tracePod{pods[0]}, []string{"n1"}, pods[0], "n1"},
		"a model":              {nil, nil, pods[4], "n2"},
		"the CPU is gone":      {[]tracePod{{"cpu", 6000, 1024, 0, 0, ""}}, []string{"n2"}, pods[1], "n1"},
	} {
		f := newFGD(nodes, []int{1, 0}, pods, byPolicy, rand.New(rand.NewPCG(1, 2)))
		for i := range tc.running {
			if !f.placeOn(tc.on[i], &tc.running[i], i) {
				t.Fatalf("%s: the pod doesn't fit", name)
			}
		}
		if got, _ := f.arrive(&tc.pod, 100); got != tc.want {
			t.Errorf("%s: node %s, want %s", name, got, tc.want)
		}
	}
}

// TestForetell: the published policy keeps room for the pods of the workload that it knows.
func TestForetell(t *testing.T) {
	nodes, pods := small()
	part, both := tracePod{"part", 1000, 1024, 1, 500, ""}, tracePod{"both", 4000, 1024, 2, 1000, "P100"}
	for name, tc := range map[string]struct {
		workload []tracePod
		want     string
	}{
		"pods that only fit n2": {[]tracePod{both}, "n1"},
		"pods that only fit n1": {[]tracePod{{"cpu", 10000, 1024, 1, 1000, ""}}, "n2"},
	} {
		f := newFGD(nodes, []int{0, 1}, pods, byPolicy, rand.New(rand.NewPCG(1, 2)))
		f.arrive(&part, 1) // Its score is kept.
		f.end(f.names[0], &part, 1)
		f.foretell(tc.workload)
		if got, _ := f.arrive(&part, 2); got != tc.want {
			t.Errorf("%s: node %s, want %s", name, got, tc.want)
		}
	}
}

// TestChurn: a run is the same each time, and pods that may wait use more of the cards than pods that are lost.
func TestChurn(t *testing.T) {
	nodes, pods := small()
	for _, times := range runTimes {
		var allocated []float64
		for _, lost := range []bool{true, false, false} {
			r := churnRun{rule: byScheduler, nodes: nodes, first: pods, then: pods[:2], next: times.next, lost: lost}
			o := options{seeds: 50}
			allocated = append(allocated, o.mean(r.with(placement.Binpack)))
		}
		if allocated[0] >= allocated[1] || allocated[1] != allocated[2] || allocated[1] > 100 {
			t.Errorf("%s: %.2f%% if pods are lost, %.2f%% and %.2f%% if they wait", times.name, allocated[0], allocated[1], allocated[2])
		}
	}
}
