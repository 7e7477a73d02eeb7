package clustercache

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	clientfake "k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

func TestMain(m *testing.M) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

var begin = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

// events is a Handler that records its calls.
type events struct{ pods, nodes, synced chan string }

func newEvents() events {
	return events{make(chan string, 100), make(chan string, 100), make(chan string, 100)}
}

func (e events) PodUpdated(old, pod *PodInfo) {
	if old == nil {
		e.pods <- "new " + string(pod.UID)
	} else {
		e.pods <- fmt.Sprintf("%s becomes %s", old.UID, pod.UID)
	}
}
func (e events) PodDeleted(pod *PodInfo)       { e.pods <- "deleted " + string(pod.UID) }
func (e events) NodeUpdated(node *corev1.Node) { e.nodes <- "updated " + node.Name }
func (e events) NodeDeleted(name string)       { e.nodes <- "deleted " + name }
func (e events) Synced()                       { e.synced <- fmt.Sprintf("%d pods, %d nodes", len(e.pods), len(e.nodes)) }

// fixture is a synced Cache on a fake API server.
type fixture struct {
	*Cache
	got    events
	t      *testing.T
	client *clientfake.Clientset
}

// start runs a Cache and waits for the sync. The events of the objects are still to be received.
func start(t *testing.T, objects ...runtime.Object) *fixture {
	t.Helper()
	client, watching := clientfake.NewClientset(objects...), make(chan struct{}, 100)
	client.PrependWatchReactor("*", func(action clienttesting.Action) (bool, watch.Interface, error) {
		w, err := client.Tracker().Watch(action.GetResource(), action.GetNamespace(), action.(clienttesting.WatchActionImpl).ListOptions)
		watching <- struct{}{}
		return true, w, err
	})
	f := &fixture{got: newEvents(), t: t, client: client}
	f.Cache = New(Options{Client: client, Clock: clocktesting.NewFakeClock(begin), CacheSynced: func(time.Duration) { f.got.synced <- "CacheSynced" }})
	check.Must(t, f.AddHandler(f.got))
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	check.Must(t, f.Run(ctx))
	for range []string{"pods", "nodes", "disruption budgets"} {
		<-watching // The fake client's watch does not report changes from before it began.
	}
	return f
}

// want waits for one event.
func (f *fixture) want(from <-chan string, want string) {
	f.t.Helper()
	if got := await.Receive(f.t, want, from); got != want {
		f.t.Fatalf("event %q, want %q", got, want)
	}
}

// publish makes the watch report the pod.
func (f *fixture) publish(pod *corev1.Pod) {
	f.t.Helper()
	pods := f.client.CoreV1().Pods(pod.Namespace)
	_, err := pods.Update(f.t.Context(), pod, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = pods.Create(f.t.Context(), pod, metav1.CreateOptions{})
	}
	check.Must(f.t, err)
}

// publishNode makes the watch report the node.
func (f *fixture) publishNode(node *corev1.Node) {
	f.t.Helper()
	if _, err := f.client.CoreV1().Nodes().Update(f.t.Context(), node, metav1.UpdateOptions{}); err != nil {
		f.t.Fatal(err)
	}
}

// names returns the names of the pods.
func names(pods []*PodInfo) map[string]bool {
	out := map[string]bool{}
	for _, pod := range pods {
		out[pod.Name] = true
	}
	return out
}

// wantEqual compares two values. Quantities are equal if their amounts are.
func wantEqual(t *testing.T, what string, want, got any, options ...cmp.Option) {
	t.Helper()
	check.Equal(t, what, want, got, append(options, cmp.Comparer(resource.Quantity.Equal))...)
}
