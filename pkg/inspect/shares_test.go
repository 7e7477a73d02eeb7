package inspect

import (
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

func TestShares(t *testing.T) {
	invalid := newPod("i", 3).in("bob")
	invalid.Labels = map[string]string{protocol.LabelCount: "x"}
	api := newFakeAPI(t, objects([]nodeBuilder{inventoryNode(t, "n1", "10.0.0.1", gpu.GiB, t4(0, 16), t4(1, 16))},
		newPod("a", 10).in("alice").on("n1", 0), newPod("b", 6).in("bob").on("n1", 0), newPod("c", 16).in("bob").on("n1", 1),
		newPod("d", 4).in("alice").gated(protocol.GateFairShare), newPod("e", 17).in("alice").gated(protocol.GateFairShare), newPod("f", 8).in("carol"),
		newPod("g", 2).in("alice").gated("example.com/quota"), newPod("h", 2).in("free"), invalid))
	namespace := func(name string, labels, annotations map[string]string) {
		api.put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels, Annotations: annotations}})
	}
	namespace("alice", map[string]string{"team": "x"}, map[string]string{protocol.AnnotationFairShareWeight: "2"})
	namespace("bob", map[string]string{"team": "x"}, map[string]string{protocol.AnnotationFairShareGuaranteed: "4"})
	namespace("carol", nil, map[string]string{protocol.AnnotationFairShareWeight: "much"})
	namespace("free", map[string]string{protocol.LabelFairShare: protocol.FairShareOff}, nil)
	problem := "namespace carol: annotation gpushare.aliyun.com/fair-share-weight: \"much\" is not a whole number from 1 to 1000000: the default value is used\n"

	byLabel := `
TENANT  WEIGHT  GUARANTEED  SHARE  ALLOCATED  WAITING  PODS WAITING  NEXT POD
<none>  1       0           8      0          8        1             cards are full
x       2       4           24     32         21       2             cards are full
`
	off := "Fair sharing is off: these are the shares with --fair-share=dispatch.\n"
	extender := func(created int64, args ...string) *corev1.Pod {
		p := newPod("extender", 0).in("kube-system").bound("n1").phase(corev1.PodRunning)
		p.Labels, p.CreationTimestamp = map[string]string{"app.kubernetes.io/component": "extender"}, metav1.Unix(created, 0)
		p.Spec.Containers[0].Name, p.Spec.Containers[0].Args = extenderContainer, args
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: extenderContainer, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
		return p.Pod
	}
	crashing := extender(3)
	crashing.Status.ContainerStatuses[0].State = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}
	unknown := "No pod of the extender is running, so its flags aren't known: these are the shares with the defaults.\n"
	for name, test := range map[string]struct {
		args      []string
		extenders []*corev1.Pod
		remark    string
		want      string
	}{
		"by namespace": {nil, nil, unknown, `
TENANT  WEIGHT  GUARANTEED  SHARE  ALLOCATED  WAITING  PODS WAITING  NEXT POD
alice   2       0           14     10         21       2             cards are full
bob     1       4           11     22         0        0             -
carol   1       0           7      0          8        1             cards are full
`},
		"by a label":                    {[]string{"--fair-share-by=label:team"}, nil, unknown, byLabel},
		"an extender that can't start":  {[]string{"--fair-share-by=label:team"}, []*corev1.Pod{crashing}, unknown, byLabel},
		"fair sharing is off":           {[]string{"--fair-share-by=label:team"}, []*corev1.Pod{extender(1, "--fair-share=off")}, off, byLabel},
		"fair sharing was never on":     {[]string{"--fair-share-by=label:team"}, []*corev1.Pod{extender(1)}, off, byLabel},
		"by the newest extender's flag": {nil, []*corev1.Pod{extender(2, "-v=2", "--leader-elect", "--fair-share=dispatch", "--fair-share-by=label:team"), extender(1)}, "", byLabel},
		"pods above the cutoff are free": {nil, []*corev1.Pod{extender(1, "--fair-share=reclaim", "--fair-share-priority-cutoff=0")},
			"Pods without a priority need no turn, because --fair-share-priority-cutoff is 0: raise it (default 2000000000).\n", `
TENANT  WEIGHT  GUARANTEED  SHARE  ALLOCATED  WAITING  PODS WAITING  NEXT POD
alice   2       0           10     10         0        0             -
bob     1       4           22     22         0        0             -
`},
	} {
		for i, pod := range test.extenders {
			pod.Name += strconv.Itoa(i)
			api.put(pod)
		}
		out, errOut, err := execute(t, api, append(test.args, "--shares")...)
		check.Must(t, err)
		for _, pod := range test.extenders {
			api.remove(pod)
		}
		if diff := cmp.Diff(strings.TrimPrefix(test.want, "\n"), out); diff != "" || errOut != problem+test.remark {
			t.Errorf("%s: stderr %q (-want +got)\n%s", name, errOut, diff)
		}
	}
	out, _, err := execute(t, api, "--shares", "-o", "json")
	var shares Shares
	if err != nil || json.Unmarshal([]byte(out), &shares) != nil || shares.Kind != SharesKind || shares.Total != 32 || len(shares.Tenants) != 3 {
		t.Errorf("%v: %s", err, out)
	}
	for _, args := range [][]string{{"--shares", "--pending"}, {"--shares", "n1"}, {"--shares", "--fair-share-by=team"}, {"--shares", "--fair-share-by=label:"}, {"--fair-share-by=namespace"}} {
		if _, _, err := execute(t, api, args...); err == nil {
			t.Errorf("%v is accepted", args)
		}
	}
	empty := newFakeAPI(t, objects(nil))
	if out, errOut, err := execute(t, empty, "--shares"); out != "" || errOut != "No tenant has or asks for GPU memory.\n"+unknown || err != nil {
		t.Errorf("an empty cluster: %q %q %v", out, errOut, err)
	}
}

// TestSharesProblems: settings with which no tenant gets what its administrator meant are reported.
func TestSharesProblems(t *testing.T) {
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: "alice", Labels: map[string]string{"team": "x"}, Annotations: map[string]string{protocol.AnnotationFairShareGuaranteed: "32768"},
	}}
	nodes := []nodeBuilder{inventoryNode(t, "n1", "10.0.0.1", gpu.GiB, t4(0, 16), t4(1, 16)), legacyNode("n2", "10.0.0.2", 16)}
	const guaranteed = "tenant alice: its guaranteed amount of 32768 units is more than the cluster's 48: write it in units of aliyun.com/gpu-mem"
	for name, test := range map[string]struct {
		nodes []nodeBuilder
		label string
		want  []string
	}{
		"a guaranteed amount in MiB": {nodes, "", []string{guaranteed}},
		"a label that no namespace has": {nodes, "taem", []string{
			"no namespace has the label taem of --fair-share-by, so all are one tenant", strings.Replace(guaranteed, "alice", "<none>", 1),
		}},
		"a node with another unit": {append([]nodeBuilder{inventoryNode(t, "n3", "10.0.0.3", gpu.MiB, t4(0, 16<<10))}, nodes...), "", []string{
			"nodes have different units of GPU memory, so the same request means different amounts: MiB (n3), GiB (n1, n2); give all the same devicePlugin.memoryUnit",
			strings.Replace(guaranteed, "48", "16432", 1),
		}},
		"no nodes yet": {nil, "team", []string{}},
	} {
		settings := ShareSettings{Label: test.label, PriorityCutoff: dispatch.DefaultPriorityCutoff}
		shares := BuildShares(objects(test.nodes, newPod("p", 1).in("alice")), []*corev1.Namespace{namespace}, settings, time.Now())
		check.Equal(t, name, test.want, shares.Problems)
	}
}

// A group counts as a whole, as in the extender: not while members are missing, and not if it is larger than the cluster.
func TestSharesOfGroups(t *testing.T) {
	member := func(namespace, name string, request int64, size int) podBuilder {
		return newPod(name, request).in(namespace).gated(protocol.GateFairShare).member("g", size)
	}
	objects := objects([]nodeBuilder{inventoryNode(t, "n1", "10.0.0.1", gpu.GiB, t4(0, 16), t4(1, 16))},
		member("incomplete", "a", 8, 3), member("incomplete", "b", 8, 3),
		member("large", "c", 16, 3), member("large", "d", 16, 3), member("large", "e", 16, 3),
		member("whole", "f", 8, 2), member("whole", "g", 8, 2))
	var namespaces []*corev1.Namespace
	for _, name := range []string{"incomplete", "large", "whole"} {
		namespaces = append(namespaces, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	causes := map[string]string{}
	shares := func(settings ShareSettings) map[string]gpu.Memory {
		settings.PriorityCutoff = dispatch.DefaultPriorityCutoff
		out := map[string]gpu.Memory{}
		for _, tenant := range BuildShares(objects, namespaces, settings, time.Now()).Tenants {
			out[tenant.Name], causes[tenant.Name] = tenant.Share, tenant.Cause
		}
		return out
	}
	check.Equal(t, "the result", map[string]gpu.Memory{"large": 0, "whole": 16}, shares(ShareSettings{}))
	check.Equal(t, "causes", map[string]string{"large": reasons.ObstacleNeverFits.String(), "whole": reasons.Fits.Words()}, causes)
	if diff := cmp.Diff(map[string]gpu.Memory{"incomplete": 11, "large": 11, "whole": 10}, shares(ShareSettings{WithoutGroups: true})); diff != "" {
		t.Errorf("without groups (-want +got)\n%s", diff)
	}
}
