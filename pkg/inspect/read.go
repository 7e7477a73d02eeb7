package inspect

import (
	"context"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// scope selects nodes by name or by label; the zero scope selects all nodes. Pods without a node belong only to the zero
// scope.
type scope struct {
	nodes    []string
	selector string
}

func (s scope) all() bool { return len(s.nodes) == 0 && s.selector == "" }

// read reads the nodes of the scope and their pods that ask for GPU memory. A named node that doesn't exist is an error.
//
// Lists are read in pages, and as consistent reads (no resource version is given), so that the result is current.
func read(ctx context.Context, client kubernetes.Interface, scope scope) (Objects, error) {
	var objects Objects
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		return each(ctx, "nodes", client.CoreV1().Nodes().List, scope.nodeOptions(), func(node *corev1.Node) {
			objects.Nodes = append(objects.Nodes, scope.trim(node).(*corev1.Node))
		})
	})
	group.Go(func() error {
		return each(ctx, "pods", client.CoreV1().Pods(metav1.NamespaceAll).List, scope.podOptions(), func(pod *corev1.Pod) {
			if scope.coversPod(pod) {
				objects.Pods = append(objects.Pods, scope.trim(pod).(*corev1.Pod))
			}
		})
	})
	if err := group.Wait(); err != nil {
		return Objects{}, err
	}
	for _, name := range scope.nodes {
		if !objects.hasNode(name) {
			return Objects{}, apierrors.NewNotFound(corev1.Resource("nodes"), name)
		}
	}
	return objects, nil
}

// each visits the items of all pages of a list.
func each[List, Item runtime.Object](
	ctx context.Context, what string, list func(context.Context, metav1.ListOptions) (List, error), options metav1.ListOptions, visit func(Item),
) error {
	page := func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
		return list(ctx, options)
	}
	err := pager.New(page).EachListItem(ctx, options, func(object runtime.Object) error {
		visit(object.(Item))
		return nil
	})
	if err != nil {
		return fmt.Errorf("listing %s: %w", what, err)
	}
	return nil
}

// nodeOptions lets the server filter nodes by label, or by name if there is only one. coversNode filters several names.
func (s scope) nodeOptions() metav1.ListOptions {
	options := metav1.ListOptions{LabelSelector: s.selector}
	if len(s.nodes) == 1 {
		options.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, s.nodes[0]).String()
	}
	return options
}

// podOptions lets the server omit pods that have ended, and those of other nodes if one is named.
func (s scope) podOptions() metav1.ListOptions {
	terms := []fields.Selector{
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodSucceeded)),
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodFailed)),
	}
	if len(s.nodes) == 1 {
		terms = append(terms, fields.OneTermEqualSelector("spec.nodeName", s.nodes[0]))
	}
	return metav1.ListOptions{FieldSelector: fields.AndSelectors(terms...).String()}
}

func (s scope) coversNode(name string) bool {
	return len(s.nodes) == 0 || slices.Contains(s.nodes, name)
}

func (s scope) coversPod(pod *corev1.Pod) bool {
	if protocol.PodRequest(pod) == 0 {
		return false
	}
	return s.all() || pod.Spec.NodeName != "" && s.coversNode(pod.Spec.NodeName)
}

// trim removes large fields that are not used from a node or pod. Of one that the scope doesn't cover it leaves nothing that
// Build reports.
func (s scope) trim(object any) any {
	switch object := object.(type) {
	case *corev1.Node:
		object.ManagedFields, object.Status.Images = nil, nil
		if !s.coversNode(object.Name) {
			object.Annotations, object.Status = nil, corev1.NodeStatus{}
		}
	case *corev1.Pod:
		object.ManagedFields = nil
		if !s.coversPod(object) {
			object.Labels, object.Annotations, object.Spec, object.Status = nil, nil, corev1.PodSpec{}, corev1.PodStatus{}
		}
	}
	return object // A DeletedFinalStateUnknown of an informer holds an object that is already trimmed.
}
