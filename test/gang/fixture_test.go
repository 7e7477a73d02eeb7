package gang

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// timeout bounds every wait. It is long enough for a slow machine.
const timeout = 3 * time.Minute

// fixtureLabel restricts the pods of a test to its own nodes.
const fixtureLabel = "gang/fixture"

// card is the memory of each card, in GiB.
const card = 16

// longRun reports whether the long form is run.
func longRun() bool { return os.Getenv("GPUSHARE_TEST_LONG") != "" }

// shortOrLong returns the value for the short or for the long form.
func shortOrLong(short, longer int) int {
	if longRun() {
		return longer
	}
	return short
}

// fixture is the namespace and the nodes of one test. They are removed when the test ends.
type fixture struct {
	testing.TB
	bed       *framework.Cluster
	namespace string
	// wholeCardNodes counts the nodes that offer whole cards.
	wholeCardNodes int
}

// newFixture creates a namespace, and a node for each number of cards.
func newFixture(t testing.TB, bed *framework.Cluster, cards ...int) *fixture {
	t.Helper()
	namespace, err := bed.Client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "gang-"},
	}, metav1.CreateOptions{})
	must(t, err)
	f := &fixture{TB: t, bed: bed, namespace: namespace.Name}
	var nodes []controlplane.Node
	for i, n := range cards {
		nodes = append(nodes, controlplane.Node{
			Name: f.node(i), Unit: gpu.GiB, Cards: controlplane.EqualCards(n, card), Labels: map[string]string{fixtureLabel: f.namespace},
		})
	}
	must(t, bed.CreateNodes(t.Context(), nodes...))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		err := f.deleteAll(ctx)
		for i := range cards {
			err = errors.Join(err, bed.Client.CoreV1().Nodes().Delete(ctx, f.node(i), metav1.DeleteOptions{}))
		}
		if err != nil {
			t.Error(err)
		}
	})
	return f
}

func (f *fixture) node(i int) string { return f.namespace + "-" + strconv.Itoa(i) }

// deleteAll deletes all pods of the namespace and waits until they are gone.
func (f *fixture) deleteAll(ctx context.Context) error {
	pods := f.bed.Client.CoreV1().Pods(f.namespace)
	if err := pods.DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}, metav1.ListOptions{}); err != nil {
		return err
	}
	return wait.PollUntilContextCancel(ctx, 20*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		left, err := pods.List(ctx, metav1.ListOptions{})
		return err == nil && len(left.Items) == 0, nil
	})
}

// edit changes a pod before it is created.
type edit func(*corev1.Pod)

// inGang makes a pod a member by annotations.
func inGang(gang string, size int) edit {
	return func(pod *corev1.Pod) {
		pod.Annotations = map[string]string{
			protocol.AnnotationGroupName: gang, protocol.AnnotationGroupSize: strconv.Itoa(size),
		}
		pod.Labels = map[string]string{"group": gang}
	}
}

// inGangByLabels makes a pod a member by labels.
func inGangByLabels(gang string, size int) edit {
	return func(pod *corev1.Pod) {
		pod.Labels = map[string]string{
			"group": gang, protocol.LabelGroupName: gang, protocol.LabelGroupSize: strconv.Itoa(size),
		}
	}
}

// pod returns a pod that asks for GPU memory and is restricted to the test's nodes.
func (f *fixture) pod(name string, memory int64, edits ...edit) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: name},
		Spec: corev1.PodSpec{
			Containers:   []corev1.Container{{Name: "main", Image: "registry.example/app:1"}},
			NodeSelector: map[string]string{fixtureLabel: f.namespace},
		},
	}
	if memory > 0 {
		pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{protocol.ResourceMemory: *resource.NewQuantity(memory, resource.DecimalSI)}
	}
	for _, edit := range edits {
		edit(pod)
	}
	return pod
}

// create creates a pod.
func (f *fixture) create(name string, memory int64, edits ...edit) {
	f.Helper()
	_, err := f.bed.Client.CoreV1().Pods(f.namespace).Create(f.Context(), f.pod(name, memory, edits...), metav1.CreateOptions{})
	must(f, err)
}

// createGang creates the members of a gang, named GANG-0 and so on, in parallel.
func (f *fixture) createGang(gang string, size int, memory int64, edits ...edit) {
	f.Helper()
	f.createMembers(gang, size, 0, size, memory, edits...)
}

// createMembers creates the members with the numbers from ≤ i < to.
func (f *fixture) createMembers(gang string, size, from, to int, memory int64, edits ...edit) {
	f.Helper()
	makers := new(errgroup.Group)
	makers.SetLimit(16)
	for i := from; i < to; i++ {
		makers.Go(func() error {
			pod := f.pod(fmt.Sprintf("%s-%d", gang, i), memory, append([]edit{inGang(gang, size)}, edits...)...)
			_, err := f.bed.Client.CoreV1().Pods(f.namespace).Create(f.Context(), pod, metav1.CreateOptions{})
			return err
		})
	}
	must(f, makers.Wait())
}

// deletePods deletes pods without a grace period.
func (f *fixture) deletePods(names ...string) {
	f.Helper()
	for _, name := range names {
		must(f, f.bed.Client.CoreV1().Pods(f.namespace).Delete(f.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
	}
}

// deleteGang deletes all members of a gang.
func (f *fixture) deleteGang(gang string) {
	f.Helper()
	must(f, f.requestGangDeletion(f.Context(), gang))
}

// pods lists the pods of the namespace.
func (f *fixture) pods(ctx context.Context) ([]corev1.Pod, error) {
	list, err := f.bed.Client.CoreV1().Pods(f.namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// bound counts the bound pods by gang; "" stands for single pods.
func (f *fixture) bound(ctx context.Context) (map[string]int, error) {
	pods, err := f.pods(ctx)
	if err != nil {
		return nil, err
	}
	counts := map[string]int{}
	for i := range pods {
		if pods[i].Spec.NodeName != "" && pods[i].DeletionTimestamp == nil {
			counts[pods[i].Labels["group"]]++
		}
	}
	return counts, nil
}

// awaitBound waits until the numbers of bound pods by gang are as wanted.
func (f *fixture) awaitBound(want map[string]int) {
	f.Helper()
	f.eventually(fmt.Sprintf("bound: %v", want), func(ctx context.Context) error {
		counts, err := f.bound(ctx)
		if err == nil && !maps.Equal(counts, want) {
			err = fmt.Errorf("bound: %v; %s", counts, f.pendingReasons(ctx))
		}
		return err
	})
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

// pendingReasons returns the scheduler's messages on the pending pods, with their numbers.
func (f *fixture) pendingReasons(ctx context.Context) string {
	pods, err := f.pods(ctx)
	if err != nil {
		return err.Error()
	}
	reasons := map[string]int{}
	for i := range pods {
		if pods[i].Spec.NodeName == "" {
			reasons[pods[i].Labels["group"]+": "+schedulerMessage(&pods[i])]++
		}
	}
	return fmt.Sprint(reasons)
}

// schedulerMessage returns kube-scheduler's latest message on a pending pod.
func schedulerMessage(pod *corev1.Pod) string {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled {
			return condition.Message
		}
	}
	return "nothing"
}

// awaitRejected waits until n pods of the gang are pending with a message that contains reason.
func (f *fixture) awaitRejected(gang string, n int, reason string) {
	f.Helper()
	f.eventually(fmt.Sprintf("%d pods of %s are rejected: %s", n, gang, reason), func(ctx context.Context) error {
		pods, err := f.pods(ctx)
		if err != nil {
			return err
		}
		rejected := 0
		for i := range pods {
			if pods[i].Labels["group"] == gang && pods[i].Spec.NodeName == "" && strings.Contains(schedulerMessage(&pods[i]), reason) {
				rejected++
			}
		}
		if rejected != n {
			return fmt.Errorf("%d are; %s", rejected, f.pendingReasons(ctx))
		}
		return nil
	})
}

// checkCards fails the test if a card is over-allocated, according to the annotations of the bound pods.
func (f *fixture) checkCards() {
	f.Helper()
	pods, err := f.pods(f.Context())
	must(f, err)
	used := map[string]gpu.Memory{}
	for i := range pods {
		if pods[i].Spec.NodeName == "" || protocol.PodRequest(&pods[i]) == 0 {
			continue
		}
		where, err := protocol.PodPlacement(&pods[i])
		must(f, err)
		for _, share := range where {
			used[fmt.Sprintf("%s card %d", pods[i].Spec.NodeName, share.Card)] += share.Memory
		}
	}
	for name, memory := range used {
		if memory > card {
			f.Errorf("%s has %d of %d allocated", name, memory, card)
		}
	}
}

// eventually waits until the condition returns nil.
func (f *fixture) eventually(what string, condition func(context.Context) error) {
	f.Helper()
	f.within(timeout, what, condition)
}

func (f *fixture) within(patience time.Duration, what string, condition func(context.Context) error) {
	f.Helper()
	var last error
	err := wait.PollUntilContextTimeout(f.Context(), 50*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
		last = condition(ctx)
		return last == nil, nil
	})
	if err != nil {
		f.Fatalf("timed out waiting until %s: %v", what, last)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// awaitEvent waits for an Event on the pod with this reason and text.
func (f *fixture) awaitEvent(pod, reason, text string) {
	f.Helper()
	f.eventually(fmt.Sprintf("pod %s has the Event %s", pod, reason), func(ctx context.Context) error {
		list, err := f.bed.Client.CoreV1().Events(f.namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + pod})
		if err != nil {
			return err
		}
		var said []string
		for i := range list.Items {
			if event := &list.Items[i]; event.Reason == reason && strings.Contains(event.Message, text) {
				return nil
			}
			said = append(said, list.Items[i].Reason+": "+list.Items[i].Message)
		}
		return errors.New(strings.Join(said, "; "))
	})
}

// wholeCard makes a pod ask for a whole card instead of memory.
func wholeCard(pod *corev1.Pod) {
	pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{protocol.ResourceWholeCard: resource.MustParse("1")}
}

// addWholeCards creates a node with whole cards for each number.
func (f *fixture) addWholeCards(cards ...int64) {
	f.Helper()
	var nodes []controlplane.Node
	for _, n := range cards {
		f.wholeCardNodes++
		nodes = append(nodes, controlplane.Node{
			Name: fmt.Sprintf("%s-whole-%d", f.namespace, f.wholeCardNodes), Labels: map[string]string{fixtureLabel: f.namespace},
			Capacity: corev1.ResourceList{protocol.ResourceWholeCard: *resource.NewQuantity(n, resource.DecimalSI)},
		})
	}
	must(f, f.bed.CreateNodes(f.Context(), nodes...))
	f.Cleanup(func() {
		for _, node := range nodes {
			if err := f.bed.Client.CoreV1().Nodes().Delete(context.Background(), node.Name, metav1.DeleteOptions{}); err != nil {
				f.Error(err)
			}
		}
	})
}
