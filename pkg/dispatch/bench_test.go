package dispatch

import (
	"fmt"
	"slices"
	"testing"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// benchTenants, benchPods and benchNodes are the size of a large cluster, whose nodes have eight cards of 16 GiB.
const benchTenants, benchPods, benchNodes = 50, 10_000, 5_000

// newBench returns a Manager with that many pods that wait. Their tenants differ in weight, their pods in size and in the nodes
// that they can use. The nodes are full.
func newBench() (*Manager, *ledger.Ledger, *time.Time) {
	l, now := ledger.New(), begin
	var nodes []string
	for i := range benchNodes {
		name := fmt.Sprint("n", i)
		cards := make([]gpu.Card, 8)
		for j := range cards {
			cards[j] = gpu.Card{Index: j, Memory: 16}
		}
		l.SetNode(name, ledger.NodeSpec{Unit: gpu.GiB, Cards: cards})
		nodes = append(nodes, name)
	}
	half := slices.Clone(nodes[:benchNodes/2])
	m := New(Options{
		Ledger: l, View: ledger.View{Card: placement.Binpack, Node: placement.Binpack}, PriorityCutoff: 1 << 30,
		Release: func(uid gpu.PodUID) { l.Release(uid) },
		EligibleNodes: func(constraints unique.Handle[string]) []string {
			if constraints == unique.Make("half") {
				return half
			}
			return nodes
		},
		Observer: &fixture{},
	})
	for i := range benchTenants {
		name := fmt.Sprint("t", i)
		m.SetNamespace(name, Namespace{Tenant: name, Terms: fairshare.Terms{Weight: 1 + int64(i%4)}})
	}
	for i := range benchNodes * 8 {
		name, node := fmt.Sprint("full-", i), nodes[i/8]
		p := gpu.Pod{UID: gpu.PodUID(name), Namespace: fmt.Sprint("t", i%benchTenants), Name: name, Request: 16}
		l.SetBound(node, p, gpu.On(i%8, 16), begin)
		m.SetPod(Pod{Pod: p, Node: node})
	}
	for i := range benchPods {
		name, constraints := fmt.Sprint("p", i), []string{"", "half"}[i%2]
		p := gpu.Pod{UID: gpu.PodUID(name), Namespace: fmt.Sprint("t", i%benchTenants), Name: name, Request: gpu.Memory(1 + i%16), Priority: int32(i % 3)}
		m.SetPod(Pod{
			Pod: p, Gated: true, Created: begin.Add(time.Duration(i) * time.Second), Constraints: unique.Make(constraints),
			Likeness: unique.Make(fmt.Sprint(constraints, p.Priority)),
		})
	}
	m.StartLeading()
	m.Tick(now)
	return m, l, &now
}

// BenchmarkTick frees a card and lets the Manager grant what fits: the time of an iteration is that of a round, in which one pod
// or some are granted. It reports the 99th percentile of a round, and the median and the 99th percentile of the time per pod.
func BenchmarkTick(b *testing.B) {
	m, l, now := newBench()
	granted, i, left := 0, 0, benchPods
	var rounds, decisions []time.Duration
	for b.Loop() {
		if left < benchPods/4 { // With few pods left, decisions are fast.
			b.StopTimer()
			m, l, now = newBench()
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
			p := m.pods[pod.UID].Pod
			p.Node, p.Gated = node, false
			m.SetPod(p)
		}
	}
	b.ReportMetric(float64(granted)/float64(b.N), "pods/op")
	for unit, times := range map[string][]time.Duration{"p99-µs/round": rounds, "p99-µs/pod": decisions} {
		slices.Sort(times)
		b.ReportMetric(float64(times[len(times)*99/100].Nanoseconds())/1000, unit)
	}
	b.ReportMetric(float64(decisions[len(decisions)/2].Nanoseconds())/1000, "p50-µs/pod") // The loop has sorted them.
}

// BenchmarkIdleTick is a tick in which nothing has changed.
func BenchmarkIdleTick(b *testing.B) {
	m, _, now := newBench()
	for b.Loop() {
		m.Tick(*now)
	}
}

// BenchmarkReclaim is a tick in which room is requested for tenants below their share.
func BenchmarkReclaim(b *testing.B) {
	m, _, now := newBench()
	m.ReclaimAfter = time.Second
	m.Tick(*now)
	for b.Loop() {
		*now = now.Add(time.Minute)
		m.reclaims.attempt = nil
		m.Tick(*now)
		if m.TakeEffects().Reclaim == nil {
			b.Fatal("nothing is requested")
		}
	}
}
