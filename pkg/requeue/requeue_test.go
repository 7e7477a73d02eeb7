package requeue

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/fake"
)

func TestRequeue(t *testing.T) {
	both := []string{"n1", "n2"}
	freed := func(f *fixture) { f.ledger.Remove("full-n1") }
	for name, test := range map[string]struct {
		// before happens while both nodes, with 100 each, are full.
		before func(f *fixture)
		// want is the node by which the pods are requeued; empty if they are not.
		want string
	}{
		"memory came free after rejections":            {func(f *fixture) { f.reject("a"); f.reject("b"); freed(f) }, "n1"},
		"no pod was rejected":                          {freed, ""},
		"the pod was rejected again since":             {func(f *fixture) { f.reject("a"); freed(f); f.clock.Step(1); f.reject("a") }, ""},
		"the pod passed since":                         {func(f *fixture) { f.reject("a"); freed(f); f.Passed("a", false) }, ""},
		"the pod is bound or gone":                     {func(f *fixture) { f.reject("a"); freed(f); f.Forget("a") }, ""},
		"something else requeues the pod":              {func(f *fixture) { f.reject("a"); freed(f); f.ForgetRejection("a") }, ""},
		"another pod took the memory":                  {func(f *fixture) { f.reject("a"); freed(f); f.allocate("n1", pod("b", 91)) }, ""},
		"kube-scheduler has retried the pod by itself": {func(f *fixture) { f.reject("a"); f.clock.Step(queue.KubeSchedulerRetries); freed(f) }, ""},
		"the rejection is recorded after a round for memory that came free after filter read the ledger": {func(f *fixture) {
			read := f.Revision()
			freed(f)
			f.Requeue(f.t.Context())
			f.Rejected(pod("a", 10), both, read)
		}, "n1"},
		"the same, and another pod has taken the memory": {func(f *fixture) {
			read := f.Revision()
			freed(f)
			f.Requeue(f.t.Context())
			f.allocate("n1", pod("b", 91))
			f.Rejected(pod("a", 10), both, read)
		}, ""},
		"the rejection is recorded after a round for memory that filter saw": {func(f *fixture) {
			freed(f)
			read := f.Revision()
			f.Requeue(f.t.Context())
			f.Rejected(pod("a", 10), both, read)
		}, ""},
		"the rejection is recorded after the pod may go to any node again": {func(f *fixture) {
			freed(f)
			read := f.Revision()
			f.Requeue(f.t.Context())
			f.Unrestricted("a")
			f.Rejected(pod("a", 10), both, read)
		}, "n1"},
		"a gang is bound, whose members a rejected pod can preempt": {func(f *fixture) { f.reject("a"); f.Preemptible(-1) }, "n1"},
		"a gang of the same priority is bound":                      {func(f *fixture) { f.reject("a"); f.Preemptible(0) }, ""},
		"the rejection is recorded after the gang is bound": {func(f *fixture) {
			read := f.Revision()
			f.Preemptible(-1)
			f.Requeue(f.t.Context())
			f.Rejected(pod("a", 10), both, read)
		}, "n1"},
		"a rejected pod may go to any node again": {func(f *fixture) {
			freed(f)
			f.Requeue(f.t.Context())
			f.reject("a")
			f.Unrestricted("a")
		}, "n1"},
		"a pod that passed may go to any node again": {func(f *fixture) {
			freed(f)
			f.Requeue(f.t.Context())
			f.reject("a")
			f.Unrestricted("b")
		}, ""},
		"a request with a node":                    {func(f *fixture) { f.RequeueAll("n2") }, "n2"},
		"a request without a node":                 {func(f *fixture) { f.RequeueAll("") }, "n1"},
		"a request while the cluster has no nodes": {func(f *fixture) { f.cache.nodes = nil; f.RequeueAll("") }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, fake.Node("n1", 100), fake.Node("n2", 100))
			f.allocate("n1", pod("full-n1", 100))
			f.allocate("n2", pod("full-n2", 100))
			f.Requeue(t.Context()) // The nodes were added, so they have free memory.
			f.clock.Step(time.Second)
			test.before(f)
			if test.want == "" {
				f.wantRequeue()
				return
			}
			f.wantRequeue(test.want)
			if got := f.observer.Counts(); got["requeued"] != 1 || got["write node"] != 1 {
				t.Errorf("counted %v", got)
			}
			// One write requeued every pod: no rejected pod is left.
			f.clock.Step(time.Second)
			f.Freed("n1")
			f.wantRequeue(test.want)
		})
	}
}

// A write that isn't made, because it fails or because another replica leads, is made later. It may change another node, because the first one
// may be gone.
func TestRequeueAgain(t *testing.T) {
	for name, set := range map[string]func(f *fixture, err error){
		"the write fails":       func(f *fixture, err error) { f.server.Answer(fake.Answers{Annotate: err}) },
		"another replica leads": func(f *fixture, err error) { f.standby = err },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, fake.Node("n1", 100), fake.Node("n2", 100))
			set(f, errors.New("no"))
			f.reject("a")
			f.Freed("n1")
			f.wantRequeue()
			select {
			case <-f.work: // Freed's signal, which run would have taken.
			default:
				t.Error("no further round follows")
			}
			set(f, nil)
			f.wantRequeue("n1")

			set(f, errors.New("no"))
			f.RequeueAll("n2")
			f.wantRequeue("n1")
			set(f, nil)
			f.wantRequeue("n1", "n1")
		})
	}
}

// Run requeues pods after a pause, and at most once in writeInterval.
func TestRun(t *testing.T) {
	f := newFixture(t, fake.Node("n1", 100), fake.Node("n2", 100))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- f.run(ctx) }() // Without the ticker of the other loop, the clock has waiters only during a pause.
	writes := func(n int) func() bool { return func() bool { return f.observer.Count("requeued") == n } }
	f.RequeueAll("n1")
	await.True(t, "the pause", f.clock.HasWaiters)
	f.clock.Step(freedDelay - 1)
	if !f.clock.HasWaiters() {
		t.Error("kube-scheduler gets no time to retry by itself")
	}
	f.clock.Step(1)
	await.True(t, "the first write", writes(1))
	f.RequeueAll("n2")
	await.True(t, "the pause", f.clock.HasWaiters)
	f.clock.Step(freedDelay)
	if !f.clock.HasWaiters() {
		t.Error("the second write doesn't wait for writeInterval")
	}
	f.clock.Step(writeInterval)
	await.True(t, "the second write", writes(2))
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("run: %v", err)
	}
}

// Run requeues a pod that was rejected on a sample.
func TestRunForSampledPod(t *testing.T) {
	f := newFixture(t, fake.Node("n1", 100))
	f.cache.pending[podP] = clustercache.NewPodInfo(fake.Pod("p", 10))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- f.Run(ctx) }()
	f.Rejected(pod(podP, 10), sample(minFeasibleNodesToFind), f.Revision())
	await.True(t, "the write", func() bool {
		f.clock.Step(writeInterval)
		return f.observer.Count("requeued") == 1
	})
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Run: %v", err)
	}
}

// checks counts the calls of FirstFit.
type checks struct {
	*ledger.Ledger
	n int
}

func (c *checks) FirstFit(pod gpu.Pod, nodes []string) (string, bool) {
	c.n++
	return c.Ledger.FirstFit(pod, nodes)
}

// One check is enough for a node that helps no rejected pod, however many there are.
func TestManyRejectionsCostLittle(t *testing.T) {
	f := newFixture(t)
	counted := &checks{Ledger: f.ledger}
	f.Ledger = counted
	const nodes = 1000
	add := func(memory int64) {
		for i := range nodes {
			name := fmt.Sprint("n", i)
			f.ledger.SetNode(name, ledger.NodeSpec{Cards: []gpu.Card{{Memory: gpu.Memory(memory)}}})
			f.Freed(name)
		}
	}
	for i := range 10_000 {
		rejected := gpu.Pod{UID: gpu.PodUID(fmt.Sprint(i)), Request: gpu.Memory(100 + i%100), Priority: int32(i % 7)}
		f.Rejected(rejected, nil, f.Revision())
	}
	f.clock.Step(time.Second)
	add(99)
	if node, _ := f.reason(); node != "" || counted.n > nodes {
		t.Errorf("reason %q after %d checks, want none after one for each node", node, counted.n)
	}
	counted.n = 0
	add(100)
	if node, pod := f.reason(); node == "" || pod.Request != 100 || counted.n > 2 {
		t.Errorf("reason %q, a pod that asks for %d, after %d checks", node, pod.Request, counted.n)
	}
}

// Requests for pods that do not exist, and that are therefore never deleted, do not exhaust memory.
func TestRejectionsAreBounded(t *testing.T) {
	f, candidates := newFixture(t), sample(minFeasibleNodesToFind)
	for i := range maxRejected + 100 {
		f.Rejected(pod(gpu.PodUID(fmt.Sprint(i)), 10), candidates, f.Revision())
	}
	if len(f.rejected) != maxRejected || len(f.tried) != maxRejected {
		t.Errorf("%d rejections and %d attempts are remembered, want %d", len(f.rejected), len(f.tried), maxRejected)
	}
}

// The least of pods fits where one of them fits, also by what only this pod sees as free.
func TestLeast(t *testing.T) {
	small, large := gpu.Pod{UID: "small", Request: 10, Priority: 5}, gpu.Pod{UID: "large", Request: 100, Priority: 5}
	other := gpu.Pod{UID: "other", Request: 100, Priority: 5}
	item, longAgo := ledger.Item{ID: "item", Priority: 9}, time.Unix(0, 0)
	for name, test := range map[string]struct {
		before func(l *ledger.Ledger)
		want   bool
	}{
		"an empty node": {func(*ledger.Ledger) {}, true},
		"a full node":   {func(l *ledger.Ledger) { l.SetBound("n1", other, gpu.On(0, 100), time.Time{}) }, false},
		"a pod's own allocation": {func(l *ledger.Ledger) {
			if _, err := l.Reserve("n1", large, placement.Binpack, time.Time{}); err != nil {
				t.Error(err)
			}
		}, true},
		"a pod's own nomination":                 {func(l *ledger.Ledger) { l.Nominate("n1", large) }, true},
		"another pod's nomination":               {func(l *ledger.Ledger) { l.Nominate("n1", other) }, false},
		"a place that is held for a pod":         {func(l *ledger.Ledger) { l.AddReservation("item", held("large")) }, true},
		"a place that is held for another pod":   {func(l *ledger.Ledger) { l.AddReservation("item", held("other")) }, false},
		"an awaited reservation for a pod":       {func(l *ledger.Ledger) { l.ReserveAwaited(item, requests(large), longAgo) }, true},
		"an awaited reservation for another pod": {func(l *ledger.Ledger) { l.ReserveAwaited(item, requests(other), longAgo) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			l := fake.Ledger(fake.Node("n1", 100))
			test.before(l)
			least := leastOf(l, []gpu.Pod{small, large})
			one := fits(l, small, "n1") || fits(l, large, "n1")
			if got := least.fit("n1"); got != test.want || one != test.want {
				t.Errorf("it fits: %v; one of the pods fits: %v; want %v", got, one, test.want)
			}
		})
	}
}

// exempt is a namespace whose pods need no turn of fair sharing.
type exempt string

func (e exempt) NeedsTurn(pod gpu.Pod) bool { return pod.Namespace != string(e) }

// A rejected pod that needs no turn is requeued when memory comes free that is reserved for an item that waits for one, also together with others.
func TestLeastNeedsNoTurn(t *testing.T) {
	f := newFixture(t)
	f.ledger = ledger.NewWithResources(nil, exempt("free"))
	f.ledger.SetNode("n1", ledger.NodeSpec{Cards: []gpu.Card{{Memory: 100}}})
	f.Ledger = f.ledger
	waits, free := gpu.Pod{UID: "waits", Namespace: "tenant", Request: 10}, gpu.Pod{UID: "free", Namespace: "free", Request: 10}
	if !f.ledger.ReserveAwaited(ledger.Item{ID: "item", Priority: 9, ByTurn: true}, requests(gpu.Pod{UID: "other", Request: 100}), time.Unix(0, 0)) {
		t.Fatal("nothing is reserved")
	}
	if leastOf(f.ledger, []gpu.Pod{waits}).fit("n1") {
		t.Error("it fits, although the pod waits for a turn")
	}
	f.Rejected(waits, nil, f.Revision())
	f.Rejected(free, nil, f.Revision())
	f.Freed("n1")
	f.wantRequeue("n1")
}

// A pod with an awaited reservation sees what later items await on other nodes as free.
func TestLeastBeforeOthers(t *testing.T) {
	l := fake.Ledger(fake.Node("n1", 100), fake.Node("n2", 100))
	first, later := gpu.Pod{UID: "first", Request: 100}, gpu.Pod{UID: "later", Request: 100}
	for i, pod := range []gpu.Pod{first, later} {
		request := ledger.Request{Pod: pod, Nodes: []string{fmt.Sprint("n", i+1)}}
		if !l.ReserveAwaited(ledger.Item{ID: string(pod.UID), Entered: time.Unix(int64(i), 0)}, []ledger.Request{request}, time.Unix(0, 0)) {
			t.Fatal("nothing is reserved")
		}
	}
	for _, pod := range []gpu.Pod{first, later} {
		for _, node := range []string{"n1", "n2"} {
			if one, least := fits(l, pod, node), leastOf(l, []gpu.Pod{pod}).fit(node); one != least {
				t.Errorf("pod %s fits %s: %v, the least pod: %v", pod.UID, node, one, least)
			}
		}
	}
}

func held(uid gpu.PodUID) ledger.Reservation {
	place := ledger.Place{Pod: gpu.Pod{UID: uid}, Node: "n1", On: gpu.On(0, 100)}
	return ledger.Reservation{Source: ledger.Reclaimed, Priority: 9, Places: []ledger.Place{place}}
}

func requests(pod gpu.Pod) []ledger.Request {
	return []ledger.Request{{Pod: pod, Nodes: []string{"n1"}}}
}

// The least of pods has the fewest containers.
func TestLeastContainers(t *testing.T) {
	least := leastOf(ledger.New(), []gpu.Pod{{Request: 1, Containers: 3}, {Request: 1, Containers: 2}, {Request: 1, Containers: 4}})
	if least.pod.Containers != 2 {
		t.Errorf("it has %d containers, want 2", least.pod.Containers)
	}
}

// A pod of several cards needs of each card only its part.
func TestLeastSeveralCards(t *testing.T) {
	cards := slices.Repeat([]int64{2}, gpu.MaxCards)
	f := newFixture(t, fake.Node("n1", cards...))
	for i := range cards {
		f.ledger.SetBound("n1", gpu.Pod{UID: gpu.PodUID(fmt.Sprint(i)), Request: 1}, gpu.On(i, 1), f.clock.Now())
	}
	wide, large := gpu.Pod{UID: "wide", Request: gpu.MaxCards, Cards: gpu.MaxCards}, gpu.Pod{UID: "large", Request: 2}
	if !fits(f.ledger, wide, "n1") || fits(f.ledger, large, "n1") {
		t.Fatal("there is room on each card for one unit")
	}
	if !leastOf(f.ledger, []gpu.Pod{large, wide}).fit("n1") {
		t.Error("it does not fit where the pod of many cards fits")
	}
}
