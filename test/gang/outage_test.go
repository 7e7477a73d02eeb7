package gang

import (
	"net/http"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// TestOutageDuringBinds cuts a sole extender off from the API server in the middle of a gang's binds, for longer than
// --gang-patience: two members are bound, the answer to the third Binding is lost, and the others never arrive. When the API
// server is back, the watch is silent until the gang is whole. No member may be evicted meanwhile.
func TestOutageDuringBinds(t *testing.T) {
	c := hasty.Start(t)
	f := newFixture(t, c, 4, 4)
	outage := time.Duration(controlplane.Times(11, 120)) * time.Second
	evictions := c.Metric(t, framework.MetricGangEvictions)
	away, restore := cutDuringBinds(f, 3)
	f.createGang("job", faultySize)
	<-away
	f.waitBound(map[string]int{"job": 3})
	f.staysBound(outage, map[string]int{"job": 3})
	restore()

	f.waitPods("all members are bound", func(pods []corev1.Pod) bool {
		bound := 0
		for i := range pods {
			if pods[i].DeletionTimestamp != nil {
				f.Fatalf("member %s was evicted", pods[i].Name)
			}
			if pods[i].Spec.NodeName != "" {
				bound++
			}
		}
		return bound == faultySize
	})
	c.Proxy.SetWatchDelay(0)
	f.CheckLedger()
	f.staysBound(2*time.Second, map[string]int{"job": faultySize})
	if n := c.Metric(t, framework.MetricGangEvictions) - evictions; n > 0 {
		t.Errorf("the extender tried to evict members (%v times)", n)
	}
}

// cutDuringBinds prepares a fault that begins with the n-th Binding, which takes effect although its answer is lost. From then
// on no request of the extender arrives, until restore is called, and the watches are silent until their delay is set to 0.
// away is closed when the fault begins.
func cutDuringBinds(f *fixture, n int) (away <-chan struct{}, restore func()) {
	proxy, begun := f.Cluster.Proxy, make(chan struct{})
	var mu sync.Mutex
	var all *controlplane.Injection
	sent := 0
	bindings := proxy.Inject(controlplane.Bindings, 0, func(w http.ResponseWriter, r *http.Request, next http.Handler, lifted <-chan struct{}) {
		mu.Lock() // One Binding after another.
		defer mu.Unlock()
		switch sent++; {
		case sent < n:
			next.ServeHTTP(w, r)
		case sent == n:
			proxy.SetWatchDelay(24 * time.Hour)
			all = proxy.Inject(controlplane.Everything, 0, controlplane.CutConnection)
			close(begun)
			controlplane.CutAnswer(w, r, next, lifted)
		default:
			controlplane.CutConnection(w, r, next, lifted)
		}
	})
	return begun, func() {
		mu.Lock()
		defer mu.Unlock()
		bindings.Lift()
		all.Lift()
	}
}
