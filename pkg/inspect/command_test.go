package inspect

import (
	"context"
	"errors"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/test/check"
)

func TestCommand(t *testing.T) {
	type testCase struct {
		objects        func(*testing.T) Objects
		args           []string
		stdout, stderr string
		err            string
	}
	tests := map[string]testCase{
		"without arguments: the whole cluster": {
			objects: twoNodes,
			stdout: `
NAME              IPADDRESS     GPU0(Allocated/Total)  GPU Memory(GiB)
cn-beijing.i-2ze  192.168.0.70  0/15                   0/15

NAME                   IPADDRESS     GPU0(Allocated/Total)  GPU1(Allocated/Total)  GPU Memory(GiB)
cn-shanghai.i-uf61h64  192.168.0.71  0/15                   9/15                   9/30
--------------------------------------------------------------------------------------------------
Largest Free Piece: 15 GiB of 36 GiB free, on cn-beijing.i-2ze and 1 other node
Allocated/Total GPU Memory In Cluster:
9/45 (20%)
`,
		},
		"a pod on a deleted node, and labelled nodes without cards": {
			objects: absent,
			stdout: `
NAME  IPADDRESS  PENDING(Allocated)  GPU Memory(MiB)
gone  unknown    4000                4000/0

NAME  IPADDRESS  GPU0(Allocated/Total)  PENDING(Allocated)  GPU Memory(MiB)
n     10.0.0.1   2000/16276                                 2000/16276
---------------------------------------------------------------------------
Largest Free Piece: 14276 MiB of 14276 MiB free, on n
Allocated/Total GPU Memory In Cluster:
2000/16276 (12%)

Problems:
NODE   PROBLEM
gone   the node is gone, but pods are bound to it
gone   pods hold 4000 units of GPU memory there
empty  the label gpushare=true is set, but the node has no cards to share: its device plugin reports none
pool   the label gpushare=pool-b is set, but the node has no cards to share: its device plugin reports none
`,
		},
		"pods that were bound without the extender, while none is pending": {
			objects: bypassed, args: []string{"--pending"}, stderr: "No pod waits for GPU memory.\n",
			stdout: "\nProblem: 2 pods were bound without the extender: is default-scheduler configured to call it?\n",
		},
		"details of pods that were bound without the extender": {
			objects: bypassed, args: []string{"-d"},
			stdout: `
NAME:       n
IPADDRESS:  10.0.0.1
UNIT:       GiB

NAMESPACE    NAME         GPU0(Allocated)  STATUS
default      by-extender  1                Running
default      new          2                Running, no card chosen, bound without the extender, counted on GPU0
default      nodename     3                Running, no card chosen, counted on GPU0
default      served       4                Running, bound without the extender
Allocated :  10 (62%)
Total :      16
---------------------------------------------------------------------------------------------------------------

Largest Free Piece: 6 GiB of 6 GiB free, on n
Allocated/Total GPU Memory In Cluster:  10/16 (62%)

Problem: 2 pods were bound without the extender: is default-scheduler configured to call it?
`,
		},
		"a deleted node by name": {
			objects: absent, args: []string{"node/gone", "--no-headers"}, stdout: "\ngone  unknown  4000  4000/0\n",
		},
		"deleted nodes alone": {
			objects: func(t *testing.T) Objects {
				return objects(nil, newPod("p", 8).on("a", 0), newPod("q", 4000).on("b", 0))
			},
			args: []string{"--no-headers"}, stdout: "\na  unknown  8     8/0\nb  unknown  4000  4000/0\n",
		},
		"names leave out deleted nodes": {objects: absent, args: []string{"-o", "name"}, stdout: "\nnode/n\n"},
		"a node by name, without pending pods": {
			objects: trouble, args: []string{"node-c", "--no-headers"},
			stdout: "\nnode-c  10.0.0.3  6/16  6/16\n",
		},
		"nodes as kubectl names them": {
			objects: trouble, args: []string{"nodes/node-b", "no/node-a", "node/node-b", "-o", "name"},
			stdout: "\nnode/node-a\nnode/node-b\n",
		},
		"something else than a node": {
			objects: nothing, args: []string{"pod/p"}, err: `"pod/p" is not a node: want NAME or node/NAME`,
		},
		"the sum of a node": {
			objects: twoNodes, args: []string{"cn-beijing.i-2ze"},
			stdout: `
NAME              IPADDRESS     GPU0(Allocated/Total)  GPU Memory(GiB)
cn-beijing.i-2ze  192.168.0.70  0/15                   0/15
----------------------------------------------------------------------
Largest Free Piece: 15 GiB of 15 GiB free, on cn-beijing.i-2ze
Allocated/Total GPU Memory On Node cn-beijing.i-2ze:
0/15 (0%)
`,
		},
		"details of one namespace": {
			objects: twoNodes, args: []string{"cn-shanghai.i-uf61h64", "-d", "-n", "ml"},
			stdout: `
NAME:       cn-shanghai.i-uf61h64
IPADDRESS:  192.168.0.71
UNIT:       GiB

NAMESPACE    NAME         GPU0(Allocated)  GPU1(Allocated)
ml           binpack-1-b  0                2
Allocated :  9 (30%)
Total :      30
----------------------------------------------------------

Largest Free Piece: 15 GiB of 21 GiB free, on cn-shanghai.i-uf61h64
Allocated/Total GPU Memory On Node cn-shanghai.i-uf61h64:  9/30 (30%)
`,
		},
		"-A overrules -n": {
			objects: trouble, args: []string{"--pending", "-o", "name", "-n", "ml", "-A"},
			stdout: "\npod/waiting\npod/fresh\n",
		},
		"nodes by label": {
			objects: func(t *testing.T) Objects {
				return objects([]nodeBuilder{
					legacyNode("a", "10.0.0.1", 16).labelled("pool", "t4"),
					legacyNode("b", "10.0.0.2", 80).labelled("pool", "a100"),
				}, newPod("waiting", 5), newPod("x", 5).on("b", 0))
			},
			args: []string{"-l", "pool=a100"},
			stdout: `
NAME  IPADDRESS  GPU0(Allocated/Total)  GPU Memory(GiB)
b     10.0.0.2   5/80                   5/80
-------------------------------------------------------
Largest Free Piece: 75 GiB of 75 GiB free, on b
Allocated/Total GPU Memory On Selected Nodes:
5/80 (6%)
`,
		},
		"a node that doesn't exist": {
			objects: twoNodes, args: []string{"nowhere"},
			err: `nodes "nowhere" not found`,
		},
		"a node without GPUs": {
			objects: twoNodes, args: []string{"no-gpu"},
			stderr: "Node \"no-gpu\" shares no GPU memory: it does not offer aliyun.com/gpu-mem.\n",
		},
		"a cluster without GPUs": {
			objects: func(t *testing.T) Objects {
				return objects([]nodeBuilder{plainNode("a", "10.0.0.1")}, newPod("waiting", 5).refused("0/1 nodes are available."))
			},
			stdout: `
Pending Pods:
NAMESPACE  NAME     REQUEST  CAUSE    WHY
default    waiting  5        no_node  no node shares GPU memory
`,
			stderr: "No node shares GPU memory: none offers aliyun.com/gpu-mem.\n",
		},
		"a selector that matches no node with GPUs": {
			objects: twoNodes, args: []string{"-l", "pool=none", "-o", "wide"},
			stderr: "No selected node shares GPU memory: none offers aliyun.com/gpu-mem.\n",
		},
		"an output that doesn't exist": {
			objects: nothing, args: []string{"-o", "xml"},
			err: `--output "xml": want wide, json, yaml or name`,
		},
		"--no-headers with --details": {
			objects: nothing, args: []string{"-d", "--no-headers"},
			err: "--no-headers applies to tables only: it can't be used with --details, -o json or -o yaml",
		},
		"names for other commands": {
			objects: twoNodes, args: []string{"-o", "name"},
			stdout: "\nnode/cn-beijing.i-2ze\nnode/cn-shanghai.i-uf61h64\n",
		},
		"pending pods": {
			objects: func(t *testing.T) Objects { return split(t, newPod("piece", 12), newPod("other", 1).in("ml")) },
			args:    []string{"--pending", "-n", "default"},
			stdout: `
NAMESPACE  NAME   REQUEST  CAUSE       WHY
default    piece  12       fragmented  12 GiB free on n1, but the largest piece is 7 GiB: a pod gets one card
`,
		},
		"a pod that should have ended long ago makes no room": {
			objects: func(t *testing.T) Objects {
				return split(t, newPod("e", 16).on("n2", 1).terminating(), newPod("p", 16).with(func(p *corev1.Pod) {
					p.Status.NominatedNodeName, p.Spec.Priority = "n2", new(int32(1))
				}))
			},
			args:   []string{"--pending", "--no-headers"},
			stdout: "\ndefault  p  16  full  the cards that are large enough are taken: the largest free piece is 7 GiB, on n1\n",
		},
		"no pending pods": {
			objects: twoNodes, args: []string{"--pending"}, stderr: "No pod waits for GPU memory.\n",
		},
		"--pending with a node": {
			objects: twoNodes, args: []string{"--pending", "cn-beijing.i-2ze"},
			err: "--pending shows pods that have no node: it can't be used with --details, node names or --selector",
		},
		"a color that doesn't exist": {
			objects: twoNodes, args: []string{"--color", "blue"},
			err: `--color "blue": want auto, always or never`,
		},
		"node names and a selector": {
			objects: nothing, args: []string{"a", "-l", "b=c"},
			err: "nodes can be selected by name or by --selector, not by both",
		},
		"a selector that can't be parsed": {
			objects: nothing, args: []string{"-l", "a=("}, err: "--selector: unable to parse requirement: found '(', expected: identifier",
		},
		"a flag that doesn't exist": {
			objects: nothing, args: []string{"--nonsense"},
			err: "unknown flag: --nonsense\nSee 'kubectl inspect gpushare -h' for help",
		},
		"the version": {
			objects: nothing, args: []string{"--version"},
			stdout: "\nkubectl inspect gpushare version v1.2.3\n",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			stdout, stderr, err := execute(t, newFakeAPI(t, test.objects(t)), test.args...)
			got := testCase{stdout: stdout, stderr: stderr}
			if err != nil {
				got.err = err.Error()
			}
			want := testCase{stdout: strings.TrimPrefix(test.stdout, "\n"), stderr: test.stderr, err: test.err}
			check.Equal(t, "result", want, got, cmp.AllowUnexported(testCase{}))
		})
	}
}

func TestReadPages(t *testing.T) {
	var nodes []nodeBuilder
	var pods []podBuilder
	for name := range strings.FieldsSeq("a b c d e f g") {
		nodes = append(nodes, legacyNode(name, "10.0.0.1", 16))
		pods = append(pods, newPod("on-"+name, 2).on(name, 0), newPod("ended-"+name, 2).on(name, 0).phase(corev1.PodFailed))
	}
	api := newFakeAPI(t, objects(nodes, pods...))
	api.maxPage = 3

	stdout, _, err := execute(t, api)
	if err != nil || !strings.HasSuffix(stdout, "\n14/112 (12%)\n") {
		t.Errorf("%v\n%s", err, stdout)
	}
	pages := 0
	for _, request := range api.seen() {
		if strings.HasPrefix(request, "/api/v1/pods?") {
			pages++
			if !strings.Contains(request, "status.phase") {
				t.Errorf("ended pods were asked for too: %s", request)
			}
		}
	}
	if pages != 3 {
		t.Errorf("%d pages of pods, want 3: %v", pages, api.seen())
	}
}

func TestReadOneNode(t *testing.T) {
	api := newFakeAPI(t, twoNodes(t))
	if _, _, err := execute(t, api, "cn-beijing.i-2ze"); err != nil {
		t.Fatal(err)
	}
	for _, request := range api.seen() {
		if strings.Contains(request, "/pods?") && !strings.Contains(request, "spec.nodeName%3Dcn-beijing.i-2ze") {
			t.Errorf("asked for more than the node's pods: %s", request)
		}
	}
}

func TestAPIServerRejects(t *testing.T) {
	api := newFakeAPI(t, twoNodes(t))
	api.answerWith(http.StatusForbidden)
	for _, args := range [][]string{nil, {"-w"}} {
		stdout, _, err := execute(t, api, args...)
		if err == nil || !strings.HasPrefix(err.Error(), "listing ") || !strings.Contains(err.Error(), "viewer.yaml") || stdout != "" {
			t.Errorf("%v: error %v, output %q", args, err, stdout)
		}
	}
	api.answerWith(http.StatusUnauthorized)
	if _, _, err := execute(t, api); err == nil || !strings.Contains(err.Error(), "doesn't accept your credentials") {
		t.Errorf("error %v", err)
	}
}

// TestOneNamespace checks the output for a user with rights in one namespace only.
func TestOneNamespace(t *testing.T) {
	api := newFakeAPI(t, split(t,
		newPod("mine", 12).in("ml").refused("0/2 nodes are available: 2 no GPU card has enough free memory. preemption: not helpful."),
		newPod("other", 1),
	))
	pending := func(args ...string) (stdout, stderr string) {
		t.Helper()
		stdout, stderr, err := execute(t, api, append(args, "--pending", "-n", "ml", "--no-headers")...)
		check.NoError(t, err)
		return stdout, stderr
	}
	const full = "ml  mine  12  fragmented  12 GiB free on n1, but the largest piece is 7 GiB: a pod gets one card\n"
	if stdout, stderr := pending(); stdout != full || stderr != "" {
		t.Errorf("with rights in all namespaces: %q, %q", stdout, stderr)
	}
	api.namespace = "ml"
	if stdout, stderr := pending(); stdout != "ml  mine  12  full  0/2 nodes are available: 2 no GPU card has enough free memory\n" || stderr != notSeen+"\n" {
		t.Errorf("with rights in one namespace: %q, %q", stdout, stderr)
	}
	for _, args := range [][]string{nil, {"-n", "ml"}, {"--pending"}, {"-w"}} {
		_, _, err := execute(t, api, args...)
		if err == nil || !strings.Contains(err.Error(), "use --pending -n NAMESPACE or --groups -n NAMESPACE") {
			t.Errorf("%v: error %v", args, err)
		}
	}
	for _, mode := range []string{"--pending", "--groups"} {
		_, _, err := execute(t, api, mode, "-n", "other")
		if err == nil || !strings.HasSuffix(err.Error(), "You need the permission to list pods, and PodGroups if pods name them, in namespace other") {
			t.Errorf("%s in another namespace: error %v", mode, err)
		}
	}
}

// TestInterrupt checks that nothing is logged when Ctrl-C cancels a request in the middle of a response.
func TestInterrupt(t *testing.T) {
	logged := newOutput()
	klog.LogToStderr(false)
	klog.SetOutput(logged)
	defer klog.LogToStderr(true)

	for _, args := range [][]string{nil, {"-w"}, {"--groups"}} {
		api := newFakeAPI(t, Objects{})
		api.stalled = make(chan struct{}, 2) // A list of nodes and one of pods.
		ctx, interrupt := context.WithCancel(t.Context())
		out, errOut := newOutput(), newOutput()
		ended := start(ctx, t, api, out, errOut, args...)
		<-api.stalled
		interrupt()
		if err := ended(); !errors.Is(err, ErrInterrupted) {
			t.Errorf("%v: error %v", args, err)
		}
		klog.Flush()
		if text := out.String() + errOut.String() + logged.String(); text != "" {
			t.Errorf("%v: output and log %q", args, text)
		}
	}
}

func TestAPIServerUnreachable(t *testing.T) {
	api := newFakeAPI(t, twoNodes(t))
	api.Close()
	for _, args := range [][]string{nil, {"-w"}, {"some-node"}} {
		stdout, _, err := execute(t, api, args...)
		if err == nil || !strings.Contains(err.Error(), "The API server "+api.URL+" can't be reached") ||
			!strings.Contains(err.Error(), "connection refused") || stdout != "" {
			t.Errorf("%v: error %v, output %q", args, err, stdout)
		}
	}
}

func TestNoClusterConfigured(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	cmd := NewCommand(genericiooptions.NewTestIOStreamsDiscard(), "v1.2.3")
	cmd.SetArgs(nil)
	err := cmd.ExecuteContext(t.Context())
	if err == nil || !strings.HasPrefix(err.Error(), "no cluster is configured") {
		t.Errorf("error %v", err)
	}
}
