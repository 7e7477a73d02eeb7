package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// API makes the calls of which the outcome matters, each at most once and within the deadline of its context.
type API interface {
	// Bind creates the Binding. The server gives up on it when the context's deadline has passed.
	Bind(ctx context.Context, binding *corev1.Binding) error
	// Pod reads a pod, past every cache.
	Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error)
	// PodsOn lists the pods that are bound to a node, past every cache of ours.
	PodsOn(ctx context.Context, node string) ([]corev1.Pod, error)
	// Evict asks for the eviction of a pod, or whether it would be granted. A disruption budget can refuse it.
	Evict(ctx context.Context, pod gpu.Pod, dryRun bool) error
	// AnnotateNode sets one annotation of a node.
	AnnotateNode(ctx context.Context, node, key, value string) error
}

// NewAPI returns the API of a real API server.
func NewAPI(client kubernetes.Interface) API { return api{client} }

type api struct{ client kubernetes.Interface }

func (a api) Bind(ctx context.Context, binding *corev1.Binding) error {
	request := a.client.CoreV1().RESTClient().Post().
		Namespace(binding.Namespace).Resource("pods").Name(binding.Name).SubResource("binding").
		VersionedParams(&metav1.CreateOptions{}, scheme.ParameterCodec).
		// The server has its own clock for retries; a second attempt here could outlive our deadline unseen.
		MaxRetries(0).
		Body(binding)
	if deadline, ok := ctx.Deadline(); ok {
		// Sent along as a query parameter: what the server began stops there as well, not here alone (settler.fence).
		request = request.Timeout(time.Until(deadline))
	}
	return request.Do(ctx).Error()
}

func (a api) Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	return a.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
}

func (a api) PodsOn(ctx context.Context, node string) ([]corev1.Pod, error) {
	list, err := a.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("spec.nodeName", node).String(),
	})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

func (a api) Evict(ctx context.Context, pod gpu.Pod, dryRun bool) error {
	eviction := &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(pod.UID))},
	}
	if dryRun {
		eviction.DeleteOptions.DryRun = []string{metav1.DryRunAll}
	}
	return a.client.CoreV1().RESTClient().Post().
		Namespace(pod.Namespace).Resource("pods").Name(pod.Name).SubResource("eviction").
		MaxRetries(0). // A budget's refusal is an answer.
		Body(eviction).Do(ctx).Error()
}

func (a api) AnnotateNode(ctx context.Context, node, key, value string) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{key: value}}})
	if err != nil {
		return fmt.Errorf("writing the patch of node %s: %w", node, err)
	}
	_, err = a.client.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// verdict is what an answer of the API server says about whether a write was made.
type verdict int

const (
	// done: it was made.
	done verdict = iota
	// refused: it surely wasn't made, and this attempt will not make it.
	refused
	// conflict: the object isn't as the write expected. An earlier attempt may have made it so.
	conflict
	// unknown: the answer was lost, or the server doesn't know itself.
	unknown
)

// judge reads the error of a write.
func judge(err error) verdict {
	if err == nil {
		return done
	}
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		var op *net.OpError
		if errors.As(err, &op) && op.Op == "dial" {
			return refused // No connection came about: nothing was sent.
		}
		return unknown
	}
	switch code := status.Status().Code; {
	case code == http.StatusConflict:
		return conflict
	case code == http.StatusRequestTimeout, code < 400, code >= 500:
		return unknown
	default:
		return refused
	}
}
