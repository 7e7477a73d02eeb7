package nodee2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/test/simkubelet"
)

// player plays the trace against one kubelet.
type player struct {
	*scene
	traced
	recorder *recorder
	// newest is the creation time of the last pod.
	newest metav1.Time
}

// devices is the number of devices that the recorder offers.
const devices = 20

// offered returns the devices, with the given number of unhealthy ones.
func offered(unhealthy int) []*pluginapi.Device {
	out := make([]*pluginapi.Device, devices)
	for i := range out {
		out[i] = &pluginapi.Device{ID: fmt.Sprintf("%02d", i), Health: pluginapi.Healthy}
		if i < unhealthy {
			out[i].Health = pluginapi.Unhealthy
		}
	}
	return out
}

func (p *player) part(title string) { p.recorder.say("%s", title) }

// offer registers the recorder and waits until the node shows its devices.
func (p *player) offer() {
	p.Helper()
	p.recorder.register(p, offered(0))
	p.awaitOffer(devices)
}

// awaitOffer waits until the node offers this number of devices.
func (p *player) awaitOffer(want int64) {
	p.Helper()
	eventually(p, fmt.Sprintf("node %s offers %d", p.node, want), func(ctx context.Context) error {
		node, err := p.bed.Client.CoreV1().Nodes().Get(ctx, p.node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if got, ok := node.Status.Allocatable[recordedResource]; !ok || got.Value() != want {
			return fmt.Errorf("it offers %s", got.String())
		}
		return nil
	})
}

// described returns a pod for the recorder's node.
func (p *player) described(name string, edits ...edit) *corev1.Pod {
	pod := p.pod(0, func(pod *corev1.Pod) { pod.Spec.Containers = nil })
	pod.Name, pod.Spec.NodeName = name, p.node
	for _, edit := range edits {
		edit(pod)
	}
	return pod
}

func recorded(name string, devices int64) corev1.Container {
	c := container(name, 0)
	c.Resources.Limits = corev1.ResourceList{recordedResource: *resource.NewQuantity(devices, resource.DecimalSI)}
	return c
}

func asks(name string, devices int64) edit { return add(recorded(name, devices)) }

func initAsks(name string, devices int64) edit { return addInit(recorded(name, devices)) }

func sidecarAsks(name string, devices int64) edit { return addSidecar(recorded(name, devices)) }

// deaf makes the pod ignore SIGTERM on both kubelets.
func deaf(pod *corev1.Pod) {
	pod.Annotations = map[string]string{simkubelet.AnnotationIgnoresSIGTERM: "true"}
	tell(pod, "-stubborn")
}

// brief makes the pod end by itself.
func brief(pod *corev1.Pod) {
	pod.Annotations = map[string]string{simkubelet.AnnotationExitAfter: "500ms"}
	pod.Spec.RestartPolicy = corev1.RestartPolicyNever
	tell(pod, "-for=500ms")
}

// watch makes the recorder record the pod's visibility from now on.
func (p *player) watch(name string) {
	p.recorder.mu.Lock()
	defer p.recorder.mu.Unlock()
	p.recorder.watched = append(p.recorder.watched, p.name+"/"+name)
}

// unwatch ends the recording of the pods' visibility.
func (p *player) unwatch(names ...string) {
	p.recorder.mu.Lock()
	defer p.recorder.mu.Unlock()
	p.recorder.watched = slices.DeleteFunc(p.recorder.watched, func(pod string) bool {
		_, name, _ := strings.Cut(pod, "/")
		return slices.Contains(names, name)
	})
}

// create creates a pod on the node and watches it.
func (p *player) create(name string, edits ...edit) {
	p.Helper()
	p.watch(name)
	made, err := p.bed.Client.CoreV1().Pods(p.name).Create(p.Context(), p.described(name, edits...), metav1.CreateOptions{})
	must(p, err)
	p.newest = made.CreationTimestamp
}

// nobodys assigns the pod to a scheduler that doesn't exist.
func nobodys(pod *corev1.Pod) { pod.Spec.NodeName, pod.Spec.SchedulerName = "", "nobody" }

// nextSecond waits for a second in which no pod was created. The kubelet sorts pods by their creation time in seconds.
func (p *player) nextSecond() {
	p.Helper()
	eventually(p, "the next second has begun", func(context.Context) error {
		if now := metav1.Now().Rfc3339Copy(); !now.After(p.newest.Time) {
			return fmt.Errorf("it is %s", now)
		}
		return nil
	})
}

// unbound creates pods that no scheduler binds, each in its own second.
func (p *player) unbound(names ...string) {
	p.Helper()
	for _, name := range names {
		p.nextSecond()
		p.create(name, asks("main", 1), nobodys)
	}
}

// bind binds pods in this order.
func (p *player) bind(names ...string) {
	p.Helper()
	for _, name := range names {
		must(p, p.bed.Client.CoreV1().Pods(p.name).Bind(p.Context(), &corev1.Binding{
			ObjectMeta: metav1.ObjectMeta{Namespace: p.name, Name: name},
			Target:     corev1.ObjectReference{Kind: "Node", Name: p.node},
		}, metav1.CreateOptions{}))
	}
}

// awaitPhase waits until the pod has this phase.
func (p *player) awaitPhase(name string, phase corev1.PodPhase) *corev1.Pod {
	p.Helper()
	var pod *corev1.Pod
	eventually(p, fmt.Sprintf("pod %s is %s", name, phase), func(ctx context.Context) (err error) {
		pod, err = p.bed.Client.CoreV1().Pods(p.name).Get(ctx, name, metav1.GetOptions{})
		if err == nil && pod.Status.Phase != phase {
			err = fmt.Errorf("it is %s (%s: %s)", pod.Status.Phase, pod.Status.Reason, pod.Status.Message)
		}
		return err
	})
	return pod
}

// tellFailed records why the kubelet failed the pod, and that PodResources no longer shows it.
func (p *player) tellFailed(name string) {
	p.Helper()
	pod := p.awaitPhase(name, corev1.PodFailed)
	p.recorder.say("  pod %s has failed: %s: %s", name, pod.Status.Reason, pod.Status.Message)
	p.recorder.say("    %s", p.recorder.visible(p.Context(), p.name+"/"+name))
	p.unwatch(name)
}

// deletePods deletes pods with this grace period in seconds.
func (p *player) deletePods(grace int64, names ...string) {
	p.Helper()
	for _, name := range names {
		must(p, p.bed.Client.CoreV1().Pods(p.name).Delete(p.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: &grace}))
	}
}

// remove deletes pods and waits until they are gone.
func (p *player) remove(names ...string) {
	p.Helper()
	p.deletePods(1, names...)
	p.awaitGone(names...)
	p.unwatch(names...)
}

// awaitGone waits until the pod objects are gone.
func (p *player) awaitGone(names ...string) {
	p.Helper()
	p.gone(func(pod *corev1.Pod) bool { return slices.Contains(names, pod.Name) })
}

// crashAndAwait ends a container and waits until it has this number of restarts.
func (p *player) crashAndAwait(name, container string, restarts int32) {
	p.Helper()
	pod := p.awaitPhase(name, corev1.PodRunning)
	must(p, p.crash(p.Context(), pod.UID, container))
	eventually(p, fmt.Sprintf("container %s of pod %s runs again", container, name), func(ctx context.Context) error {
		pod, err := p.bed.Client.CoreV1().Pods(p.name).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, s := range pod.Status.ContainerStatuses {
			if s.Name == container && (s.RestartCount < restarts || s.State.Running == nil) {
				return fmt.Errorf("it was started %d times: %+v", s.RestartCount, s.State)
			}
		}
		return nil
	})
	p.recorder.say("  it runs again")
}

// flood sends more calls to PodResources than it answers, and records the refusal.
func (p *player) flood() {
	p.Helper()
	var group sync.WaitGroup
	answers := make(chan error, 300)
	for range cap(answers) {
		group.Go(func() {
			_, err := p.recorder.get(p.Context(), p.name, "nobody")
			answers <- err
		})
	}
	group.Wait()
	close(answers)
	counts := map[string]int{}
	for err := range answers {
		counts[fmt.Sprintf("%s: %s", status.Code(err), status.Convert(err).Message())]++
	}
	for answer := range counts {
		if strings.HasPrefix(answer, codes.ResourceExhausted.String()) {
			p.recorder.say("  %s", answer)
		}
	}
	p.Logf("%d answers: %v", cap(answers), counts)
}
