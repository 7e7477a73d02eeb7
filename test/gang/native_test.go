package gang

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// createPodGroup creates a PodGroup; minCount 0 stands for the policy basic.
func (f *fixture) createPodGroup(name string, minCount int32, edits ...func(*schedulingv1beta1.PodGroup)) {
	f.Helper()
	group := &schedulingv1beta1.PodGroup{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: f.ID}}
	for _, edit := range edits {
		edit(group)
	}
	if minCount > 0 {
		group.Spec.SchedulingPolicy.Gang = &schedulingv1beta1.GangSchedulingPolicy{MinCount: minCount}
	} else {
		group.Spec.SchedulingPolicy.Basic = &schedulingv1beta1.BasicSchedulingPolicy{}
	}
	_, err := f.Cluster.Client.SchedulingV1beta1().PodGroups(f.ID).Create(f.Context(), group, metav1.CreateOptions{})
	must(f, err)
}

// nativeMembers builds n pods of a PodGroup.
func (f *fixture) nativeMembers(group string, n int, memory int64) (pods []*framework.PodWrapper) {
	for i := range n {
		pods = append(pods, f.Pod(fmt.Sprintf("%s-%d", group, i), memory).PodGroup(group))
	}
	return pods
}

// createNative creates a PodGroup and its pods.
func (f *fixture) createNative(group string, minCount int32, pods int, memory int64) {
	f.Helper()
	f.createPodGroup(group, minCount)
	f.Create(f.nativeMembers(group, pods, memory)...)
}

// createClaim creates a PersistentVolumeClaim that is bound to a volume of its own, which all nodes have.
func (f *fixture) createClaim(name string) {
	f.Helper()
	capacity, class := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}, new(string)
	modes := []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
	volume := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: f.ID + "-" + name}, Spec: corev1.PersistentVolumeSpec{
		Capacity: capacity, AccessModes: modes, ClaimRef: &corev1.ObjectReference{Kind: "PersistentVolumeClaim", Namespace: f.ID, Name: name},
		PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/data"}},
	}}
	_, err := f.Cluster.Client.CoreV1().PersistentVolumes().Create(f.Context(), volume, metav1.CreateOptions{})
	must(f, err)
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"pv.kubernetes.io/bind-completed": "yes"}},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: modes, VolumeName: volume.Name, StorageClassName: class, Resources: corev1.VolumeResourceRequirements{Requests: capacity},
		},
	}
	_, err = f.Cluster.Client.CoreV1().PersistentVolumeClaims(f.ID).Create(f.Context(), claim, metav1.CreateOptions{})
	must(f, err)
}

// TestNativeGroups runs PodGroups with kube-scheduler's own cycle for groups.
func TestNativeGroups(t *testing.T) {
	c := native.Start(t)

	t.Run("a group that fits by the sums of nodes is bound only when its cards fit", func(t *testing.T) {
		f := newFixture(t, c, 2)
		f.createNative("train", 3, 3, 10) // The sum takes three, the cards two.
		f.waitAnyRejected("train", "there is no room for all members at once")
		f.staysBound(3*time.Second, map[string]int{})
		c.WaitNoneAssumed(f)
		f.Place(f.Pod("single", 10)) // Nothing is kept from others.
		f.AddNodes(f.node(1, 2))
		f.waitBound(map[string]int{"": 1, "train": 3})
		f.CheckLedger()
	})

	t.Run("a bind fails", func(t *testing.T) {
		f := newFixture(t, c, 4)
		before := c.Metric(t, framework.MetricGangFailures, "reason", "not_bound")
		c.Proxy.Inject(func(r *http.Request) bool {
			return controlplane.Bindings(r) && strings.Contains(r.URL.Path, "/pods/train-1/")
		}, 1, controlplane.Answer(http.StatusUnprocessableEntity, 0))
		f.createNative("train", 4, 4, card)
		f.waitBound(map[string]int{"train": 4})
		if after := c.Metric(t, framework.MetricGangFailures, "reason", "not_bound"); after <= before {
			t.Error("no bind failed: the test shows nothing")
		}
		f.CheckLedger()
	})

	t.Run("two groups of which one fits", func(t *testing.T) {
		f := newFixture(t, c, 4, 4)
		for round := range controlplane.Times(1, 20) {
			names := []string{fmt.Sprintf("a%d", round), fmt.Sprintf("b%d", round)}
			var members [2][]*framework.PodWrapper
			for i, name := range names {
				f.createPodGroup(name, 5)
				members[i] = f.nativeMembers(name, 5, card)
			}
			for i := range members[0] {
				f.Create(members[0][i], members[1][i])
			}
			first := f.waitOneWhole(5)
			f.CheckLedger()
			f.DeleteGroup(first)
			if second := f.waitOneWhole(5); second == first {
				t.Fatalf("%s was bound twice", first)
			}
			f.DeleteGroup(names[0])
			f.DeleteGroup(names[1])
			f.waitBound(map[string]int{})
		}
	})

	t.Run("a group of high priority evicts nothing from cards", func(t *testing.T) {
		f := newFixture(t, c, 2)
		class := c.PriorityClass(t, 1000)
		f.Place(f.Pod("low-0", card))
		f.Place(f.Pod("low-1", card))
		f.createPodGroup("train", 2, func(group *schedulingv1beta1.PodGroup) { group.Spec.PriorityClassName = class })
		for _, pod := range f.nativeMembers("train", 2, card) {
			f.Create(pod.PriorityClass(class))
		}
		f.staysPending(2, map[string]int{"": 2})
		c.WaitNoneAssumed(f)
		f.Delete("low-0", "low-1")
		f.waitBound(map[string]int{"train": 2})
	})

	t.Run("a pod preempts none of a group on several nodes whose pods are disrupted together", func(t *testing.T) {
		f := newFixture(t, c, 1, 1)
		f.createPodGroup("train", 2, func(group *schedulingv1beta1.PodGroup) {
			group.Spec.DisruptionMode = &schedulingv1beta1.DisruptionMode{All: &schedulingv1beta1.AllDisruptionMode{}}
		})
		f.Create(f.nativeMembers("train", 2, card)...)
		f.waitBound(map[string]int{"train": 2})
		f.AddNodes(f.node(2, 1))
		f.Place(f.Pod("low", card))
		f.Create(f.Pod("high", card).PriorityClass(c.PriorityClass(t, 1000)))
		f.WaitPod("low", "is preempted", func(pod *corev1.Pod) bool { return pod.DeletionTimestamp != nil })
		f.Delete("low") // No kubelet ends it.
		f.waitBound(map[string]int{"": 1, "train": 2})
		f.waitPods("the group stays", func(pods []corev1.Pod) bool {
			return !slices.ContainsFunc(pods, func(pod corev1.Pod) bool { return pod.DeletionTimestamp != nil })
		})
	})

	t.Run("the extender or kube-scheduler is killed", func(t *testing.T) {
		f := newFixture(t, c, 4, 4)
		for i, restart := range []func() error{
			func() error { return c.Extender.Restart(t.Context()) }, func() error { return c.Scheduler.Restart(t.Context()) },
		} {
			slow := c.Proxy.Inject(controlplane.Bindings, 0, controlplane.Slow(200*time.Millisecond))
			name := fmt.Sprintf("g%d", i)
			f.createNative(name, faultySize, faultySize, card)
			c.WaitMetric(t, 1, framework.MetricGangs, "phase", "binding")
			must(t, restart())
			slow.Lift()
			f.waitBound(map[string]int{name: faultySize})
			f.CheckLedger()
			f.endGang(name)
		}
	})

	t.Run("minCount shrinks, and more members than needed exist", func(t *testing.T) {
		f := newFixture(t, c, 3)
		f.createNative("elastic", 4, 4, card)
		f.Create(f.Pod("other", 1)) // kube-scheduler has no room for four, and none for another pod of a card if three are bound.
		f.WaitBound("other")
		f.staysBound(time.Second, map[string]int{"": 1})
		_, err := c.Client.SchedulingV1beta1().PodGroups(f.ID).Patch(t.Context(), "elastic", types.MergePatchType,
			[]byte(`{"spec":{"schedulingPolicy":{"gang":{"minCount":2}}}}`), metav1.PatchOptions{})
		must(t, err)
		f.waitBound(map[string]int{"": 1, "elastic": 2})
		f.Delete("other")
		f.waitBound(map[string]int{"elastic": 3})
	})

	t.Run("a member names a claim that doesn't exist", func(t *testing.T) {
		f := newFixture(t, c, 2)
		f.createPodGroup("train", 2)
		pods := f.nativeMembers("train", 2, card)
		pods[1].Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"},
		}}}
		f.Create(pods...)
		// kube-scheduler 1.37 doesn't name the claim: its plugin DynamicResources fails when a member isn't tried.
		f.waitPods("kube-scheduler has tried the group", func(pods []corev1.Pod) bool {
			return !slices.ContainsFunc(pods, func(pod corev1.Pod) bool { return framework.SchedulerMessage(&pod) == "" })
		})
		f.staysBound(2*time.Second, map[string]int{})
		c.WaitNoneAssumed(f)
		f.Place(f.Pod("other-0", card)) // Nothing is kept from others.
		f.Place(f.Pod("other-1", card))
		f.Delete("other-0", "other-1")
		f.createClaim("data")
		f.waitBound(map[string]int{"train": 2})
		f.CheckLedger()
	})

}
