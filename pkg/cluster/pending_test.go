package cluster

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/waiting"
)

// pendingReasons returns kube-scheduler's message for each pending pod, by name.
func (f *fixture) pendingReasons() map[string]string {
	reasons := map[string]string{}
	pods, _ := f.Pending(0)
	for _, pod := range pods {
		reasons[pod.Name] = pod.Reason
	}
	return reasons
}

func (f *fixture) awaitPending(want map[string]string) {
	f.t.Helper()
	var got map[string]string
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		if got = f.pendingReasons(); cmp.Equal(got, want) {
			return
		}
		if time.Now().After(deadline) {
			f.t.Fatalf("pending (-want +got):\n%s", cmp.Diff(want, got))
		}
	}
}

func turnedDown(pod *corev1.Pod, message string) *corev1.Pod {
	pod = pod.DeepCopy()
	pod.Status.Conditions = []corev1.PodCondition{
		{Type: corev1.PodReady, Status: corev1.ConditionFalse, Message: "not this one"},
		{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: message},
	}
	return pod
}

func TestPendingIsWhoWaitsAndWhy(t *testing.T) {
	old, other := newPod("old", 10), newPod("other", 10)
	old.CreationTimestamp = metav1.NewTime(time.Date(2026, 7, 1, 11, 0, 0, 0, time.UTC))
	other.Spec.SchedulerName = "mine"
	leaving := newPod("leaving", 10)
	now := metav1.Now()
	leaving.DeletionTimestamp, leaving.Finalizers = &now, []string{"x/y"}
	f := start(t, patient, newNode(t, "n1", 100), turnedDown(old, "0/1 nodes are available"), other, leaving,
		newPod("asks nothing", 0), boundPod("bound", 10, "n1", 0))
	const untried = `scheduler "mine" has not tried it yet`
	f.awaitPending(map[string]string{"old": "0/1 nodes are available", "other": untried})
	pods, revision := f.Pending(0)
	if got := pods[0].Created; !got.Equal(old.CreationTimestamp.Time) {
		t.Errorf("created %v, want %v", got, old.CreationTimestamp)
	}
	if again, _ := f.Pending(revision); again != nil {
		t.Errorf("with nothing changed: %v", again)
	}

	f.publishObject(turnedDown(old, "another reason"))
	f.awaitPending(map[string]string{"old": "another reason", "other": untried})
	f.publishObject(boundPod("old", 10, "n1", 0))
	f.awaitPending(map[string]string{"other": untried})
	f.publishGone(other)
	f.awaitPending(map[string]string{})
	if _, now := f.Pending(revision); now == revision {
		t.Error("the list changed, its revision did not")
	}
}

func (f *fixture) awaitExplained(want map[string]waiting.Diagnosis) {
	f.t.Helper()
	var got map[string]waiting.Diagnosis
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		pods, _ := f.Pending(0)
		got = map[string]waiting.Diagnosis{}
		for i, why := range f.Explain(pods) {
			got[pods[i].Name] = why
		}
		if cmp.Equal(got, want) {
			return
		}
		if time.Now().After(deadline) {
			f.t.Fatalf("explained (-want +got):\n%s", cmp.Diff(want, got))
		}
	}
}

// The fields that the informer's cache keeps of pods and nodes are enough for the diagnosis, which follows changes of
// nodes.
func TestPendingPodsAreExplained(t *testing.T) {
	plain, choosy, gated := newPod("plain", 70), newPod("choosy", 50), newPod("gated", 1)
	choosy.Spec.NodeSelector = map[string]string{"disk": "ssd"}
	choosy.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "zone", Operator: corev1.NodeSelectorOpExists}}}},
	}}}
	gated.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "quota"}}
	node := newNode(t, "n1", 100, 100)
	node.Labels = map[string]string{"disk": "ssd"}
	f := start(t, patient, node, boundPod("a", 40, "n1", 0), boundPod("b", 60, "n1", 1), plain, choosy, gated)
	why := map[string]waiting.Diagnosis{
		"plain":  {Reason: waiting.Fragmented, Message: "100 MiB free on n1, but the largest piece is 60 MiB: a pod gets one card"},
		"choosy": {Reason: waiting.NoNode, Message: "no node that shares GPU memory can take the pod; n1: the pod's node selector or affinity rules it out"},
		"gated":  {Reason: waiting.Gated, Message: "the pod is held back by its scheduling gates: quota"},
	}
	f.awaitExplained(why)

	node = node.DeepCopy()
	node.Labels["zone"] = "a"
	f.publishNode(node)
	why["choosy"] = waiting.Diagnosis{Reason: waiting.Fits, Message: "n1 has room for it now, 60 MiB on one card: the scheduler is about to try, or needs something else than GPU memory"}
	f.awaitExplained(why)

	node = node.DeepCopy()
	node.Spec.Unschedulable = true
	f.publishNode(node)
	for _, name := range []string{"plain", "choosy"} {
		why[name] = waiting.Diagnosis{Reason: waiting.NoNode, Message: "no node that shares GPU memory can take the pod; n1: the node is cordoned"}
	}
	f.awaitExplained(why)

	node = node.DeepCopy()
	node.Spec.Unschedulable, node.Spec.Taints = false, []corev1.Taint{{Key: "team", Value: "ml", Effect: corev1.TaintEffectNoSchedule}}
	f.publishNode(node)
	for _, name := range []string{"plain", "choosy"} {
		why[name] = waiting.Diagnosis{Reason: waiting.NoNode, Message: "no node that shares GPU memory can take the pod; n1: the pod doesn't tolerate its taint team=ml:NoSchedule"}
	}
	f.awaitExplained(why)
	if err := f.client.CoreV1().Nodes().Delete(t.Context(), node.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"plain", "choosy"} {
		why[name] = waiting.Diagnosis{Reason: waiting.NoNode, Message: "no node shares GPU memory"}
	}
	f.awaitExplained(why)
}
