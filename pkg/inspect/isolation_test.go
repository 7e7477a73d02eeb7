package inspect

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
)

// TestIsolation: the report has the node's mode, and marks pods whose limit isn't in force or that were started in another mode.
func TestIsolation(t *testing.T) {
	annotated := func(name, value string) *corev1.Pod {
		pod := newPod(name, 1).on("n", 0)
		if value != "" {
			pod.Annotations[protocol.AnnotationIsolation] = value
		}
		return pod.Pod
	}
	pods := []*corev1.Pod{annotated("limited", "driver"), annotated("loose", "driver: container main: its cgroup has no limit"), annotated("old", "")}
	for mode, want := range map[string]map[string][]string{
		"driver": {
			"limited": nil, "loose": {"limit not in force: container main: its cgroup has no limit"},
			"old": {"started without a limit, or not checked yet"},
		},
		"": {
			"limited": {"started with limits by driver"},
			"loose":   {"limit not in force: container main: its cgroup has no limit", "started with limits by driver"},
			"old":     nil,
		},
	} {
		text, err := protocol.Inventory{Unit: gpu.GiB, Cards: []gpu.Card{t4(0, 15)}, Isolation: mode}.Annotation()
		check.Must(t, err)
		object := inventoryNode(t, "n", "10.0.0.1", gpu.GiB, t4(0, 15)).Node
		object.Annotations[protocol.AnnotationInventory] = text
		report := Build(Objects{Nodes: []*corev1.Node{object}, Pods: pods, Now: time.Now()})
		got := map[string][]string{}
		for _, pod := range report.Nodes[0].Pods {
			got[pod.Name] = pod.Notes
		}
		if diff := cmp.Diff(want, got); diff != "" || report.Nodes[0].Isolation != mode {
			t.Errorf("mode %q: %q, -want +got:\n%s", mode, report.Nodes[0].Isolation, diff)
		}
	}
}

// TestLostCard: a pod whose card the node doesn't have any more is marked.
func TestLostCard(t *testing.T) {
	pod := newPod("a", 1).on("n", 0)
	pod.Annotations[protocol.AnnotationLostCards] = "GPU-old"
	report := Build(Objects{Nodes: []*corev1.Node{inventoryNode(t, "n", "10.0.0.1", gpu.GiB, t4(0, 15)).Node}, Pods: []*corev1.Pod{pod.Pod}})
	want := []string{"card GPU-old is not on the node any more, containers can't start again: delete the pod"}
	check.Equal(t, "the result", want, report.Nodes[0].Pods[0].Notes)
}

// TestLongAnnotations: without the guard, users can write these annotations, and a long text would hide the other pods.
func TestLongAnnotations(t *testing.T) {
	long := strings.Repeat("x", 100_000)
	pod := newPod("a", 1).on("n", 0)
	pod.Annotations[protocol.AnnotationLostCards], pod.Annotations[protocol.AnnotationIsolation] = long, long+": "+long
	report := Build(Objects{Nodes: []*corev1.Node{inventoryNode(t, "n", "10.0.0.1", gpu.GiB, t4(0, 15)).Node}, Pods: []*corev1.Pod{pod.Pod}})
	notes := report.Nodes[0].Pods[0].Notes
	if n := len(strings.Join(notes, "")); len(notes) != 3 || n > 4*protocol.MaxText {
		t.Errorf("%d notes of %d bytes, want 3 short ones", len(notes), n)
	}
}

// TestOveruse: a pod that uses more than it requests is marked.
func TestOveruse(t *testing.T) {
	text := protocol.Overuse{Used: 3000, Requested: 1024, Since: measuredAt, At: measuredAt.Add(time.Minute)}.Annotation()
	greedy, broken := newPod("greedy", 1).on("n", 0), newPod("broken", 1).on("n", 0)
	greedy.Annotations[protocol.AnnotationOveruse], broken.Annotations[protocol.AnnotationOveruse] = text, "?"
	report := Build(Objects{Nodes: []*corev1.Node{inventoryNode(t, "n", "10.0.0.1", gpu.GiB, t4(0, 15)).Node}, Pods: []*corev1.Pod{greedy.Pod, broken.Pod}})
	got := map[string][]string{}
	for _, pod := range report.Nodes[0].Pods {
		got[pod.Name] = pod.Notes
	}
	want := map[string][]string{"greedy": {"uses 3000 MiB of GPU memory and requests 1024 MiB, since 2026-07-01T12:00:00Z, measured 2026-07-01T12:01:00Z"}, "broken": nil}
	check.Equal(t, "the result", want, got)
}
