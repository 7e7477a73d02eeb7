package ledger_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/fake"
)

var sizes = []int{100, 1000, 5000}

// benchmark runs a benchmark with clusters of several sizes. The nodes have eight cards of 16276; seven pods use about 90%
// of each card.
func benchmark(b *testing.B, run func(b *testing.B, l *ledger.Ledger, names []string), sizes ...int) {
	benchmarkWith(b, nil, run, sizes...)
}

// benchmarkWith is benchmark with a ledger that knows what pods ask for.
func benchmarkWith(b *testing.B, resources ledger.Resources, run func(b *testing.B, l *ledger.Ledger, names []string), sizes ...int) {
	for _, size := range sizes {
		b.Run(fmt.Sprintf("nodes=%d", size), func(b *testing.B) {
			f, names := &fixture{t: b, Ledger: ledger.NewWithResources(resources, nil)}, make([]string, size)
			for i := range names {
				names[i] = fmt.Sprintf("node-%04d", i)
				f.SetNode(names[i], spec(16276, 16276, 16276, 16276, 16276, 16276, 16276, 16276))
				for card := range 8 {
					for part := range 7 {
						f.bind(names[i], card, pod(fmt.Sprintf("%s-%d-%d", names[i], card, part), gpu.Memory(2050+20*card)))
					}
				}
			}
			b.ReportAllocs()
			run(b, f.Ledger, names)
		})
	}
}

// reportCPU reports the CPU time of the calls after it, at the end of the benchmark. Unlike the time of a clock, it depends little on other
// processes.
func reportCPU(b *testing.B) (end func()) {
	used := cpuTime()
	return func() { b.ReportMetric(float64(cpuTime()-used)/float64(b.N), "cpu-ns/op") }
}

func cpuTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		panic(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

func TestForEachFitAllocations(t *testing.T) {
	f := newFixture(t, spec(16, 16), spec(16))
	names := []string{"n1", "n2", "unknown"}
	if n := testing.AllocsPerRun(10, func() { f.ForEachFit(pod("asking", 1), names, func(string, reasons.Reason) {}) }); n != 0 {
		t.Errorf("ForEachFit makes %v allocations", n)
	}
}

func BenchmarkForEachFit(b *testing.B) {
	benchmark(b, func(b *testing.B, l *ledger.Ledger, names []string) {
		fitting := 0
		for b.Loop() {
			l.ForEachFit(pod("asking", 1500), names, func(_ string, reason reasons.Reason) {
				if reason == reasons.Fits {
					fitting++
				}
			})
		}
		if fitting == 0 {
			b.Error("nothing fits")
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(names)), "ns/node")
	}, sizes...)
}

func BenchmarkRank(b *testing.B) {
	benchmark(b, func(b *testing.B, l *ledger.Ledger, names []string) {
		// Equal names in different memory, as decoded from two requests.
		lists := [][]string{names, make([]string, len(names))}
		for i, name := range names {
			lists[1][i] = strings.Clone(name)
		}
		defer reportCPU(b)()
		for i := 0; b.Loop(); i++ {
			l.Rank(tentative, pod("asking", 1500), lists[i%2])
		}
	}, sizes...)
}

// BenchmarkRankSample ranks a tenth of the nodes, each time the next ones, as kube-scheduler names them in a large cluster. Before each call the
// processor's caches have been used for something else.
func BenchmarkRankSample(b *testing.B) {
	benchmark(b, func(b *testing.B, l *ledger.Ledger, names []string) {
		other, sample := make([]byte, 4<<20), len(names)/10
		var used time.Duration
		for i := 0; b.Loop(); i++ {
			for at := range other {
				other[at]++
			}
			from, start := i%10*sample, cpuTime()
			l.Rank(tentative, pod("asking", 1500), names[from:from+sample])
			used += cpuTime() - start
		}
		b.ReportMetric(float64(used)/float64(b.N), "cpu-ns/op")
	}, 5000)
}

// BenchmarkRankLeastWaste ranks pods of 64 random shapes, alternately, on nodes that are full to about 90%. Before each call a node has changed.
func BenchmarkRankLeastWaste(b *testing.B) {
	shapes := shapesOf{}
	benchmarkWith(b, shapes, func(b *testing.B, l *ledger.Ledger, names []string) {
		random, kinds := rand.New(rand.NewPCG(1, 2)), []placement.Kind(nil)
		for _, name := range names {
			free := placement.NodeResources{CPU: 1000 * random.Int64N(64), NodeMemory: random.Int64N(256) << 30}
			l.SetNodeResources(name, free, placement.NodeResources{CPU: 64000, NodeMemory: 256 << 30})
		}
		pods := make([]gpu.Pod, placement.MaxKinds)
		for i := range pods {
			pods[i] = pod(fmt.Sprint("asking-", i), 50+gpu.Memory(random.IntN(2000)))
			shape := placement.Shape{
				Demand: pods[i].Demand(), NodeResources: placement.NodeResources{CPU: 1000 * random.Int64N(32), NodeMemory: random.Int64N(64) << 30},
			}
			shapes[pods[i].UID], kinds = shape, append(kinds, placement.Kind{Shape: shape, Frequency: random.Float64()})
		}
		l.Expect(kinds, 1, placement.Binpack, func(unique.Handle[string]) []string { return names })
		defer reportCPU(b)()
		for i := 0; b.Loop(); i++ {
			node := names[random.IntN(len(names))]
			if changing := pod("changing-"+node, 10); !l.Release(changing.UID) {
				if _, err := l.Reserve(node, changing, placement.Binpack, at); err != nil {
					b.Fatal(err)
				}
			}
			view := ledger.View{Card: placement.Binpack, Node: placement.LeastWaste, TentativeAt: at}
			l.Rank(view, pods[i%len(pods)], names)
		}
	}, sizes...)
}

// BenchmarkExpect measures how long a new outlook takes.
func BenchmarkExpect(b *testing.B) {
	benchmark(b, func(b *testing.B, l *ledger.Ledger, names []string) {
		random, kinds := rand.New(rand.NewPCG(1, 2)), []placement.Kind(nil)
		for range placement.MaxKinds {
			kinds = append(kinds, placement.Kind{Frequency: random.Float64(), Shape: placement.Shape{
				Demand: gpu.Demand{Cards: 1, Memory: 50 + gpu.Memory(random.IntN(2000)), Containers: 1}, NodeResources: placement.NodeResources{CPU: 1000 * random.Int64N(32)},
			}})
		}
		for b.Loop() {
			l.Expect(kinds, 1, placement.Binpack, func(unique.Handle[string]) []string { return names })
		}
	}, sizes...)
}

// shapesOf are the shapes of pods. It implements ledger.Resources: all pods fit all nodes.
type shapesOf map[gpu.PodUID]placement.Shape

func (s shapesOf) Shape(uid gpu.PodUID) (placement.Shape, bool) {
	shape, known := s[uid]
	return shape, known
}

func (shapesOf) Requests(gpu.PodUID) string               { return "" }
func (shapesOf) Fits(ledger.ResourceQuery) bool           { return true }
func (shapesOf) LargestPart(string, []gpu.PodUID) float64 { return 0 }

// reserveAndRelease reserves memory for a pod on the node and releases it.
func reserveAndRelease(b *testing.B, l *ledger.Ledger, node string) {
	asking := pod("asking", 1500)
	if _, err := l.Reserve(node, asking, placement.Binpack, at); err != nil {
		b.Error(err)
	}
	l.Release(asking.UID)
}

// besides runs the benchmark while another goroutine calls work repeatedly.
func besides(work, run func()) {
	var working sync.WaitGroup
	var done atomic.Bool
	working.Go(func() {
		for !done.Load() {
			work()
		}
	})
	run()
	done.Store(true)
	working.Wait()
}

func BenchmarkReserveRelease(b *testing.B) {
	benchmark(b, func(b *testing.B, l *ledger.Ledger, names []string) {
		for i := 0; b.Loop(); i++ {
			reserveAndRelease(b, l, names[i%len(names)])
		}
	}, sizes...)
}

// BenchmarkSetBound measures the event handler's call for a known pod, on a node with 55 others.
func BenchmarkSetBound(b *testing.B) {
	benchmark(b, func(b *testing.B, l *ledger.Ledger, names []string) {
		for p := pod(names[0]+"-0-0", 2050); b.Loop(); {
			l.SetBound(names[0], p, gpu.On(0, p.Request), at)
		}
	}, 1)
}

func BenchmarkForEachFitBesideBinds(b *testing.B) {
	benchmark(b, func(b *testing.B, l *ledger.Ledger, names []string) {
		node := 0
		besides(func() { reserveAndRelease(b, l, names[node%len(names)]); node++ }, func() {
			for b.Loop() {
				l.ForEachFit(pod("checked", 1500), names, func(string, reasons.Reason) {})
			}
		})
	}, 1000)
}

// BenchmarkReserveBesideReaders measures how long a reservation waits during complete reads, as for metrics.
func BenchmarkReserveBesideReaders(b *testing.B) {
	benchmark(b, func(b *testing.B, l *ledger.Ledger, names []string) {
		besides(func() { l.Nodes() }, func() {
			for b.Loop() {
				reserveAndRelease(b, l, names[0])
			}
		})
	}, sizes...)
}

// BenchmarkReserveAll measures a gang of 512 pods of a card each on 5,000 empty nodes, whose pods have the same list of
// candidate nodes, alternate between a few lists, or have a list each, as the pods of a StatefulSet with volumes.
// BenchmarkAwait does so for an awaited reservation.
func BenchmarkReserveAll(b *testing.B) {
	benchmarkGang(b, func(b *testing.B, l *ledger.Ledger, requests []ledger.Request) {
		for b.Loop() {
			if places, _ := l.ReserveAll(requests, nil, binpack, at); places == nil {
				b.Fatal("no room")
			}
			b.StopTimer()
			for _, request := range requests {
				l.Release(request.Pod.UID)
			}
			b.StartTimer()
		}
	})
}

func BenchmarkAwait(b *testing.B) {
	benchmarkGang(b, func(b *testing.B, l *ledger.Ledger, requests []ledger.Request) {
		for b.Loop() {
			if !l.ReserveAwaited(testItem, requests, longAgo) {
				b.Fatal("no room")
			}
		}
	})
}

func benchmarkGang(b *testing.B, run func(b *testing.B, l *ledger.Ledger, requests []ledger.Request)) {
	const nodes, members = 5000, 512
	f, names := newFixture(b), make([]string, nodes)
	for i := range names {
		names[i] = fmt.Sprintf("node-%04d", i)
		f.SetNode(names[i], spec(80, 80, 80, 80, 80, 80, 80, 80))
	}
	for name, lists := range map[string]int{"one list": 1, "few lists": 4, "own lists": members} {
		requests := make([]ledger.Request, members)
		for i := range requests {
			// Each list lacks other nodes.
			list := slices.Clone(names)
			if i < lists {
				list = slices.Delete(list, i, i+1)
			} else {
				list = requests[i%lists].Nodes
			}
			requests[i] = ledger.Request{Pod: pod(fmt.Sprint("w", i), 80), Nodes: list}
		}
		b.Run(name, func(b *testing.B) { run(b, f.Ledger, requests) })
	}
}

// BenchmarkLock measures the methods that read or change many nodes, with 10,000 nodes and 100,000 pods. longest-reserve-ns is how long a reservation
// and its end took at most meanwhile. NominateAll and ReserveAll are measured elsewhere. cpu-ns/op is the processor time of a call, with that of the
// reservations beside it. ReserveAwaited, AddReservation and End change all shares of a reservation while the lock is held once, so that no other pod gets what would be
// free between two parts: those of 1,000 pods in "Await on its shortlist", 10,000 in AddReservation.
func BenchmarkLock(b *testing.B) {
	const nodes, podsPerNode = 10_000, 10
	f, names := newFixture(b), make([]string, nodes)
	for i := range names {
		names[i] = fmt.Sprintf("gpu-node-%05d.example", i)
		f.SetNode(names[i], spec(80, 80, 80, 80, 80, 80, 80, 80))
		for p := range podsPerNode {
			f.bind(names[i], p%8, pod(fmt.Sprint(names[i], "-", p), 35))
		}
		if i%100 == 0 {
			f.Nominate(names[i], pod("nominee-"+names[i], 5, 5))
		}
	}
	f.SetNode("another node", spec(2000))
	asking, full := pod("asking", 60), pod("asking", 81)
	kinds := []placement.Kind{{Frequency: 1, Shape: placement.Shape{Demand: asking.Demand()}}}
	ignore := func(string, reasons.Reason) {}
	requests, shortlist, places := make([]ledger.Request, 1000), make([]ledger.Request, 1000), make([]heldPlace, nodes)
	for i := range requests {
		requests[i] = ledger.Request{Pod: pod(fmt.Sprint("w", i), 40), Nodes: names}
		shortlist[i] = ledger.Request{Pod: requests[i].Pod, Nodes: names[:len(requests)+16]}
	}
	for i := range places {
		places[i] = heldPlace{UID: gpu.PodUID(fmt.Sprint("held-", i)), Node: names[i], On: gpu.On(0, 10), Item: 1}
	}
	reserved := held(places, 0)
	for name, call := range map[string]func(){
		"ForEachFit":             func() { f.ForEachFit(asking, names, ignore) },
		"FirstFit":               func() { f.FirstFit(full, names) },
		"Rank":                   func() { f.Rank(tentative, asking, names) },
		"NodesWithLowerPriority": func() { f.NodesWithLowerPriority(pod("asking", 1, -1), names) },
		"FitsWithoutAssumed":     func() { f.FitsWithoutAssumed(full, names) },
		"FitsEmpty":              func() { f.FitsEmpty(requests) },
		"NodeCards":              func() { f.NodeCards() },
		"NodeMemory":             func() { f.NodeMemory() },
		"Await":                  func() { f.ReserveAwaited(testItem, requests, longAgo) },
		"Await on its shortlist": func() { f.ReserveAwaited(testItem, shortlist, longAgo) },
		"AwaitedUsable":          func() { f.AwaitedUsable(testItem, requests) },
		"AwaitedIdle":            func() { f.AwaitedIdle() },
		"End of Await":           func() { f.ReserveAwaited(testItem, requests[:1], longAgo); f.End(ledger.Queued, testItem.ID) },
		"Hold":                   func() { f.AddReservation("held", reserved[0]) },
		"End of Hold":            func() { f.End(ledger.Reclaimed, "held") },
		"Expect":                 func() { f.Expect(kinds, 1, placement.Binpack, func(unique.Handle[string]) []string { return names }) },
		"AddTentative":           func() { f.AddTentative(asking, names[:100], at) },
		"Move":                   func() { f.Move(requests[0], binpack, at); f.Release(requests[0].Pod.UID) },
	} {
		b.Run(name, func(b *testing.B) {
			var used time.Duration
			longest := fake.LongestBeside(func() { reserveAndRelease(b, f.Ledger, "another node") }, func() {
				for b.Loop() {
					b.StopTimer()
					switch name {
					case "Hold":
						f.End(ledger.Reclaimed, "held")
					case "End of Hold":
						f.AddReservation("held", reserved[0])
					}
					before := cpuTime()
					b.StartTimer()
					call()
					used += cpuTime() - before
				}
			})
			b.ReportMetric(float64(longest.Nanoseconds()), "longest-reserve-ns")
			b.ReportMetric(float64(used)/float64(b.N), "cpu-ns/op")
		})
	}
}
