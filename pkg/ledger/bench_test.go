package ledger_test

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// cluster returns a ledger with nodes of eight cards of 16276; seven pods use about 90% of each card.
func cluster(nodes int) (*ledger.Ledger, []string) {
	l := ledger.New()
	names := make([]string, nodes)
	for i := range names {
		names[i] = fmt.Sprintf("node-%04d", i)
		l.SetNode(names[i], spec(16276, 16276, 16276, 16276, 16276, 16276, 16276, 16276))
		for card := range 8 {
			for part := range 7 {
				p := pod(fmt.Sprintf("%s-%d-%d", names[i], card, part), gpu.Memory(2050+20*card))
				l.SetBound(names[i], p, gpu.On(card, p.Request), at)
			}
		}
	}
	return l, names
}

var sizes = []int{100, 1000, 5000}

func TestCheckAllocations(t *testing.T) {
	l, names := cluster(10)
	asking, fitting := pod("asking", 1500), 0
	allocations := testing.AllocsPerRun(10, func() {
		l.Check(asking, names, func(_ string, reason placement.Reason) {
			if reason == placement.Fits {
				fitting++
			}
		})
	})
	if allocations != 0 {
		t.Errorf("Check of 10 nodes makes %v allocations", allocations)
	}
	if fitting == 0 {
		t.Error("nothing fits")
	}
}

func BenchmarkCheck(b *testing.B) {
	for _, size := range sizes {
		b.Run(fmt.Sprintf("nodes=%d", size), func(b *testing.B) {
			l, names := cluster(size)
			asking, fitting := pod("asking", 1500), 0
			b.ReportAllocs()
			for b.Loop() {
				l.Check(asking, names, func(_ string, reason placement.Reason) {
					if reason == placement.Fits {
						fitting++
					}
				})
			}
			if fitting == 0 {
				b.Error("nothing fits")
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*size), "ns/node")
		})
	}
}

func BenchmarkRank(b *testing.B) {
	for _, size := range sizes {
		b.Run(fmt.Sprintf("nodes=%d", size), func(b *testing.B) {
			l, names := cluster(size)
			// Equal names in different memory, as decoded from two requests.
			lists := [][]string{names, make([]string, size)}
			for i, name := range names {
				lists[1][i] = strings.Clone(name)
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				l.Rank(ledger.View{Card: placement.Binpack, Node: placement.Binpack, TentativeAt: at}, pod("asking", 1500), lists[i%2], func(int, placement.Suitability, placement.Reason) {})
			}
		})
	}
}

func BenchmarkReserveRelease(b *testing.B) {
	for _, size := range sizes {
		b.Run(fmt.Sprintf("nodes=%d", size), func(b *testing.B) {
			l, names := cluster(size)
			asking := pod("asking", 1500)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if _, err := l.Reserve(names[i%size], asking, placement.Binpack, at); err != nil {
					b.Fatal(err)
				}
				l.Release(asking.UID)
			}
		})
	}
}

// BenchmarkHold measures the event handler's call for a known pod, on a node with 55 others.
func BenchmarkHold(b *testing.B) {
	l, names := cluster(1)
	p := pod(names[0]+"-0-0", 2050)
	b.ReportAllocs()
	for b.Loop() {
		l.SetBound(names[0], p, gpu.On(0, p.Request), at)
	}
}

// BenchmarkCheckBesideBinds checks 1,000 nodes during concurrent reservations.
func BenchmarkCheckBesideBinds(b *testing.B) {
	l, names := cluster(1000)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		binding := pod("binding", 1500)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				_, _ = l.Reserve(names[i%len(names)], binding, placement.Binpack, at)
				l.Release(binding.UID)
			}
		}
	}()
	b.ReportAllocs()
	for b.Loop() {
		l.Check(pod("asking", 1500), names, func(string, placement.Reason) {})
	}
	b.StopTimer()
	close(stop)
	<-stopped
}

// BenchmarkReserveBesideReaders measures how long a reservation waits during complete reads, as for metrics.
func BenchmarkReserveBesideReaders(b *testing.B) {
	for _, size := range sizes {
		b.Run(fmt.Sprintf("nodes=%d", size), func(b *testing.B) {
			l, names := cluster(size)
			var readers sync.WaitGroup
			var done atomic.Bool
			readers.Go(func() {
				for !done.Load() {
					l.Nodes()
				}
			})
			asking := pod("asking", 1500)
			for b.Loop() {
				if _, err := l.Reserve(names[0], asking, placement.Binpack, at); err != nil {
					b.Fatal(err)
				}
				l.Release(asking.UID)
			}
			done.Store(true)
			readers.Wait()
		})
	}
}
