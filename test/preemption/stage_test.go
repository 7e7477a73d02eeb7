package preemption

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// patience bounds every wait. It is no promise: what should come and hasn't by then isn't coming.
const patience = time.Minute

// stageLabel keeps the pods of one test on its own node.
const stageLabel = "preemption/stage"

// stage is one test's namespace, and its node of the same name.
type stage struct {
	*testing.T
	bed  *framework.Cluster
	name string
	// kubelet says that pods that are deleted end at once.
	kubelet bool
}

// play runs a test on a node with so many cards of 16.
func play(t *testing.T, bed *framework.Cluster, title string, cards int, act func(s *stage)) {
	t.Helper()
	t.Run(title, func(t *testing.T) {
		namespace, err := bed.Client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "stage-"},
		}, metav1.CreateOptions{})
		must(t, err)
		s := &stage{T: t, bed: bed, name: namespace.Name, kubelet: true}
		must(t, bed.CreateNodes(t.Context(), controlplane.Node{
			Name: s.name, Unit: gpu.GiB, Cards: controlplane.EqualCards(cards, 16), Labels: map[string]string{stageLabel: s.name},
		}))
		t.Cleanup(func() {
			zero := int64(0)
			err := bed.Client.CoreV1().Pods(s.name).DeleteCollection(context.Background(),
				metav1.DeleteOptions{GracePeriodSeconds: &zero}, metav1.ListOptions{})
			if err = errors.Join(err, bed.Client.CoreV1().Nodes().Delete(context.Background(), s.name, metav1.DeleteOptions{})); err != nil {
				t.Error(err)
			}
		})
		act(s)
	})
}

// createPriorities makes the priority classes that pods name: "p5" has the value 5.
func createPriorities(t *testing.T, bed *framework.Cluster, values ...int32) {
	t.Helper()
	for _, value := range values {
		_, err := bed.Client.SchedulingV1().PriorityClasses().Create(t.Context(), &schedulingv1.PriorityClass{
			ObjectMeta: metav1.ObjectMeta{Name: priorityClass(value)}, Value: value,
		}, metav1.CreateOptions{})
		must(t, err)
	}
}

func priorityClass(value int32) string { return "p" + strconv.Itoa(int(value)) }

// edit changes a pod before it is created.
type edit func(*corev1.Pod)

func cpu(n int64) edit {
	return func(pod *corev1.Pod) {
		pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: *resource.NewQuantity(n, resource.DecimalSI)}
	}
}

func labelled(value string) edit {
	return func(pod *corev1.Pod) { pod.Labels = map[string]string{"app": value} }
}

// create makes a pod that asks for GPU memory, or for none where that is 0.
func (s *stage) create(name string, memory int64, priority int32, edits ...edit) {
	s.Helper()
	grace := int64(300) // Longer than any test: only the stand-in for the kubelet ends pods.
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.name, Name: name},
		Spec: corev1.PodSpec{
			Containers:                    []corev1.Container{{Name: "main", Image: "registry.example/app:1"}},
			NodeSelector:                  map[string]string{stageLabel: s.name},
			PriorityClassName:             priorityClass(priority),
			TerminationGracePeriodSeconds: &grace,
		},
	}
	if memory > 0 {
		pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{protocol.ResourceMemory: *resource.NewQuantity(memory, resource.DecimalSI)}
	}
	for _, edit := range edits {
		edit(pod)
	}
	_, err := s.bed.Client.CoreV1().Pods(s.name).Create(s.Context(), pod, metav1.CreateOptions{})
	must(s, err)
}

// place makes a pod and waits until it sits on the card (-1 for none).
func (s *stage) place(name string, memory int64, priority int32, card int, edits ...edit) {
	s.Helper()
	s.create(name, memory, priority, edits...)
	s.sits(name, card)
}

// sits waits until the pod is bound, and checks its card.
func (s *stage) sits(name string, card int) {
	s.Helper()
	if got := s.card(name); got != card {
		s.Errorf("pod %s sits on card %d, want %d", name, got, card)
	}
}

// card waits until the pod is bound, and returns its card, -1 for none.
func (s *stage) card(name string) int {
	s.Helper()
	var pod *corev1.Pod
	s.eventually("pod "+name+" is bound", func() (err error) {
		if pod, err = s.get(name); err == nil && pod.Spec.NodeName == "" {
			err = fmt.Errorf("it waits: %v", s.said(name))
		}
		return err
	})
	assignment, err := protocol.ParseAssignment(pod.Annotations)
	switch {
	case errors.Is(err, protocol.ErrNotAssumed):
		return -1
	case err != nil:
		s.Fatal(err)
	}
	return assignment.Card
}

// started tells kube-scheduler since when pods run: of equal priority those that run longest are evicted last.
func (s *stage) started(ago time.Duration, names ...string) {
	s.Helper()
	for _, name := range names {
		pod, err := s.get(name)
		must(s, err)
		start := metav1.NewTime(time.Now().Add(-ago))
		pod.Status.Phase, pod.Status.StartTime = corev1.PodRunning, &start
		_, err = s.bed.Client.CoreV1().Pods(s.name).UpdateStatus(s.Context(), pod, metav1.UpdateOptions{})
		must(s, err)
	}
}

// guard makes a disruption budget that allows so many evictions of pods with the label.
func (s *stage) guard(label string, allowed int32) {
	s.Helper()
	budgets := s.bed.Client.PolicyV1().PodDisruptionBudgets(s.name)
	budget, err := budgets.Create(s.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: label},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": label}}},
	}, metav1.CreateOptions{})
	must(s, err)
	budget.Status = policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: allowed, ObservedGeneration: budget.Generation}
	_, err = budgets.UpdateStatus(s.Context(), budget, metav1.UpdateOptions{})
	must(s, err)
}

// evicted waits until just these pods have been deleted, ending them as the kubelet would where s.kubelet says so.
func (s *stage) evicted(names ...string) {
	s.Helper()
	var left []string
	for _, name := range names {
		s.eventually("pod "+name+" is evicted", func() error {
			pod, err := s.get(name)
			switch {
			case apierrors.IsNotFound(err):
				return nil
			case err != nil:
				return err
			case pod.DeletionTimestamp == nil:
				return errors.New("it stays")
			case s.kubelet:
				s.end(name)
			}
			return nil
		})
	}
	pods, err := s.bed.Client.CoreV1().Pods(s.name).List(s.Context(), metav1.ListOptions{})
	must(s, err)
	for i := range pods.Items {
		if pod := &pods.Items[i]; pod.DeletionTimestamp != nil && !slices.Contains(names, pod.Name) {
			left = append(left, pod.Name)
		}
	}
	if len(left) > 0 {
		s.Errorf("evicted too: %v", left)
	}
}

// nominated waits until kube-scheduler has written which node it means for the pod.
func (s *stage) nominated(name string) {
	s.Helper()
	s.eventually("pod "+name+" is nominated", func() error {
		pod, err := s.get(name)
		if err == nil && pod.Status.NominatedNodeName != s.name {
			err = fmt.Errorf("it is nominated to %q", pod.Status.NominatedNodeName)
		}
		return err
	})
}

// end removes a pod that is being deleted, as the kubelet does once its containers have ended.
func (s *stage) end(name string) {
	s.Helper()
	zero := int64(0)
	err := s.bed.Client.CoreV1().Pods(s.name).Delete(s.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: &zero})
	if err != nil && !apierrors.IsNotFound(err) {
		s.Fatal(err)
	}
}

// stay checks that the pods are there and are not being deleted.
func (s *stage) stay(names ...string) {
	s.Helper()
	for _, name := range names {
		if pod, err := s.get(name); err != nil || pod.DeletionTimestamp != nil {
			s.Errorf("pod %s was evicted (%v)", name, err)
		}
	}
}

// refused waits until kube-scheduler has said of the pod that it found no node, for this reason.
func (s *stage) refused(name, reason string) {
	s.Helper()
	s.eventually(fmt.Sprintf("pod %s is refused: %s", name, reason), func() error {
		if said := s.said(name); !strings.Contains(said, reason) {
			return errors.New(said)
		}
		return nil
	})
}

// said is what kube-scheduler last said of a pod that waits.
func (s *stage) said(name string) string {
	pod, err := s.get(name)
	if err != nil {
		return err.Error()
	}
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled {
			return condition.Message
		}
	}
	return "nothing"
}

func (s *stage) get(name string) (*corev1.Pod, error) {
	return s.bed.Client.CoreV1().Pods(s.name).Get(s.Context(), name, metav1.GetOptions{})
}

// eventually waits until the condition returns nil.
func (s *stage) eventually(what string, condition func() error) {
	s.Helper()
	var last error
	err := wait.PollUntilContextTimeout(s.Context(), 20*time.Millisecond, patience, true, func(context.Context) (bool, error) {
		last = condition()
		return last == nil, nil
	})
	if err != nil {
		s.Fatalf("waited in vain until %s: %v", what, last)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
