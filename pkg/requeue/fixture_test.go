package requeue

import (
	"slices"
	"testing"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// fixture is a Requeuer that doesn't run: the test moves the clock and calls the rounds.
type fixture struct {
	*Requeuer
	t        testing.TB
	clock    *clocktesting.FakeClock
	server   *fake.Server
	observer *fake.Observer
	ledger   *ledger.Ledger
	cache    *cache
	// ineligible are the nodes that no pod can use.
	ineligible map[string]bool
	// standby is why this replica must not write; nil if it may.
	standby error
}

func newFixture(t testing.TB, nodes ...*corev1.Node) *fixture {
	f := &fixture{
		t: t, clock: clocktesting.NewFakeClock(time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)), server: fake.NewServer(),
		observer: &fake.Observer{}, ledger: fake.Ledger(nodes...), cache: &cache{nodes: nodes, pending: map[gpu.PodUID]*clustercache.PodInfo{}},
	}
	f.Requeuer = New(Options{
		API: f.server, Ledger: f.ledger, Cache: f.cache, EligibleNodes: f.eligible, Observer: f.observer, Leading: func() error { return f.standby }, Clock: f.clock,
	})
	f.ledger.AddFreedListener(f.Freed)
	return f
}

func (f *fixture) eligible(unique.Handle[string]) (names []string) {
	for _, node := range f.cache.nodes {
		if !f.ineligible[node.Name] {
			names = append(names, node.Name)
		}
	}
	return names
}

// cache implements Cache.
type cache struct {
	nodes   []*corev1.Node
	pending map[gpu.PodUID]*clustercache.PodInfo
}

func (c *cache) Nodes() []*corev1.Node { return c.nodes }

func (c *cache) PendingPod(uid gpu.PodUID) (*clustercache.PodInfo, bool) {
	pod, ok := c.pending[uid]
	return pod, ok
}

func pod(uid gpu.PodUID, memory gpu.Memory) gpu.Pod {
	return gpu.Pod{UID: uid, Namespace: "default", Name: string(uid), Request: memory}
}

// allocate gives memory of the node's card 0 to a pod.
func (f *fixture) allocate(node string, pod gpu.Pod) {
	f.ledger.SetBound(node, pod, gpu.On(0, pod.Request), f.clock.Now())
}

// reject records a rejection, and lets time pass.
func (f *fixture) reject(uid gpu.PodUID) {
	f.Rejected(pod(uid, 10), nil, f.Revision())
	f.clock.Step(time.Millisecond)
}

// wantRequeue runs one round and compares the nodes that were changed so far.
func (f *fixture) wantRequeue(want ...string) {
	f.t.Helper()
	f.Requeue(f.t.Context())
	check.Equal(f.t, "changed nodes", want, f.server.Calls().Annotated)
}

// sample returns n candidate nodes, none of which has cards.
func sample(n int) []string { return slices.Repeat([]string{"plain"}, n) }
