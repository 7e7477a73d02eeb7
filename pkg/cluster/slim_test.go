package cluster

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/waiting"
)

// reading holds all values that this package reads from a pod.
type reading struct {
	Pod        gpu.Pod
	Where      gpu.Placement
	Err        string
	AssumeTime time.Time
	Node       string
	Terminal   bool
}

func readPod(pod *corev1.Pod) reading {
	where, err := protocol.PodPlacement(pod)
	assignment, _ := protocol.ParseAssignment(pod.Annotations)
	return reading{
		Pod: protocol.Pod(pod), Where: where, Err: fmt.Sprint(err), AssumeTime: assignment.AssumeTime,
		Node: pod.Spec.NodeName, Terminal: protocol.Terminal(pod),
	}
}

func TestSlimmingAPodLosesNothingThatIsRead(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 2))
	asking := 0
	for range 5000 {
		pod := randomPod(random)
		before := readPod(pod)
		untouched := pod.DeepCopy()
		slimmed := slimmed(t, new(slimmer), pod)
		if diff := cmp.Diff(untouched, pod); diff != "" {
			t.Fatalf("slimming changed what it was given:\n%s", diff)
		}
		if diff := cmp.Diff(podRequests(pod, protocol.PodRequest(pod)), slimmed.Spec.Resources.Requests, cmp.Comparer(resource.Quantity.Equal)); diff != "" {
			t.Fatalf("what it takes of its node (-before +after):\n%s\nof %v", diff, pod)
		}
		if before.Pod.Request == 0 {
			if len(slimmed.Labels)+len(slimmed.Annotations)+len(slimmed.Spec.Containers) != 0 {
				t.Fatalf("kept fields that are never read: %v", slimmed)
			}
			if diff := cmp.Diff(before.Pod, protocol.Pod(slimmed)); diff != "" {
				t.Fatalf("(-before +after):\n%s", diff)
			}
			continue
		}
		asking++
		if diff := cmp.Diff(before, readPod(slimmed)); diff != "" {
			t.Fatalf("(-before +after):\n%s\nof %v", diff, pod)
		}
		if len(slimmed.Spec.Volumes) != 0 || slimmed.Annotations["big"] != "" {
			t.Fatalf("kept fields that are never read: %v", slimmed)
		}
	}
	if asking < 1000 {
		t.Errorf("only %d pods ask for GPU memory: this test shows little", asking)
	}
}

// slimmed returns the pod as it is read from the cache.
func slimmed(t *testing.T, s *slimmer, pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	once, err := s.slim(pod)
	if err != nil {
		t.Fatal(err)
	}
	// An informer can transform an object twice, on its way through two stores.
	twice, err := s.slim(once)
	if err != nil {
		t.Fatal(err)
	}
	out, ok := podOf(twice)
	if !ok {
		t.Fatalf("the cache keeps a %T", twice)
	}
	return out
}

// The cached form of a pod is small enough that a large cluster fits into a small process.
func TestWhatAPodTakesInMemory(t *testing.T) {
	const pods = 10_000
	s, kept := new(slimmer), make([]any, pods)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range kept {
		pod := boundPod(fmt.Sprintf("training-7d9f8c6b5-%05d", i), 1+int64(i), fmt.Sprint("n", i%1000), i%8)
		pod.Labels = map[string]string{"app.kubernetes.io/name": "training", "pod-template-hash": fmt.Sprint(i / 100)}
		pod.UID = types.UID(fmt.Sprintf("%036d", i))
		pod.Spec.Containers[0].Image = strings.Repeat("image", 1000)
		var err error
		if kept[i], err = s.slim(pod); err != nil {
			t.Fatal(err)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	each := (int64(after.HeapAlloc) - int64(before.HeapAlloc)) / pods
	t.Logf("%d bytes a pod", each)
	if each > 1000 {
		t.Errorf("%d bytes a pod, want under 1000", each)
	}
	runtime.KeepAlive(kept)
}

func TestSlimmingANodeLosesNothingThatIsRead(t *testing.T) {
	nodes := map[string]*corev1.Node{
		"nothing to share": {},
		"an inventory":     newNode(t, "n1", 100, 200),
	}
	wrong := newNode(t, "n1", 100, 200)
	wrong.Status.Capacity = amount(protocol.ResourceMemory, 7)
	nodes["an inventory that disagrees"] = wrong
	broken := newNode(t, "n1", 100, 200)
	broken.Annotations[protocol.AnnotationInventory] = "{"
	nodes["an inventory that can't be read"] = broken
	plain := newNode(t, "n1", 100, 100)
	plain.Annotations = nil
	nodes["an existing plugin's node"] = plain
	whole := newNode(t, "n1", 100)
	whole.Status.Capacity[protocol.ResourceWholeCard] = amount("x", 1)["x"]
	nodes["whole cards beside"] = whole
	shared := newNode(t, "n1", 100)
	shared.Status.Capacity["nvidia.com/gpu.shared"] = amount("x", 1)["x"]
	nodes["cards that NVIDIA's plugin shares beside"] = shared
	for name, node := range nodes {
		node.Labels = map[string]string{"a": "b"}
		node.Spec = corev1.NodeSpec{Unschedulable: true, Taints: []corev1.Taint{{Key: "a", Effect: corev1.TaintEffectNoSchedule}}}
		node.Status.NodeInfo.KubeletVersion = "v1"
		node.Status.Conditions = []corev1.NodeCondition{
			{Type: corev1.NodeDiskPressure, Status: corev1.ConditionTrue}, {Type: corev1.NodeReady, Status: corev1.ConditionUnknown},
		}
		if node.Annotations != nil {
			node.Annotations["big"] = "text"
		}
		text := func(n protocol.Node) string { return fmt.Sprintf("%+v", n) }
		before := text(protocol.ParseNode(node))
		out, err := new(slimmer).slim(node)
		if err != nil {
			t.Fatal(err)
		}
		slimmed := out.(*corev1.Node)
		if after := text(protocol.ParseNode(slimmed)); after != before {
			t.Errorf("%s: %s, was %s", name, after, before)
		}
		if slimmed.Annotations["big"] != "" || len(slimmed.Status.NodeInfo.KubeletVersion) > 0 || len(slimmed.Status.Conditions) > 1 {
			t.Errorf("%s: kept fields that are never read", name)
		}
		// Labels and taints matter only on nodes that share their cards.
		_, shares := node.Status.Capacity[protocol.ResourceMemory]
		if got := slimmed.Labels["a"] == "b" && len(slimmed.Spec.Taints) == 1; got != shares {
			t.Errorf("%s: labels and taints kept: %v, want %v", name, got, shares)
		}
		if diff := cmp.Diff(waiting.Closed(node, false), waiting.Closed(slimmed, false)); shares && diff != "" {
			t.Errorf("%s: why no pod can run there (-before +after):\n%s", name, diff)
		}
	}
}

func TestSlimmingPassesOverWhatIsNoObject(t *testing.T) {
	gone := cache.DeletedFinalStateUnknown{Key: "k", Obj: newPod("p", 1)}
	if out, err := new(slimmer).slim(gone); err != nil || out.(cache.DeletedFinalStateUnknown).Key != "k" {
		t.Errorf("%v, %v", out, err)
	}
}

// randomPod returns a pod with random values in all fields that affect what is read.
func randomPod(random *rand.Rand) *corev1.Pod {
	one := func(of ...string) string { return of[random.IntN(len(of))] }
	containers := func(most int) []corev1.Container {
		out := make([]corev1.Container, random.IntN(most+1))
		for i := range out {
			out[i].Name, out[i].Image = fmt.Sprint("c", i), "image"
			if random.IntN(4) == 0 {
				always := corev1.ContainerRestartPolicyAlways
				out[i].RestartPolicy = &always
			}
			list := amount(corev1.ResourceCPU, 1)
			if random.IntN(2) == 0 {
				list[protocol.ResourceMemory] = amount("x", random.Int64N(5000))["x"]
			}
			if random.IntN(2) == 0 {
				out[i].Resources.Limits = list
			} else {
				out[i].Resources.Requests = list
			}
		}
		return out
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: "p", UID: types.UID(fmt.Sprint(random.Uint64())), ResourceVersion: "5",
			Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"big": "text"},
		},
		Spec: corev1.PodSpec{
			NodeName: one("", "n1"), Containers: containers(3), InitContainers: containers(3),
			Volumes:  []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}},
			Overhead: amount(protocol.ResourceMemory, 3),
		},
		Status: corev1.PodStatus{Phase: corev1.PodPhase(one("Pending", "Running", "Succeeded", "Failed", "Unknown"))},
	}
	for name, values := range map[string][]string{
		protocol.AnnotationIndex:      {"0", "7", "x", "0,1", "-1"},
		protocol.AnnotationPod:        {"1", "x"},
		protocol.AnnotationDevice:     {"16276"},
		protocol.AnnotationAssumeTime: {"1700000000000000000", "x"},
		protocol.AnnotationAssigned:   {"true", "false"},
		protocol.AnnotationAssignTime: {"1700000000000000001"},
		protocol.AnnotationAllocation: {`{"c0":{"1":7}}`, `{"c0":{"1":7,"2":9}}`, "{"},
	} {
		if random.IntN(2) == 0 {
			pod.Annotations[name] = one(values...)
		}
	}
	return pod
}
