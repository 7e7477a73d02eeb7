package inspect

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// Scope selects nodes by name or by label; the zero Scope selects all nodes. Pods without a node belong only to the zero
// Scope.
type Scope struct {
	Nodes    []string
	Selector string
}

func (s Scope) all() bool { return len(s.Nodes) == 0 && s.Selector == "" }

// Gather reads the nodes of the scope and their pods that ask for GPU memory. A named node that doesn't exist is an error.
//
// Lists are read in pages, and as consistent reads (no resource version is given), so that the result is current.
func Gather(ctx context.Context, client kubernetes.Interface, scope Scope) (Objects, error) {
	var (
		mu      sync.Mutex // guards objects
		objects = Objects{Now: time.Now()}
	)
	addNode := func(node *corev1.Node) {
		mu.Lock()
		defer mu.Unlock()
		objects.Nodes = append(objects.Nodes, trimNode(node))
	}
	addPod := func(pod *corev1.Pod) {
		if !scope.wants(pod) {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		objects.Pods = append(objects.Pods, trimPod(pod))
	}

	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(8)
	if len(scope.Nodes) == 0 {
		group.Go(func() error { return eachNode(ctx, client, scope.Selector, addNode) })
		group.Go(func() error { return eachPod(ctx, client, "", addPod) })
	}
	for _, name := range scope.Nodes {
		group.Go(func() error {
			node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err // The error names the node.
			}
			addNode(node)
			return eachPod(ctx, client, name, addPod)
		})
	}
	if err := group.Wait(); err != nil {
		return Objects{}, err
	}
	return objects, nil
}

func eachNode(ctx context.Context, client kubernetes.Interface, selector string, visit func(*corev1.Node)) error {
	list := func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
		return client.CoreV1().Nodes().List(ctx, options)
	}
	options := metav1.ListOptions{LabelSelector: selector}
	err := pager.New(list).EachListItem(ctx, options, func(object runtime.Object) error {
		visit(object.(*corev1.Node))
		return nil
	})
	if err != nil {
		return fmt.Errorf("listing nodes: %w", err)
	}
	return nil
}

// eachPod visits the pods that haven't ended, of one node, or of all if node is empty.
func eachPod(ctx context.Context, client kubernetes.Interface, node string, visit func(*corev1.Pod)) error {
	list := func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
		return client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, options)
	}
	options := metav1.ListOptions{FieldSelector: livePods(node)}
	err := pager.New(list).EachListItem(ctx, options, func(object runtime.Object) error {
		visit(object.(*corev1.Pod))
		return nil
	})
	if err != nil {
		return fmt.Errorf("listing pods: %w", err)
	}
	return nil
}

// livePods returns a field selector of the pods that may hold memory, so that the server doesn't send ended ones.
func livePods(node string) string {
	terms := []fields.Selector{
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodSucceeded)),
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodFailed)),
	}
	if node != "" {
		terms = append(terms, fields.OneTermEqualSelector("spec.nodeName", node))
	}
	return fields.AndSelectors(terms...).String()
}

// wants reports whether the pod can be part of a report of this scope.
func (s Scope) wants(pod *corev1.Pod) bool {
	if protocol.PodRequest(pod) == 0 {
		return false
	}
	return s.all() || pod.Spec.NodeName != ""
}

// covers reports whether the scope selects the node by name. The server filters by label.
func (s Scope) covers(node *corev1.Node) bool {
	return len(s.Nodes) == 0 || slices.Contains(s.Nodes, node.Name)
}

// trimNode removes large fields that are not used.
func trimNode(node *corev1.Node) *corev1.Node {
	node.ManagedFields = nil
	node.Status.Images = nil
	return node
}

func trimPod(pod *corev1.Pod) *corev1.Pod {
	pod.ManagedFields = nil
	return pod
}
