package inspect

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// scope selects nodes by name or by label; a scope without these selects all nodes. Pods without a node belong only to a
// scope of all nodes.
type scope struct {
	nodes    []string
	selector string
	// podsOnly is the namespace of the only pods that are read, and no nodes are, for users with rights in one namespace.
	// Empty reads nodes, and pods of all namespaces.
	podsOnly string
	// others is true if bound pods that ask for no GPU memory are read too, see readsOthers.
	others bool
	// podGroupsForbidden is true if the user may not list PodGroups.
	podGroupsForbidden bool
}

func (s scope) all() bool { return len(s.nodes) == 0 && s.selector == "" }

// readsOthers reports whether all bound pods that ask for no GPU memory are read too, without what isn't needed to add up their requests.
func (s scope) readsOthers() bool { return s.others && s.all() && s.podsOnly == "" }

// name returns what the sums of the scope are about, for titles; empty for the cluster.
func (s scope) name() string {
	switch {
	case len(s.nodes) == 1:
		return "On Node " + s.nodes[0]
	case !s.all():
		return "On Selected Nodes"
	}
	return ""
}

// nodeNames returns the sorted names of the arguments, each once. Like kubectl, it accepts NAME and node/NAME.
func nodeNames(args []string) ([]string, error) {
	var names []string
	for _, arg := range args {
		name := arg
		if kind, rest, typed := strings.Cut(arg, "/"); typed {
			name = rest
			if !slices.Contains([]string{"node", "nodes", "no"}, kind) {
				return nil, fmt.Errorf("%q is not a node: want NAME or node/NAME", arg)
			}
		}
		names = append(names, name)
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// read reads the nodes of the scope and the pods on them or without a node. A named node that neither exists nor has pods is
// an error.
//
// Lists are read in pages, and as consistent reads (no resource version is given), so that the result is current.
func read(ctx context.Context, client kubernetes.Interface, scope scope) (Objects, error) {
	var nodes []*corev1.Node
	var pods []*corev1.Pod
	group, lists := errgroup.WithContext(ctx)
	if scope.podsOnly == "" {
		group.Go(func() error {
			return each(lists, "nodes", client.CoreV1().Nodes().List, scope.nodeOptions(), func(node *corev1.Node) {
				nodes = append(nodes, scope.trim(node).(*corev1.Node))
			})
		})
	}
	group.Go(func() error {
		return each(lists, "pods", client.CoreV1().Pods(scope.podsOnly).List, scope.podOptions(), func(pod *corev1.Pod) {
			if scope.coversPod(pod) || scope.readsOthers() && pod.Spec.NodeName != "" {
				pods = append(pods, scope.trim(pod).(*corev1.Pod))
			}
		})
	})
	if err := group.Wait(); err != nil {
		return Objects{}, err
	}
	objects := scope.objects(nodes, pods)
	if err := scope.addPodGroups(ctx, client, &objects); err != nil {
		return Objects{}, err
	}
	for _, name := range scope.nodes {
		if !objects.hasNode(name) && !objects.hasPodsOn(name) {
			return Objects{}, apierrors.NewNotFound(corev1.Resource("nodes"), name)
		}
	}
	return objects, nil
}

// objects returns the nodes and pods that were read. Pods of nodes that the selector doesn't match are left out: in a scope
// of all nodes, or of names, a pod on no node of the list is on a deleted node.
func (s scope) objects(nodes []*corev1.Node, pods []*corev1.Pod) Objects {
	out := Objects{Nodes: nodes, PodsOnly: s.podsOnly != ""}
	if s.readsOthers() {
		out.Others = []*corev1.Pod{}
	}
	for _, pod := range pods {
		switch {
		case s.coversPod(pod):
			out.Pods = append(out.Pods, pod)
		case out.Others != nil && pod.Spec.NodeName != "":
			out.Others = append(out.Others, pod)
		}
	}
	if s.selector != "" {
		selected := map[string]bool{}
		for _, node := range nodes {
			selected[node.Name] = true
		}
		out.Pods = slices.DeleteFunc(out.Pods, func(pod *corev1.Pod) bool { return !selected[pod.Spec.NodeName] })
	}
	return out
}

// addPodGroups reads the PodGroups if a pending pod names one.
func (s scope) addPodGroups(ctx context.Context, client kubernetes.Interface, objects *Objects) (err error) {
	named := func(pod *corev1.Pod) bool { return pod.Spec.NodeName == "" && protocol.PodGroupName(pod) != "" }
	if !slices.ContainsFunc(objects.Pods, named) {
		return nil
	}
	if !s.podGroupsForbidden {
		objects.PodGroups, err = readPodGroups(ctx, client, s.podsOnly)
	}
	if s.podGroupsForbidden || apierrors.IsForbidden(err) {
		objects.PodGroups, objects.podGroupsForbidden, err = nil, true, nil
	}
	return err
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
	if protocol.PodRequest(pod) == 0 && diagnosis.RequestProblem(pod) == "" && diagnosis.UnservedRequest(pod) == "" {
		return false
	}
	return s.all() || pod.Spec.NodeName != "" && s.coversNode(pod.Spec.NodeName)
}

// trim removes large fields that are not used from a node or pod. Of one that the scope doesn't cover it leaves nothing that
// Build reports. Few pods keep managedFields, which diagnosis.BoundWithoutExtender reads.
func (s scope) trim(object any) any {
	switch object := object.(type) {
	case *corev1.Node:
		object.ManagedFields, object.Status.Images = nil, nil
		if !s.coversNode(object.Name) {
			object.Labels, object.Annotations, object.Status = nil, nil, corev1.NodeStatus{}
		}
	case *corev1.Pod:
		if !diagnosis.BoundWithoutExtender(object) {
			object.ManagedFields = nil
		}
		if !s.coversPod(object) {
			requests := corev1.PodSpec{}
			if s.readsOthers() && object.Spec.NodeName != "" {
				requests = onlyRequests(&object.Spec)
			}
			object.ManagedFields, object.Labels, object.Annotations, object.Spec, object.Status = nil, nil, nil, requests, corev1.PodStatus{}
		}
	}
	return object // A DeletedFinalStateUnknown of an informer holds an object that is already trimmed.
}
