package nodee2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/simkubelet"
)

// TestTrace runs the same pods on the real kubelet and on the simulated kubelet that other tests use. Both must behave the
// same: the order and content of their calls to a device plugin, the pods that PodResources shows at each call, the
// devices that they reuse, and the calls and pods that they reject, with the messages.
func TestTrace(t *testing.T) {
	c := newCluster(t, cardMiB)
	sim := startSimulated(t, c)
	var onReal, onSimulated []string
	var both sync.WaitGroup // At the same time, because both wait for most of it.
	both.Go(func() { t.Run("real", func(t *testing.T) { onReal = traceInTime(t, c, realKubelet(c)) }) })
	both.Go(func() { t.Run("simulated", func(t *testing.T) { onSimulated = traceInTime(t, c, sim) }) })
	both.Wait()
	if diff := cmp.Diff(onReal, onSimulated); diff != "" {
		t.Errorf("the simulated kubelet (+) differs from the real one (-):\n%s", diff)
	}
	t.Logf("the real kubelet's trace:\n%s", strings.Join(onReal, "\n"))
}

// tracedKubelet is a kubelet on which the trace is run.
type tracedKubelet struct {
	nodeName                    string
	devicePlugins, podResources string
	kill                        func() error
	start                       func(context.Context) error
	endContainer                func(ctx context.Context, pod types.UID, container string) error
}

func realKubelet(c *cluster) tracedKubelet {
	n := c.node
	return tracedKubelet{
		nodeName: n.name, devicePlugins: n.devicePluginDir(), podResources: n.podResourcesSocket(),
		kill: n.kubelet.Kill, start: n.kubelet.Start,
		endContainer: func(ctx context.Context, pod types.UID, container string) error {
			o, err := n.find(pod, container)
			if err != nil {
				return err
			}
			return n.kill(ctx, o)
		},
	}
}

func startSimulated(t *testing.T, c *cluster) tracedKubelet {
	t.Helper()
	root, err := os.MkdirTemp("", "sim-")
	check.Must(t, err)
	k, err := simkubelet.New(simkubelet.Options{
		NodeName: "simulated", Client: c.Client, Root: root, LiftNotReadyTaint: true,
		Labels: map[string]string{protocol.LabelShared: "true"},
	})
	check.Must(t, err)
	check.Must(t, k.Start(t.Context()))
	t.Cleanup(func() {
		k.Stop()
		check.Must(t, os.RemoveAll(root))
	})
	return tracedKubelet{
		nodeName: "simulated", devicePlugins: k.DevicePluginDir(), podResources: k.PodResourcesSocket(),
		kill: func() error { k.Stop(); return nil }, start: k.Start,
		endContainer: func(_ context.Context, pod types.UID, container string) error {
			return k.CrashContainer(pod, container)
		},
	}
}

// traceInTime returns the record of a run in which the recorder registered in time after each restart of the kubelet.
func traceInTime(t *testing.T, c *cluster, k tracedKubelet) (lines []string) {
	inTime := false
	for attempt := 0; attempt < 3 && !inTime && !t.Failed(); attempt++ {
		t.Run(fmt.Sprint("attempt ", attempt), func(t *testing.T) { lines, inTime = runTrace(t, c, k) })
	}
	if !inTime && !t.Failed() {
		t.Error("the recorder never registered before the kubelet admitted pods")
	}
	return lines
}

// runTrace runs the trace and returns the record, without the names that differ between runs. inTime is false if the restarted kubelet
// rejected pods because the recorder hadn't registered yet.
func runTrace(t *testing.T, c *cluster, k tracedKubelet) (lines []string, inTime bool) {
	r := &recorder{dir: k.devicePlugins, podResources: k.podResources}
	s := &traceRun{scenario: c.scenarioBeside(t), tracedKubelet: k, recorder: r}
	t.Cleanup(r.stop)
	s.register()

	r.log("a pod with an init container, a sidecar and two containers, and another pod")
	s.createPod("all", func(pod *framework.PodWrapper) {
		pod.InitContainer("init", 0).Sidecar("sidecar", 0).Container("second", 0)
		setDevices(&pod.Spec.InitContainers[0], 4)
		setDevices(&pod.Spec.InitContainers[1], 2)
		setDevices(&pod.Spec.Containers[0], 3)
		setDevices(&pod.Spec.Containers[1], 1)
	})
	s.WaitPhase("all", corev1.PodRunning)
	s.waitNextSecond()
	s.createPod("plain", request2)
	s.WaitPhase("plain", corev1.PodRunning)

	r.log("pods that are bound one after the other, the newer one first")
	s.createUnbound("one", "two")
	s.bind("two", "one")
	s.WaitPhase("one", corev1.PodRunning)
	s.WaitPhase("two", corev1.PodRunning)

	r.log("a pod whose second container requests too much")
	s.createPod("big", func(pod *framework.PodWrapper) { setDevices(&pod.Container("second", 0).Spec.Containers[1], devices) })
	s.expectRejected("big")

	r.log("a pod that the plugin rejects")
	r.rejectNext(status.Error(codes.ResourceExhausted, "no card"))
	s.createPod("rejected")
	s.expectRejected("rejected")

	r.log("a pod in its grace period, and after it")
	s.createPod("stubborn", ignoresSIGTERM)
	s.WaitPhase("stubborn", corev1.PodRunning)
	s.DeleteWithGrace("stubborn", 4)
	s.createPod("meanwhile")
	s.WaitPhase("meanwhile", corev1.PodRunning)
	s.WaitGone("stubborn")
	s.createPod("afterwards")
	s.WaitPhase("afterwards", corev1.PodRunning)

	r.log("a pod that has ended")
	s.createPod("ended", endsSoon)
	s.WaitPhase("ended", corev1.PodSucceeded)
	s.createPod("next")
	s.WaitPhase("next", corev1.PodRunning)

	r.log("devices that become unhealthy")
	r.lists <- makeDevices(3)
	s.waitAllocatable(devices - 3)
	s.createPod("fewer")
	s.WaitPhase("fewer", corev1.PodRunning)
	s.remove("fewer", "next", "meanwhile", "afterwards", "one", "two")
	r.lists <- makeDevices(0)
	s.waitAllocatable(devices)

	r.log("the devices of a pod that is deleted by force are free while its containers run")
	s.createPod("forced", ignoresSIGTERM, func(pod *framework.PodWrapper) { setDevices(&pod.Spec.Containers[0], devices/2) })
	s.WaitPhase("forced", corev1.PodRunning)
	s.DeleteWithGrace("forced", 0)
	s.WaitGone("forced")
	s.unwatch("forced")
	s.createPod("successor", func(pod *framework.PodWrapper) { setDevices(&pod.Spec.Containers[0], devices/2) })
	s.WaitPhase("successor", corev1.PodRunning)
	s.remove("successor")

	r.log("a container that ends and is restarted")
	s.killAndWait("plain", 1)

	r.log("the kubelet restarts: pods bound meanwhile, the newer one first")
	check.Must(s, s.kill())
	s.createUnbound("three", "four")
	s.bind("four", "three")
	s.restart()
	if !s.admitted("three") || !s.admitted("four") || !s.known("all") || !s.known("plain") {
		return nil, false
	}

	r.log("the kubelet restarts without its checkpoint")
	s.remove("three", "four")
	check.Must(s, s.kill())
	check.Must(s, os.Remove(filepath.Join(s.devicePlugins, "kubelet_internal_checkpoint")))
	s.restart()
	s.createPod("new")
	s.WaitPhase("new", corev1.PodRunning)
	if !s.known("all") || !s.known("plain") {
		return nil, false
	}

	r.log("a container without an entry in the checkpoint that ends and is restarted")
	s.killAndWait("plain", 2)

	r.log("more calls of PodResources than it answers")
	s.exceedRateLimit()

	r.log("the plugin registers again with another socket, and then its old stream ends")
	old := r.detach()
	s.registerAs("second.sock", makeDevices(1))
	s.waitAllocatable(devices - 1)
	old.Stop()
	r.lists <- makeDevices(2)
	s.waitAllocatable(devices - 2)

	r.log("a list of devices that is too large")
	s.register()
	large := makeDevices(0)
	large[0].ID = strings.Repeat("x", 4<<20)
	r.lists <- large
	s.waitAllocatable(0)

	r.log("the plugin ends")
	s.register()
	r.stop()
	s.waitAllocatable(0)
	s.createPod("late")
	s.expectRejected("late")

	r.log("the plugin registers again with the same socket before its old stream ends: the socket is refused also after that")
	s.register()
	old = r.detach()
	s.expectRefused("recorder.sock")
	old.Stop()
	s.expectRefused("recorder.sock")
	s.registerAs("third.sock", makeDevices(3))
	s.waitAllocatable(devices - 3)

	lines = r.lines
	for i := range lines {
		lines[i] = strings.NewReplacer(s.ID, "NAMESPACE", s.nodeName, "NODE").Replace(lines[i])
	}
	return lines, true
}

// traceRun is a run of the trace on one kubelet.
type traceRun struct {
	*scenario
	tracedKubelet
	recorder *recorder
	// newest is the creation time of the last pod.
	newest metav1.Time
}

// setDevices sets the number of the recorder's devices that a container requests.
func setDevices(c *corev1.Container, n int64) {
	c.Resources.Limits = framework.MakePod("").Limit(recordedResource, n).Spec.Containers[0].Resources.Limits
}

func request2(pod *framework.PodWrapper) { setDevices(&pod.Spec.Containers[0], 2) }

// ignoresSIGTERM makes the pod ignore SIGTERM on both kubelets.
func ignoresSIGTERM(pod *framework.PodWrapper) {
	setArg(pod.Annotation(simkubelet.AnnotationIgnoresSIGTERM, "true"), "-ignore-sigterm")
}

// endsSoon makes the pod end by itself on both kubelets.
func endsSoon(pod *framework.PodWrapper) {
	setArg(pod.Annotation(simkubelet.AnnotationExitAfter, "500ms"), "-for=500ms")
	pod.Spec.RestartPolicy = corev1.RestartPolicyNever
}

// register registers the recorder and waits until the node has its devices.
func (s *traceRun) register() {
	s.Helper()
	s.recorder.register(s, makeDevices(0))
	s.waitAllocatable(devices)
}

// registerAs registers the recorder with another socket.
func (s *traceRun) registerAs(socket string, devices []*pluginapi.Device) {
	s.Helper()
	check.Must(s, s.tryAgain(func() error { return s.recorder.tryRegister(s.Context(), socket, devices) }))
}

// tryAgain calls register again if the kubelet could not dial the plugin in time. It has ten seconds for that, which is too short on a machine
// with few processors that runs other tests at a higher priority. A plugin tries again then, too.
func (s *traceRun) tryAgain(register func() error) (err error) {
	for range 5 {
		if err = register(); err == nil || !strings.Contains(err.Error(), context.DeadlineExceeded.Error()) {
			return err
		}
		s.Logf("the plugin registers again after: %v", err)
	}
	return err
}

// expectRefused records why the kubelet refuses a registration with the socket.
func (s *traceRun) expectRefused(socket string) {
	s.Helper()
	err := s.tryAgain(func() error { return s.recorder.tryRegister(s.Context(), socket, makeDevices(0)) })
	if err == nil {
		s.Fatalf("the kubelet accepted %s", socket)
	}
	text, _, _ := strings.Cut(status.Convert(err).Message(), ":")
	s.recorder.log("  refused: %s", text)
}

// restart starts the killed kubelet. The recorder registers as soon as the kubelet listens: without a plugin the kubelet rejects
// the pods that it finds.
func (s *traceRun) restart() {
	s.Helper()
	started := make(chan error, 1)
	go func() { started <- s.start(s.Context()) }()
	s.recorder.register(s, makeDevices(0))
	check.Must(s, <-started)
	s.waitAllocatable(devices)
}

// admitted waits until a pod that is new to the kubelet runs or was rejected because the recorder was away.
func (s *traceRun) admitted(name string) bool {
	s.Helper()
	pod := s.WaitPod(name, "runs or was rejected without a plugin", func(pod *corev1.Pod) bool {
		return pod.Status.Phase == corev1.PodRunning || pod.Status.Phase == corev1.PodFailed && pluginAway.MatchString(pod.Status.Message)
	})
	return pod.Status.Phase == corev1.PodRunning
}

// known reports whether the kubelet has not rejected a pod that ran before the kubelet's restart. PodResources shows this at once, the pod's
// status later. Pods that run and are younger were admitted after this one.
func (s *traceRun) known(name string) bool {
	s.Helper()
	return !strings.Contains(s.recorder.visible(s.Context(), s.ID+"/"+name), codes.Unknown.String())
}

func (s *traceRun) waitAllocatable(want int64) {
	s.Helper()
	s.Eventually(fmt.Sprintf("node %s has %d devices", s.nodeName, want), func(ctx context.Context) error {
		node, err := s.Client.CoreV1().Nodes().Get(ctx, s.nodeName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if got, ok := node.Status.Allocatable[recordedResource]; !ok || got.Value() != want {
			return fmt.Errorf("it has %s", got.String())
		}
		return nil
	})
}

// createPod creates a pod on the node, which requests one device, and records its visibility from now on.
func (s *traceRun) createPod(name string, change ...func(*framework.PodWrapper)) {
	s.Helper()
	s.recorder.watch(s.ID + "/" + name)
	pod := framework.MakePod(name).Limit(recordedResource, 1).GracePeriod(5).Node(s.nodeName)
	for _, change := range change {
		change(pod)
	}
	s.create(pod)
	s.newest = pod.CreationTimestamp
}

// waitNextSecond waits for a second in which no pod was created. The kubelet sorts pods by their creation time in seconds.
func (s *traceRun) waitNextSecond() {
	s.Helper()
	s.Eventually("the next second has begun", func(context.Context) error {
		if now := metav1.Now().Rfc3339Copy(); !now.After(s.newest.Time) {
			return fmt.Errorf("it is %s", now)
		}
		return nil
	})
}

// createUnbound creates pods that no scheduler binds, each in its own second.
func (s *traceRun) createUnbound(names ...string) {
	s.Helper()
	for _, name := range names {
		s.waitNextSecond()
		s.createPod(name, func(pod *framework.PodWrapper) { pod.Node("").Scheduler("none") })
	}
}

// bind binds pods in this order.
func (s *traceRun) bind(names ...string) {
	s.Helper()
	for _, name := range names {
		check.Must(s, s.Pods().Bind(s.Context(), &corev1.Binding{
			ObjectMeta: metav1.ObjectMeta{Namespace: s.ID, Name: name},
			Target:     corev1.ObjectReference{Kind: "Node", Name: s.nodeName},
		}, metav1.CreateOptions{}))
	}
}

// expectRejected records why the kubelet rejected the pod, and that PodResources no longer shows it.
func (s *traceRun) expectRejected(name string) {
	s.Helper()
	pod := s.WaitPhase(name, corev1.PodFailed)
	s.recorder.log("  pod %s has failed: %s: %s", name, pod.Status.Reason, pod.Status.Message)
	s.recorder.log("    %s", s.recorder.visible(s.Context(), s.ID+"/"+name))
	s.unwatch(name)
}

// unwatch ends the recording of the pods' visibility.
func (s *traceRun) unwatch(names ...string) {
	for _, name := range names {
		s.recorder.unwatch(s.ID + "/" + name)
	}
}

// remove deletes pods and waits until they are gone.
func (s *traceRun) remove(names ...string) {
	s.Helper()
	for _, name := range names {
		s.DeleteWithGrace(name, 1)
	}
	s.WaitGone(names...)
	s.unwatch(names...)
}

// killAndWait kills the pod's first container and waits until it runs again with this number of restarts.
func (s *traceRun) killAndWait(name string, restarts int32) {
	s.Helper()
	pod := s.WaitPhase(name, corev1.PodRunning)
	check.Must(s, s.endContainer(s.Context(), pod.UID, framework.MainContainer))
	s.WaitPod(name, fmt.Sprintf("has restarted %d times", restarts), func(pod *corev1.Pod) bool {
		return slices.ContainsFunc(pod.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool {
			return c.Name == framework.MainContainer && c.RestartCount >= restarts && c.State.Running != nil
		})
	})
	s.recorder.log("  it runs again")
}

// exceedRateLimit sends more calls to PodResources than it answers, and records the error.
func (s *traceRun) exceedRateLimit() {
	s.Helper()
	var group errgroup.Group
	for range 300 {
		group.Go(func() error {
			if _, err := s.recorder.get(s.Context(), s.ID, "none"); status.Code(err) == codes.ResourceExhausted {
				return err
			}
			return nil
		})
	}
	s.recorder.log("  %v", group.Wait())
}
