package fake

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Server has the methods of apiserver.Client. Its state of pods is independent of what a watch has reported. It answers as an
// API server does, unless a test sets another answer. Its methods are safe for concurrent use.
type Server struct {
	mu   sync.Mutex
	pods map[types.NamespacedName]*corev1.Pod
	// configMaps are the ConfigMaps; their resource version is the number of writes.
	configMaps map[types.NamespacedName]*corev1.ConfigMap
	// claims are the volumes of the claims; nil for a claim that isn't bound.
	claims  map[types.NamespacedName]*corev1.PersistentVolume
	answers Answers
	calls   Calls
}

// Answers replace the answers of a Server.
type Answers struct {
	// Bind answers a Binding.
	Bind func(ctx context.Context, binding *corev1.Binding) error
	// Evict answers the request of an eviction.
	Evict func(pod gpu.Pod, dryRun bool) error
	// Record is called before each call for a ConfigMap, with its verb. If it returns an error, that is the answer.
	Record func(verb string) error
	// Read is the error of reads, Annotate that of AnnotateNode, Open that of OpenGate, Nominate that
	// of Nominate.
	Read, Annotate, Open, Nominate error
}

// Calls are the calls that a Server has received.
type Calls struct {
	// Binds and Reads count the calls.
	Binds, Reads int
	// Evicted are the names of the pods whose eviction was requested. A dry run has the prefix "?", a grace period is appended.
	Evicted []string
	// Annotated are the nodes whose annotation was set.
	Annotated []string
	// Opened are the names of the pods whose gate was removed.
	Opened []string
	// Nominated are the nominations, as POD=NODE.
	Nominated []string
}

var configMapResource = corev1.Resource("configmaps")

// PodResource is the resource of pods, for errors.
var PodResource = corev1.Resource("pods")

// NewServer returns a Server that has the pods.
func NewServer(pods ...*corev1.Pod) *Server {
	s := &Server{
		pods: map[types.NamespacedName]*corev1.Pod{}, configMaps: map[types.NamespacedName]*corev1.ConfigMap{},
		claims: map[types.NamespacedName]*corev1.PersistentVolume{},
	}
	for _, pod := range pods {
		s.Set(pod)
	}
	return s
}

func key(pod *corev1.Pod) types.NamespacedName {
	return types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
}

// Answer sets the answers. The zero value of a field stands for the answer of an API server.
func (s *Server) Answer(answers Answers) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers = answers
}

// Calls returns the calls so far.
func (s *Server) Calls() Calls {
	s.mu.Lock()
	defer s.mu.Unlock()
	calls := s.calls
	calls.Evicted, calls.Annotated, calls.Opened = slices.Clone(calls.Evicted), slices.Clone(calls.Annotated), slices.Clone(calls.Opened)
	calls.Nominated = slices.Clone(calls.Nominated)
	return calls
}

// Set creates or replaces a pod.
func (s *Server) Set(pod *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pods[key(pod)] = pod.DeepCopy()
}

// Get returns the current state of the pod; nil if it was removed.
func (s *Server) Get(pod *corev1.Pod) *corev1.Pod {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pods[key(pod)].DeepCopy()
}

// Remove deletes a pod.
func (s *Server) Remove(pod *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pods, key(pod))
}

// Pods returns the current state of all pods.
func (s *Server) Pods() []*corev1.Pod {
	s.mu.Lock()
	defer s.mu.Unlock()
	var pods []*corev1.Pod
	for _, pod := range s.pods {
		pods = append(pods, pod.DeepCopy())
	}
	return pods
}

// Bind creates a Binding.
func (s *Server) Bind(ctx context.Context, binding *corev1.Binding) error {
	s.mu.Lock()
	s.calls.Binds++
	answer := s.answers.Bind
	s.mu.Unlock()
	if answer != nil {
		return answer(ctx, binding)
	}
	return s.Commit(binding)
}

// Commit binds as an API server does: once, if the UID matches, with annotations and node in one write.
func (s *Server) Commit(binding *corev1.Binding) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	pod, ok := s.pods[types.NamespacedName{Namespace: binding.Namespace, Name: binding.Name}]
	switch {
	case !ok:
		return apierrors.NewNotFound(PodResource, binding.Name)
	case pod.UID != binding.UID, pod.Spec.NodeName != "":
		return apierrors.NewConflict(PodResource, binding.Name, errors.New("precondition failed, or already assigned"))
	}
	maps.Copy(annotations(pod), binding.Annotations)
	pod.Spec.NodeName = binding.Target.Name
	return nil
}

// Pod reads a pod.
func (s *Server) Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.read(ctx); err != nil {
		return nil, err
	}
	pod, ok := s.pods[types.NamespacedName{Namespace: namespace, Name: name}]
	if !ok {
		return nil, apierrors.NewNotFound(PodResource, name)
	}
	return pod.DeepCopy(), nil
}

// PodsOn lists the pods of a node.
func (s *Server) PodsOn(ctx context.Context, node string) ([]corev1.Pod, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.read(ctx); err != nil {
		return nil, err
	}
	var pods []corev1.Pod
	for _, pod := range s.pods {
		if pod.Spec.NodeName == node {
			pods = append(pods, *pod.DeepCopy())
		}
	}
	return pods, nil
}

// SetClaim creates or replaces a claim in the namespace of pods, bound to the volume, or to none if it is nil.
func (s *Server) SetClaim(name string, volume *corev1.PersistentVolume) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.claims[types.NamespacedName{Namespace: metav1.NamespaceDefault, Name: name}] = volume
}

// Claim reads a PersistentVolumeClaim.
func (s *Server) Claim(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.read(ctx); err != nil {
		return nil, err
	}
	volume, found := s.claims[types.NamespacedName{Namespace: namespace, Name: name}]
	if !found {
		return nil, apierrors.NewNotFound(corev1.Resource("persistentvolumeclaims"), name)
	}
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	if volume != nil {
		claim.Spec.VolumeName = volume.Name
	}
	return claim, nil
}

// Volume reads a PersistentVolume.
func (s *Server) Volume(ctx context.Context, name string) (*corev1.PersistentVolume, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.read(ctx); err != nil {
		return nil, err
	}
	for _, volume := range s.claims {
		if volume != nil && volume.Name == name {
			return volume.DeepCopy(), nil
		}
	}
	return nil, apierrors.NewNotFound(corev1.Resource("persistentvolumes"), name)
}

// read counts a read and returns its error. The caller holds mu.
func (s *Server) read(ctx context.Context) error {
	s.calls.Reads++
	return errors.Join(ctx.Err(), s.answers.Read)
}

// Evict requests an eviction. The pod stays.
func (s *Server) Evict(_ context.Context, pod gpu.Pod, grace *int64, dryRun bool) error {
	s.mu.Lock()
	name := pod.Name
	if dryRun {
		name = "?" + name
	}
	if grace != nil {
		name = fmt.Sprintf("%s %ds", name, *grace)
	}
	s.calls.Evicted = append(s.calls.Evicted, name)
	answer := s.answers.Evict
	s.mu.Unlock()
	if answer != nil {
		return answer(pod, dryRun)
	}
	return nil
}

// ConfigMap reads a ConfigMap.
func (s *Server) ConfigMap(_ context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.record("get"); err != nil {
		return nil, err
	}
	object := s.configMaps[types.NamespacedName{Namespace: namespace, Name: name}]
	if object == nil {
		return nil, apierrors.NewNotFound(configMapResource, name)
	}
	return object.DeepCopy(), nil
}

// CreateConfigMap creates an empty ConfigMap.
func (s *Server) CreateConfigMap(_ context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.record("create"); err != nil {
		return nil, err
	}
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, ResourceVersion: "0"}, Data: map[string]string{}}
	s.configMaps[types.NamespacedName{Namespace: namespace, Name: name}] = object
	return object.DeepCopy(), nil
}

// RemoveConfigMap deletes a ConfigMap.
func (s *Server) RemoveConfigMap(name types.NamespacedName) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.configMaps, name)
}

// PatchConfigMap sets data of a ConfigMap.
func (s *Server) PatchConfigMap(_ context.Context, namespace, name, version string, data map[string]string) (*corev1.ConfigMap, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.record("patch"); err != nil {
		return nil, err
	}
	object := s.configMaps[types.NamespacedName{Namespace: namespace, Name: name}]
	switch {
	case object == nil:
		return nil, apierrors.NewNotFound(configMapResource, name)
	case object.ResourceVersion != version:
		return nil, apierrors.NewConflict(configMapResource, name, errors.New("another resource version"))
	}
	n, _ := strconv.Atoi(version)
	object.ResourceVersion = strconv.Itoa(n + 1)
	maps.Copy(object.Data, data)
	return object.DeepCopy(), nil
}

// record returns the error of a call for a ConfigMap. The caller holds mu.
func (s *Server) record(verb string) error {
	if s.answers.Record != nil {
		return s.answers.Record(verb)
	}
	return nil
}

// OpenGate removes the gate of fair shares.
func (s *Server) OpenGate(_ context.Context, pod gpu.Pod, gate string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.answers.Open != nil {
		return s.answers.Open
	}
	if gate != protocol.GateFairShare {
		return fmt.Errorf("gate %q removed", gate)
	}
	s.calls.Opened = append(s.calls.Opened, pod.Name)
	return nil
}

// Nominate sets or removes the nomination of a pod.
func (s *Server) Nominate(_ context.Context, pod gpu.Pod, _, node string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls.Nominated = append(s.calls.Nominated, pod.Name+"="+node)
	return s.answers.Nominate
}

// AnnotateNode sets the annotation that requeues pods.
func (s *Server) AnnotateNode(_ context.Context, node, key, value string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.answers.Annotate != nil {
		return s.answers.Annotate
	}
	if key != protocol.AnnotationFreed || value == "" {
		return fmt.Errorf("annotated with %q=%q", key, value)
	}
	s.calls.Annotated = append(s.calls.Annotated, node)
	return nil
}
