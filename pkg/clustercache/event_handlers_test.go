package clustercache

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

func TestHandler(t *testing.T) {
	f := start(t, fake.Node("n1", 100), fake.Pod("a", 10))
	f.want(f.got.synced, "1 pods, 1 nodes")
	f.want(f.got.synced, "CacheSynced")
	f.want(f.got.nodes, "updated n1")
	f.want(f.got.pods, "new uid-a")

	f.publish(fake.Pod("a", 10, fake.Bound("n1", 0)))
	f.want(f.got.pods, "uid-a becomes uid-a")
	f.publish(fake.Pod("no GPU", 0))
	f.want(f.got.pods, "new uid-no GPU")
	// While the watch was interrupted, the pod was deleted and another pod was created with its name.
	f.publish(fake.Pod("a", 10, func(pod *corev1.Pod) { pod.UID = "another" }))
	f.want(f.got.pods, "uid-a becomes another")
	check.Must(t, f.client.CoreV1().Pods("default").Delete(t.Context(), "a", metav1.DeleteOptions{}))
	f.want(f.got.pods, "deleted another")
	if pods := f.Pending(); len(pods) != 0 {
		t.Errorf("pending: %v", names(pods))
	}

	check.Must(t, f.client.CoreV1().Nodes().Delete(t.Context(), "n1", metav1.DeleteOptions{}))
	f.want(f.got.nodes, "deleted n1")
	if n := len(f.got.synced); n > 0 {
		t.Errorf("Synced was called %d times more", n)
	}
}

// The watch missed a deletion, and the next list showed it.
func TestMissedDeletion(t *testing.T) {
	f := start(t, fake.Node("n1", 100), fake.Pod("a", 10))
	f.want(f.got.nodes, "updated n1")
	f.want(f.got.pods, "new uid-a")
	f.podEvents(f.got).OnDelete(cache.DeletedFinalStateUnknown{Key: "default/a", Obj: NewPodInfo(fake.Pod("a", 10))})
	f.want(f.got.pods, "deleted uid-a")
	if pods := f.Pending(); len(pods) != 0 {
		t.Errorf("pending: %v", names(pods))
	}
	nodeEvents(f.got).OnDelete(cache.DeletedFinalStateUnknown{Key: "n1", Obj: fake.Node("n1")})
	f.want(f.got.nodes, "deleted n1")
}

func TestRelevantChange(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*corev1.Node)
		want   bool
	}{
		"nothing":                  {func(*corev1.Node) {}, false},
		"a label":                  {func(n *corev1.Node) { n.Labels = map[string]string{"a": "b"} }, true},
		"a taint":                  {func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "a"}} }, true},
		"allocatable CPU":          {func(n *corev1.Node) { n.Status.Allocatable = fake.Amount(corev1.ResourceCPU, 1) }, true},
		"only its version":         {func(n *corev1.Node) { n.ResourceVersion = "7" }, false},
		"the inventory":            {func(n *corev1.Node) { n.Annotations[protocol.AnnotationInventory] = "{}" }, true},
		"a capacity":               {func(n *corev1.Node) { n.Status.Capacity[protocol.ResourceMemory] = fake.Amount("x", 7)["x"] }, true},
		"a further resource":       {func(n *corev1.Node) { n.Status.Capacity[protocol.ResourceWholeCard] = fake.Amount("x", 1)["x"] }, true},
		"another resource instead": {func(n *corev1.Node) { n.Status.Capacity = corev1.ResourceList{"x": {}, "y": {}} }, true},
		"cordoned":                 {func(n *corev1.Node) { n.Spec.Unschedulable = true }, true},
		"not ready": {func(n *corev1.Node) {
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}
		}, true},
		"without its plugin": {func(n *corev1.Node) { n.Status.Allocatable = fake.Amount(protocol.ResourceMemory, 0) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			old, node := fake.Node("n1", 100), fake.Node("n1", 100)
			test.change(node)
			if got := relevantChange(old, node); got != test.want {
				t.Errorf("%v, want %v", got, test.want)
			}
		})
	}
}
