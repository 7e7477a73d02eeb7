package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/simkubelet"
)

// From the API server's pod to the container's environment: nodes with the real device plugin.
func TestNode(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{})
	node := addMachine(t, bed, framework.NodeSpec{Name: "node", Kubelet: simkubelet.Options{OmitResourceHealth: true}})
	// As where the kubelet can't be asked which pod it is admitting.
	old := addMachine(t, bed, framework.NodeSpec{Name: "old", PluginArgs: []string{"--pod-resources-socket="}})

	playOn(t, bed, node, "pods of one size each get the card that their annotations name", func(s *scene) {
		assumed := map[string]*corev1.Pod{}
		s.inOneBatch(node, func() {
			for i := range 4 {
				name := fmt.Sprintf("pod-%d", i)
				assumed[name] = s.place(name, 8138, on(node.Name))
				s.sits(assumed[name], node.Name, i/2)
				if got := assumed[name].Annotations[protocol.AnnotationAssigned]; got != "false" {
					s.Errorf("before the node has seen %s, %s is %q", name, protocol.AnnotationAssigned, got)
				}
			}
		})
		for name, before := range assumed {
			pod := s.assigned(name)
			s.handed(node, pod)
			s.keeps(before, pod)
			if pod.Annotations[protocol.AnnotationAssignTime] <= pod.Annotations[protocol.AnnotationAssumeTime] {
				s.Errorf("%s was assigned at %s, before it was assumed", name, pod.Annotations[protocol.AnnotationAssignTime])
			}
		}
	})

	playOn(t, bed, node, "pods that reach the kubelet in another order than they were bound", func(s *scene) {
		assumed := map[string]*corev1.Pod{}
		s.inOneBatch(node, func() {
			for _, name := range []string{"a", "b", "c", "d", "e", "f"} {
				s.create(name, 5000, on(node.Name), gated)
			}
			for _, name := range []string{"d", "f", "a", "c", "e", "b"} {
				s.ungate(name)
				assumed[name] = s.bound(name)
			}
		})
		for name, before := range assumed {
			pod := s.assigned(name)
			s.handed(node, pod)
			s.keeps(before, pod)
		}
	})

	// As kubelets 1.34 and 1.35.
	shows := addMachine(t, bed, framework.NodeSpec{Name: "shows", Kubelet: simkubelet.Options{OmitResourceHealth: true, ShowRejected: true}})
	playOn(t, bed, shows, "where the kubelet shows pods that it has rejected: none of them is taken for the next", func(s *scene) {
		var next *corev1.Pod
		s.inOneBatch(shows, func() {
			rejected := s.place("rejected", 12207, on(shows.Name), annotated(map[string]string{simkubelet.AnnotationRejected: "Evicted"}))
			s.sits(rejected, shows.Name, 0)
			s.nextSecond(rejected)
			next = s.place("next", 12207, on(shows.Name))
			s.sits(next, shows.Name, 1)
		})
		s.await("rejected", "rejected", func(pod *corev1.Pod) bool { return pod.Status.Reason == "Evicted" })
		pod := s.assigned("next")
		s.handed(shows, pod)
		s.keeps(next, pod)
	})

	playOn(t, bed, old, "where the kubelet doesn't tell which pod it is: of one size the earliest assumed", func(s *scene) {
		before := len(old.calls.of(simkubelet.CallAllocate))
		s.inOneBatch(old, func() {
			made := s.create("made-first", 12207, on(old.Name), gated)
			s.nextSecond(made)
			s.sits(s.place("assumed-first", 12207, on(old.Name)), old.Name, 0)
			s.ungate("made-first")
			s.sits(s.bound("made-first"), old.Name, 1)
		})
		// The kubelet takes the older pod first. It gets the other one's card, and what the pods' annotations say follows.
		for _, name := range []string{"made-first", "assumed-first"} {
			s.awaitHanded(old, name)
		}
		var cards []string
		for _, call := range old.calls.of(simkubelet.CallAllocate)[before:] {
			cards = append(cards, call.Env[protocol.AnnotationIndex])
		}
		if want := []string{"0", "1"}; !slices.Equal(cards, want) {
			s.Errorf("the cards were handed out in the order %v, want %v: that in which they were chosen", cards, want)
		}
	})

	playOn(t, bed, node, "pods of every shape get one card for all of their containers", func(s *scene) {
		s.place("filler", 9000, on(node.Name)) // so that both cards are used
		shapes := map[string]*corev1.Pod{
			"plain":           s.pod("plain", 2000, on(node.Name)),
			"two-containers":  s.pod("two-containers", 2000, with("second", 2000), on(node.Name)),
			"three-different": s.pod("three-different", 1000, with("second", 2000), with("third", 500), on(node.Name)),
			"init":            s.pod("init", 2000, first("prepare", 2000), on(node.Name)),
			"larger-init":     s.pod("larger-init", 1000, first("prepare", 2000), on(node.Name)),
			"sidecar":         s.pod("sidecar", 2000, beside("proxy", 1000), on(node.Name)),
			"all-of-it":       s.pod("all-of-it", 1000, beside("proxy", 500), first("prepare", 2000), with("second", 1000), on(node.Name)),
			"half-without":    s.pod("half-without", 2000, without("plain"), on(node.Name)),
		}
		var wg sync.WaitGroup
		for _, pod := range shapes {
			wg.Go(func() {
				if _, err := bed.Client.CoreV1().Pods(s.name).Create(s.Context(), pod, metav1.CreateOptions{}); err != nil {
					s.Error(err)
				}
			})
		}
		wg.Wait()
		cards := map[int]bool{}
		for name := range shapes {
			s.handed(node, s.assigned(name))
			cards[s.cardOf(s.get(name))] = true
		}
		if len(cards) != 2 {
			s.Errorf("the pods use cards %v; with one card this shows nothing", cards)
		}
	})

	playOn(t, bed, node, "pods with a nodeName, forged annotations and all, are counted like others", func(s *scene) {
		s.sits(s.place("honest", 12207, on(node.Name)), node.Name, 0)
		s.assigned("honest")
		unscheduled := func(pod *corev1.Pod) { pod.Spec.NodeName, pod.Spec.NodeSelector = node.Name, nil }
		s.create("bare", 5000, unscheduled)
		s.sits(s.awaitHanded(node, "bare"), node.Name, 1)
		s.create("forged", 5000, unscheduled, annotated(map[string]string{
			protocol.AnnotationIndex: "0", protocol.AnnotationPod: "1", protocol.AnnotationDevice: "999999",
			protocol.AnnotationAssumeTime: "1", protocol.AnnotationAssigned: "false",
		}))
		s.sits(s.awaitHanded(node, "forged"), node.Name, 1)
		// 4069 and 6276 are left: what fits the sum but no card is refused by the node, too.
		s.create("too-much", 10000, unscheduled, annotated(map[string]string{protocol.AnnotationIndex: "0", protocol.AnnotationPod: "1"}))
		s.await("too-much", "refused", func(pod *corev1.Pod) bool { return pod.Status.Phase == corev1.PodFailed })
		s.sits(s.place("scheduled", 6276, on(node.Name)), node.Name, 1)
		s.handed(node, s.assigned("scheduled"))
	})

	playOn(t, bed, node, "a pod that ignores SIGTERM holds its memory until it is gone", func(s *scene) {
		stubborn := annotated(map[string]string{simkubelet.AnnotationIgnoresSIGTERM: "true"})
		s.place("stubborn", 12207, on(node.Name), stubborn)
		s.place("filler", 12207, on(node.Name))
		s.running("stubborn")
		s.create("waits", 8138, on(node.Name))
		s.refused("waits", "1 no GPU card has enough free memory")
		must(s, s.delete("stubborn", 3))
		dies := s.get("stubborn").DeletionTimestamp
		if dies == nil {
			s.Fatal("the pod isn't being deleted")
		}
		waits := s.bound("waits")
		assignment, err := protocol.ParseAssignment(waits.Annotations)
		must(s, err)
		if assignment.AssumeTime.Before(dies.Time) {
			s.Errorf("its place was given away at %s, %s before its grace period was over", assignment.AssumeTime, dies.Sub(assignment.AssumeTime))
		}
		s.gone("stubborn")
		s.handed(node, s.assigned("waits"))
	})

	playOn(t, bed, node, "pods that come to their end by themselves make room", func(s *scene) {
		brief := annotated(map[string]string{simkubelet.AnnotationExitAfter: "300ms"})
		s.create("one", 16000, on(node.Name), brief)
		s.create("two", 16000, on(node.Name), brief)
		s.create("three", 16000, on(node.Name), brief)
		s.create("four", 16000, on(node.Name))
		s.handed(node, s.assigned("four"))
		for _, name := range []string{"one", "two", "three"} {
			s.await(name, "at its end", func(pod *corev1.Pod) bool { return pod.Status.Phase == corev1.PodSucceeded })
		}
	})

	for title, stop := range map[string]func(s *scene){
		"killed":       func(s *scene) { must(s, node.Plugin.Kill()) },
		"asked to end": func(s *scene) { terminate(s, node.Plugin) },
	} {
		playOn(t, bed, node, "the device plugin "+title+" between pods", func(s *scene) {
			for i := range 2 {
				name := fmt.Sprintf("before-%d", i)
				s.place(name, 9000, on(node.Name))
				s.assigned(name)
			}
			before := node.Kubelet.Containers()
			stop(s)
			s.awaitAllocatable(node, 0)
			s.create("meanwhile", 5000, on(node.Name))
			s.refused("meanwhile", "1 Insufficient "+string(protocol.ResourceMemory))
			must(s, node.Plugin.Start(s.Context()))
			s.handed(node, s.assigned("meanwhile"))
			s.handed(node, s.assigned("before-0"))
			s.handed(node, s.assigned("before-1"))
			if diff := cmp.Diff(before, s.containers(node, "before-0", "before-1")); diff != "" {
				s.Errorf("containers that ran before aren't as they were:\n%s", diff)
			}
		})
	}

	for title, restart := range map[string]struct {
		what simkubelet.RestartOptions
		// mayBeLost says that the kubelet wants the pods' devices as soon as it starts: by its rule they fail if no plugin
		// has registered by then, and have what they had if one has.
		mayBeLost bool
	}{
		"":                             {simkubelet.RestartOptions{}, false},
		" and has lost its checkpoint": {simkubelet.RestartOptions{DropCheckpoint: true}, false},
		" with the machine":            {simkubelet.RestartOptions{Reboot: true}, true},
		" with the machine, and has lost its checkpoint": {simkubelet.RestartOptions{Reboot: true, DropCheckpoint: true}, true},
	} {
		playOn(t, bed, node, "the kubelet starts again"+title, func(s *scene) {
			names := []string{"one", "two", "three"}
			for _, name := range names {
				s.place(name, 6000, on(node.Name), with("second", 1000))
				s.assigned(name)
			}
			s.restartKubelet(node, restart.what)
			s.awaitAllocatable(node, 2*cardMiB)
			for _, name := range names {
				if restart.mayBeLost && s.lost(node, name) {
					continue
				}
				s.awaitHanded(node, name)
			}
			s.place("four", 2000, on(node.Name))
			s.awaitHanded(node, "four")
		})
	}

	playOn(t, bed, node, "plugin, kubelet, extender and scheduler all killed under way", func(s *scene) {
		names := []string{"a", "b", "c", "d", "e", "f"}
		for _, name := range names[:3] {
			s.place(name, 5000, on(node.Name))
		}
		must(s, bed.Extender.Kill())
		must(s, bed.Scheduler.Kill())
		for _, name := range names[:3] {
			s.assigned(name)
		}
		must(s, node.Plugin.Kill())
		node.Kubelet.Stop()
		for _, name := range names[3:] {
			s.create(name, 5000, on(node.Name))
		}
		must(s, node.Kubelet.Start(s.Context()))
		s.awaitAllocatable(node, 0)
		must(s, node.Plugin.Start(s.Context()))
		must(s, bed.Scheduler.Start(s.Context()))
		must(s, bed.Extender.Start(s.Context()))
		for _, name := range names {
			s.handed(node, s.assigned(name))
		}
	})
}

// lost waits until the pod has failed or every container of it runs again, and says which.
func (s *scene) lost(node machine, name string) bool {
	s.Helper()
	pod := s.await(name, "lost, or running again", func(pod *corev1.Pod) bool {
		if pod.Status.Phase == corev1.PodFailed {
			return true
		}
		for _, c := range s.containers(node, name) {
			if !c.Running {
				return false
			}
		}
		return pod.Status.Phase == corev1.PodRunning
	})
	return pod.Status.Phase == corev1.PodFailed
}

// machine is a node with a record of what its kubelet called.
type machine struct {
	*framework.Node
	calls *trace
}

// addMachine starts a node, of two cards if the spec has none.
func addMachine(t *testing.T, bed *framework.Cluster, spec framework.NodeSpec) machine {
	t.Helper()
	calls := &trace{}
	spec.KubeletThroughProxy, spec.Kubelet.Trace = true, calls.add
	if spec.Cards == nil {
		spec.Cards = []uint64{cardMiB, cardMiB}
	}
	node, err := bed.AddNode(t.Context(), spec)
	must(t, err)
	return machine{node, calls}
}

// playOn plays a scene with pods on a real node, and checks at its end what the node's containers hold.
func playOn(t *testing.T, bed *framework.Cluster, node machine, title string, act func(s *scene)) {
	t.Helper()
	play(t, bed, title, func(s *scene) {
		s.alive = true
		act(s)
		s.checkContainers(node)
	})
}

// inOneBatch does something while the kubelet is away from the API server, and starts the kubelet anew before it comes
// back: so it learns of everything at once, with the device plugin there already.
func (s *scene) inOneBatch(node machine, do func()) {
	s.Helper()
	heal := node.Proxy.Blackhole()
	defer heal()
	do()
	// A checkpoint would still name the devices of earlier pods, and the kubelet gives none of those out before it has
	// seen that the pods are gone.
	s.restartKubelet(node, simkubelet.RestartOptions{DropCheckpoint: true})
}

// nextSecond waits for another second than that in which the pod was made: within one the kubelet can't tell which of two
// pods is older.
func (s *scene) nextSecond(made *corev1.Pod) {
	s.Helper()
	eventually(s, "another second has begun", func(context.Context) error {
		if made.CreationTimestamp.Unix() == time.Now().Unix() {
			return errors.New("it is still the same")
		}
		return nil
	})
}

// restartKubelet returns when the device plugin has registered with the new kubelet.
func (s *scene) restartKubelet(node machine, what simkubelet.RestartOptions) {
	s.Helper()
	before := node.calls.lists()
	must(s, node.Kubelet.Restart(s.Context(), what))
	eventually(s, "the device plugin has registered again", func(context.Context) error {
		if node.calls.lists() == before {
			return errors.New("the kubelet has been told of no devices")
		}
		return nil
	})
}

// without adds a container that asks for no GPU memory.
func without(name string) edit {
	return func(pod *corev1.Pod) {
		pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{Name: name, Image: "registry.example/app:1"})
	}
}

// keeps checks that a pod's annotations still say what the extender wrote at bind.
func (s *scene) keeps(before, pod *corev1.Pod) {
	s.Helper()
	for _, name := range []string{protocol.AnnotationAssumeTime, protocol.AnnotationIndex, protocol.AnnotationPod, protocol.AnnotationDevice} {
		if pod.Annotations[name] != before.Annotations[name] {
			s.Errorf("%s of pod %s was %q at bind and is %q now", name, pod.Name, before.Annotations[name], pod.Annotations[name])
		}
	}
}

// handed checks that every GPU container of the pod got what the pod's annotations say.
func (s *scene) handed(node machine, pod *corev1.Pod) {
	s.Helper()
	if err := s.wasHanded(s.Context(), node, pod); err != nil {
		s.Error(err)
	}
}

// awaitHanded waits until every GPU container of the pod runs, or ran, with what the pod's annotations say.
func (s *scene) awaitHanded(node machine, name string) *corev1.Pod {
	s.Helper()
	var pod *corev1.Pod
	eventually(s, fmt.Sprintf("the containers of pod %s have what its annotations say", name), func(ctx context.Context) (err error) {
		if pod, err = s.bed.Client.CoreV1().Pods(s.name).Get(ctx, name, metav1.GetOptions{}); err != nil {
			return err
		}
		if pod.Status.Phase != corev1.PodRunning || pod.Annotations[protocol.AnnotationAssigned] != "true" {
			return fmt.Errorf("the pod is %s (%s: %s) with annotations %v: %v",
				pod.Status.Phase, pod.Status.Reason, pod.Status.Message, pod.Annotations, s.events(ctx, name))
		}
		return s.wasHanded(ctx, node, pod)
	})
	return pod
}

func (s *scene) wasHanded(ctx context.Context, node machine, pod *corev1.Pod) error {
	uuids, err := s.uuids(ctx, node)
	if err != nil {
		return err
	}
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		var want map[string]string
		if memory, ok := c.Resources.Limits[protocol.ResourceMemory]; ok {
			want = map[string]string{
				protocol.AnnotationIndex:   pod.Annotations[protocol.AnnotationIndex],
				protocol.AnnotationPod:     fmt.Sprint(memoryOf(pod)),
				protocol.AnnotationDevice:  fmt.Sprint(cardMiB),
				protocol.EnvContainer:      fmt.Sprint(memory.Value()),
				protocol.EnvVisibleDevices: uuids[pod.Annotations[protocol.AnnotationIndex]],
			}
		}
		got := node.Kubelet.Env(pod.UID, c.Name)
		if len(got) == 0 && len(want) == 0 {
			continue
		}
		if diff := cmp.Diff(want, got); diff != "" {
			return fmt.Errorf("the environment of container %s of pod %s isn't what the annotations %v say (-want +got):\n%s",
				c.Name, pod.Name, pod.Annotations, diff)
		}
	}
	return nil
}

// uuids returns the UUID of each card by its index, as the node's inventory tells it.
func (s *scene) uuids(ctx context.Context, node machine) (map[string]string, error) {
	object, err := s.bed.Client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	var inventory struct {
		Cards []struct {
			Index int
			UUID  string
		}
	}
	if err := json.Unmarshal([]byte(object.Annotations[protocol.AnnotationInventory]), &inventory); err != nil {
		return nil, fmt.Errorf("the inventory of node %s: %w", node.Name, err)
	}
	uuids := map[string]string{}
	for _, card := range inventory.Cards {
		uuids[fmt.Sprint(card.Index)] = card.UUID
	}
	return uuids, nil
}

// checkContainers adds up what the containers that run on the node were given: no card over its total.
func (s *scene) checkContainers(node machine) {
	s.Helper()
	held := map[string]int64{}
	for _, c := range node.Kubelet.Containers() {
		if !c.Running || len(c.Env) == 0 {
			continue
		}
		var memory int64
		if _, err := fmt.Sscan(c.Env[protocol.EnvContainer], &memory); err != nil {
			s.Errorf("container %s of pod %s has %s=%q", c.Container, c.Name, protocol.EnvContainer, c.Env[protocol.EnvContainer])
		}
		held[c.Env[protocol.EnvVisibleDevices]] += memory
	}
	for card, memory := range held {
		if memory > cardMiB {
			s.Errorf("the containers on card %s hold %d of %d", card, memory, cardMiB)
		}
	}
}

// containers returns what runs and ran of these pods of the scene.
func (s *scene) containers(node machine, pods ...string) []simkubelet.Container {
	return slices.DeleteFunc(node.Kubelet.Containers(), func(c simkubelet.Container) bool {
		return c.Namespace != s.name || !slices.Contains(pods, c.Name)
	})
}

// awaitAllocatable waits until the node offers that much.
func (s *scene) awaitAllocatable(node machine, want int64) {
	s.Helper()
	eventually(s, fmt.Sprintf("node %s offers %d", node.Name, want), func(ctx context.Context) error {
		object, err := s.bed.Client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if got := object.Status.Allocatable[protocol.ResourceMemory]; got.Value() != want {
			return fmt.Errorf("it offers %s", got.String())
		}
		return nil
	})
}

// trace keeps the calls that a kubelet has made.
type trace struct {
	mu     sync.Mutex
	events []simkubelet.Event
}

func (c *trace) add(e simkubelet.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.events = append(c.events, e)
}

// lists returns how often the kubelet was told of devices.
func (c *trace) lists() int {
	return len(slices.DeleteFunc(c.of(simkubelet.CallListAndWatch), func(e simkubelet.Event) bool { return e.Err != nil }))
}

// of returns the calls of one kind, in the order in which they ended.
func (c *trace) of(call simkubelet.Call) []simkubelet.Event {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []simkubelet.Event
	for _, e := range c.events {
		if e.Call == call {
			out = append(out, e)
		}
	}
	return out
}
