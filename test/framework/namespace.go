package framework

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
)

// LabelNamespace keeps the pods of a Namespace on its own nodes.
const LabelNamespace = "gpushare.test/namespace"

// Namespace is a namespace of its own for one test, with nodes of its own. The pods and nodes are removed when the test
// ends. It is also the test, so that its methods can fail it.
type Namespace struct {
	*testing.T
	Cluster *Cluster
	// ID is the name of the namespace.
	ID string
	// Kubelets is set by a test whose pods run on kubelets: they end the pods at the end of the test.
	Kubelets bool

	// plain is true if pods and nodes aren't kept apart from others.
	plain bool
	nodes []string
}

// NewNamespace creates a Namespace for the rest of the test.
func (c *Cluster) NewNamespace(t *testing.T) *Namespace {
	t.Helper()
	object, err := c.Client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"},
	}, metav1.CreateOptions{})
	check.Must(t, err)
	n := &Namespace{T: t, Cluster: c, ID: object.Name}
	t.Cleanup(n.remove)
	if c.ControllerManager != nil { // The API server rejects pods until the namespace has its ServiceAccount.
		n.Eventually("the namespace has its ServiceAccount", func(ctx context.Context) error {
			_, err := c.Client.CoreV1().ServiceAccounts(n.ID).Get(ctx, "default", metav1.GetOptions{})
			return err
		})
	}
	return n
}

// DefaultNamespace returns the namespace "default" for the rest of the test, without anything that keeps its pods and nodes
// apart: nodes have the names that the test gives them, and pods can be scheduled to all nodes. It is for tests that show
// these names to a reader.
func (c *Cluster) DefaultNamespace(t *testing.T) *Namespace {
	n := &Namespace{T: t, Cluster: c, ID: metav1.NamespaceDefault, plain: true}
	t.Cleanup(n.remove)
	return n
}

// remove removes the pods and the nodes. The namespace itself stays, because no controller would complete its removal.
func (n *Namespace) remove() {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	err := n.DeleteAll(ctx)
	for _, node := range n.nodes {
		if nodeErr := n.Cluster.Client.CoreV1().Nodes().Delete(ctx, node, metav1.DeleteOptions{}); !apierrors.IsNotFound(nodeErr) {
			err = errors.Join(err, nodeErr)
		}
	}
	if err != nil {
		n.Errorf("removing what is left in namespace %s: %v", n.ID, err)
	}
}

// Pods returns the client for the pods of the namespace.
func (n *Namespace) Pods() typedcorev1.PodInterface { return n.Cluster.Client.CoreV1().Pods(n.ID) }

// NodeName returns the name under which AddNodes creates a node. Node names differ between namespaces.
func (n *Namespace) NodeName(name string) string {
	if n.plain {
		return name
	}
	return name + "." + n.ID
}

// AddNodes creates nodes without kubelets for the pods of this namespace, under the name that NodeName returns, and waits
// until the extender knows them.
func (n *Namespace) AddNodes(nodes ...*NodeWrapper) {
	n.Helper()
	objects := make([]*corev1.Node, len(nodes))
	for i, node := range nodes {
		objects[i] = node.Rename(n.NodeName(node.Name)).Label(LabelNamespace, n.ID).Obj()
		n.nodes = append(n.nodes, objects[i].Name)
	}
	check.Must(n, n.Cluster.CreateNodes(n.Context(), objects...))
	if !n.Cluster.options.Bare {
		n.CheckLedger()
	}
}

// Pod builds a pod whose first container requests GPU memory, or nothing if memory is 0. It is scheduled to the
// namespace's nodes.
func (n *Namespace) Pod(name string, memory int64) *PodWrapper {
	pod := MakePod(name).Namespace(n.ID)
	if !n.plain {
		pod.NodeSelector(LabelNamespace, n.ID)
	}
	if memory > 0 {
		pod.GPUMem(memory)
	}
	return pod
}

// Create creates pods, several at a time, in this namespace.
func (n *Namespace) Create(pods ...*PodWrapper) {
	n.Helper()
	var group errgroup.Group
	group.SetLimit(16)
	for _, pod := range pods {
		group.Go(func() error {
			created, err := n.Pods().Create(n.Context(), pod.Namespace(n.ID).Obj(), metav1.CreateOptions{})
			if err == nil {
				pod.Pod = *created
			}
			return err
		})
	}
	check.Must(n, group.Wait())
}

// Place creates a pod and waits until it is bound.
func (n *Namespace) Place(pod *PodWrapper) *corev1.Pod {
	n.Helper()
	n.Create(pod)
	return n.WaitBound(pod.Name)
}

// Delete deletes pods without a grace period.
func (n *Namespace) Delete(names ...string) {
	n.Helper()
	for _, name := range names {
		n.DeleteWithGrace(name, 0)
	}
}

// DeleteWithGrace deletes a pod with a grace period.
func (n *Namespace) DeleteWithGrace(name string, seconds int64) {
	n.Helper()
	check.Must(n, n.Pods().Delete(n.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: &seconds}))
}

// DeleteGroup deletes all members of a group without a grace period.
func (n *Namespace) DeleteGroup(group string) {
	n.Helper()
	check.Must(n, n.Pods().DeleteCollection(n.Context(), metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)},
		metav1.ListOptions{LabelSelector: LabelGroup + "=" + group}))
}

// DeleteAll deletes all pods and waits until they are gone.
func (n *Namespace) DeleteAll(ctx context.Context) error {
	grace := ptr.To[int64](0)
	if n.Kubelets {
		grace = ptr.To[int64](1)
	}
	if err := n.Pods().DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: grace}, metav1.ListOptions{}); err != nil {
		return err
	}
	return poll(ctx, Patience, func(ctx context.Context) error {
		left, err := n.Pods().List(ctx, metav1.ListOptions{})
		if err == nil && len(left.Items) > 0 {
			err = fmt.Errorf("%d pods are left", len(left.Items))
		}
		return err
	})
}

// Patch merges a change into a pod.
func (n *Namespace) Patch(name string, change map[string]any, subresources ...string) {
	n.Helper()
	data, err := json.Marshal(change)
	check.Must(n, err)
	_, err = n.Pods().Patch(n.Context(), name, types.MergePatchType, data, metav1.PatchOptions{}, subresources...)
	check.Must(n, err)
}

// SetRunning reports that pods run, as their kubelets would. Pods that are gone are skipped.
func (n *Namespace) SetRunning(ctx context.Context, pods ...corev1.Pod) error {
	const status = `{"status":{"phase":"Running","conditions":[{"type":"Ready","status":"True"},{"type":"ContainersReady","status":"True"}]}}`
	for i := range pods {
		_, err := n.Pods().Patch(ctx, pods[i].Name, types.StrategicMergePatchType, []byte(status), metav1.PatchOptions{}, "status")
		if err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

// Annotate sets annotations of a pod.
func (n *Namespace) Annotate(name string, annotations map[string]string) {
	n.Helper()
	n.Patch(name, map[string]any{"metadata": map[string]any{"annotations": annotations}})
}

// Ungate removes the scheduling gates of a pod.
func (n *Namespace) Ungate(name string) {
	n.Helper()
	n.Patch(name, map[string]any{"spec": map[string]any{"schedulingGates": nil}})
}

// Get reads a pod.
func (n *Namespace) Get(name string) *corev1.Pod {
	n.Helper()
	pod, err := n.Pods().Get(n.Context(), name, metav1.GetOptions{})
	check.Must(n, err)
	return pod
}

// List lists the pods.
func (n *Namespace) List(ctx context.Context) ([]corev1.Pod, error) {
	list, err := n.Pods().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// Eventually waits until the condition returns nil.
func (n *Namespace) Eventually(what string, condition func(context.Context) error) {
	n.Helper()
	Eventually(n, what, condition)
}

// WaitPod waits until the pod is as wanted, and returns it. Errors of the API server don't fail the test, because a test
// may have stopped it. what completes "waiting until pod NAME ...".
func (n *Namespace) WaitPod(name, what string, wanted func(*corev1.Pod) bool) (pod *corev1.Pod) {
	n.Helper()
	n.Eventually(fmt.Sprintf("pod %s %s", name, what), func(ctx context.Context) (err error) {
		if pod, err = n.Pods().Get(ctx, name, metav1.GetOptions{}); err != nil {
			return err
		}
		if !wanted(pod) {
			return fmt.Errorf("it is %s on node %q with annotations %v; kube-scheduler's message: %s; Events: %s", pod.Status.Phase,
				pod.Spec.NodeName, pod.Annotations, SchedulerMessage(pod), strings.Join(n.Events(ctx, name), "; "))
		}
		return nil
	})
	return pod
}

// WaitBound waits until the pod is bound.
func (n *Namespace) WaitBound(name string) *corev1.Pod {
	n.Helper()
	return n.WaitPod(name, "is bound", func(pod *corev1.Pod) bool { return pod.Spec.NodeName != "" })
}

// WaitPhase waits until the pod is in the phase.
func (n *Namespace) WaitPhase(name string, phase corev1.PodPhase) *corev1.Pod {
	n.Helper()
	return n.WaitPod(name, "is "+string(phase), func(pod *corev1.Pod) bool { return pod.Status.Phase == phase })
}

// WaitAssigned waits until the pod runs and the device plugin has annotated it as assigned.
func (n *Namespace) WaitAssigned(name string) *corev1.Pod {
	n.Helper()
	return n.WaitPod(name, "is assigned", func(pod *corev1.Pod) bool {
		return pod.Annotations[protocol.AnnotationAssigned] == "true" && pod.Status.Phase == corev1.PodRunning
	})
}

// WaitUnschedulable waits until kube-scheduler's message on the pending pod contains the reason.
func (n *Namespace) WaitUnschedulable(name, reason string) *corev1.Pod {
	n.Helper()
	return n.WaitPod(name, "is unschedulable: "+reason, func(pod *corev1.Pod) bool {
		return pod.Spec.NodeName == "" && strings.Contains(SchedulerMessage(pod), reason)
	})
}

// WaitGone waits until the pods don't exist.
func (n *Namespace) WaitGone(names ...string) {
	n.Helper()
	for _, name := range names {
		n.Eventually("pod "+name+" is gone", func(ctx context.Context) error {
			_, err := n.Pods().Get(ctx, name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return nil
			}
			return errors.Join(errors.New("it exists"), err)
		})
	}
}

// WaitEvent waits for an Event on the pod, or on any pod if the name is empty, that contains all texts, and returns it as
// Events does.
func (n *Namespace) WaitEvent(pod string, texts ...string) (found string) {
	n.Helper()
	n.Eventually(fmt.Sprintf("pod %q has an Event with %q", pod, texts), func(ctx context.Context) error {
		events := n.Events(ctx, pod)
		for _, event := range events {
			if ContainsAll(event, texts...) {
				found = event
				return nil
			}
		}
		return fmt.Errorf("the Events are %q", events)
	})
	return found
}

// Events returns the Events on a pod, or on all pods if the name is empty, each as "reason: message". If they can't be
// read, it returns the error in place of them.
func (n *Namespace) Events(ctx context.Context, pod string) (events []string) {
	var options metav1.ListOptions
	if pod != "" {
		options.FieldSelector = "involvedObject.name=" + pod
	}
	list, err := n.Cluster.Client.CoreV1().Events(n.ID).List(ctx, options)
	if err != nil {
		return []string{err.Error()}
	}
	for i := range list.Items {
		events = append(events, list.Items[i].Reason+": "+list.Items[i].Message)
	}
	return events
}

// WantCard fails the test if the pod isn't on this card of this node.
func (n *Namespace) WantCard(pod *corev1.Pod, node string, card int) {
	n.Helper()
	if got := n.CardOf(pod); pod.Spec.NodeName != node || got != card {
		n.Errorf("pod %s is on card %d of node %s, want card %d of node %s", pod.Name, got, pod.Spec.NodeName, card, node)
	}
}

// CardOf returns the card in the pod's annotation.
func (n *Namespace) CardOf(pod *corev1.Pod) int {
	n.Helper()
	card, err := strconv.Atoi(pod.Annotations[protocol.AnnotationIndex])
	if err != nil {
		n.Fatalf("pod %s has no card: its annotations are %v", pod.Name, pod.Annotations)
	}
	return card
}

// CheckLedger is Cluster.CheckLedger.
func (n *Namespace) CheckLedger() {
	n.Helper()
	n.Cluster.CheckLedger(n)
}

// SchedulerMessage returns kube-scheduler's latest message on a pending pod.
func SchedulerMessage(pod *corev1.Pod) string {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled {
			return condition.Message
		}
	}
	return "none"
}

// ContainsAll reports whether the text contains all parts.
func ContainsAll(text string, parts ...string) bool {
	for _, part := range parts {
		if !strings.Contains(text, part) {
			return false
		}
	}
	return true
}
