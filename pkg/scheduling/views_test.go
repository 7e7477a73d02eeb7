package scheduling

import (
	"regexp"
	"slices"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
)

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
