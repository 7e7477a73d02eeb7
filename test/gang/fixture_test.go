package gang

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// card is the memory of each card, in GiB.
const card = 16

// shortTimeouts are extender flags that shorten the tests from minutes to seconds.
var shortTimeouts = []string{"--bind-timeout=1s", "--gang-hold=3s", "--gang-patience=8s"}

// faultyScheduler waits for a frozen extender only a little longer than a bind may take, and retries pods soon. It also asks
// the extender about pods that request whole cards.
var faultyScheduler = controlplane.SchedulerOptions{
	Edits: []controlplane.ConfigEdit{controlplane.ExtenderTimeout(6 * time.Second), controlplane.MaxBackoff(1), manageWholeCards},
}

func manageWholeCards(config map[string]any) error {
	extender := config["extenders"].([]any)[0].(map[string]any)
	extender["managedResources"] = append(extender["managedResources"].([]any),
		map[string]any{"name": string(protocol.ResourceWholeCard), "ignoredByScheduler": false})
	return nil
}

// shared is a cluster with the extender's defaults, controlled one with kube-controller-manager, hasty one with short timeouts
// and a proxy between the extender and the API server, native one with PodGroups besides.
var (
	shared     = &framework.Shared{Options: framework.Options{MemoryUnit: "GiB"}}
	controlled = &framework.Shared{Options: framework.Options{
		MemoryUnit: "GiB", ExtenderArgs: shortTimeouts, ControlPlane: controlplane.Options{ControllerManager: true},
	}}
	hasty = &framework.Shared{Options: framework.Options{
		MemoryUnit: "GiB", ExtenderArgs: append([]string{flagMaxIdle + "0"}, shortTimeouts...), ThroughProxy: true,
		ControlPlane: controlplane.Options{Scheduler: faultyScheduler},
	}}
	native = &framework.Shared{Options: framework.Options{
		MemoryUnit: "GiB", ExtenderArgs: shortTimeouts, ThroughProxy: true, NativeGroups: true,
		ControlPlane: controlplane.Options{Scheduler: faultyScheduler},
	}}
)

// flagMaxIdle is the extender's flag for how much memory on cards in use is reserved; 0 turns that off.
const flagMaxIdle = "--reservation-max-idle="

var must = check.Must

func TestMain(m *testing.M) { os.Exit(framework.RunShared(m, shared, controlled, hasty, native)) }

// fixture is the namespace and the nodes of one test.
type fixture struct{ *framework.Namespace }

// newFixture creates a namespace, and a node for each number of cards.
func newFixture(t *testing.T, c *framework.Cluster, cards ...int) *fixture {
	t.Helper()
	f := &fixture{c.NewNamespace(t)}
	for i, n := range cards {
		f.AddNodes(f.node(i, n))
	}
	return f
}

func (f *fixture) node(i, cards int) *framework.NodeWrapper {
	return framework.MakeNode(fmt.Sprintf("n%d", i)).Unit(gpu.GiB).Cards(cards, card)
}

// member builds a member of a gang that requests GPU memory. It is named GANG-I.
func (f *fixture) member(gang string, size, i int, memory int64) *framework.PodWrapper {
	return f.Pod(fmt.Sprintf("%s-%d", gang, i), memory).Group(gang, size)
}

// members builds the members with the numbers from ≤ i < to, each of which requests a card.
func (f *fixture) members(gang string, size, from, to int) (pods []*framework.PodWrapper) {
	for i := from; i < to; i++ {
		pods = append(pods, f.member(gang, size, i, card))
	}
	return pods
}

// createGang creates all members of a gang, each of which requests a card.
func (f *fixture) createGang(gang string, size int) {
	f.Helper()
	f.Create(f.members(gang, size, 0, size)...)
}

// bound counts the bound pods by gang; "" stands for single pods.
func (f *fixture) bound(ctx context.Context) (map[string]int, error) {
	pods, err := f.List(ctx)
	if err != nil {
		return nil, err
	}
	counts := map[string]int{}
	for i := range pods {
		if pods[i].Spec.NodeName != "" && pods[i].DeletionTimestamp == nil {
			counts[pods[i].Labels[framework.LabelGroup]]++
		}
	}
	return counts, nil
}

// waitBound waits until the numbers of bound pods by gang are as wanted.
func (f *fixture) waitBound(want map[string]int) {
	f.Helper()
	f.waitCounts(fmt.Sprintf("bound: %v", want), func(counts map[string]int) bool { return maps.Equal(counts, want) })
}

// waitCounts waits until the numbers of bound pods by gang are as wanted.
func (f *fixture) waitCounts(what string, wanted func(counts map[string]int) bool) {
	f.Helper()
	f.Eventually(what, func(ctx context.Context) error {
		counts, err := f.bound(ctx)
		if err == nil && !wanted(counts) {
			err = fmt.Errorf("bound: %v; %s", counts, f.pendingReasons(ctx))
		}
		return err
	})
}

// waitOneWhole waits until one of the gangs is whole and no other pod is bound, and returns that gang.
func (f *fixture) waitOneWhole(size int) (whole string) {
	f.Helper()
	f.waitCounts("one gang is whole, and no other pod is bound", func(counts map[string]int) bool {
		for gang, n := range counts {
			whole = gang
			return gang != "" && n == size && len(counts) == 1
		}
		return false
	})
	return whole
}

// staysBound fails the test if the numbers of bound pods by gang differ from want within the duration.
func (f *fixture) staysBound(duration time.Duration, want map[string]int) {
	f.Helper()
	err := wait.PollUntilContextTimeout(f.Context(), 50*time.Millisecond, duration, true, func(ctx context.Context) (bool, error) {
		counts, err := f.bound(ctx)
		switch {
		case ctx.Err() != nil:
			return false, nil
		case err == nil && !maps.Equal(counts, want):
			err = fmt.Errorf("bound: %v, want %v; %s", counts, want, f.pendingReasons(ctx))
		}
		return false, err
	})
	if !wait.Interrupted(err) {
		f.Fatalf("the bound pods changed: %v", err)
	}
}

// staysPending waits until n pods have been rejected, and fails the test if the numbers of bound pods by gang differ from want
// until then, or for two seconds after that.
func (f *fixture) staysPending(n int, want map[string]int) {
	f.Helper()
	f.waitCounts(fmt.Sprintf("%d pods are rejected", n), func(counts map[string]int) bool {
		if !maps.Equal(counts, want) {
			f.Fatalf("bound: %v, want %v", counts, want)
		}
		pods, err := f.List(f.Context())
		return err == nil && len(rejected(pods)) == n
	})
	f.staysBound(2*time.Second, want)
}

// rejected returns the pending pods that kube-scheduler has tried to schedule.
func rejected(pods []corev1.Pod) (out []corev1.Pod) {
	for i := range pods {
		if pods[i].Spec.NodeName == "" && slices.ContainsFunc(pods[i].Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable
		}) {
			out = append(out, pods[i])
		}
	}
	return out
}

// waitPods waits until the pods of the namespace are as wanted.
func (f *fixture) waitPods(what string, wanted func(pods []corev1.Pod) bool) {
	f.Helper()
	f.Eventually(what, func(ctx context.Context) error {
		pods, err := f.List(ctx)
		if err == nil && !wanted(pods) {
			err = errors.New(reasons(pods))
		}
		return err
	})
}

// waitRejected waits until n pods of the gang are pending with a message that contains the reason.
func (f *fixture) waitRejected(gang string, n int, reason string) {
	f.Helper()
	f.Eventually(fmt.Sprintf("%d pods of %s are rejected: %s", n, gang, reason), func(ctx context.Context) error {
		pods, err := f.List(ctx)
		rejected := 0
		for i := range pods {
			pod := &pods[i]
			if pod.Labels[framework.LabelGroup] == gang && pod.Spec.NodeName == "" && strings.Contains(framework.SchedulerMessage(pod), reason) {
				rejected++
			}
		}
		if err == nil && rejected != n {
			err = fmt.Errorf("%d are; %s", rejected, reasons(pods))
		}
		return err
	})
}

// waitAnyRejected waits until a pod of the gang is pending with a message that contains the reason.
func (f *fixture) waitAnyRejected(gang, reason string) {
	f.Helper()
	f.waitPods(fmt.Sprintf("a pod of %s is rejected: %s", gang, reason), func(pods []corev1.Pod) bool {
		return slices.ContainsFunc(rejected(pods), func(pod corev1.Pod) bool {
			return pod.Labels[framework.LabelGroup] == gang && strings.Contains(framework.SchedulerMessage(&pod), reason)
		})
	})
}

// pendingReasons returns the scheduler's messages on the pending pods, with their numbers.
func (f *fixture) pendingReasons(ctx context.Context) string {
	pods, err := f.List(ctx)
	if err != nil {
		return err.Error()
	}
	return reasons(pods)
}

func reasons(pods []corev1.Pod) string {
	counts := map[string]int{}
	for i := range pods {
		if pods[i].Spec.NodeName == "" {
			counts[pods[i].Labels[framework.LabelGroup]+": "+framework.SchedulerMessage(&pods[i])]++
		}
	}
	return fmt.Sprint(counts)
}

// endGang deletes the gang and waits until no pod is bound and nothing is assumed.
func (f *fixture) endGang(gang string) {
	f.Helper()
	f.DeleteGroup(gang)
	f.waitBound(map[string]int{})
	f.Cluster.WaitNoneAssumed(f)
}

// requestDeletion deletes the pod without a grace period, unless another pod has its name now.
func (f *fixture) requestDeletion(ctx context.Context, pod *corev1.Pod) error {
	return f.Pods().Delete(ctx, pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: ptr.To[int64](0), Preconditions: metav1.NewUIDPreconditions(string(pod.UID)),
	})
}
