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

// API makes the calls whose outcome matters. It sends each at most once and within the deadline of its context.
type API interface {
	// Bind creates the Binding. The API server abandons it after the context's deadline.
	Bind(ctx context.Context, binding *corev1.Binding) error
	// Pod reads a pod from the API server, not from a cache.
	Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error)
	// PodsOn lists the pods that are bound to a node from the API server, not from a cache of this process.
	PodsOn(ctx context.Context, node string) ([]corev1.Pod, error)
	// Evict requests the eviction of a pod. A dry run only checks whether the eviction would be granted. A disruption
	// budget can refuse either.
	Evict(ctx context.Context, pod gpu.Pod, dryRun bool) error
	// AnnotateNode sets one annotation of a Node.
	AnnotateNode(ctx context.Context, node, key, value string) error
}

// NewAPI returns an API that uses the client.
func NewAPI(client kubernetes.Interface) API { return api{client} }

type api struct{ client kubernetes.Interface }

func (a api) Bind(ctx context.Context, binding *corev1.Binding) error {
	request := a.client.CoreV1().RESTClient().Post().
		Namespace(binding.Namespace).Resource("pods").Name(binding.Name).SubResource("binding").
		VersionedParams(&metav1.CreateOptions{}, scheme.ParameterCodec).
		// No retries: this process does not see a second attempt, which could reach the API server after the deadline.
		MaxRetries(0).
		Body(binding)
	if deadline, ok := ctx.Deadline(); ok {
		// The deadline is sent as a query parameter, so that the API server stops the request as well (settler.fence).
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
		MaxRetries(0). // A refusal by a disruption budget is an answer.
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

// verdict is what an answer of the API server says about a write.
type verdict int

const (
	// done means that the write was made.
	done verdict = iota
	// refused means that the write was not made and that this attempt will not make it.
	refused
	// conflict means that the object is not in the state that the write expects. An earlier attempt may be the cause.
	conflict
	// unknown means that the answer was lost, or that the API server does not know the outcome.
	unknown
)

// judge returns the verdict for the error of a write.
func judge(err error) verdict {
	if err == nil {
		return done
	}
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		var op *net.OpError
		if errors.As(err, &op) && op.Op == "dial" {
			return refused // There was no connection, so nothing was sent.
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
