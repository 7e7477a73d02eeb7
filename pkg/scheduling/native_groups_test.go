package scheduling

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/fake"
)

// TestNativeGroups: pods of a PodGroup are placed alone until it is known that the API server has PodGroups; then as the PodGroup says.
// A change of it takes effect on pending pods.
func TestNativeGroups(t *testing.T) {
	pod := fake.Pod("a", 8, func(pod *corev1.Pod) {
		pod.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: new("train")}
	})
	for name, test := range map[string]struct {
		served bool
		policy *schedulingv1beta1.PodGroupSchedulingPolicy
		// message is why no node passes; empty if one does.
		message string
		holds   bool
	}{
		"not served":             {},
		"there is no such group": {served: true, message: "gang: invalid group: PodGroup train doesn't exist", holds: true},
		"no policy": {
			served: true, policy: &schedulingv1beta1.PodGroupSchedulingPolicy{},
			message: "gang: invalid group: PodGroup train: its policy is neither gang nor basic", holds: true,
		},
		"gang": {
			served: true, policy: &schedulingv1beta1.PodGroupSchedulingPolicy{Gang: &schedulingv1beta1.GangSchedulingPolicy{MinCount: 2}},
			message: "gang: 1 of 2 members exist", holds: true,
		},
		"basic": {
			served: true, policy: &schedulingv1beta1.PodGroupSchedulingPolicy{Basic: &schedulingv1beta1.BasicSchedulingPolicy{}}, holds: true,
		},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			g := newGangFixture(t)
			g.fixture = newFixture(t, Options{Gangs: GangOptions{Hold: 1, Observer: g.gangs}}, pod, fake.Node("n1", 16))
			if test.served {
				g.groups.PodGroupsServed()
			}
			g.run()
			g.awaitSync()
			g.pass("it leads", func() bool { return g.filter(pod, "n1").Message != reasons.GroupStarting.Text() })
			if test.policy != nil {
				g.groups.PodGroupUpdated(&schedulingv1beta1.PodGroup{
					ObjectMeta: metav1.ObjectMeta{Name: "train", Namespace: pod.Namespace}, Spec: schedulingv1beta1.PodGroupSpec{SchedulingPolicy: *test.policy},
				})
			}
			result := g.filter(pod, "n1")
			if result.Message != test.message || (len(result.Passed) > 0) != (test.message == "") {
				t.Errorf("%d nodes, message %q; want %q", len(result.Passed), result.Message, test.message)
			}
			info, _ := g.cachedPod(request(pod, "n1"))
			if g.groups.needsPermit(info) != test.holds {
				t.Errorf("its bind is held: %v", !test.holds)
			}
			wait := g.groups.wait(info)
			if reported := wait != nil && wait.Native && strings.HasSuffix(test.message, wait.Reason.Words) || test.message == "" && wait == nil; !reported {
				t.Errorf("it waits for %v", wait)
			}
			if test.policy != nil {
				g.groups.PodGroupDeleted(pod.Namespace, "train")
			}
		}))
	}
}
