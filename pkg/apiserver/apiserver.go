// Package apiserver makes the calls to the API server whose outcome matters, and classifies their results.
package apiserver

import (
	"context"
	"encoding/json"
	"errors"
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

// timeout bounds each call but Bind, which has a deadline of its own.
const timeout = 5 * time.Second

// Client sends each call at most once. It gives up after the timeout, or at the deadline of the call's context if that is earlier.
type Client struct{ client kubernetes.Interface }

// New returns a Client.
func New(client kubernetes.Interface) Client { return Client{client} }

// Bind creates the Binding. The API server abandons it after the context's deadline.
func (c Client) Bind(ctx context.Context, binding *corev1.Binding) error {
	request := c.client.CoreV1().RESTClient().Post().
		Namespace(binding.Namespace).Resource("pods").Name(binding.Name).SubResource("binding").
		VersionedParams(&metav1.CreateOptions{}, scheme.ParameterCodec).
		// No retries: this process does not see a second attempt, which could reach the API server after the deadline.
		MaxRetries(0).
		Body(binding)
	if deadline, ok := ctx.Deadline(); ok {
		// The deadline is sent as a query parameter, so that the API server stops the request as well (binding.Deadline).
		request = request.Timeout(time.Until(deadline))
	}
	return request.Do(ctx).Error()
}

// Pod reads a pod from the API server, not from a cache.
func (c Client) Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return c.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
}

// PodsOn lists the pods that are bound to a node from the API server, not from a cache of this process.
func (c Client) PodsOn(ctx context.Context, node string) ([]corev1.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	list, err := c.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("spec.nodeName", node).String(),
	})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// Claim reads a PersistentVolumeClaim.
func (c Client) Claim(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return c.client.CoreV1().PersistentVolumeClaims(namespace).Get(ctx, name, metav1.GetOptions{})
}

// Volume reads a PersistentVolume.
func (c Client) Volume(ctx context.Context, name string) (*corev1.PersistentVolume, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return c.client.CoreV1().PersistentVolumes().Get(ctx, name, metav1.GetOptions{})
}

// Evict requests the eviction of a pod; a dry run checks whether it would be granted. A disruption budget can reject both. grace is the grace
// period in seconds; nil means the pod's own.
func (c Client) Evict(ctx context.Context, pod gpu.Pod, grace *int64, dryRun bool) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	eviction := &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
		DeleteOptions: &metav1.DeleteOptions{GracePeriodSeconds: grace, Preconditions: metav1.NewUIDPreconditions(string(pod.UID))},
	}
	if dryRun {
		eviction.DeleteOptions.DryRun = []string{metav1.DryRunAll}
	}
	return c.client.CoreV1().RESTClient().Post().
		Namespace(pod.Namespace).Resource("pods").Name(pod.Name).SubResource("eviction").
		MaxRetries(0). // A rejection by a disruption budget is an answer.
		Body(eviction).Do(ctx).Error()
}

// ConfigMap reads a ConfigMap.
func (c Client) ConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return c.client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
}

// CreateConfigMap creates an empty ConfigMap.
func (c Client) CreateConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	return c.client.CoreV1().ConfigMaps(namespace).Create(ctx, object, metav1.CreateOptions{})
}

// PatchConfigMap sets data of a ConfigMap. It fails with a conflict if the ConfigMap has another resource version.
func (c Client) PatchConfigMap(ctx context.Context, namespace, name, version string, data map[string]string) (*corev1.ConfigMap, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	patch := encode(map[string]any{"metadata": map[string]string{"resourceVersion": version}, "data": data})
	return c.client.CoreV1().ConfigMaps(namespace).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
}

// OpenGate removes one scheduling gate of a pod, and changes nothing else. It succeeds if the pod doesn't have the gate. If the
// pod has another UID the API server rejects the patch as invalid, because a UID can't change.
func (c Client) OpenGate(ctx context.Context, pod gpu.Pod, gate string) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	patch := encode(map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"spec":     map[string]any{"schedulingGates": []map[string]string{{"$patch": "delete", "name": gate}}},
	})
	_, err := c.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	return err
}

// Nominate sets status.nominatedNodeName of a pod, or removes it if node is empty, and changes nothing else. If the pod has another
// resource version the API server answers with a conflict.
func (c Client) Nominate(ctx context.Context, pod gpu.Pod, resourceVersion, node string) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	status := map[string]any{"nominatedNodeName": nil}
	if node != "" {
		status["nominatedNodeName"] = node
	}
	patch := encode(map[string]any{
		"metadata": map[string]any{"uid": pod.UID, "resourceVersion": resourceVersion},
		"status":   status,
	})
	_, err := c.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}

// AnnotateNode sets one annotation of a Node.
func (c Client) AnnotateNode(ctx context.Context, node, key, value string) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	patch := encode(map[string]any{"metadata": map[string]any{"annotations": map[string]string{key: value}}})
	_, err := c.client.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// encode returns a patch in JSON.
func encode(patch map[string]any) []byte {
	text, _ := json.Marshal(patch) // It can't fail: all values are texts, or maps and lists of them.
	return text
}

// Outcome is what the error of a write says about the write.
type Outcome int

const (
	// Done means that the write was made.
	Done Outcome = iota
	// Rejected means that the write was not made and that this attempt will not make it.
	Rejected
	// Conflict means that the object is not in the state that the write expects. An earlier attempt may be the cause.
	Conflict
	// Unknown means that the answer was lost, or that the API server does not know the outcome.
	Unknown
)

// OutcomeOf returns the outcome of a write that returned the error.
func OutcomeOf(err error) Outcome {
	if err == nil {
		return Done
	}
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		var op *net.OpError
		if errors.As(err, &op) && op.Op == "dial" {
			return Rejected // There was no connection, so nothing was sent.
		}
		return Unknown
	}
	switch code := status.Status().Code; {
	case code == http.StatusConflict:
		return Conflict
	case code == http.StatusRequestTimeout, code < 400, code >= 500:
		return Unknown
	default:
		return Rejected
	}
}

// Reference returns the object reference of a pod for Events.
func Reference(pod gpu.Pod) *corev1.ObjectReference {
	return &corev1.ObjectReference{
		APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: types.UID(pod.UID),
	}
}
