package binding

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fake"
)

const cardSize = 100

// disorder is a Binder with an API server that loses answers, and with owners of places that give them up and move them at any time. The model
// is the API server's state: the sum of the pods on each card.
type disorder struct {
	*Binder
	t      *testing.T
	clock  *clocktesting.FakeClock
	server *fake.Server
	nodes  []string
	// watch is held from a read of a pod, or its deletion, until the Binder has the report: a watch keeps the order of events.
	watch sync.Mutex

	// mu guards the fields below.
	mu     sync.Mutex
	random *rand.Rand
	// pods are the pods that exist. Their names stay, and their UIDs change.
	pods []*corev1.Pod
	// begun is when the latest bind of each pod began.
	begun map[types.UID]time.Time
	// late are the Bindings whose answers were lost, and that may still be made.
	late []lateWrite
	// owned are the pods whose place belongs to a plan.
	owned map[gpu.PodUID]bool
}

type lateWrite struct {
	binding *corev1.Binding
	until   time.Time
}

func newDisorder(t *testing.T, seed uint64) *disorder {
	d := &disorder{
		t: t, clock: clocktesting.NewFakeClock(begin), server: fake.NewServer(), nodes: []string{"n1", "n2"},
		random: rand.New(rand.NewPCG(seed, 1)), begun: map[types.UID]time.Time{}, owned: map[gpu.PodUID]bool{},
	}
	d.Binder = New(Options{
		API: d.server, Ledger: fake.Ledger(fake.Node("n1", cardSize, cardSize), fake.Node("n2", cardSize, cardSize)), Recorder: &record.FakeRecorder{},
		Observer: &fake.Observer{}, Clock: d.clock, Timeout: timeout, Window: 100 * time.Millisecond, Leading: func() error { return nil },
	})
	d.server.Answer(fake.Answers{Bind: d.answer})
	for i := range 12 {
		d.pods = append(d.pods, nil)
		d.replace(i)
	}
	return d
}

func (d *disorder) roll(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.random.IntN(n)
}

// pick returns some pod.
func (d *disorder) pick() (int, *corev1.Pod) {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := d.random.IntN(len(d.pods))
	return i, d.pods[i]
}

// replace deletes a pod and creates another one of its name.
func (d *disorder) replace(i int) {
	d.watch.Lock()
	defer d.watch.Unlock()
	d.mu.Lock()
	old := d.pods[i]
	d.pods[i] = fake.Pod(fmt.Sprint("p", i), int64(30+d.random.IntN(50)), func(pod *corev1.Pod) { pod.UID = types.UID(fmt.Sprint("uid-", d.random.Uint64())) })
	d.server.Set(d.pods[i])
	d.mu.Unlock()
	if old != nil {
		d.PodGone(gpu.PodUID(old.UID))
	}
}

// answer answers a Binding.
func (d *disorder) answer(_ context.Context, b *corev1.Binding) error {
	switch d.roll(8) {
	case 0, 1, 2:
		return d.server.Commit(b)
	case 3:
		return errForbidden
	case 4:
		_ = d.server.Commit(b) // It is made, and the answer is lost.
	case 5, 6:
		d.mu.Lock()
		defer d.mu.Unlock()
		d.late = append(d.late, lateWrite{b, d.begun[b.UID].Add(Deadline(timeout))})
	}
	return errLost
}

// pass lets some time pass, and makes some of the late writes that can still be made.
func (d *disorder) pass() {
	d.clock.Step(time.Duration(1 + d.roll(int(Deadline(timeout)/3))))
	d.mu.Lock()
	defer d.mu.Unlock()
	var left []lateWrite
	for _, w := range d.late {
		switch {
		case d.clock.Now().After(w.until):
		case d.random.IntN(4) == 0:
			_ = d.server.Commit(w.binding)
		default:
			left = append(left, w)
		}
	}
	d.late = left
}

// bind makes the bind of a pod. Some binds fail before their write.
func (d *disorder) bind(pod *corev1.Pod) {
	claim, ok := d.Claim(gpu.PodUID(pod.UID))
	if !ok {
		return
	}
	defer claim.End()
	if d.roll(5) == 0 {
		d.Gather(d.t.Context(), queued)
		return
	}
	node := d.nodes[d.roll(len(d.nodes))]
	if home, _, ok := d.Ledger.Lookup(gpu.PodUID(pod.UID)); ok {
		node = home
	}
	allocation, err := d.Ledger.Reserve(node, protocol.Pod(pod), placement.Binpack, d.clock.Now())
	if err != nil {
		return
	}
	d.Gather(d.t.Context(), queued)
	d.mu.Lock()
	d.begun[pod.UID] = d.clock.Now()
	d.mu.Unlock()
	_, _ = claim.Write(d.t.Context(), node, allocation, nil, Membership{})
}

// plan reserves a place for the pod. Places of other pods give way.
func (d *disorder) plan(pod *corev1.Pod) {
	_, other := d.pick()
	request := ledger.Request{Pod: protocol.Pod(pod), Nodes: d.nodes}
	places, _ := d.Ledger.ReserveAll([]ledger.Request{request}, [][]gpu.PodUID{{gpu.PodUID(other.UID)}}, binpack, d.clock.Now())
	if places != nil && !places[0].Existing {
		d.own(request.Pod.UID)
	}
}

// move moves the place of a pod, or reserves one.
func (d *disorder) move(pod *corev1.Pod) {
	request := ledger.Request{Pod: protocol.Pod(pod), Nodes: d.nodes}
	if _, ok := d.Ledger.Move(request, binpack, d.clock.Now()); ok {
		d.own(request.Pod.UID)
	}
}

func (d *disorder) own(uid gpu.PodUID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.owned[uid] = true
}

func (d *disorder) giveUp(uid gpu.PodUID) {
	d.mu.Lock()
	delete(d.owned, uid)
	d.mu.Unlock()
	d.Release(uid)
}

// report reports the API server's state of the pod, as the watch does.
func (d *disorder) report(pod *corev1.Pod) {
	d.watch.Lock()
	defer d.watch.Unlock()
	if now := d.server.Get(pod); now != nil && now.Spec.NodeName != "" {
		d.PodBound(clustercache.NewPodInfo(now))
	}
}

func (d *disorder) step() {
	switch i, pod := d.pick(); d.roll(24) {
	default:
		d.bind(pod)
	case 0, 1:
		d.plan(pod)
	case 2, 3, 4:
		d.giveUp(gpu.PodUID(pod.UID))
	case 5:
		d.move(pod)
	case 6, 7:
		d.Resolve(d.t.Context())
	case 8:
		d.VerifyPod(d.t.Context(), protocol.Pod(pod))
	case 9, 10:
		d.report(pod)
	case 11, 12, 13, 14:
		d.replace(i)
	}
	d.audit()
}

// audit checks that no card has more pods than it has memory. A live read can be older than the deletion of its pod, so the ledger can have pods
// that are gone, until the next read.
func (d *disorder) audit() {
	nodes, exists, used := d.Ledger.Nodes(), map[gpu.PodUID]bool{}, map[string]gpu.Memory{}
	use := func(what, node string, where gpu.Placement) {
		card := fmt.Sprint(what, " ", node, " ", where)
		if used[card] += where.Total(); used[card] > cardSize {
			d.t.Errorf("%s: pods with %d of %d", card, used[card], cardSize)
		}
	}
	for _, pod := range d.server.Pods() {
		exists[gpu.PodUID(pod.UID)] = true
		if pod.Spec.NodeName != "" {
			use("the API server,", pod.Spec.NodeName, clustercache.NewPodInfo(pod).Placement)
		}
	}
	for _, node := range nodes {
		for _, a := range node.Allocations {
			if exists[a.UID] {
				use("the ledger,", node.Name, a.Placement)
			}
		}
	}
}

// Answers are lost, binds wait for others, places are given up and moved, and live reads find out what has become of binds, all at the same time. No
// card is ever promised to more pods than it has room for. When all has ended, the ledger has exactly the bound pods.
func TestRandomBinds(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rounds, passes := 500, 0
	d := newDisorder(t, seed)
	var workers sync.WaitGroup
	var working atomic.Int64
	for range 8 {
		working.Add(1)
		workers.Go(func() {
			defer working.Add(-1)
			for range rounds {
				if t.Failed() {
					return
				}
				d.step()
			}
		})
	}
	for working.Load() > 0 {
		d.pass()
		passes++
		d.Resolve(t.Context())
		for range 20 {
			runtime.Gosched()
		}
	}
	workers.Wait()
	for uid := range d.owned {
		d.Release(uid)
	}
	for range 2 { // Unconfirmed binds are resolved first, then those that the watch doesn't report.
		d.clock.Step(Deadline(timeout) + 1)
		d.Resolve(t.Context())
	}
	d.audit()
	want, got := map[gpu.PodUID]string{}, map[gpu.PodUID]string{}
	for _, pod := range d.server.Pods() {
		if d.report(pod); pod.Spec.NodeName != "" {
			want[gpu.PodUID(pod.UID)] = fmt.Sprint(ledger.Bound, " ", pod.Spec.NodeName, " ", clustercache.NewPodInfo(pod).Placement)
		}
	}
	for _, node := range d.Ledger.Nodes() {
		for _, a := range node.Allocations {
			got[a.UID] = fmt.Sprint(a.State, " ", node.Name, " ", a.Placement)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the allocations in the end (-API server +ledger):\n%s", diff)
	}
	if n := len(d.tracker.pods); n > 0 {
		t.Errorf("%d binds are in flight, or have open writes", n)
	}
	t.Logf("%d rounds of time, %d Bindings, %d allocations in the end", passes, d.server.Calls().Binds, len(got))
}
