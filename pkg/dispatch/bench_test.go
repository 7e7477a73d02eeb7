package dispatch

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"
	"unique"

	"golang.org/x/sys/unix"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

// benchTenants, benchPods and benchNodes are the size of a large cluster, whose nodes have eight cards of 16 GiB.
const benchTenants, benchPods, benchNodes = 50, 10_000, 5_000

// lockNodes and lockPods are the size of a cluster in which no lock may be held for long: 100,000 pods, of which 20,000 wait.
const lockNodes, lockPods = 10_000, 20_000

// newBench returns a Manager with that many nodes and pods that wait. The pods' tenants differ in weight, their pods in size and in the nodes
// that they can use. The nodes are full.
func newBench(nNodes, nPods int) (*Manager, *ledger.Ledger, *time.Time) {
	l, now := ledger.New(), begin
	var nodes []string
	for i := range nNodes {
		name := fmt.Sprint("n", i)
		cards := make([]gpu.Card, 8)
		for j := range cards {
			cards[j] = gpu.Card{Index: j, Memory: 16}
		}
		l.SetNode(name, ledger.NodeSpec{Unit: gpu.GiB, Cards: cards})
		nodes = append(nodes, name)
	}
	half := slices.Clone(nodes[:nNodes/2])
	m := New(Options{
		Ledger: l, View: ledger.View{Card: placement.Binpack, Node: placement.Binpack}, TurnRules: NewTurnRules(1 << 30), Patience: patience, MayEvict: func() bool { return true },
		Failures: &queue.Failures{},
		Evicting: func(gpu.PodUID) bool { return false },
		Release:  func(uid gpu.PodUID) { l.Release(uid) },
		Nodes: nodesOf(func(constraints unique.Handle[string]) []string {
			if constraints == unique.Make("half") {
				return half
			}
			return nodes
		}),
		Observer: &fixture{},
	})
	for i := range benchTenants {
		name := fmt.Sprint("t", i)
		m.SetNamespace(name, Namespace{Tenant: name, Terms: fairshare.Terms{Weight: 1 + int64(i%4)}})
	}
	for i := range nNodes * 8 {
		name, node := fmt.Sprint("full-", i), nodes[i/8]
		p := gpu.Pod{UID: gpu.PodUID(name), Namespace: fmt.Sprint("t", i%benchTenants), Name: name, Request: 16}
		l.SetBound(node, p, gpu.On(i%8, 16), begin)
		m.SetPod(Pod{Pod: p, Node: node})
	}
	for i := range nPods {
		name, constraints := fmt.Sprint("p", i), []string{"", "half"}[i%2]
		p := gpu.Pod{UID: gpu.PodUID(name), Namespace: fmt.Sprint("t", i%benchTenants), Name: name, Request: gpu.Memory(1 + i%16), Priority: int32(i % 3)}
		m.SetPod(Pod{
			Pod: p, Gated: true, Created: begin.Add(time.Duration(i) * time.Second), Constraints: unique.Make(constraints),
			RoomKey: unique.Make(fmt.Sprint(p.Request, constraints, p.Priority)),
		})
	}
	m.StartLeading()
	m.Tick(now)
	return m, l, &now
}

// BenchmarkTick frees a card and lets the Manager grant what fits: the time of an iteration is that of a round, in which one pod
// or some are granted. It reports the 99th percentile of a round, and the median and the 99th percentile of the time per pod.
func BenchmarkTick(b *testing.B) {
	m, l, now := newBench(benchNodes, benchPods)
	granted, i, left := 0, 0, benchPods
	var rounds, decisions []time.Duration
	for b.Loop() {
		if left < benchPods/4 { // With few pods left, decisions are fast.
			b.StopTimer()
			m, l, now = newBench(benchNodes, benchPods)
			i, left = 0, benchPods
			b.StartTimer()
		}
		n := i * 7919 % (benchNodes * 8)
		freed := gpu.PodUID(fmt.Sprint("full-", n))
		i++
		l.Remove(freed)
		m.RemovePod(freed)
		m.Freed(fmt.Sprint("n", n/8))
		*now = now.Add(100 * time.Millisecond)
		start := time.Now()
		m.Tick(*now)
		took, open := time.Since(start), m.TakeEffects().Open
		left -= len(open)
		rounds, decisions = append(rounds, took), append(decisions, took/time.Duration(max(len(open), 1)))
		for _, pod := range open {
			granted++
			node, allocation, _ := l.Lookup(pod.UID)
			l.SetBound(node, pod, allocation.Placement, *now)
			p := *m.pods[pod.UID].Pod
			p.Node, p.Gated = node, false
			m.SetPod(p)
		}
	}
	b.ReportMetric(float64(granted)/float64(b.N), "pods/op")
	for metric, times := range map[string][]time.Duration{"p99-µs/round": rounds, "p99-µs/pod": decisions} {
		slices.Sort(times)
		b.ReportMetric(float64(times[len(times)*99/100].Nanoseconds())/1000, metric)
	}
	b.ReportMetric(float64(decisions[len(decisions)/2].Nanoseconds())/1000, "p50-µs/pod") // The loop has sorted them.
}

// BenchmarkIdleTick is a tick in which nothing has changed.
func BenchmarkIdleTick(b *testing.B) {
	m, _, now := newBench(benchNodes, benchPods)
	for b.Loop() {
		m.Tick(*now)
	}
}

// BenchmarkReclaim makes room for tenants below their share: the tick that requests it, the search for victims, and the hold of their places.
// The plan isn't timed. It reports the longest time for which the Manager's lock is held.
func BenchmarkReclaim(b *testing.B) {
	m, l, now := newBench(lockNodes, lockPods)
	m.ReclaimAfter = time.Second
	*now = now.Add(time.Hour)
	m.Tick(*now) // From now on the tenants count as below their shares.
	var longest longestHold
	for b.Loop() {
		*now = now.Add(time.Hour)
		longest.tick(m, *now)
		first := m.TakeEffects().Reclaim
		need := first.Need()
		b.StopTimer()
		plan, ok := reclaim.Choose(need, (&fixture{Manager: m, ledger: l}).cluster())
		b.StartTimer()
		var search *Search
		longest.of(func() { search = m.searchAgain() })
		m.setShares(search.standings)
		evictable := search.evictable(plan)
		longest.of(func() { ok = ok && m.addHolds(first, search, plan, evictable) })
		if !ok {
			b.Fatal("no room is made")
		}
		m.Reclaimed(first, time.Time{})
	}
	longest.report(b)
}

// BenchmarkTurns reads what an explanation of all pending pods needs, and reports as BenchmarkReclaim does.
func BenchmarkTurns(b *testing.B) {
	m, _, _ := newBench(lockNodes, lockPods)
	var longest longestHold
	for b.Loop() {
		var s *standings
		longest.of(func() { _, _, s = m.waitingTurns() })
		m.setShares(s)
	}
	longest.report(b)
}

// BenchmarkNodesChanged is a tick after a node changed, which divides the nodes into regions again. It reports as BenchmarkReclaim does.
func BenchmarkNodesChanged(b *testing.B) {
	m, _, now := newBench(lockNodes, lockPods)
	m.ReclaimAfter = 1 << 62
	var longest longestHold
	for b.Loop() {
		m.Freed("n1")
		*now = now.Add(time.Second)
		longest.tick(m, *now)
	}
	longest.report(b)
}

// BenchmarkPodsEnd is a tick after 30 pods have ended, as 300 in a second do, of a tenant that has less than its share and whose next pods don't come, while
// pods of others wait. It reports as BenchmarkReclaim does.
func BenchmarkPodsEnd(b *testing.B) {
	const tenant, perTick = 3, 30
	var longest longestHold
	var m *Manager
	var l *ledger.Ledger
	var now *time.Time
	left := 0
	for b.Loop() {
		b.StopTimer()
		if left < perTick {
			m, l, now = newBench(lockNodes, lockPods)
			for i := tenant; i < lockPods; i += benchTenants {
				m.RemovePod(gpu.PodUID(fmt.Sprint("p", i)))
			}
			left = lockNodes * 8 / benchTenants
		}
		for range perTick {
			left--
			n := tenant + left*benchTenants
			uid := gpu.PodUID(fmt.Sprint("full-", n))
			l.Remove(uid)
			m.RemovePod(uid)
			m.Freed(fmt.Sprint("n", n/8))
		}
		*now = now.Add(100 * time.Millisecond)
		b.StartTimer()
		longest.tick(m, *now)
	}
	longest.report(b)
}

// longestHold is the most processor time of a call that holds the Manager's lock. What other programs use doesn't count.
type longestHold time.Duration

func (l *longestHold) of(call func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begin := threadTime()
	call()
	*l = max(*l, longestHold(threadTime()-begin))
}

// tick is Tick in its parts.
func (l *longestHold) tick(m *Manager, now time.Time) {
	var s *standings
	l.of(func() { m.grantDue(now) })
	if l.of(func() { s = m.dueStandings() }); s == nil {
		return
	}
	m.setShares(s)
	l.of(func() { m.reclaim(s) })
}

func (l *longestHold) report(b *testing.B) {
	b.ReportMetric(float64(time.Duration(*l).Microseconds())/1000, "max-ms/lock")
}

// threadTime returns the processor time of the present thread.
func threadTime() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now); err != nil {
		panic(err)
	}
	return time.Duration(now.Nano())
}
