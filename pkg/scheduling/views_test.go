package scheduling

import (
	"regexp"
	"slices"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// What the cache and the ledger keep of pods and nodes is enough for the diagnosis, which follows changes of the node.
func TestDiagnose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		plain, choosy := fake.Pod("plain", 70), fake.Pod("choosy", 50)
		choosy.Spec.NodeSelector = map[string]string{"disk": "ssd"}
		gated := fake.Pod("gated", 1, func(pod *corev1.Pod) { pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "quota"}} })
		nominated := fake.Pod("nominated", 100, fake.Nominated("n1"), fake.Priority(5))
		node := fake.Node("n1", 100, 100)
		f := start(t, Options{}, node, fake.Pod("a", 40, fake.Bound("n1", 0)), fake.Pod("b", 60, fake.Bound("n1", 1), fake.Terminating(begin)),
			plain, choosy, gated, nominated)
		noNode := func(rejection string) diagnosis.Diagnosis {
			return diagnosis.Diagnosis{Reason: reasons.NoNode, Message: "no node that shares GPU memory can take the pod; n1: " + rejection}
		}
		want := map[string]diagnosis.Diagnosis{
			"plain": {
				Reason: reasons.Fragmented, Message: "100 MiB free on n1, but the largest piece is 60 MiB: a pod gets one card",
				Position: diagnosis.Position{Queued: true},
			},
			"choosy":    noNode("excluded by the pod's node selector (disk=ssd)"),
			"gated":     {Reason: reasons.Gated, Message: "the pod is held back by its scheduling gates: quota"},
			"nominated": {Reason: reasons.Nominated, Message: "pods of lower priority are leaving n1 to make room for it"},
		}
		check := func(what string) {
			t.Helper()
			pods := f.cache.Pending()
			got := map[string]diagnosis.Diagnosis{}
			diagnoses := f.diagnose(pods)
			for i, d := range diagnoses {
				got[pods[i].Name] = d
			}
			check.Equal(t, what, want, got)
		}
		change := func(what string, edit func(*corev1.Node)) {
			t.Helper()
			node = node.DeepCopy()
			edit(node)
			f.publishNode(node)
			check(what)
		}
		check("at first")

		want["choosy"] = diagnosis.Diagnosis{Reason: reasons.Fits, Message: "n1 has room for it, 60 MiB on one card: kube-scheduler has not tried it yet"}
		change("with a label", func(node *corev1.Node) { node.Labels = map[string]string{"disk": "ssd"} })

		cordoned := noNode("the node is cordoned")
		want["plain"], want["choosy"], want["nominated"] = cordoned, cordoned, cordoned
		change("the node is cordoned", func(node *corev1.Node) { node.Spec.Unschedulable = true })

		deleted := diagnosis.Diagnosis{Reason: reasons.NoNode, Message: "no node shares GPU memory"}
		want["plain"], want["choosy"], want["nominated"] = deleted, deleted, deleted
		f.publishNodeGone("n1")
		check("the node is deleted")
		if got := f.diagnose(nil); got != nil {
			t.Errorf("no pods: %v", got)
		}
	})
}

// The leader diagnoses a member by the state of its group. A standby has none, and shows what was reported last.
func TestDiagnoseMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reported := func(pod *corev1.Pod) {
			pod.Status.Conditions = []corev1.PodCondition{{
				Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable,
				Message: "0/1 nodes are available: 1 gang: 0 of 3 members exist.",
			}}
		}
		g := startGroups(t, GangOptions{}, member(3, 0, reported), member(3, 1, reported))
		since := regexp.MustCompile(" since [^ ]+Z")
		diagnosed := func() (messages []string) {
			pods := g.cache.Pending()
			diagnoses := g.diagnose(pods)
			for _, d := range diagnoses {
				messages = append(messages, d.Reason.String()+": "+since.ReplaceAllString(d.Message, ""))
			}
			return messages
		}
		await := func(what, want string) {
			t.Helper()
			g.pass(what, func() bool {
				return slices.Equal(diagnosed(), slices.Repeat([]string{"waits_for_group: group default/job waits: " + want}, 2))
			})
		}
		await("the leader's diagnosis", "2 of 3 members exist")
		g.standby.Store(true)
		await("the standby's diagnosis", "0 of 3 members exist")
	})
}
