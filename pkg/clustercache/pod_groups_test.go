package clustercache

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	clientfake "k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// podGroupEventsSeen is a PodGroupHandler that records its calls.
type podGroupEventsSeen chan string

func (e podGroupEventsSeen) PodGroupsServed() { e <- "served" }
func (e podGroupEventsSeen) PodGroupUpdated(group *schedulingv1beta1.PodGroup) {
	e <- fmt.Sprintf("%s has minCount %d", group.Name, group.Spec.SchedulingPolicy.Gang.MinCount)
}
func (e podGroupEventsSeen) PodGroupDeleted(namespace, name string) {
	e <- "deleted " + namespace + "/" + name
}

// TestPodGroupWatch: PodGroups are watched if the API server has them, and known before the cache is synced. Otherwise the cache is synced
// without them. An error is no answer.
func TestPodGroupWatch(t *testing.T) {
	group := &schedulingv1beta1.PodGroup{ObjectMeta: metav1.ObjectMeta{Name: "train", Namespace: "default"}}
	group.Spec.SchedulingPolicy.Gang = &schedulingv1beta1.GangSchedulingPolicy{MinCount: 4}
	start := func(t *testing.T, failures int, resources ...string) (podGroupEventsSeen, *clientfake.Clientset) {
		client, seen, watching := clientfake.NewClientset(group), make(podGroupEventsSeen, 10), make(chan struct{}, 10)
		list := &metav1.APIResourceList{GroupVersion: podGroupVersion}
		for _, name := range resources {
			list.APIResources = append(list.APIResources, metav1.APIResource{Name: name})
		}
		if len(resources) > 0 {
			client.Resources = append(client.Resources, list)
		}
		client.PrependReactor("get", "resource", func(clienttesting.Action) (bool, runtime.Object, error) {
			failures--
			return failures >= 0, nil, apierrors.NewInternalError(errors.New("not now"))
		})
		client.PrependWatchReactor("podgroups", func(action clienttesting.Action) (bool, watch.Interface, error) {
			w, err := client.Tracker().Watch(action.GetResource(), action.GetNamespace(), action.(clienttesting.WatchActionImpl).ListOptions)
			watching <- struct{}{}
			return true, w, err
		})
		c := New(Options{Client: client, Clock: clock.RealClock{}}) // A failure costs a second.
		check.Must(t, c.AddHandler(newEvents()))
		c.AddPodGroupHandler(seen)
		ctx, cancel := context.WithCancel(t.Context())
		t.Cleanup(cancel)
		check.Must(t, errors.Join(c.Run(ctx), c.Ready()))
		if len(seen) > 0 {
			<-watching
		}
		return seen, client
	}
	want := func(seen podGroupEventsSeen, want ...string) {
		t.Helper()
		for _, text := range want {
			if got := await.Receive(t, text, seen); got != text {
				t.Errorf("%q, want %q", got, text)
			}
		}
	}
	for title, resources := range map[string][]string{"no group": nil, "other resources": {"workloads"}} {
		t.Run(title, func(t *testing.T) {
			if seen, _ := start(t, 0, resources...); len(seen) > 0 {
				t.Errorf("event %q", <-seen)
			}
		})
	}
	t.Run("served", func(t *testing.T) {
		seen, client := start(t, 1, "workloads", "podgroups")
		if len(seen) < 2 {
			t.Error("it is synced before the PodGroups are")
		}
		want(seen, "served", "train has minCount 4")
		check.Must(t, client.SchedulingV1beta1().PodGroups("default").Delete(t.Context(), "train", metav1.DeleteOptions{}))
		want(seen, "deleted default/train")
	})
}

// TestPodGroupsForbidden: without the right to list PodGroups, the reason is shown.
func TestPodGroupsForbidden(t *testing.T) {
	client := clientfake.NewClientset()
	client.Resources = append(client.Resources, &metav1.APIResourceList{GroupVersion: podGroupVersion, APIResources: []metav1.APIResource{{Name: "podgroups"}}})
	client.PrependReactor("list", "podgroups", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(schedulingv1beta1.Resource("podgroups"), "", errors.New("no rights"))
	})
	c := New(Options{Client: client, Clock: clocktesting.NewFakeClock(begin)})
	check.Must(t, c.AddHandler(newEvents()))
	c.AddPodGroupHandler(make(podGroupEventsSeen, 1))
	await.Run(t, c.Run)
	await.True(t, "the reason", func() bool { return strings.Contains(c.Ready().Error(), "no rights") })
}

// TestPodGroupOf: what the PodGroup says about preemption.
func TestPodGroupOf(t *testing.T) {
	group := &schedulingv1beta1.PodGroup{ObjectMeta: metav1.ObjectMeta{Name: "train", Namespace: "default"}}
	group.Spec.SchedulingPolicy.Gang = &schedulingv1beta1.GangSchedulingPolicy{MinCount: 4}
	_, got := PodGroupOf(group)
	check.Equal(t, "by default", gang.PodGroup{Size: 4}, got)
	group.Spec.Priority = new(int32(7))
	group.Spec.DisruptionMode = &schedulingv1beta1.DisruptionMode{Single: &schedulingv1beta1.SingleDisruptionMode{}}
	_, got = PodGroupOf(group)
	check.Equal(t, "single", gang.PodGroup{Size: 4, Priority: 7}, got)
	group.Spec.DisruptionMode = &schedulingv1beta1.DisruptionMode{All: &schedulingv1beta1.AllDisruptionMode{}}
	_, got = PodGroupOf(group)
	check.Equal(t, "all", gang.PodGroup{Size: 4, Priority: 7, Together: true}, got)
}
