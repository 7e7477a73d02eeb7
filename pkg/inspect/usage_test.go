package inspect

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
)

// pluginPod returns a device plugin's pod that serves its measured use at this port.
func pluginPod(node string, port int32) podBuilder {
	p := newPod("plugin-"+node, 0).in("gpushare").bound(node)
	p.Labels = map[string]string{"app.kubernetes.io/component": "device-plugin"}
	p.Spec.Containers[0].Ports = []corev1.ContainerPort{
		{Name: "metrics", ContainerPort: 12346}, {Name: protocol.PortUsage, ContainerPort: port}}
	return p
}

const mib = 1 << 20

var measuredAt = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

func usageOf(node string, containers ...protocol.ContainerUsage) protocol.Usage {
	return protocol.Usage{
		APIVersion: protocol.UsageAPIVersion, Kind: protocol.UsageKind, Node: node, Time: measuredAt, IntervalSeconds: 10, Problems: []string{},
		Cards: []protocol.CardUsage{{Index: 0, UUID: "GPU-0", Used: 900 * mib, Pods: 500 * mib}}, Containers: containers,
	}
}

func TestUsageTable(t *testing.T) {
	limit := uint64(512 * mib)
	a := usageOf("n1",
		protocol.ContainerUsage{Namespace: "team", Pod: "small", UID: "1", Container: "main", Processes: 1, Used: 100*mib + 1, Requested: 512 * mib, Limit: &limit},
		protocol.ContainerUsage{Namespace: "team", Pod: "greedy", UID: "2", Container: "main", Processes: 2, Used: 700 * mib, Requested: 512 * mib, Incomplete: true},
		protocol.ContainerUsage{Namespace: "team", Pod: "notebook", UID: "4", Container: "main", Processes: 1, Used: 600 * mib, Requested: 512 * mib, Allowed: 1024 * mib},
		protocol.ContainerUsage{UID: "static", Processes: 1, Used: 300 * mib},
		protocol.ContainerUsage{Namespace: "team", Pod: "loose", UID: "3", Container: "main", Requested: 512 * mib, NotInForce: "its cgroup has no limit"})
	b := usageOf("n2")
	b.Cards[0].Host, b.Cards[0].Unresolved, b.Cards[0].MPS = 20*mib, 1, 30*mib
	b.Cards = append(b.Cards, protocol.CardUsage{Index: 1, UUID: "GPU-1", Problem: "reading its memory: GPU is lost"})
	b.Problems = []string{"no hostPID"}
	report := UsageReport{Nodes: []protocol.Usage{a, b}}
	for name, test := range map[string]struct {
		report UsageReport
		format format
		want   string
	}{
		"those above their limit come first, then those that borrow": {report, format{}, `
NAMESPACE  POD         CONTAINER  NODE  CARD  USED(MiB)  REQUESTED(MiB)  LIMIT(MiB)  OVER(MiB)  BORROWED(MiB)
-          uid:static  -          n1    GPU0  300        0               -           +300       -
team       greedy      main       n1    GPU0  700+?      512             -           +188       -
team       notebook    main       n1    GPU0  600        512             1024        -          88
team       small       main       n1    GPU0  101        512             512         -          -
team       loose       main       n1    GPU0  0          512             not held    -          -

Other Use:
NODE  CARD  USED(MiB)  PODS(MiB)  HOST(MiB)  UNRESOLVED(MiB)  MPS(MiB)
n2    GPU0  900        500        20         1                30

Problems:
NODE  PROBLEM
n1    container main of pod team/loose: its cgroup has no limit
n2    no hostPID
n2    GPU1: reading its memory: GPU is lost
`},
		"rows only": {report, format{rowsOnly: true}, `
-     uid:static  -     n1  GPU0  300    0    -         +300  -
team  greedy      main  n1  GPU0  700+?  512  -         +188  -
team  notebook    main  n1  GPU0  600    512  1024      -     88
team  small       main  n1  GPU0  101    512  512       -     -
team  loose       main  n1  GPU0  0      512  not held  -     -
`},
		"nothing in use": {UsageReport{Nodes: []protocol.Usage{usageOf("n3")}}, format{wide: true}, `
No container uses GPU memory or has a card.

Other Use:
NODE  CARD  USED(MiB)  PODS(MiB)  HOST(MiB)  UNRESOLVED(MiB)  MPS(MiB)
n3    GPU0  900        500        0          0                0
`},
		"no node could be asked": {UsageReport{Nodes: []protocol.Usage{{Node: "n4", Problems: []string{"asking the device plugin: forbidden"}}}}, format{}, `
No container is known to use GPU memory: not all nodes could be measured.

Problems:
NODE  PROBLEM
n4    asking the device plugin: forbidden
`},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			writeUsage(&out, test.report, test.format)
			check.Equal(t, "the result", strings.TrimPrefix(test.want, "\n"), out.String())
		})
	}
}

func TestUsageSource(t *testing.T) {
	leaving := pluginPod("n4", 1).terminating()
	api := fake.NewClientset(pluginPod("n2", 12347).Pod, pluginPod("n1", 12347).Pod, pluginPod("n3", 12347).Pod, leaving.Pod, newPod("other", 1).on("n1", 0).Pod)
	source := usageSource{
		client: api, now: func() time.Time { return measuredAt.Add(31 * time.Second) },
		fetch: func(_ context.Context, plugin *corev1.Pod, port int) (protocol.Usage, error) {
			if port != 12347 {
				t.Errorf("port %d", port)
			}
			if plugin.Spec.NodeName == "n3" {
				return protocol.Usage{}, errors.New("connection refused")
			}
			return usageOf(plugin.Spec.NodeName), nil
		},
	}
	problems := func(scope scope) map[string][]string {
		t.Helper()
		source.scope = scope
		report, err := source.Read(t.Context())
		check.Must(t, err)
		out := map[string][]string{}
		for _, node := range report.Nodes {
			out[node.Node] = node.Problems
		}
		return out
	}
	old := "measured 31s ago: the driver doesn't answer, or the clocks differ"
	if diff := cmp.Diff(map[string][]string{
		"n1": {old}, "n2": {old}, "n3": {"asking the device plugin (pod gpushare/plugin-n3): connection refused"},
	}, problems(scope{})); diff != "" {
		t.Errorf("all nodes: -want +got:\n%s", diff)
	}
	source.now = func() time.Time { return measuredAt.Add(29 * time.Second) }
	check.Equal(t, "one node", map[string][]string{"n2": {}}, problems(scope{nodes: []string{"n2"}}))
	source.scope = scope{nodes: []string{"n9"}}
	if _, err := source.Read(t.Context()); !errors.Is(err, errNoUsage) {
		t.Errorf("without a plugin: %v", err)
	}
}

// serveForward makes the API server forward ports of pods to addresses of this machine, by SPDY.
func serveForward(t *testing.T, api *fakeAPI, target string) {
	next := api.Config.Handler
	api.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, "/portforward") {
			next.ServeHTTP(w, r)
			return
		}
		if _, err := httpstream.Handshake(r, w, []string{"portforward.k8s.io"}); err != nil {
			return
		}
		var failures httpstream.Stream // SPDY delivers the streams one after the other.
		connection := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(stream httpstream.Stream, replied <-chan struct{}) error {
			if stream.Headers().Get(corev1.StreamType) == corev1.StreamTypeError {
				failures = stream
				return nil
			}
			go func() {
				<-replied
				defer stream.Close()
				defer failures.Close()
				plugin, err := net.Dial("tcp", target)
				if err != nil {
					_, _ = io.WriteString(failures, "the kubelet's error")
					return
				}
				defer plugin.Close()
				go func() { _, _ = io.Copy(plugin, stream) }()
				_, _ = io.Copy(stream, plugin)
			}()
			return nil
		})
		if connection != nil {
			<-connection.CloseChan()
		}
	})
}

// TestUsageUnreached: if no node can be asked, the report has the reasons, and the command fails.
func TestUsageUnreached(t *testing.T) {
	api := fake.NewClientset(pluginPod("n1", 1).Pod, pluginPod("n2", 2).Pod)
	down := map[int]bool{1: true}
	source := usageSource{client: api, now: time.Now, fetch: func(_ context.Context, plugin *corev1.Pod, port int) (protocol.Usage, error) {
		if down[port] {
			return protocol.Usage{}, errors.New("connection refused")
		}
		return usageOf(plugin.Spec.NodeName), nil
	}}
	var out bytes.Buffer
	o := &options{connection: genericclioptions.NewConfigFlags(false), streams: genericclioptions.IOStreams{Out: &out, ErrOut: io.Discard}}
	if err := o.printUsage(t.Context(), source); err != nil {
		t.Errorf("one of two nodes answers: %v", err)
	}
	down[2] = true
	out.Reset()
	if err := o.printUsage(t.Context(), source); !errors.Is(err, errUnreached) || !strings.Contains(out.String(), "connection refused") {
		t.Errorf("no node answers: %v\n%s", err, out.String())
	}
}

func TestUsageByPortForward(t *testing.T) {
	plugin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/usage" {
			http.NotFound(w, r)
			return
		}
		usage := usageOf("n1", protocol.ContainerUsage{Namespace: "team", Pod: "p", Container: "c", Used: mib},
			protocol.ContainerUsage{Namespace: "other", Pod: "q", Container: "c", Used: mib})
		usage.Time = time.Now()
		_ = json.NewEncoder(w).Encode(usage)
	}))
	defer plugin.Close()
	api := newFakeAPI(t, Objects{Pods: []*corev1.Pod{pluginPod("n1", 12347).Pod}})
	serveForward(t, api, plugin.Listener.Addr().String())
	stdout, stderr, err := execute(t, api, "--usage", "-n", "team", "--no-headers")
	if want := "team  p  c  n1  GPU0  1  0  -  +1  -\n"; err != nil || stdout != want || stderr != "" {
		t.Errorf("got %q, %q, %v", stdout, stderr, err)
	}
	stdout, _, err = execute(t, api, "--usage", "-o", "json")
	var report UsageReport
	if err := errors.Join(err, json.Unmarshal([]byte(stdout), &report)); err != nil || report.Kind != UsageKind || len(report.Nodes[0].Containers) != 2 {
		t.Errorf("got %s, %v", stdout, err)
	}

	stdout, stderr, err = execute(t, api, "--usage", "--no-headers", "n1", "n2")
	if want := "Node \"n2\" has no running device plugin that serves measured use.\n"; err != nil || strings.Count(stdout, "\n") != 2 || stderr != want {
		t.Errorf("a node without a plugin: got %q, %q, %v", stdout, stderr, err)
	}

	plugin.Close()
	stdout, _, err = execute(t, api, "--usage")
	if !errors.Is(err, errUnreached) || !strings.Contains(stdout, "asking the device plugin (pod gpushare/plugin-n1): the kubelet's error") {
		t.Errorf("got %s, %v", stdout, err)
	}
}

func TestUsageWatch(t *testing.T) {
	out, errOut := newOutput(), newOutput()
	o := &options{watch: true, pause: time.Millisecond}
	o.streams.Out, o.streams.ErrOut = out, errOut
	o.connection = genericclioptions.NewConfigFlags(true)
	readings := 0
	source := usageSource{
		client: fake.NewClientset(pluginPod("n1", 12347).Pod), now: time.Now,
		fetch: func(context.Context, *corev1.Pod, int) (protocol.Usage, error) {
			readings++
			return usageOf("n1", protocol.ContainerUsage{Namespace: "team", Pod: "p", Container: "c", Used: uint64(readings) * mib}), nil
		},
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- o.printUsage(ctx, source) }()
	out.waitFor(t, "second reading", func(text string) bool {
		return strings.Contains(text, "========") && strings.Contains(text, "GPU0  2 ")
	})
	stop()
	check.NoError(t, <-ended)
}
