package simkubelet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	clienttesting "k8s.io/client-go/testing"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpushare/gpushare/test/simkubelet/checkpoint"
)

func TestNodeStatusFollowsDevices(t *testing.T) {
	f := newFixture(t, func(o *Options) { o.EndpointStopGrace = 300 * time.Millisecond })
	f.start()
	f.awaitNode(corev1.ResourcePods, 110, 110)
	devices := healthy(4)
	devices[1].Health = pluginapi.Unhealthy
	p := f.plug(&plugin{}, devices)
	f.awaitNode(resourceName, 4, 3)
	p.lists <- healthy(5)
	f.awaitNode(resourceName, 5, 5)

	patch := []byte(`{"status":{"capacity":{"example.com/count":"2"},"allocatable":{"example.com/count":"1"}}}`)
	if _, err := f.api.CoreV1().Nodes().Patch(f.ctx, nodeName, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil {
		t.Fatal(err)
	}
	f.awaitNode("example.com/count", 2, 2) // Kept, and allocatable made equal to capacity.

	p.server.Stop()
	f.awaitNode(resourceName, 5, 0)
	f.awaitNode(resourceName, 0, 0)
	f.awaitNode("example.com/count", 2, 2)
}

func TestExtendedResourcesAreZeroedOnlyForAnEmptyDirectory(t *testing.T) {
	for name, late := range map[string]bool{"registered after the directory was served": false, "registered before": true} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, func(o *Options) { o.LateRuntime = late })
			list := corev1.ResourceList{"example.com/count": resourceQuantity(2)}
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}, Status: corev1.NodeStatus{Capacity: list, Allocatable: list.DeepCopy()}}
			if _, err := f.api.CoreV1().Nodes().Create(f.ctx, node, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			f.start()
			f.awaitNode(corev1.ResourcePods, 110, 110)
			want := int64(2)
			if late {
				want = 0
			}
			f.awaitNode("example.com/count", want, want)
		})
	}
}

func TestAdmissionIsInOrderOfCreation(t *testing.T) {
	f := newFixture(t)
	f.create(
		newPod("third", createdAt(3), app("a", 1), app("b", 1)),
		newPod("first", createdAt(1), app("a", 1)),
		newPod("other-node", createdAt(0), app("a", 1), func(pod *corev1.Pod) { pod.Spec.NodeName = "node-2" }),
		newPod("second", createdAt(2), app("a", 1), initContainer("i", 1), sidecar("s", 1)),
	)
	// The first list waits until the devices are there.
	gate := make(chan struct{})
	f.api.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		<-gate
		return false, nil, nil
	})
	if err := f.kubelet.Start(f.ctx); err != nil {
		t.Fatal(err)
	}
	f.plug(&plugin{}, healthy(8))
	f.await("the devices are known", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return slices.ContainsFunc(f.events, func(e Event) bool { return e.Call == CallListAndWatch && e.Available == 8 })
	})
	close(gate)
	f.awaitPhase("third", corev1.PodRunning)
	want := []string{
		"Allocate first/a",
		"Allocate second/i", "Allocate second/s", "Allocate second/a",
		"Allocate third/a", "Allocate third/b",
	}
	if diff := cmp.Diff(want, f.calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	for _, name := range []string{"first", "second", "third"} {
		f.awaitPhase(name, corev1.PodRunning)
	}
	if pod := f.pod("second"); pod.Status.PodIP == "" || len(pod.Status.InitContainerStatuses) != 2 || !pod.Status.ContainerStatuses[0].Ready {
		t.Errorf("status of second: %+v", pod.Status)
	}
	if env := f.kubelet.Env("uid-first", "a"); env["DEVICES"] != fmt.Sprint(f.allocated("first", "a")) {
		t.Errorf("environment of first/a: %v, allocated %v", env, f.allocated("first", "a"))
	}
}

func TestVisibilityDuringAllocate(t *testing.T) {
	f := newFixture(t)
	f.start()
	client := f.podResources()
	type view struct {
		devices map[string][]string
		err     error
	}
	views := make(chan map[string]view, 1)
	var look atomic.Bool // Not each time: the kubelet answers ten questions at once, and then a hundred a second.
	f.plug(&plugin{allocate: func(ctx context.Context, _ []string) error {
		if !look.Load() {
			return nil
		}
		seen := map[string]view{}
		for _, name := range []string{"one", "two", "three"} {
			devices, err := visible(ctx, client, name)
			seen[name] = view{devices, err}
		}
		views <- seen
		return nil
	}}, healthy(8))
	f.awaitNode(resourceName, 8, 8)

	f.create(newPod("one", initContainer("i", 1), app("a", 2)))
	f.awaitPhase("one", corev1.PodRunning)
	look.Store(true)
	f.create(newPod("two", app("a", 1)))
	f.awaitPhase("two", corev1.PodRunning)
	seen := <-views
	if diff := cmp.Diff(map[string][]string{"a": f.allocated("one", "a")}, seen["one"].devices); diff != "" {
		t.Errorf("the pod served before, without its init container (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string][]string{"a": nil}, seen["two"].devices); diff != "" {
		t.Errorf("the pod being served (-want +got):\n%s", diff)
	}
	err := seen["three"].err
	if status.Code(err) != codes.Unknown || status.Convert(err).Message() != "pod three in namespace default not found" {
		t.Errorf("the pod not admitted yet: %v", err)
	}
	list, err := client.List(f.ctx, &podresourcesapi.ListPodResourcesRequest{})
	if err != nil || len(list.PodResources) != 2 {
		t.Errorf("List: %v, %v", list, err)
	}
	allocatable, err := client.GetAllocatableResources(f.ctx, &podresourcesapi.AllocatableResourcesRequest{})
	if err != nil || len(allocatable.Devices) != 8 {
		t.Errorf("GetAllocatableResources: %d devices, %v", len(allocatable.GetDevices()), err)
	}
}

// Kubelets 1.34 and 1.35 show a pod that they have rejected like one that is being served.
func TestRejectedPodsInPodResources(t *testing.T) {
	for _, shown := range []bool{false, true} {
		f := newFixture(t, func(o *Options) { o.ShowRejected = shown })
		f.start()
		f.create(newPod("rejected", app("a", 1), annotated(AnnotationRejected, "Evicted")))
		f.awaitPhase("rejected", corev1.PodFailed)
		devices, err := visible(f.ctx, f.podResources(), "rejected")
		if (err == nil) != shown || len(devices["a"]) > 0 {
			t.Errorf("shown: %t, got %v and %v", shown, devices, err)
		}
	}
}

func TestPodResourcesLimitsItsRate(t *testing.T) {
	f := newFixture(t)
	f.start()
	client := f.podResources()
	var limited error
	// The burst is 10, and these take far less than a second.
	for range 200 {
		if _, err := visible(f.ctx, client, "none"); status.Code(err) == codes.ResourceExhausted {
			limited = err
		}
	}
	if status.Convert(limited).Message() != "rejected by rate limit" {
		t.Errorf("error is %v", limited)
	}
}

func TestDevicesOfInitContainersAreUsedAgain(t *testing.T) {
	f := newFixture(t)
	f.start()
	var must [][]string
	f.plug(&plugin{
		options: &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true},
		prefer: func(r *pluginapi.ContainerPreferredAllocationRequest) []string {
			must = append(must, r.MustIncludeDeviceIDs)
			ids := slices.Clone(r.MustIncludeDeviceIDs)
			for _, id := range slices.Backward(slices.Sorted(slices.Values(r.AvailableDeviceIDs))) {
				if len(ids) < int(r.AllocationSize) && !slices.Contains(ids, id) {
					ids = append(ids, id)
				}
			}
			return ids
		},
	}, healthy(8))
	f.awaitNode(resourceName, 8, 8)
	f.create(newPod("pod", initContainer("i", 4), sidecar("s", 2), app("a", 3)))
	f.awaitPhase("pod", corev1.PodRunning)

	want := []string{
		"GetPreferredAllocation pod/i", "Allocate pod/i",
		"Allocate pod/s", // All of it reused: the plugin isn't asked.
		"GetPreferredAllocation pod/a", "Allocate pod/a",
	}
	if diff := cmp.Diff(want, f.calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	i, s, a := sets.New(f.allocated("pod", "i")...), sets.New(f.allocated("pod", "s")...), sets.New(f.allocated("pod", "a")...)
	if diff := cmp.Diff([]string{"d04", "d05", "d06", "d07"}, sets.List(i)); diff != "" {
		t.Errorf("devices preferred for i (-want +got):\n%s", diff)
	}
	if !i.IsSuperset(s) || s.HasAny(a.UnsortedList()...) {
		t.Errorf("the sidecar's devices %v must be of %v, and not in %v", s, i, a)
	}
	if rest := i.Difference(s); !a.IsSuperset(rest) || !sets.New(must[1]...).Equal(rest) {
		t.Errorf("app has %v, told to include %v; the init container left %v", a, must[1], rest)
	}
}

func TestRejectedPods(t *testing.T) {
	f := newFixture(t)
	f.start()
	fail := false
	f.plug(&plugin{allocate: func(context.Context, []string) error {
		if fail {
			return errors.New("no card")
		}
		return nil
	}}, healthy(4))
	f.awaitNode(resourceName, 4, 4)

	f.create(newPod("big", app("a", 5)))
	f.awaitPhase("big", corev1.PodFailed)
	f.create(newPod("half", app("a", 3), app("b", 3)))
	f.awaitPhase("half", corev1.PodFailed)
	f.create(newPod("cpu", app("a", 1), func(pod *corev1.Pod) {
		pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resourceQuantity(65)}
	}))
	f.awaitPhase("cpu", corev1.PodFailed)
	fail = true
	f.create(newPod("refused", app("a", 1)))
	f.awaitPhase("refused", corev1.PodFailed)
	fail = false

	for name, want := range map[string][2]string{
		"big": {"UnexpectedAdmissionError", "Pod was rejected: Allocate failed due to requested number of devices unavailable for " +
			resourceName + ". Requested: 5, Available: 4, which is unexpected"},
		"half": {"UnexpectedAdmissionError", "Pod was rejected: Allocate failed due to requested number of devices unavailable for " +
			resourceName + ". Requested: 3, Available: 1, which is unexpected"},
		"cpu": {"OutOfcpu", "Pod was rejected: Node didn't have enough resource: cpu, requested: 65000, used: 0, capacity: 64000"},
		"refused": {"UnexpectedAdmissionError",
			"Pod was rejected: Allocate failed due to rpc error: code = Unknown desc = no card, which is unexpected"},
	} {
		s := f.pod(name).Status
		if diff := cmp.Diff(want, [2]string{s.Reason, s.Message}); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if _, err := visible(f.ctx, f.podResources(), name); status.Code(err) != codes.Unknown {
			t.Errorf("%s is visible: %v", name, err)
		}
	}
	// The first container of "half" and the pod "cpu" had been served; their devices are free again.
	f.create(newPod("all", app("a", 4)))
	f.awaitPhase("all", corev1.PodRunning)
	f.await("an event tells of the rejection", func() bool {
		events, err := f.api.CoreV1().Events("default").List(f.ctx, metav1.ListOptions{})
		return err == nil && slices.ContainsFunc(events.Items, func(e corev1.Event) bool { return e.Reason == "OutOfcpu" || e.Reason == reasonUnexpected })
	})
}

func TestPodsEnd(t *testing.T) {
	f := newFixture(t)
	f.start()
	f.plug(&plugin{}, healthy(4))
	f.awaitNode(resourceName, 4, 4)
	f.create(newPod("done", app("a", 1), annotated(AnnotationExitAfter, "1ms")),
		newPod("failed", app("a", 1), annotated(AnnotationExitAfter, "1ms"), annotated(AnnotationExitCode, "3")),
		newPod("prompt", app("a", 1), sidecar("s", 1)))
	f.awaitPhase("done", corev1.PodSucceeded)
	f.awaitPhase("failed", corev1.PodFailed)
	f.awaitPhase("prompt", corev1.PodRunning)
	f.del("prompt", 30)
	f.await("the deleted pod is gone", func() bool { return f.pod("prompt").Name == "" && len(f.running()) == 0 })

	f.create(newPod("stubborn", app("a", 4), annotated(AnnotationIgnoresSIGTERM, "true")))
	f.awaitPhase("stubborn", corev1.PodRunning)
	begun := time.Now()
	f.del("stubborn", 1)
	f.create(newPod("next", app("a", 4)))
	f.awaitPhase("next", corev1.PodFailed) // The devices are still in use.
	if _, runs := f.running()["stubborn/a"]; !runs {
		t.Error("stubborn doesn't run in its grace period")
	}
	f.await("stubborn is killed", func() bool { return f.pod("stubborn").Name == "" })
	if took := time.Since(begun); took < minimumGrace {
		t.Errorf("stubborn ended after %v", took)
	}
	f.create(newPod("last", app("a", 4)))
	f.awaitPhase("last", corev1.PodRunning)
}

func TestForcedDeletionFreesDevicesBeforeTheContainerEnds(t *testing.T) {
	f := newFixture(t)
	f.start()
	f.plug(&plugin{}, healthy(4))
	f.awaitNode(resourceName, 4, 4)
	f.create(newPod("forced", app("a", 4), annotated(AnnotationIgnoresSIGTERM, "true")))
	f.awaitPhase("forced", corev1.PodRunning)
	if err := f.api.CoreV1().Pods("default").Delete(f.ctx, "forced", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	f.create(newPod("next", app("a", 4)))
	f.awaitPhase("next", corev1.PodRunning)
	if _, runs := f.running()["forced/a"]; !runs {
		t.Error("the container ended with its object")
	}
}

func TestRestarts(t *testing.T) {
	for name, test := range map[string]struct {
		what    RestartOptions
		devices bool
	}{
		"with the checkpoint, the books are kept":      {RestartOptions{}, true},
		"without it, running containers have no books": {RestartOptions{DropCheckpoint: true}, false},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.start()
			f.plug(&plugin{}, healthy(4))
			f.awaitNode(resourceName, 4, 4)
			f.create(newPod("old", app("a", 2)), newPod("ended", app("a", 1), annotated(AnnotationExitAfter, "1ms")))
			f.awaitPhase("old", corev1.PodRunning)
			f.awaitPhase("ended", corev1.PodSucceeded)
			env, served := f.kubelet.Env("uid-old", "a"), f.allocated("old", "a")
			f.clear()

			f.restart(test.what)
			var got map[string][]string
			f.await("the pod is taken up", func() (taken bool) {
				var err error
				got, err = visible(f.ctx, f.podResources(), "old")
				return err == nil
			})
			want := map[string][]string{"a": nil}
			if test.devices {
				want["a"] = served
			}
			if !cmp.Equal(want, got) {
				t.Errorf("books: %v, want %v", got, want)
			}
			f.plug(&plugin{}, healthy(4))
			f.awaitListed(4) // The node's status still has what the kubelet before wrote.
			f.awaitNode(resourceName, 4, 4)
			f.create(newPod("new", app("a", 1)))
			f.awaitPhase("new", corev1.PodRunning)
			if diff := cmp.Diff([]string{"Allocate new/a"}, f.calls()); diff != "" {
				t.Errorf("calls after the restart (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(env, f.kubelet.Env("uid-old", "a")); diff != "" {
				t.Errorf("environment after the restart (-want +got):\n%s", diff)
			}
			if phase := f.pod("ended").Status.Phase; phase != corev1.PodSucceeded {
				t.Errorf("the pod that had ended is %s", phase)
			}

			// A container without books is served when it starts again, one with books isn't.
			f.clear()
			if err := f.kubelet.CrashContainer("uid-old", "a"); err != nil {
				t.Fatal(err)
			}
			f.await("the container is started again", func() bool {
				i := slices.IndexFunc(f.kubelet.Containers(), func(c Container) bool { return c.Name == "old" })
				return f.kubelet.Containers()[i].Restarts == 1
			})
			if got := len(f.calls()) > 0; got == test.devices {
				t.Errorf("calls for the container's second start: %v", f.calls())
			}
		})
	}
}

func TestCheckpointHoldsAnswers(t *testing.T) {
	f := newFixture(t)
	f.start()
	f.plug(&plugin{}, healthy(2))
	f.awaitNode(resourceName, 2, 2)
	f.create(newPod("pod", app("a", 2)))
	f.awaitPhase("pod", corev1.PodRunning)
	entries, registered, err := checkpoint.Read(f.kubelet.DevicePluginDir() + "/kubelet_internal_checkpoint")
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 1 || entries[0].PodUID != "uid-pod" || len(entries[0].DeviceIDs[noNUMA]) != 2 ||
		!strings.Contains(string(entries[0].AllocResp), "[d00 d01]") {
		t.Errorf("entries: %+v", entries)
	}
	if len(registered[resourceName]) != 2 {
		t.Errorf("registered: %v", registered)
	}
}

func TestListOverFourMiBEndsTheStream(t *testing.T) {
	f := newFixture(t)
	f.start()
	p := f.plug(&plugin{}, healthy(3))
	f.awaitNode(resourceName, 3, 3)
	big := healthy(1)
	big[0].ID = strings.Repeat("x", 4<<20)
	p.lists <- big
	f.awaitNode(resourceName, 3, 0)
}

func TestRegistrationIsRefused(t *testing.T) {
	r := &registration{}
	for name, test := range map[string]struct {
		request *pluginapi.RegisterRequest
		want    string
	}{
		"for another version": {&pluginapi.RegisterRequest{Version: "v1", ResourceName: resourceName},
			`requested API version "v1" is not supported by kubelet. Supported version is ["v1beta1"]`},
		"for a native resource": {&pluginapi.RegisterRequest{Version: pluginapi.Version, ResourceName: "cpu"}, `the ResourceName "cpu" is invalid`},
	} {
		if err := r.register(t.Context(), test.request); err == nil || err.Error() != test.want {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSeedRepeatsTheChoice(t *testing.T) {
	choose := func(seed uint64) []string {
		f := newFixture(t, func(o *Options) { o.Seed = seed })
		f.start()
		f.plug(&plugin{}, healthy(64))
		f.awaitNode(resourceName, 64, 64)
		f.create(newPod("pod", app("a", 8)))
		f.awaitPhase("pod", corev1.PodRunning)
		return f.allocated("pod", "a")
	}
	if diff := cmp.Diff(choose(7), choose(7)); diff != "" {
		t.Errorf("two runs with one seed differ:\n%s", diff)
	}
	if cmp.Equal(choose(7), choose(8)) {
		t.Error("another seed makes no difference")
	}
}

func TestSocketsOfTheDeadAreRemoved(t *testing.T) {
	f := newFixture(t)
	f.start()
	p := f.plug(&plugin{}, healthy(1))
	f.awaitNode(resourceName, 1, 1)
	f.kubelet.Stop()
	if _, err := os.Stat(f.kubelet.DevicePluginDir() + "/kubelet.sock"); err != nil {
		t.Errorf("a killed kubelet leaves its socket: %v", err)
	}
	f.restart(RestartOptions{})
	if _, err := os.Stat(f.kubelet.DevicePluginDir() + "/p.sock"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the plugin's socket: %v", err)
	}
	f.awaitNode(resourceName, 0, 0)
	p.server.Stop()
}

func TestOptionsAreChecked(t *testing.T) {
	api := newFixture(t).api
	for name, options := range map[string]Options{
		"without a node's name":  {Client: api, Root: "/r"},
		"with too long a socket": {Client: api, NodeName: "n", Root: "/" + strings.Repeat("x", 100)},
	} {
		if _, err := New(options); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestEndOfAnOldStreamCutsTheNewRegistration(t *testing.T) {
	f := newFixture(t)
	f.start()
	old := f.plug(&plugin{}, healthy(1))
	f.awaitNode(resourceName, 1, 1)
	f.plug(&plugin{}, healthy(2))
	f.awaitNode(resourceName, 2, 2)
	old.server.Stop()
	f.awaitNode(resourceName, 2, 0)
}
