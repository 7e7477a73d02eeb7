package inspect

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericiooptions"
)

// output collects what a command writes. It can be read while the command runs.
type output struct {
	mu      sync.Mutex
	text    bytes.Buffer  // Guarded by mu.
	written chan struct{} // Closed at the next write. Guarded by mu.
}

func newOutput() *output { return &output{written: make(chan struct{})} }

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	close(o.written)
	o.written = make(chan struct{})
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// waitFor waits until the condition is true for the whole output.
func (o *output) waitFor(t *testing.T, what string, condition func(string) bool) {
	t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		o.mu.Lock()
		text, written := o.text.String(), o.written
		o.mu.Unlock()
		if condition(text) {
			return
		}
		select {
		case <-written:
		case <-deadline:
			t.Fatalf("no %s within 30 s; written so far:\n%s", what, text)
		}
	}
}

// execute runs the command against the API until it ends.
func execute(t *testing.T, api *fakeAPI, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	out, errOut := newOutput(), newOutput()
	err = start(t.Context(), t, api, out, errOut, args...)()
	return out.String(), errOut.String(), err
}

// start runs the command and returns a function that waits for its end.
func start(ctx context.Context, t *testing.T, api *fakeAPI, out, errOut *output, args ...string) func() error {
	t.Helper()
	return startOn(ctx, t, api, genericiooptions.IOStreams{In: strings.NewReader(""), Out: out, ErrOut: errOut}, args...)
}

func startOn(ctx context.Context, t *testing.T, api *fakeAPI, streams genericiooptions.IOStreams, args ...string) func() error {
	t.Helper()
	cmd := NewCommand(streams, "v1.2.3")
	cmd.SetArgs(append(args, "--kubeconfig", writeKubeconfig(t, api.URL)))
	ended := make(chan error, 1)
	go func() { ended <- cmd.ExecuteContext(ctx) }()
	return func() error {
		t.Helper()
		select {
		case err := <-ended:
			return err
		case <-time.After(30 * time.Second):
			t.Fatal("the command did not end within 30 s")
			return nil
		}
	}
}

func writeKubeconfig(t *testing.T, server string) string {
	t.Helper()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	config := `{"apiVersion":"v1","kind":"Config","current-context":"test",` +
		`"clusters":[{"name":"test","cluster":{"server":"` + server + `"}}],` +
		`"users":[{"name":"test","user":{}}],` +
		`"contexts":[{"name":"test","context":{"cluster":"test","user":"test","namespace":"of-the-context"}}]}`
	if err := os.WriteFile(kubeconfig, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return kubeconfig
}

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
NAME                   IPADDRESS     GPU0(Allocated/Total)  GPU1(Allocated/Total)  GPU Memory(GiB)
cn-beijing.i-2ze       192.168.0.70  0/15                   0/0                    0/15
cn-shanghai.i-uf61h64  192.168.0.71  0/15                   9/15                   9/30
--------------------------------------------------------------------------------------------------
Largest Free Piece: 15 GiB of 36 GiB free, on cn-beijing.i-2ze and 1 other node
Allocated/Total GPU Memory In Cluster:
9/45 (20%)
`,
		},
		"a node by name, without pending pods": {
			objects: trouble, args: []string{"node-c", "--no-headers"},
			stdout: "\nnode-c  10.0.0.3  6/16  6/16\n",
		},
		"two nodes by name": {
			objects: twoNodes, args: []string{"cn-shanghai.i-uf61h64", "cn-beijing.i-2ze", "--no-headers"},
			stdout: `
cn-beijing.i-2ze       192.168.0.70  0/15  0/0   0/15
cn-shanghai.i-uf61h64  192.168.0.71  0/15  9/15  9/30
`,
		},
		"details of one namespace": {
			objects: twoNodes, args: []string{"cn-shanghai.i-uf61h64", "-d", "-n", "ml"},
			stdout: `
NAME:       cn-shanghai.i-uf61h64
IPADDRESS:  192.168.0.71
UNIT:       GiB

NAME         NAMESPACE  GPU0(Allocated)  GPU1(Allocated)
binpack-1-b  ml         0                2
Allocated :  9 (30%)
Total :      30
--------------------------------------------------------

Largest Free Piece: 15 GiB of 21 GiB free, on cn-shanghai.i-uf61h64
Allocated/Total GPU Memory In Cluster:  9/30 (30%)
`,
		},
		"-A overrules -n": {
			objects: trouble, args: []string{"--pending", "-o", "name", "-n", "ml", "-A"},
			stdout: "\npod/waiting\npod/fresh\n",
		},
		"nodes by label": {
			objects: func(t *testing.T) Objects {
				return objects([]nodeBuilder{
					legacyNode(t, "a", "10.0.0.1", 16).labelled("pool", "t4"),
					legacyNode(t, "b", "10.0.0.2", 80).labelled("pool", "a100"),
				}, newPod("waiting", 5), newPod("x", 5).on("b", 0))
			},
			args:   []string{"-l", "pool=a100"},
			stdout: "\n" + oneNode,
		},
		"a node that doesn't exist": {
			objects: twoNodes, args: []string{"nowhere"},
			err: `nodes "nowhere" not found`,
		},
		"a node that exists and one that doesn't": {
			objects: twoNodes, args: []string{"cn-beijing.i-2ze", "nowhere"},
			err: `nodes "nowhere" not found`,
		},
		"a node without GPUs": {
			objects: twoNodes, args: []string{"no-gpu"},
			stderr: "Node \"no-gpu\" shares no GPU memory: it does not offer aliyun.com/gpu-mem.\n",
		},
		"a cluster without GPUs": {
			objects: func(t *testing.T) Objects {
				return objects([]nodeBuilder{plainNode(t, "a", "10.0.0.1")}, newPod("waiting", 5).refused("0/1 nodes are available."))
			},
			stdout: `
Pending Pods:
NAME     NAMESPACE  REQUEST  REASON
waiting  default    5        0/1 nodes are available.
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
		"names of pending pods": {
			objects: trouble, args: []string{"--pending", "-o", "name", "-n", "ml"},
			stdout: "\npod/fresh\n",
		},
		"pending pods": {
			objects: func(t *testing.T) Objects { return split(t, newPod("piece", 12), newPod("other", 1).in("ml")) },
			args:    []string{"--pending", "-n", "default"},
			stdout: `
NAMESPACE  NAME   REQUEST  CAUSE       WHY
default    piece  12       fragmented  12 GiB free on n1, but the largest piece is 7 GiB: a pod gets one card
`,
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
			if diff := cmp.Diff(want, got, cmp.AllowUnexported(testCase{})); diff != "" {
				t.Errorf("result (-want +got):\n%s", diff)
			}
		})
	}
}

const oneNode = `NAME  IPADDRESS  GPU0(Allocated/Total)  GPU Memory(GiB)
b     10.0.0.2   5/80                   5/80
-------------------------------------------------------
Largest Free Piece: 75 GiB of 75 GiB free, on b
Allocated/Total GPU Memory In Cluster:
5/80 (6%)
`

func TestHelp(t *testing.T) {
	stdout, _, err := execute(t, newFakeAPI(t, Objects{}), "-h")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"kubectl inspect gpushare [NODE...]", "-d, --details", "-o, --output", "-w, --watch", "-l, --selector",
		"-A, --all-namespaces", "-n, --namespace", "--no-headers", "--context", "--kubeconfig", "--version",
	} {
		if !strings.Contains(stdout, want) {
			t.Errorf("help lacks %q:\n%s", want, stdout)
		}
	}
}

func TestGatherPages(t *testing.T) {
	var nodes []nodeBuilder
	var pods []podBuilder
	for name := range strings.FieldsSeq("a b c d e f g") {
		nodes = append(nodes, legacyNode(t, name, "10.0.0.1", 16))
		pods = append(pods, newPod("on-"+name, 2).on(name, 0), newPod("ended-"+name, 2).on(name, 0).phase(corev1.PodFailed))
	}
	api := newFakeAPI(t, objects(nodes, pods...))
	api.maxPage = 3

	stdout, _, err := execute(t, api, "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	var report struct {
		Cluster struct{ Allocated, Total int }
	}
	if err := json.Unmarshal([]byte(stdout), &report); err != nil {
		t.Fatal(err)
	}
	if report.Cluster.Allocated != 14 || report.Cluster.Total != 112 {
		t.Errorf("sum: %+v, want 14 of 112", report.Cluster)
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

func TestGatherOneNode(t *testing.T) {
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

func TestCompletion(t *testing.T) {
	api := newFakeAPI(t, twoNodes(t))
	api.put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}})
	api.put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ml"}})
	for name, test := range map[string]struct {
		words []string
		want  string
	}{
		"nodes that share GPU memory": {[]string{""},
			"cn-beijing.i-2ze\ncn-shanghai.i-uf61h64\n:4\n"},
		"nodes not named before":    {[]string{"-d", "cn-beijing.i-2ze", ""}, "cn-shanghai.i-uf61h64\n:4\n"},
		"formats":                   {[]string{"-o", ""}, "wide\njson\nyaml\nname\n:4\n"},
		"colors":                    {[]string{"--color", ""}, "auto\nalways\nnever\n:4\n"},
		"contexts":                  {[]string{"--context", ""}, "test\n:4\n"},
		"namespaces of the cluster": {[]string{"-n", ""}, "default\nml\n:4\n"},
	} {
		t.Run(name, func(t *testing.T) {
			// The kubeconfig comes from the environment, since on the command line it would be another word.
			t.Setenv("KUBECONFIG", writeKubeconfig(t, api.URL))
			out := newOutput()
			cmd := NewCommand(genericiooptions.IOStreams{In: strings.NewReader(""), Out: out, ErrOut: newOutput()}, "v1.2.3")
			cmd.SetArgs(CompletionArgs(test.words))
			if err := cmd.ExecuteContext(t.Context()); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, out.String()); diff != "" {
				t.Errorf("completions (-want +got):\n%s", diff)
			}
		})
	}
	api.Close()
	t.Setenv("KUBECONFIG", writeKubeconfig(t, api.URL))
	out := newOutput()
	cmd := NewCommand(genericiooptions.IOStreams{In: strings.NewReader(""), Out: out, ErrOut: newOutput()}, "v1.2.3")
	cmd.SetArgs(CompletionArgs([]string{""}))
	if err := cmd.ExecuteContext(t.Context()); err != nil || out.String() != ":4\n" {
		t.Errorf("with an unreachable API server: %q, %v", out, err)
	}
}

func TestCompletionScripts(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		out := newOutput()
		cmd := NewCommand(genericiooptions.IOStreams{In: strings.NewReader(""), Out: out, ErrOut: newOutput()}, "v1.2.3")
		cmd.SetArgs([]string{"completion", shell})
		if err := cmd.ExecuteContext(t.Context()); err != nil || !strings.Contains(out.String(), "kubectl-inspect-gpushare") {
			t.Errorf("%s: %v\n%s", shell, err, out)
		}
	}
}

func TestWatch(t *testing.T) {
	const (
		header = "NAME  IPADDRESS  GPU0(Allocated/Total)  GPU Memory(GiB)\n"
		sum    = "Allocated/Total GPU Memory In Cluster:\n"
		next   = "\n========\n\n"
	)
	api := newFakeAPI(t, objects([]nodeBuilder{legacyNode(t, "node", "10.0.0.1", 16)}))
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	out, errOut := newOutput(), newOutput()
	ended := start(ctx, t, api, out, errOut, "-w")

	want := ""
	expect := func(what, table string) {
		t.Helper()
		want += table
		out.waitFor(t, what, func(text string) bool { return len(text) >= len(want) })
		if diff := cmp.Diff(want, out.String()); diff != "" {
			t.Fatalf("%s (-want +got):\n%s", what, diff)
		}
	}
	largest := func(used string) string {
		n, _ := strconv.Atoi(used)
		return fmt.Sprintf("Largest Free Piece: %[1]d GiB of %[1]d GiB free, on node\n", 16-n)
	}
	table := func(used, percent string) string {
		row := "node  10.0.0.1   " + used + "/16" + strings.Repeat(" ", 20-len(used)) + used + "/16\n"
		return header + row + rule(len(header)-1, look{}) + "\n" + largest(used) + sum + used + "/16 (" + percent + "%)\n"
	}
	expect("first table", table("0", "0"))

	pod := newPod("pod", 4)
	api.put(pod.on("node", 0))
	expect("table with the pod", next+table("4", "25"))

	// Changes that are not visible cause no draw. The next table shows all changes.
	api.put(newPod("no-gpu", 0).bound("node"))
	api.put(pod.with(func(p *corev1.Pod) { p.Annotations["other"] = "changed" }))
	api.put(legacyNode(t, "node", "10.0.0.1", 16).labelled("heartbeat", "1"))
	api.put(newPod("pod-2", 8).on("node", 0))
	expect("table with both pods", next+table("12", "75"))

	api.put(pod.terminating())
	api.put(pod.phase(corev1.PodSucceeded))
	expect("table without the pod that ended", next+table("8", "50"))

	api.answerWith(http.StatusServiceUnavailable)
	expect("table with the warning", next+table("8", "50"))
	errOut.waitFor(t, "warning", func(text string) bool {
		return text == "Warning: the API server can't be read, this may be old: it answers 503 Service Unavailable\n"
	})
	api.answerWith(0)
	expect("table without the warning", next+table("8", "50"))

	api.remove(newPod("pod-2", 8))
	expect("empty table", next+table("0", "0"))

	interrupt()
	if err := ended(); err != nil {
		t.Errorf("ended with %v", err)
	}
}

func TestWatchOneNodeJSON(t *testing.T) {
	node := legacyNode(t, "node", "10.0.0.1", 16)
	api := newFakeAPI(t, objects([]nodeBuilder{node, legacyNode(t, "other", "10.0.0.2", 16)}))
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	out, errOut := newOutput(), newOutput()
	ended := start(ctx, t, api, out, errOut, "node", "-w", "-o", "json")

	documents := func(text string) (totals []int) {
		decoder := json.NewDecoder(strings.NewReader(text))
		for {
			var report struct{ Cluster struct{ Total int } }
			if decoder.Decode(&report) != nil {
				return totals
			}
			totals = append(totals, report.Cluster.Total)
		}
	}
	out.waitFor(t, "document", func(text string) bool { return len(documents(text)) == 1 })
	api.put(legacyNode(t, "other", "10.0.0.2", 80)) // Not selected.
	api.put(legacyNode(t, "node", "10.0.0.1", 16, 16))
	out.waitFor(t, "second document", func(text string) bool { return len(documents(text)) == 2 })
	api.remove(node)
	errOut.waitFor(t, "word that the node is gone", func(text string) bool { return text == "Node \"node\" is gone.\n" })
	out.waitFor(t, "third document", func(text string) bool { return len(documents(text)) == 3 })
	interrupt()
	if err := ended(); err != nil {
		t.Errorf("ended with %v", err)
	}
	if diff := cmp.Diff([]int{16, 32, 0}, documents(out.String())); diff != "" {
		t.Errorf("totals (-want +got):\n%s", diff)
	}
}
