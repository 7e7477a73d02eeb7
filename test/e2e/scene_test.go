package e2e

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// cardMiB is the card of the seeds' figures.
const cardMiB = 16276

// patience bounds every wait. It is no promise: what should come and hasn't by then isn't coming. kube-scheduler itself
// takes more than a minute to come back to an API server that was away for 20 s: its watches wait up to 30 s before they try
// again, and again when the server that has just started refuses them.
const patience = 3 * time.Minute

// sceneLabel keeps the pods of one scene on its own nodes.
const sceneLabel = "e2e/scene"

// scene is one test's corner of a bed: its namespace and its nodes. Both are swept when the test ends.
type scene struct {
	*testing.T
	bed *framework.Cluster
	// name is the namespace and the value of sceneLabel.
	name  string
	nodes []string
	// alive says that kubelets run the pods: they are left to end them.
	alive bool
}

// play runs a test in a scene of its own, and checks the books at its end.
func play(t *testing.T, bed *framework.Cluster, title string, act func(s *scene)) {
	t.Helper()
	t.Run(title, func(t *testing.T) {
		s := newScene(t, bed)
		act(s)
		s.checkBooks()
	})
}

func newScene(t *testing.T, bed *framework.Cluster) *scene {
	t.Helper()
	namespace, err := bed.Client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "scene-"},
	}, metav1.CreateOptions{})
	must(t, err)
	s := &scene{T: t, bed: bed, name: namespace.Name}
	t.Cleanup(s.sweep)
	return s
}

func (s *scene) sweep() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	pods := s.bed.Client.CoreV1().Pods(s.name)
	grace := ptr.To[int64](0)
	if s.alive {
		grace = ptr.To[int64](1)
	}
	if err := pods.DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: grace}, metav1.ListOptions{}); err != nil {
		s.Errorf("sweeping the pods of %s: %v", s.name, err)
	}
	err := wait.PollUntilContextCancel(ctx, 20*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		left, err := pods.List(ctx, metav1.ListOptions{})
		return err == nil && len(left.Items) == 0, nil
	})
	if err != nil {
		s.Errorf("the pods of %s don't go: %v", s.name, err)
	}
	for _, node := range s.nodes {
		if err := s.bed.Client.CoreV1().Nodes().Delete(ctx, node, metav1.DeleteOptions{}); err != nil {
			s.Errorf("sweeping node %s: %v", node, err)
		}
	}
}

// at returns the name of one of the scene's nodes: no two scenes share any.
func (s *scene) at(node string) string { return node + "." + s.name }

// mebibytes are healthy cards of these sizes.
func mebibytes(sizes ...int64) []gpu.Card {
	cards := controlplane.EqualCards(len(sizes), 0)
	for i, size := range sizes {
		cards[i].Memory = gpu.Memory(size)
	}
	return cards
}

// addNodes creates nodes of the scene that nothing runs on, and waits until the extender knows them.
func (s *scene) addNodes(nodes ...controlplane.Node) {
	s.Helper()
	for i := range nodes {
		nodes[i].Name = s.at(nodes[i].Name)
		if nodes[i].Unit == 0 {
			nodes[i].Unit = gpu.MiB
		}
		labels := map[string]string{sceneLabel: s.name}
		maps.Copy(labels, nodes[i].Labels)
		nodes[i].Labels = labels
		s.nodes = append(s.nodes, nodes[i].Name)
	}
	must(s, s.bed.CreateNodes(s.Context(), nodes...))
	s.checkBooks()
}

// edit changes a pod before it is created.
type edit func(*corev1.Pod)

// on pins a pod to a node, through the scheduler.
func on(node string) edit {
	return func(pod *corev1.Pod) { pod.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node} }
}

func annotated(annotations map[string]string) edit {
	return func(pod *corev1.Pod) {
		if pod.Annotations == nil {
			pod.Annotations = map[string]string{}
		}
		maps.Copy(pod.Annotations, annotations)
	}
}

// with adds a container that asks for GPU memory.
func with(name string, memory int64) edit {
	return func(pod *corev1.Pod) { pod.Spec.Containers = append(pod.Spec.Containers, container(name, memory)) }
}

// first adds an init container that asks for GPU memory.
func first(name string, memory int64) edit {
	return func(pod *corev1.Pod) {
		pod.Spec.InitContainers = append(pod.Spec.InitContainers, container(name, memory))
	}
}

// beside adds a sidecar that asks for GPU memory.
func beside(name string, memory int64) edit {
	return func(pod *corev1.Pod) {
		sidecar := container(name, memory)
		sidecar.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
		pod.Spec.InitContainers = append(pod.Spec.InitContainers, sidecar)
	}
}

// gated keeps a pod from being scheduled until it is ungated.
func gated(pod *corev1.Pod) {
	pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: sceneLabel}}
}

func container(name string, memory int64) corev1.Container {
	return corev1.Container{
		Name: name, Image: "registry.example/app:1",
		Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{
			protocol.ResourceMemory: *resource.NewQuantity(memory, resource.DecimalSI),
		}},
	}
}

// pod describes a pod of one container that asks for GPU memory, kept to the scene's nodes.
func (s *scene) pod(name string, memory int64, edits ...edit) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.name, Name: name},
		Spec: corev1.PodSpec{
			Containers:   []corev1.Container{container("main", memory)},
			NodeSelector: map[string]string{sceneLabel: s.name},
		},
	}
	for _, edit := range edits {
		edit(pod)
	}
	return pod
}

// create makes a pod.
func (s *scene) create(name string, memory int64, edits ...edit) *corev1.Pod {
	s.Helper()
	pod, err := s.bed.Client.CoreV1().Pods(s.name).Create(s.Context(), s.pod(name, memory, edits...), metav1.CreateOptions{})
	must(s, err)
	return pod
}

// place makes a pod and waits until it is bound.
func (s *scene) place(name string, memory int64, edits ...edit) *corev1.Pod {
	s.Helper()
	s.create(name, memory, edits...)
	return s.bound(name)
}

// fill places pods on one node, one after the other, and returns their names.
func (s *scene) fill(node string, sizes ...int64) []string {
	s.Helper()
	var names []string
	for i, size := range sizes {
		name := fmt.Sprintf("%s-%d", strings.TrimSuffix(node, "."+s.name), i)
		s.place(name, size, on(node))
		names = append(names, name)
	}
	return names
}

// remove deletes pods at once and waits until the extender knows.
func (s *scene) remove(names ...string) {
	s.Helper()
	for _, name := range names {
		must(s, s.delete(name, 0))
	}
	s.checkBooks()
}

func (s *scene) delete(name string, graceSeconds int64) error {
	return s.bed.Client.CoreV1().Pods(s.name).Delete(s.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: &graceSeconds})
}

// patch merges something into a pod.
func (s *scene) patch(name string, what map[string]any, subresources ...string) {
	s.Helper()
	data, err := json.Marshal(what)
	must(s, err)
	_, err = s.bed.Client.CoreV1().Pods(s.name).Patch(s.Context(), name, types.MergePatchType, data, metav1.PatchOptions{}, subresources...)
	must(s, err)
}

func (s *scene) ungate(name string) {
	s.Helper()
	s.patch(name, map[string]any{"spec": map[string]any{"schedulingGates": nil}})
}

// kubectlInspect runs the kubectl plugin and returns what it prints.
func (s *scene) kubectlInspect(args ...string) string {
	s.Helper()
	command := exec.CommandContext(s.Context(), s.bed.Binary("kubectl-inspect-gpushare"), args...)
	var stderr strings.Builder
	command.Stderr = &stderr
	out, err := command.Output()
	if err != nil {
		s.Fatalf("%v: %v: %s", command.Args, err, stderr.String())
	}
	return string(out)
}

// get reads a pod.
func (s *scene) get(name string) *corev1.Pod {
	s.Helper()
	pod, err := s.bed.Client.CoreV1().Pods(s.name).Get(s.Context(), name, metav1.GetOptions{})
	must(s, err)
	return pod
}

// bound waits until the pod is bound.
func (s *scene) bound(name string) *corev1.Pod {
	s.Helper()
	return s.await(name, "bound", func(pod *corev1.Pod) bool { return pod.Spec.NodeName != "" })
}

// running waits until the pod's containers run.
func (s *scene) running(name string) *corev1.Pod {
	s.Helper()
	return s.await(name, "running", func(pod *corev1.Pod) bool { return pod.Status.Phase == corev1.PodRunning })
}

// assigned waits until the node has said that it handed the card out.
func (s *scene) assigned(name string) *corev1.Pod {
	s.Helper()
	return s.await(name, "assigned", func(pod *corev1.Pod) bool {
		return pod.Annotations[protocol.AnnotationAssigned] == "true" && pod.Status.Phase == corev1.PodRunning
	})
}

// await waits until the pod is as wanted. Errors of the API server are waited out: it may be the one that is disturbed.
func (s *scene) await(name, what string, ready func(*corev1.Pod) bool) *corev1.Pod {
	s.Helper()
	var pod *corev1.Pod
	eventually(s, fmt.Sprintf("pod %s is %s", name, what), func(ctx context.Context) error {
		var err error
		if pod, err = s.bed.Client.CoreV1().Pods(s.name).Get(ctx, name, metav1.GetOptions{}); err != nil {
			return err
		}
		if !ready(pod) {
			return fmt.Errorf("it is %s on node %q with annotations %v: %s",
				pod.Status.Phase, pod.Spec.NodeName, pod.Annotations, strings.Join(s.events(ctx, name), "; "))
		}
		return nil
	})
	return pod
}

// gone waits until the pod's object is no more.
func (s *scene) gone(name string) {
	s.Helper()
	eventually(s, "pod "+name+" is gone", func(ctx context.Context) error {
		_, err := s.bed.Client.CoreV1().Pods(s.name).Get(ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err == nil:
			err = fmt.Errorf("it is there")
		}
		return err
	})
}

// events returns the events of a pod, or of all pods where it is empty, each as "reason: message".
func (s *scene) events(ctx context.Context, pod string) []string {
	var options metav1.ListOptions
	if pod != "" {
		options.FieldSelector = "involvedObject.name=" + pod
	}
	list, err := s.bed.Client.CoreV1().Events(s.name).List(ctx, options)
	if err != nil {
		return []string{err.Error()}
	}
	var events []string
	for i := range list.Items {
		events = append(events, list.Items[i].Reason+": "+list.Items[i].Message)
	}
	return events
}

// event waits for an event of the pod, or of any where it is empty, that contains each of the texts, and returns it.
func (s *scene) event(pod string, texts ...string) string {
	s.Helper()
	var found string
	eventually(s, fmt.Sprintf("pod %s has an event with %q", cmp.Or(pod, "(any)"), texts), func(ctx context.Context) error {
		events := s.events(ctx, pod)
		for _, event := range events {
			if containsAll(event, texts) {
				found = event
				return nil
			}
		}
		return fmt.Errorf("the events are %q", events)
	})
	return found
}

// refused waits until the scheduler has said that it found no node, for this reason, and that the pod still waits.
func (s *scene) refused(pod string, reason string) {
	s.Helper()
	s.event(pod, "FailedScheduling", reason)
	if got := s.get(pod); got.Spec.NodeName != "" || got.Status.Phase != corev1.PodPending {
		s.Errorf("pod %s is %s on node %q, want it to wait", pod, got.Status.Phase, got.Spec.NodeName)
	}
}

func containsAll(s string, parts []string) bool {
	for _, part := range parts {
		if !strings.Contains(s, part) {
			return false
		}
	}
	return true
}

// cardOf returns the card that the pod's annotation names.
func (s *scene) cardOf(pod *corev1.Pod) int {
	s.Helper()
	card, err := strconv.Atoi(pod.Annotations[protocol.AnnotationIndex])
	if err != nil {
		s.Fatalf("pod %s has no card: its annotations are %v", pod.Name, pod.Annotations)
	}
	return card
}

// sits checks where the pod was put.
func (s *scene) sits(pod *corev1.Pod, node string, card int) {
	s.Helper()
	if got := s.cardOf(pod); pod.Spec.NodeName != node || got != card {
		s.Errorf("pod %s is on card %d of %s, want card %d of %s", pod.Name, got, pod.Spec.NodeName, card, node)
	}
}

// eventually waits until the condition returns nil.
func eventually(t testing.TB, what string, condition func(context.Context) error) {
	t.Helper()
	framework.Eventually(t, what, condition)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
