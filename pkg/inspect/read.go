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
	// onlyNamespace is the namespace of the only pods that are read, and no nodes are, for users with rights in one namespace.
	// Empty reads nodes, and pods of all namespaces.
	onlyNamespace string
	// others is true if bound pods that ask for no GPU memory are read too, see readsOthers.
	others bool
}

func (s scope) all() bool { return len(s.nodes) == 0 && s.selector == "" }

// readsOthers reports whether all bound pods that ask for no GPU memory are read too, without what isn't needed to add up their requests.
func (s scope) readsOthers() bool { return s.others && s.all() && s.onlyNamespace == "" }

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

// read reads the nodes of the scope and the pods on them or without a node. Pods on no node of the list are on a deleted one, except with a selector: then
// they are on nodes that it doesn't match.
//
// Lists are read in pages, and as consistent reads (no resource version is given), so that the result is current.
func read(ctx context.Context, client kubernetes.Interface, scope scope) (Objects, error) {
	out := Objects{PodsOnly: scope.onlyNamespace != ""}
	if scope.readsOthers() {
		out.Others = []*corev1.Pod{}
	}
	group, lists := errgroup.WithContext(ctx)
	if !out.PodsOnly {
		group.Go(func() error {
			return each(lists, "nodes", client.CoreV1().Nodes().List, scope.nodeOptions(), func(node *corev1.Node) {
				if scope.coversNode(node.Name) {
					node.ManagedFields, node.Status.Images = nil, nil
					out.Nodes = append(out.Nodes, node)
				}
			})
		})
	}
	group.Go(func() error {
		return each(lists, "pods", client.CoreV1().Pods(scope.onlyNamespace).List, scope.podOptions(), func(pod *corev1.Pod) {
			if scope.coversPod(pod) {
				if !diagnosis.BoundWithoutExtender(pod) { // It reads managedFields.
					pod.ManagedFields = nil
				}
				out.Pods = append(out.Pods, pod)
			} else if scope.readsOthers() && pod.Spec.NodeName != "" {
				out.Others = append(out.Others, onlyRequests(pod))
			}
		})
	})
	if err := group.Wait(); err != nil {
		return Objects{}, err
	}
	if scope.selector != "" {
		selected := map[string]bool{}
		for _, node := range out.Nodes {
			selected[node.Name] = true
		}
		out.Pods = slices.DeleteFunc(out.Pods, func(pod *corev1.Pod) bool { return !selected[pod.Spec.NodeName] })
	}
	err := scope.addPodGroups(ctx, client, &out)
	return out, err
}

// checkNodes returns an error for a named node that neither exists nor has pods.
func (s scope) checkNodes(objects Objects) error {
	for _, name := range s.nodes {
		if !objects.hasNode(name) && !objects.hasPodsOn(name) {
			return apierrors.NewNotFound(corev1.Resource("nodes"), name)
		}
	}
	return nil
}

// addPodGroups reads the PodGroups if a pending pod names one.
func (s scope) addPodGroups(ctx context.Context, client kubernetes.Interface, objects *Objects) (err error) {
	named := func(pod *corev1.Pod) bool { return pod.Spec.NodeName == "" && protocol.PodGroupName(pod) != "" }
	if !slices.ContainsFunc(objects.Pods, named) {
		return nil
	}
	objects.PodGroups, err = readPodGroups(ctx, client, s.onlyNamespace)
	if apierrors.IsForbidden(err) {
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
