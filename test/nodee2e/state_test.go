package nodee2e

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// state is the complete state of the node at one moment, from all sources.
type state struct {
	pods    []corev1.Pod
	running []observed
	// ledger is the extender's.
	ledger allocations
	// kubelet holds the cards of the devices in PodResources, by pod ("namespace/name") and container. It is nil if it must
	// not be compared.
	kubelet map[string]map[string][]int
	// guesses is true if a container's environment may have the total request of another pod, and its devices in PodResources may be of another card.
	// Neither can be corrected for a running container.
	guesses bool
}

// allocations maps each card to its pods, each as "namespace/name memory", sorted.
type allocations map[int][]string

func (a allocations) add(card int, namespace, name string, memory int64) {
	a[card] = append(a[card], fmt.Sprintf("%s/%s %d", namespace, name, memory))
	slices.Sort(a[card])
}

func (c *cluster) readState(ctx context.Context) (s state, err error) {
	list, err := c.Client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + c.node.name})
	if err != nil {
		return s, err
	}
	s.pods = list.Items
	if s.running, err = c.node.running(); err != nil {
		return s, err
	}
	if s.ledger, err = c.readLedger(ctx); err != nil {
		return s, err
	}
	s.kubelet, err = c.node.readKubelet(ctx)
	return s, err
}

// use is the use of a card: memory in units, and a percentage of its cores.
type use struct{ memory, cores int64 }

// exceeds reports whether the card, one of those with these sizes in MiB, has less.
func (u use) exceeds(cards []uint64, card int) bool {
	return card >= len(cards) || u.memory > gibibytes(cards[card]) || u.cores > 100
}

// annotated returns the pods and the use of each card by the annotations. It shares no code for the sums with the programs under
// test.
func annotated(pods []corev1.Pod) (a allocations, used map[int]use, err error) {
	a, used = allocations{}, map[int]use{}
	for i := range pods {
		pod := &pods[i]
		memory := framework.GPUMemOf(pod)
		if memory == 0 || pod.Spec.NodeName == "" || ended(pod) {
			continue
		}
		cards, parseErr := parseCards(pod.Annotations[protocol.AnnotationIndex])
		if parseErr != nil {
			err = errors.Join(err, fmt.Errorf("pod %s is on the node without a card: %v", pod.Name, pod.Annotations))
			continue
		}
		n := int64(len(cards))
		for _, card := range cards {
			used[card] = use{used[card].memory + memory/n, used[card].cores + coresOf(pod)/n}
			a.add(card, pod.Namespace, pod.Name, memory/n)
		}
	}
	return a, used, err
}

// coresOf returns the cores that the containers ask for. No test asks for more in an init container.
func coresOf(pod *corev1.Pod) (sum int64) {
	for i := range pod.Spec.Containers {
		sum += limitOf(&pod.Spec.Containers[i], protocol.ResourceCores)
	}
	return sum
}

// allocation returns the annotation that a pod with these cards must have beside the list of cards: empty for one card.
func allocation(pod *corev1.Pod, cards []int) string {
	if len(cards) == 1 {
		return ""
	}
	var containers []string
	for i := range pod.Spec.Containers {
		memory := limit(&pod.Spec.Containers[i])
		if memory == 0 {
			continue
		}
		var shares []string
		for _, card := range cards {
			shares = append(shares, fmt.Sprintf("%q:%d", strconv.Itoa(card), memory/int64(len(cards))))
		}
		containers = append(containers, fmt.Sprintf("%q:{%s}", strconv.Itoa(i), strings.Join(shares, ",")))
	}
	return "{" + strings.Join(containers, ",") + "}"
}

func ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

func terminating(pod *corev1.Pod) bool { return pod.DeletionTimestamp != nil }

func isSidecar(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

func limit(c *corev1.Container) int64 { return limitOf(c, protocol.ResourceMemory) }

func limitOf(c *corev1.Container, name corev1.ResourceName) int64 {
	quantity := c.Resources.Limits[name]
	return quantity.Value()
}

// readLedger reads the node's allocations from the extender.
func (c *cluster) readLedger(ctx context.Context) (allocations, error) {
	nodes, err := c.LedgerAllocations(ctx)
	out := allocations{}
	for index, card := range nodes[c.node.name] {
		if len(card.Pods) > 0 {
			out[index] = card.Pods
		}
	}
	return out, err
}

// readKubelet returns, by pod and container, the cards of the devices that the kubelet's PodResources lists.
func (n *node) readKubelet(ctx context.Context) (map[string]map[string][]int, error) {
	var answer *podresourcesv1.ListPodResourcesResponse
	err := n.callPodResources(ctx, func(ctx context.Context, client podresourcesv1.PodResourcesListerClient) (err error) {
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

// inconsistencies returns all errors on a node at rest. There every pod must run, and annotations, environments, the
// extender's ledger and the kubelet's PodResources must agree.
func (s state) inconsistencies(cards []uint64) (out []string) {
	add := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	want, used, err := annotated(s.pods)
	if err != nil {
		add("%v", err)
	}
	for card, use := range used {
		if use.exceeds(cards, card) {
			add("card %d has %d and %d%% by the annotations: %v", card, use.memory, use.cores, want[card])
		}
	}
	if diff := gocmp.Diff(want, s.ledger); diff != "" {
		add("the extender's ledger (+) differs from the annotations (-):\n%s", diff)
	}
	running := map[string]map[string]observed{}
	for _, o := range s.running {
		if running[o.PodUID] == nil {
			running[o.PodUID] = map[string]observed{}
		}
		running[o.PodUID][o.Container] = o
	}
	for i := range s.pods {
		pod := &s.pods[i]
		if framework.GPUMemOf(pod) > 0 && !ended(pod) {
			for _, problem := range s.podInconsistencies(pod, running[string(pod.UID)]) {
				add("pod %s: %s", pod.Name, problem)
			}
		}
		delete(running, string(pod.UID))
	}
	for uid := range running {
		add("containers run of pod %s, which the API server doesn't know", uid)
	}
	return out
}

// podInconsistencies compares one pod that must be running with its containers and with PodResources.
func (s state) podInconsistencies(pod *corev1.Pod, running map[string]observed) (out []string) {
	add := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	if pod.Status.Phase != corev1.PodRunning || terminating(pod) {
		add("it is %s (terminating: %t)", pod.Status.Phase, terminating(pod))
		return out
	}
	if pod.Annotations[protocol.AnnotationAssigned] != "true" {
		add("it is not assigned: %v", pod.Annotations)
	}
	if _, err := strconv.ParseInt(pod.Annotations[protocol.AnnotationAssumeTime], 10, 64); err != nil {
		add("the annotations have no assume time: %v", pod.Annotations)
	}
	cards, err := parseCards(pod.Annotations[protocol.AnnotationIndex])
	if err != nil {
		return out // Already reported.
	}
	if want := cmp.Or(pod.Labels[protocol.LabelCount], "1"); strconv.Itoa(len(cards)) != want && !s.guesses {
		add("it has cards %v, want %s", cards, want)
	}
	if got, want := pod.Annotations[protocol.AnnotationAllocation], allocation(pod, cards); got != want {
		add("its allocation is %q, want %q", got, want)
	}
	containers := slices.DeleteFunc(slices.Clone(pod.Spec.InitContainers), func(c corev1.Container) bool { return !isSidecar(&c) })
	for _, c := range append(containers, pod.Spec.Containers...) {
		if s.kubelet != nil && !s.guesses {
			got := s.kubelet[pod.Namespace+"/"+pod.Name][c.Name]
			if !devicesOf(got, cards, limit(&c), reusesDevices(pod)) {
				add("PodResources has devices of cards %v for container %s, which has %d of cards %v", got, c.Name, limit(&c), cards)
			}
		}
		o, ok := running[c.Name]
		if !ok {
			add("its container %s doesn't run", c.Name)
			continue
		}
		if limit(&c) == 0 {
			if _, has := o.Env[protocol.AnnotationIndex]; has {
				add("container %s requests no GPU memory and has a card", c.Name)
			}
			continue
		}
		if got, err := o.cards(); err != nil || !slices.Equal(got, cards) {
			add("container %s has cards %v, the annotation says %v (%v)", c.Name, got, cards, err)
		}
		if cores := limitOf(&c, protocol.ResourceCores); o.cores() != cores/int64(len(cards)) {
			add("container %s has %d%% of each card, want %d%% of %d cards", c.Name, o.cores(), cores, len(cards))
		}
		want := map[string]string{
			protocol.EnvContainer:     strconv.FormatInt(limit(&c)/int64(len(cards)), 10),
			protocol.AnnotationDevice: pod.Annotations[protocol.AnnotationDevice],
		}
		if !s.guesses {
			want[protocol.AnnotationPod] = strconv.FormatInt(framework.GPUMemOf(pod), 10)
		}
		for name, value := range want {
			if o.Env[name] != value {
				add("container %s has %s=%q, want %q", c.Name, name, o.Env[name], value)
			}
		}
	}
	return out
}

// devicesOf reports whether these are the cards of a number of devices: as many of each card, or, if uneven is set, any number.
func devicesOf(got, cards []int, devices int64, uneven bool) bool {
	count := map[int]int64{}
	for _, card := range got {
		count[card]++
	}
	for _, card := range cards {
		if uneven || count[card] == devices/int64(len(cards)) {
			delete(count, card)
		}
	}
	return int64(len(got)) == devices && len(count) == 0
}

// reusesDevices reports whether an init container of the pod, which has several cards, asks for devices. The kubelet gives any of them
// to the containers after it.
func reusesDevices(pod *corev1.Pod) bool {
	return pod.Labels[protocol.LabelCount] != "" && slices.ContainsFunc(pod.Spec.InitContainers, func(c corev1.Container) bool { return limit(&c) > 0 })
}

// The comparison that all tests rely on detects each kind of error.
func TestInconsistencies(t *testing.T) {
	setCard := func(s *state, container int, card string) {
		env := s.running[container].Env
		var uuids []string
		for index := range strings.SplitSeq(card, ",") {
			uuids = append(uuids, cardUUID(int(index[0]-'0')))
		}
		env[protocol.AnnotationIndex], env[protocol.EnvVisibleDevices] = card, strings.Join(uuids, ",")
	}
	setCores := func(s *state, container int, cores int64) {
		s.pods[0].Spec.Containers[container].Resources.Limits[protocol.ResourceCores] = *resource.NewQuantity(cores, resource.DecimalSI)
	}
	// severalCards gives the pod two cards.
	severalCards := func(s *state) {
		pod := &s.pods[0]
		pod.Labels = map[string]string{protocol.LabelCount: "2"}
		pod.Annotations[protocol.AnnotationIndex], pod.Annotations[protocol.AnnotationAllocation] = "0,1", `{"0":{"0":2,"1":2},"1":{"0":1,"1":1}}`
		for i, memory := range []int64{4, 2} {
			pod.Spec.Containers[i].Resources.Limits[protocol.ResourceMemory] = *resource.NewQuantity(memory, resource.DecimalSI)
			setCard(s, i, "0,1")
			s.running[i].Env[protocol.EnvContainer], s.running[i].Env[protocol.AnnotationPod] = strconv.FormatInt(memory/2, 10), "6"
		}
		s.ledger = allocations{0: {"a/pod 3"}, 1: {"a/pod 3"}}
		s.kubelet["a/pod"] = map[string][]int{"main": {0, 1, 0, 1}, "second": {1, 0}}
	}
	makePod := func(name string, memory int64) *framework.PodWrapper {
		pod := framework.MakePod(name).Namespace("a").UID(types.UID("uid-" + name)).GPUMem(memory).Node("real").Annotations(map[string]string{
			protocol.AnnotationIndex: "1", protocol.AnnotationDevice: "15", protocol.AnnotationAssigned: "true",
			protocol.AnnotationAssumeTime: "1",
		})
		pod.Status.Phase = corev1.PodRunning
		return pod
	}
	for name, test := range map[string]struct {
		change func(*state)
		want   string // Empty if there is no inconsistency.
	}{
		"no error":                                {func(*state) {}, ""},
		"another card in the container":           {func(s *state) { setCard(s, 0, "0") }, "container main has cards [0], the annotation says [1]"},
		"a UUID of another card":                  {func(s *state) { s.running[0].Env[protocol.EnvVisibleDevices] = cardUUID(0) }, "which isn't card 1"},
		"no card in the container":                {func(s *state) { s.running[0].Env[protocol.AnnotationIndex] = "" }, "has no card"},
		"another amount":                          {func(s *state) { s.running[0].Env[protocol.EnvContainer] = "4" }, `has ALIYUN_COM_GPU_MEM_CONTAINER="4", want "3"`},
		"a container that doesn't run":            {func(s *state) { s.running = s.running[:1] }, "its container second doesn't run"},
		"a container of an unknown pod":           {func(s *state) { s.running[1].PodUID = "other" }, "containers run of pod other"},
		"not assigned":                            {func(s *state) { delete(s.pods[0].Annotations, protocol.AnnotationAssigned) }, "not assigned"},
		"no annotation":                           {func(s *state) { delete(s.pods[0].Annotations, protocol.AnnotationIndex) }, "on the node without a card"},
		"another card in the ledger":              {func(s *state) { s.ledger = allocations{0: s.ledger[1]} }, "the extender's ledger"},
		"another card in PodResources":            {func(s *state) { s.kubelet["a/pod"]["main"][2] = 0 }, "PodResources has devices of cards [1 1 0]"},
		"too few devices":                         {func(s *state) { s.kubelet["a/pod"]["second"] = nil }, "PodResources has devices of cards []"},
		"PodResources are not compared":           {func(s *state) { s.kubelet = nil }, ""},
		"a card above its total":                  {func(s *state) { s.pods = append(s.pods, makePod("more", 13).Pod) }, "card 1 has 18"},
		"a pod that isn't running":                {func(s *state) { s.pods[0].Status.Phase = corev1.PodPending }, "it is Pending"},
		"another pod's request":                   {func(s *state) { s.running[0].Env[protocol.AnnotationPod] = "4" }, `ALIYUN_COM_GPU_MEM_POD="4", want "5"`},
		"another card in PodResources, guessed":   {func(s *state) { s.kubelet["a/pod"]["main"][2], s.guesses = 0, true }, ""},
		"another pod's request, pods are guessed": {func(s *state) { s.running[0].Env[protocol.AnnotationPod], s.guesses = "4", true }, ""},
		"a failed pod that has memory":            {func(s *state) { s.pods[0].Status.Phase = corev1.PodFailed }, "the extender's ledger"},
		"cores that the container doesn't have":   {func(s *state) { setCores(s, 0, 40) }, "container main has 0% of each card, want 40% of 1 cards"},
		"more cores than a card has":              {func(s *state) { setCores(s, 0, 80); setCores(s, 1, 40) }, "card 1 has 5 and 120%"},
		"several cards":                           {severalCards, ""},
		"fewer cards than the label names":        {func(s *state) { severalCards(s); s.pods[0].Labels[protocol.LabelCount] = "4" }, "it has cards [0 1], want 4"},
		"another of several cards":                {func(s *state) { severalCards(s); setCard(s, 0, "0,2") }, "container main has cards [0 2], the annotation says [0 1]"},
		"one of several cards":                    {func(s *state) { severalCards(s); setCard(s, 0, "0") }, "container main has cards [0], the annotation says [0 1]"},
		"a card twice":                            {func(s *state) { severalCards(s); setCard(s, 0, "0,0") }, "has no card"},
		"no allocation":                           {func(s *state) { severalCards(s); delete(s.pods[0].Annotations, protocol.AnnotationAllocation) }, "its allocation is"},
		"uneven devices":                          {func(s *state) { severalCards(s); s.kubelet["a/pod"]["main"] = []int{0, 0, 0, 1} }, "PodResources has devices of cards [0 0 0 1]"},
	} {
		t.Run(name, func(t *testing.T) {
			s := state{
				pods: []corev1.Pod{makePod("pod", 3).Container("second", 2).Pod},
				running: []observed{
					{PodUID: "uid-pod", Container: "main", Env: map[string]string{protocol.EnvContainer: "3"}},
					{PodUID: "uid-pod", Container: "second", Env: map[string]string{protocol.EnvContainer: "2"}},
				},
				ledger:  allocations{1: {"a/pod 5"}},
				kubelet: map[string]map[string][]int{"a/pod": {"main": {1, 1, 1}, "second": {1, 1}}},
			}
			for i := range s.running {
				s.running[i].Env[protocol.AnnotationPod], s.running[i].Env[protocol.AnnotationDevice] = "5", "15"
				setCard(&s, i, "1")
			}
			test.change(&s)
			got := strings.Join(s.inconsistencies([]uint64{cardMiB, cardMiB}), "\n")
			if test.want == "" && got != "" || !strings.Contains(got, test.want) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
