package inspect

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

func TestOutput(t *testing.T) {
	structured := func(output string) func(*bytes.Buffer, Report, format) {
		return func(out *bytes.Buffer, report Report, _ format) {
			check.NoError(t, writeStructured(out, output, report))
		}
	}
	tests := map[string]struct {
		objects func(*testing.T) Objects
		write   func(*bytes.Buffer, Report, format)
		format  format
		want    string
	}{
		"wide adds columns on the right; nodes with different cards have tables of their own, and a common unit": {mixed, writeTable, format{wide: true}, `
NAME    IPADDRESS  GPU0(Allocated/Total)  GPU Memory(MiB)  LARGEST FREE(MiB)  UNIT    MODEL         PROBLEMS
in-256  10.0.0.3   1024/15360             1024/15360       14336              256MiB  1 x Tesla T4  -
in-mib  10.0.0.2   8138/16276             8138/16276       8138               MiB     1 x Tesla T4  -

NAME    IPADDRESS  GPU0(Allocated/Total)  GPU2(Allocated/Total)  GPU Memory(MiB)  LARGEST FREE(MiB)  UNIT  MODEL         PROBLEMS
in-gib  10.0.0.1   0/16384                2048/16384             2048/32768       16384              GiB   2 x Tesla T4  -
------------------------------------------------------------------------------------------------------------------------
Largest Free Piece: 16384 MiB of 53194 MiB free, on in-gib
Allocated/Total GPU Memory In Cluster:
11210/64404 (17%)

Problem: nodes have different units of GPU memory, so the same request means different amounts: MiB (in-mib), 256MiB (in-256), GiB (in-gib); give all the same devicePlugin.memoryUnit
`},
		"simulated cards": {simulated, writeTable, format{}, `
NAME    IPADDRESS  GPU0(Allocated/Total)  GPU Memory(GiB)
kind-a  10.0.0.1   0/16                   0/16
kind-b  10.0.0.1   0/16                   0/16
real    10.0.0.1   0/16                   0/16
---------------------------------------------------------
Simulated Cards: on kind-a and 1 other node, for a trial: no container can compute on them
Largest Free Piece: 16 GiB of 48 GiB free, on kind-a and 2 other nodes
Allocated/Total GPU Memory In Cluster:
0/48 (0%)
`},
		"simulated cards, details": {func(t *testing.T) Objects { return Objects{Nodes: simulated(t).Nodes[1:2]} }, writeDetails, format{}, `
NAME:       kind-b
IPADDRESS:  10.0.0.1
UNIT:       GiB
CARDS:      simulated for a trial: no container can compute on them

NAMESPACE    NAME  GPU0(Allocated)
Allocated :  0 (0%)
Total :      16
-------------------------------------------------------------------

Largest Free Piece: 16 GiB of 16 GiB free, on kind-b
Allocated/Total GPU Memory In Cluster:  0/16 (0%)
`},
		"simulated cards, JSON": {simulated, func(out *bytes.Buffer, report Report, _ format) {
			for _, node := range report.Nodes {
				marked, err := json.Marshal(node)
				check.NoError(t, err)
				fmt.Fprintln(out, node.Name, strings.Contains(string(marked), `"simulated":true`))
			}
		}, format{}, `
kind-a true
kind-b true
real false
`},
		"the table lists problems and pending pods": {trouble, writeTable, format{}, `
NAME    IPADDRESS  GPU0(Allocated/Total)  GPU1(Allocated/Total)  PENDING(Allocated)  GPU Memory(GiB)
node-a  10.0.0.1   18/16                  0/16                   8                   26/32

NAME    IPADDRESS  GPU0(Allocated/Total)  PENDING(Allocated)  GPU Memory(GiB)
node-b  10.0.0.2   0/16                                       0/16
node-c  10.0.0.3   6/16                                       6/16
----------------------------------------------------------------------------------------------------
Largest Free Piece: none
Allocated/Total GPU Memory In Cluster:
32/64 (50%)

Problems:
NODE    PROBLEM
node-a  GPU0 is oversubscribed: 18 of 16 (GiB)
node-a  GPU1 is unhealthy: Xid 79: fell off the bus
node-a  pods hold 3 (GiB) of GPU7, which the node doesn't report
node-a  pods whose card is not known hold 5 (GiB)
node-b  the node also offers its cards by nvidia.com/gpu or DRA, which excludes sharing them
node-c  the device plugin is not connected: nothing of aliyun.com/gpu-mem is allocatable
node-c  the node is not ready
node-c  the node is cordoned

Pending Pods:
NAMESPACE  NAME     REQUEST  CAUSE                  WHY
default    waiting  20       too_large              no card is large enough for 20 GiB: the largest has 16 GiB, on node-a; node-c: the device plugin is not connected: nothing of aliyun.com/gpu-mem is allocatable; node-b: the node also offers its cards by nvidia.com/gpu or DRA, which excludes sharing them
ml         fresh    2        waits_for_termination  node-a has room for it once default/under has ended, terminating since 2023-11-14T22:13:20Z; node-c: the device plugin is not connected: nothing of aliyun.com/gpu-mem is allocatable; node-b: the node also offers its cards by nvidia.com/gpu or DRA, which excludes sharing them
`},
		"wide has problems in a column and unshortened reasons": {sick, writeTable, format{wide: true}, `
NAME    IPADDRESS  GPU0(Allocated/Total)  GPU1(Allocated/Total)  PENDING(Allocated)  GPU Memory(GiB)  LARGEST FREE(GiB)  UNIT  MODEL         PROBLEMS
node-a  10.0.0.1   18/16                  0/16                   8                   26/32            0                  GiB   2 x Tesla T4  GPU0 is oversubscribed: 18 of 16 (GiB); GPU1 is unhealthy: Xid 79: fell off the bus; pods hold 3 (GiB) of GPU7, which the node doesn't report; pods whose card is not known hold 5 (GiB)
------------------------------------------------------------------------------------------------------------------------
Largest Free Piece: none
Allocated/Total GPU Memory In Cluster:
26/32 (81%)

Pending Pods:
NAMESPACE  NAME     REQUEST  CAUSE                  WHY                                                                                          AHEAD  SINCE  SCHEDULER          SCHEDULER SAYS
default    waiting  20       too_large              no card is large enough for 20 GiB: the largest has 16 GiB, on node-a                        -      -      default-scheduler  0/3 nodes are available: 2 no GPU card has enough free memory, 1 node(s) were unschedulable. preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling.
ml         fresh    2        waits_for_termination  node-a has room for it once default/under has ended, terminating since 2023-11-14T22:13:20Z  0      -      default-scheduler  scheduler "default-scheduler" has not tried it yet
`},
		"details are in each node's own unit": {mixed, writeDetails, format{}, `
NAME:       in-256
IPADDRESS:  10.0.0.3
UNIT:       256MiB

NAMESPACE    NAME  GPU0(Allocated)
default      c     4
Allocated :  4 (6%)
Total :      60
----------------------------------

NAME:       in-gib
IPADDRESS:  10.0.0.1
UNIT:       GiB

NAMESPACE    NAME  GPU0(Allocated)  GPU2(Allocated)
default      a     0                2
Allocated :  2 (6%)
Total :      32
---------------------------------------------------

NAME:       in-mib
IPADDRESS:  10.0.0.2
UNIT:       MiB

NAMESPACE    NAME  GPU0(Allocated)
default      b     8138
Allocated :  8138 (50%)
Total :      16276
----------------------------------

Largest Free Piece: 16384 MiB of 53194 MiB free, on in-gib
Allocated/Total GPU Memory In Cluster:  11210/64404 (17%) in MiB

Problem: nodes have different units of GPU memory, so the same request means different amounts: MiB (in-mib), 256MiB (in-256), GiB (in-gib); give all the same devicePlugin.memoryUnit
`},
		"wide details have the cards and every status": {failing, writeDetails, format{wide: true}, `
NAME:       n
IPADDRESS:  10.0.0.1
UNIT:       GiB

GPU   UUID   MODEL     NUMA  ALLOCATED/TOTAL  HEALTH
GPU0  GPU-0  Tesla T4  1     9/16             healthy
GPU1  GPU-1  Tesla T4  -     0/16             unhealthy: Xid 79

NAMESPACE    NAME  GPU0(Allocated)  GPU1(Allocated)  STATUS
default      fine  9                0                Running
Allocated :  9 (28%)
Total :      32
Problems :   GPU1 is unhealthy: Xid 79
---------------------------------------------------------------

Largest Free Piece: 7 GiB of 7 GiB free, on n
Allocated/Total GPU Memory In Cluster:  9/32 (28%)
`},
		"cores have columns of their own; a request over several cards is one word": {severalCards, writeTable, format{}, `
NAME    IPADDRESS  GPU0(Allocated/Total)  GPU1(Allocated/Total)  GPU2(Allocated/Total)  GPU Memory(GiB)  GPU0(Cores)  GPU1(Cores)  GPU2(Cores)
node-a  10.0.0.1   8/16                   6/16                   12/16                  26/48            50/100       0/100        110/100

NAME    IPADDRESS  GPU0(Allocated/Total)  GPU Memory(GiB)  GPU0(Cores)
node-b  10.0.0.2   2/16                   2/16             -
------------------------------------------------------------------------------------------------------------------------
Largest Free Piece: 14 GiB of 36 GiB free, on node-b
Allocated/Total GPU Memory In Cluster:
28/64 (43%)

Problems:
NODE    PROBLEM
node-a  the cores of GPU2 are oversubscribed: 110 of 100

Pending Pods:
NAMESPACE  NAME    REQUEST   CAUSE            WHY
default    pair    2x10,25%  fragmented       2 cards with 10 GiB and 25% of their computing free each are needed on one node: node-a has 1, though enough in sum; node-b: the node's GPU device plugin is too old for pods with several cards
default    slow    4,100%    fits             node-a has room for it, 4 GiB and 100% of the computing on 1 card: kube-scheduler has not tried it yet
default    uneven  5         invalid_request  no node can give the pod what it asks for: container main: aliyun.com/gpu-mem 5 can't be divided evenly over 2 cards
`},
		"wide, with RDMA adapters": {withAdapters, writeTable, format{wide: true, rowsOnly: true}, `
rdma     10.0.0.1  0/16  0/16  0/32  16  GiB  2 x Tesla T4  GPU0 mlx5_1:1, GPU1 -  -
without  10.0.0.2  0/16  0/16  0/32  16  GiB  2 x Tesla T4  -                      -
`},
		"details of several cards and cores": {severalCards, writeDetails, format{wide: true}, `
NAME:       node-a
IPADDRESS:  10.0.0.1
UNIT:       GiB
CORES:      counted, not enforced

GPU   UUID   MODEL     NUMA  ALLOCATED/TOTAL  CORES    HEALTH
GPU0  GPU-0  Tesla T4  -     8/16             50/100   healthy
GPU1  GPU-1  Tesla T4  -     6/16             0/100    healthy
GPU2  GPU-2  Tesla T4  -     12/16            110/100  healthy

NAMESPACE    NAME    GPU0(Allocated)  GPU1(Allocated)  GPU2(Allocated)  GPU0(Cores)  GPU1(Cores)  GPU2(Cores)  STATUS
default      tensor  8                0                8                50           0            50           Running
default      one     0                6                0                0            0            0            Running
default      half    0                0                4                0            0            60           Running
Allocated :  26 (54%)
Total :      48
Problems :   the cores of GPU2 are oversubscribed: 110 of 100
----------------------------------------------------------------------------------------------------------------------

NAME:       node-b
IPADDRESS:  10.0.0.2
UNIT:       GiB

GPU   UUID  MODEL  NUMA  ALLOCATED/TOTAL  HEALTH
GPU0  -     -      -     2/16             healthy

NAMESPACE    NAME   GPU0(Allocated)  STATUS
default      other  2                Running
Allocated :  2 (12%)
Total :      16
-------------------------------------------------

Largest Free Piece: 14 GiB of 36 GiB free, on node-b
Allocated/Total GPU Memory In Cluster:  28/64 (43%)

Pending Pods:
NAMESPACE  NAME    REQUEST   CAUSE            WHY                                                                                                                                                                                               AHEAD  SINCE  SCHEDULER          SCHEDULER SAYS
default    pair    2x10,25%  fragmented       2 cards with 10 GiB and 25% of their computing free each are needed on one node: node-a has 1, though enough in sum; node-b: the node's GPU device plugin is too old for pods with several cards  0      -      default-scheduler  scheduler "default-scheduler" has not tried it yet
default    slow    4,100%    fits             node-a has room for it, 4 GiB and 100% of the computing on 1 card: kube-scheduler has not tried it yet                                                                                            -      -      default-scheduler  scheduler "default-scheduler" has not tried it yet
default    uneven  5         invalid_request  no node can give the pod what it asks for: container main: aliyun.com/gpu-mem 5 can't be divided evenly over 2 cards                                                                              -      -      default-scheduler  scheduler "default-scheduler" has not tried it yet
`},
		"YAML with everything in it": {sick, structured(outputYAML), format{}, `
---
apiVersion: inspect.gpushare.aliyun.com/v1
cluster:
  allocated: 26
  free: 0
  largestFree: 0
  percent: 81
  total: 32
  unit: GiB
kind: GPUShareReport
nodes:
- address: 10.0.0.1
  allocated: 26
  cards:
  - allocated: 18
    healthy: true
    index: 0
    model: Tesla T4
    numaNode: 1
    oversubscribed: true
    total: 16
    uuid: GPU-0
  - allocated: 0
    healthy: false
    index: 1
    model: Tesla T4
    oversubscribed: false
    reason: 'Xid 79: fell off the bus'
    total: 16
    uuid: GPU-1
  free: 0
  largestFree: 0
  name: node-a
  percent: 81
  pods:
  - name: over
    namespace: default
    phase: Running
    request: 10
    shares:
    - card: 0
      memory: 10
    terminating: false
    uid: uid-over
  - name: under
    namespace: default
    phase: Running
    request: 8
    shares:
    - card: 0
      memory: 8
    terminating: true
    uid: uid-under
  - name: vanished
    namespace: default
    phase: Running
    request: 3
    shares:
    - card: 7
      memory: 3
    terminating: false
    uid: uid-vanished
  - name: cardless
    namespace: default
    notes:
    - no card chosen
    phase: Pending
    request: 4
    shares: []
    terminating: false
    uid: uid-cardless
  - name: garbled
    namespace: default
    notes:
    - 'annotation ALIYUN_COM_GPU_MEM_IDX: "x\x1b[2J" is not a card index'
    phase: Running
    request: 1
    shares: []
    terminating: false
    uid: uid-garbled
  problems:
  - 'GPU0 is oversubscribed: 18 of 16 (GiB)'
  - 'GPU1 is unhealthy: Xid 79: fell off the bus'
  - pods hold 3 (GiB) of GPU7, which the node doesn't report
  - pods whose card is not known hold 5 (GiB)
  total: 32
  unit: GiB
  unknownCard: 8
nodesWithoutCards: []
pendingPods:
- cause: too_large
  explanation: 'no card is large enough for 20 GiB: the largest has 16 GiB, on node-a'
  name: waiting
  namespace: default
  reason: '0/3 nodes are available: 2 no GPU card has enough free memory, 1 node(s)
    were unschedulable. preemption: 0/3 nodes are available: 3 Preemption is not helpful
    for scheduling.'
  request: 20
  schedulerName: default-scheduler
  uid: uid-waiting
- ahead: 0
  cause: waits_for_termination
  explanation: node-a has room for it once default/under has ended, terminating since
    2023-11-14T22:13:20Z
  name: fresh
  namespace: ml
  reason: scheduler "default-scheduler" has not tried it yet
  request: 2
  schedulerName: default-scheduler
  uid: uid-fresh
problems: []
requestProblems: []
`},
		"wide pending pods have kube-scheduler's message": {refused, writePending, format{wide: true}, `
NAMESPACE  NAME   REQUEST  CAUSE       WHY                                                                     AHEAD  SINCE  SCHEDULER          SCHEDULER SAYS
default    piece  12       fragmented  12 GiB free on n1, but the largest piece is 7 GiB: a pod gets one card  0      -      default-scheduler  0/2 nodes are available: 2 no GPU card has enough free memory.
ml         large  17       too_large   no card is large enough for 17 GiB: the largest has 16 GiB, on n1       -      -      default-scheduler  0/2 nodes are available: 2 too large. preemption: not helpful.
`},
		"an empty cluster has empty lists": {nothing, structured(outputJSON), format{}, `
{
    "apiVersion": "inspect.gpushare.aliyun.com/v1",
    "kind": "GPUShareReport",
    "cluster": {
        "unit": "",
        "allocated": 0,
        "total": 0,
        "percent": 0,
        "free": 0,
        "largestFree": 0
    },
    "problems": [],
    "nodes": [],
    "nodesWithoutCards": [],
    "pendingPods": [],
    "requestProblems": []
}
`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			test.write(&out, Build(test.objects(t)), test.format)
			check.Equal(t, "output", strings.TrimPrefix(test.want, "\n"), out.String())
		})
	}
}

// One node with as many cards as possible makes only its own rows long.
func TestOneNodeWithManyCards(t *testing.T) {
	cards := make([]gpu.Card, gpu.MaxNodeCards)
	for i := range cards {
		cards[i] = t4(i, 16)
	}
	all := objects([]nodeBuilder{inventoryNode(t, "large", "10.0.0.1", gpu.GiB, cards...), inventoryNode(t, "small", "10.0.0.2", gpu.GiB, t4(0, 16))})
	var out bytes.Buffer
	writeTable(&out, Build(all), format{wide: true})
	for line := range strings.Lines(out.String()) {
		if strings.HasPrefix(line, "small") && len(line) > 120 {
			t.Errorf("the row of a node with one card has %d bytes: %.200s", len(line), line)
		}
	}
	if !strings.Contains(out.String(), "\nsmall ") {
		t.Errorf("no row begins with the small node's name: %.300s", out.String())
	}
}

// TestSeveralCardsJSON checks the fields that only pods with several cards or cores, and nodes that count cores, have.
func TestSeveralCardsJSON(t *testing.T) {
	report := Build(severalCards(t))
	pair := report.PendingPods[0]
	pair.Reason, pair.Explanation = "", ""
	for want, value := range map[string]any{
		`{"index":0,"uuid":"GPU-0","model":"Tesla T4","allocated":8,"total":16,"healthy":true,"cores":100,"allocatedCores":50,"oversubscribed":false}`: report.Nodes[0].Cards[0],
		`{"namespace":"default","name":"tensor","uid":"uid-tensor","phase":"Running","terminating":false,"request":16,"cores":100,` +
			`"shares":[{"card":0,"memory":8,"cores":50},{"card":2,"memory":8,"cores":50}]}`: report.Nodes[0].Pods[0],
		`{"namespace":"default","name":"pair","uid":"uid-pair","request":20,"cards":2,"cores":50,"schedulerName":"default-scheduler",` +
			`"reason":"","cause":"fragmented","explanation":"","ahead":0}`: pair,
	} {
		if got, err := json.Marshal(value); err != nil || string(got) != want {
			t.Errorf("got  %s, %v\nwant %s", got, err, want)
		}
	}
}

// TestForgedAmounts checks that sums of forged amounts saturate.
func TestForgedAmounts(t *testing.T) {
	node := inventoryNode(t, "node", "10.0.0.1", gpu.GiB, t4(0, 16))
	other := inventoryNode(t, "other", "10.0.0.2", gpu.MiB, t4(0, 16276))
	report := Build(objects([]nodeBuilder{node, other},
		newPod("a", 1<<62).on("node", 0), newPod("b", 1<<62).on("node", 0)))

	const largest = 1<<63 - 1
	if report.Cluster.Allocated != largest || report.Nodes[0].Cards[0].Allocated != largest {
		t.Errorf("allocated %d in the cluster, %d on the card", report.Cluster.Allocated, report.Nodes[0].Cards[0].Allocated)
	}
}

func TestPercent(t *testing.T) {
	for in, want := range map[[2]gpu.Memory]int{
		{0, 0}: 0, {0, 5}: 0, {29, 100}: 29, {2, 3}: 66, {999, 1000}: 99, {18, 16}: 112, {1 << 62, 1 << 62}: 100,
	} {
		if got := percent(in[0], in[1]); got != want {
			t.Errorf("%d of %d: %d%%, want %d%%", in[0], in[1], got, want)
		}
	}
}

// TestUnitInferred checks that no card has 1024 GiB or more, and none less than 1024 MiB.
func TestUnitInferred(t *testing.T) {
	for memory, want := range map[int64]string{15: "GiB", 1023: "GiB", 1024: "MiB", 16276: "MiB"} {
		node := Build(objects([]nodeBuilder{legacyNode("n", "10.0.0.1", memory)})).Nodes[0]
		if node.Unit.String() != want || !node.UnitInferred {
			t.Errorf("cards of %d: unit %s (inferred: %v), want %s", memory, node.Unit, node.UnitInferred, want)
		}
	}
}

func TestShorten(t *testing.T) {
	for name, test := range map[string]struct{ in, want string }{
		"a short message": {"0/1 nodes are available: 1 full.", "0/1 nodes are available: 1 full."},
		"the part on preemption is removed": {
			"0/1 nodes are available: 1 full. preemption: 0/1 nodes are available: 1 No victims.", "0/1 nodes are available: 1 full.",
		},
		"other plugins' messages before it are removed": {
			"0/1 nodes are available: 1 full. no new claims to deallocate, preemption: 0/1 nodes are available: 1 No victims.", "0/1 nodes are available: 1 full.",
		},
		"a long message is cut between characters": {strings.Repeat("ü", 301), strings.Repeat("ü", 299) + "…"},
		"a message at the limit is not cut":        {strings.Repeat("ü", 300), strings.Repeat("ü", 300)},
	} {
		if got := shorten(test.in); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}
