package nodee2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// sighting is a test container as it was found. It holds only what the container's own environment contains.
type sighting struct {
	PodUID, Container string
	// ID is the container's ID in containerd, and Pid its process in the machine. Both are empty for a file that a container
	// has left behind.
	ID  string
	Pid int
	Env map[string]string
}

func newSighting(environment []byte) (sighting, bool) {
	env := map[string]string{}
	for variable := range strings.SplitSeq(string(environment), "\x00") {
		if name, value, ok := strings.Cut(variable, "="); ok {
			env[name] = value
		}
	}
	s := sighting{PodUID: env["POD_UID"], Container: env["CONTAINER"], Env: env}
	return s, s.PodUID != "" && s.Container != ""
}

// card returns the index of the container's card. It returns an error if the variables of the environment disagree.
func (s sighting) card() (int, error) {
	card, err := strconv.Atoi(s.Env[protocol.AnnotationIndex])
	if err != nil {
		return 0, fmt.Errorf("container %s has no card: %q", s.Container, s.Env[protocol.AnnotationIndex])
	}
	if got, want := s.Env[protocol.EnvVisibleDevices], cardUUID(card); got != want {
		return 0, fmt.Errorf("container %s sees %s, which isn't card %d", s.Container, got, card)
	}
	return card, nil
}

func (s sighting) memory() int64 {
	memory, _ := strconv.ParseInt(s.Env[protocol.EnvContainer], 10, 64) // 0 if it isn't a GPU container
	return memory
}

// running returns the running containers, from the environment of their first process.
func (n *node) running() ([]sighting, error) {
	files, err := filepath.Glob(n.machine.path("run/containerd/io.containerd.runtime.v2.task/k8s.io/*/init.pid"))
	if err != nil {
		return nil, err
	}
	var out []sighting
	for _, file := range files {
		pid, err := os.ReadFile(file)
		if err != nil {
			continue // The process has ended in the meantime.
		}
		environment, err := os.ReadFile(n.machine.path("proc", string(pid), "environ"))
		if err != nil {
			continue
		}
		if s, ok := newSighting(environment); ok {
			s.ID = filepath.Base(filepath.Dir(file))
			s.Pid, _ = strconv.Atoi(string(pid))
			out = append(out, s)
		}
	}
	return out, nil
}

// find returns a running container.
func (n *node) find(pod types.UID, container string) (sighting, error) {
	running, err := n.running()
	if err != nil {
		return sighting{}, err
	}
	for _, c := range running {
		if c.PodUID == string(pod) && c.Container == container {
			return c, nil
		}
	}
	return sighting{}, fmt.Errorf("container %s of pod %s doesn't run", container, pod)
}

// end kills the container's process.
func (n *node) end(ctx context.Context, c sighting) error {
	return n.machine.run(ctx, "kill", "-KILL", strconv.Itoa(c.Pid))
}

// testimonies returns the environments of all containers that ever started, from the files that they wrote.
func (n *node) testimonies() ([]sighting, error) {
	entries, err := os.ReadDir(n.witnessDir())
	if err != nil {
		return nil, err
	}
	var out []sighting
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), ".") {
			continue
		}
		environment, err := os.ReadFile(filepath.Join(n.witnessDir(), entry.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if s, ok := newSighting(environment); ok {
			out = append(out, s)
		}
	}
	return out, nil
}

// containerOf identifies a container of a pod.
type containerOf struct{ pod, name string }

// restarts returns the containers that started more than once.
func restarts(testimonies []sighting) (again []containerOf) {
	starts := map[containerOf]int{}
	for _, s := range testimonies {
		starts[containerOf{s.PodUID, s.Container}]++
	}
	for container, n := range starts {
		if n > 1 {
			again = append(again, container)
		}
	}
	return again
}

// holders maps each card to its pods, each as "namespace/name memory".
type holders map[int][]string

func (h holders) sorted() holders {
	for card := range h {
		slices.Sort(h[card])
	}
	return h
}

// promised returns the pods and the used memory of each card according to the annotations. It shares no code for the sums
// with the programs under test.
func promised(pods []corev1.Pod) (h holders, used map[int]int64, err error) {
	h, used = holders{}, map[int]int64{}
	for i := range pods {
		pod := &pods[i]
		memory := memoryOf(pod)
		if memory == 0 || pod.Spec.NodeName == "" || terminal(pod) {
			continue
		}
		card, parseErr := strconv.Atoi(pod.Annotations[protocol.AnnotationIndex])
		if parseErr != nil {
			err = errors.Join(err, fmt.Errorf("pod %s is on the node without a card: %v", pod.Name, pod.Annotations))
			continue
		}
		used[card] += memory
		h[card] = append(h[card], fmt.Sprintf("%s/%s %d", pod.Namespace, pod.Name, memory))
	}
	return h.sorted(), used, err
}

func terminal(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// memoryOf returns the pod's request: the sum of its containers and sidecars, or an init container plus the sidecars that
// start before it, whichever is larger.
func memoryOf(pod *corev1.Pod) int64 {
	var sidecars, most, sum int64
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		if sidecar(c) {
			sidecars += limitOf(c)
		} else {
			most = max(most, sidecars+limitOf(c))
		}
	}
	for i := range pod.Spec.Containers {
		sum += limitOf(&pod.Spec.Containers[i])
	}
	return max(most, sidecars+sum)
}

func sidecar(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

func limitOf(c *corev1.Container) int64 {
	quantity := c.Resources.Limits[protocol.ResourceMemory]
	return quantity.Value()
}

// ledger reads the node's allocations from the extender.
func (r *rig) ledger(ctx context.Context) (holders, error) {
	body, err := framework.Fetch(ctx, r.bed.ExtenderURL+"/gpushare-scheduler/inspect/"+r.node.name)
	if err != nil {
		return nil, err
	}
	var answer struct {
		Nodes []struct {
			Devs []struct {
				ID   int
				Pods []struct {
					Name, Namespace string
					UsedGPU         int64
				}
			}
		}
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return nil, fmt.Errorf("inspect answers %.200s: %w", body, err)
	}
	out := holders{}
	for _, node := range answer.Nodes {
		for _, dev := range node.Devs {
			for _, pod := range dev.Pods {
				out[dev.ID] = append(out[dev.ID], fmt.Sprintf("%s/%s %d", pod.Namespace, pod.Name, pod.UsedGPU))
			}
		}
	}
	return out.sorted(), nil
}

// kubeletBooks returns, by pod and container, the cards of the devices that the kubelet's PodResources lists.
func (n *node) kubeletBooks(ctx context.Context) (map[string]map[string][]int, error) {
	var answer *podresourcesv1.ListPodResourcesResponse
	err := n.askKubelet(ctx, func(ctx context.Context, client podresourcesv1.PodResourcesListerClient) (err error) {
		answer, err = client.List(ctx, &podresourcesv1.ListPodResourcesRequest{})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listing PodResources: %w", err)
	}
	out := map[string]map[string][]int{}
	for _, pod := range answer.PodResources {
		containers := map[string][]int{}
		for _, container := range pod.Containers {
			for _, devices := range container.Devices {
				if devices.ResourceName != string(protocol.ResourceMemory) {
					continue
				}
				for _, id := range devices.DeviceIds {
					// The first character is the card's index; no test has more than ten cards.
					containers[container.Name] = append(containers[container.Name], int(id[0]-'0'))
				}
			}
		}
		out[pod.Namespace+"/"+pod.Name] = containers
	}
	return out, nil
}

// truth is the complete state of the node at one moment, from all sources.
type truth struct {
	pods    []corev1.Pod
	running []sighting
	ledger  holders
	// kubelet is nil if PodResources must not be compared.
	kubelet map[string]map[string][]int
	// guessed is true if a container's environment may have the total request of another pod. The environment of a running
	// container can't be corrected.
	guessed bool
}

func (r *rig) look(ctx context.Context) (t truth, err error) {
	list, err := r.bed.Client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + r.node.name})
	if err != nil {
		return t, err
	}
	t.pods = list.Items
	if t.running, err = r.node.running(); err != nil {
		return t, err
	}
	if t.ledger, err = r.ledger(ctx); err != nil {
		return t, err
	}
	t.kubelet, err = r.node.kubeletBooks(ctx)
	return t, err
}

// disagreements returns all errors on a node at rest. There every pod must run, and annotations, environments, the
// extender's ledger and the kubelet's PodResources must agree.
func (t truth) disagreements(cards []uint64) (out []string) {
	say := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }

	want, used, err := promised(t.pods)
	if err != nil {
		say("%v", err)
	}
	for card, memory := range used {
		if card >= len(cards) || memory > gibibytes(cards[card]) {
			say("card %d is promised %d: %v", card, memory, want[card])
		}
	}
	for card := range cards {
		if !slices.Equal(want[card], t.ledger[card]) {
			say("card %d: the annotations say %v, the extender's ledger %v", card, want[card], t.ledger[card])
		}
	}
	seen := map[string]map[string]sighting{}
	for _, s := range t.running {
		if seen[s.PodUID] == nil {
			seen[s.PodUID] = map[string]sighting{}
		}
		seen[s.PodUID][s.Container] = s
	}
	for i := range t.pods {
		pod := &t.pods[i]
		containers := seen[string(pod.UID)]
		delete(seen, string(pod.UID))
		if memoryOf(pod) > 0 && !terminal(pod) {
			out = append(out, podDisagreements(pod, containers, t.guessed)...)
			if t.kubelet != nil {
				out = append(out, booksDisagreements(pod, t.kubelet[pod.Namespace+"/"+pod.Name])...)
			}
		}
	}
	for uid := range seen {
		say("containers run of pod %s, which the API server doesn't know", uid)
	}
	return out
}

// podDisagreements compares one pod that must be running with its containers.
func podDisagreements(pod *corev1.Pod, seen map[string]sighting, guessed bool) (out []string) {
	say := func(format string, args ...any) {
		out = append(out, fmt.Sprintf("pod %s: ", pod.Name)+fmt.Sprintf(format, args...))
	}
	if pod.Status.Phase != corev1.PodRunning || pod.DeletionTimestamp != nil {
		say("it is %s (being deleted: %t)", pod.Status.Phase, pod.DeletionTimestamp != nil)
		return out
	}
	if pod.Annotations[protocol.AnnotationAssigned] != "true" {
		say("its annotations don't say that it is assigned: %v", pod.Annotations)
	}
	if _, err := strconv.ParseInt(pod.Annotations[protocol.AnnotationAssumeTime], 10, 64); err != nil {
		say("nobody knows when its card was chosen: %v", pod.Annotations)
	}
	card, err := strconv.Atoi(pod.Annotations[protocol.AnnotationIndex])
	if err != nil {
		return out // already reported
	}
	all := lasting(pod)
	for i := range all {
		c := &all[i]
		s, ok := seen[c.Name]
		if !ok {
			say("its container %s doesn't run", c.Name)
			continue
		}
		if limitOf(c) == 0 {
			if _, given := s.Env[protocol.AnnotationIndex]; given {
				say("container %s asks for no GPU memory and was given some", c.Name)
			}
			continue
		}
		got, err := s.card()
		if err != nil {
			say("%v", err)
			continue
		}
		if got != card {
			say("container %s has card %d, the annotation says %d", c.Name, got, card)
		}
		if whole := strconv.FormatInt(memoryOf(pod), 10); !guessed && s.Env[protocol.AnnotationPod] != whole {
			say("container %s has %s=%q, want %q", c.Name, protocol.AnnotationPod, s.Env[protocol.AnnotationPod], whole)
		}
		for name, value := range map[string]string{
			protocol.EnvContainer:     strconv.FormatInt(limitOf(c), 10),
			protocol.AnnotationDevice: pod.Annotations[protocol.AnnotationDevice],
		} {
			if s.Env[name] != value {
				say("container %s has %s=%q, want %q", c.Name, name, s.Env[name], value)
			}
		}
	}
	return out
}

// booksDisagreements compares one pod that must be running with the cards that PodResources lists.
func booksDisagreements(pod *corev1.Pod, booked map[string][]int) (out []string) {
	card, err := strconv.Atoi(pod.Annotations[protocol.AnnotationIndex])
	if err != nil {
		return nil // already reported
	}
	all := lasting(pod)
	for i := range all {
		got, want := booked[all[i].Name], limitOf(&all[i])
		if int64(len(got)) != want || slices.ContainsFunc(got, func(of int) bool { return of != card }) {
			out = append(out, fmt.Sprintf("pod %s: the kubelet books devices of cards %v for container %s, which has %d of card %d",
				pod.Name, got, all[i].Name, want, card))
		}
	}
	return out
}

// lasting returns the containers that run as long as the pod: all except init containers that end.
func lasting(pod *corev1.Pod) []corev1.Container {
	all := slices.Clone(pod.Spec.Containers)
	for i := range pod.Spec.InitContainers {
		if sidecar(&pod.Spec.InitContainers[i]) {
			all = append(all, pod.Spec.InitContainers[i])
		}
	}
	return all
}
