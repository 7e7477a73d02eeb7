package webui

import (
	"fmt"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/test/fake"
)

// BenchmarkRefresh measures what one second of an open page costs, with 10,000 nodes and 100,000 pods, of which that many nodes have changed.
// longest-reserve-ns is the longest time that a reservation of memory took meanwhile.
func BenchmarkRefresh(b *testing.B) {
	const nodes, podsPerNode = 10_000, 10
	source, names := &source{ledger: ledger.New()}, make([]string, nodes)
	for i := range names {
		names[i] = fmt.Sprintf("gpu-node-%05d.example", i)
		source.ledger.SetNode(names[i], spec(80, 80, 80, 80, 80, 80, 80, 80))
		for p := range podsPerNode {
			source.ledger.SetBound(names[i], pod(fmt.Sprint(names[i], "-", p), 10), gpu.On(p%8, 10), time.Time{})
		}
	}
	now := clocktesting.NewFakeClock(time.Unix(1700000000, 0))
	for _, changed := range []int{0, 100, nodes} {
		b.Run(fmt.Sprintf("changed=%d", changed), func(b *testing.B) {
			board := NewBoard(Options{Source: source, Clock: now})
			if !board.enter() {
				b.Fatal("too many viewers")
			}
			if _, err := board.Whole(); err != nil {
				b.Fatal(err)
			}
			reserve := func() {
				if _, err := source.ledger.Reserve(names[0], pod("asking", 1), placement.Binpack, now.Now()); err != nil {
					b.Error(err)
				}
				source.ledger.Release("uid-asking")
			}
			longest := fake.LongestBeside(reserve, func() {
				for i := 0; b.Loop(); i++ {
					b.StopTimer()
					for _, name := range names[:changed] {
						source.ledger.SetBound(name, pod("changing "+name, gpu.Memory(1+i%2)), gpu.On(0, gpu.Memory(1+i%2)), time.Time{})
					}
					now.Step(refreshEvery)
					b.StartTimer()
					if _, _, _, err := board.after(0); err != nil {
						b.Fatal(err)
					}
				}
			})
			b.ReportMetric(float64(longest.Nanoseconds()), "longest-reserve-ns")
		})
	}
}
