package gang

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/queue"
)

// benchCluster is a Manager with nodes of eight cards of 80, of which 70 are used.
type benchCluster struct {
	manager *Manager
	ledger  *ledger.Ledger
	nodes   []string
	now     time.Time
}

func newBenchCluster(nodes int) *benchCluster {
	c := &benchCluster{ledger: ledger.New(), now: time.Unix(1_800_000_000, 0)}
	c.ledger.AddFreedListener(func(string) { c.manager.MemoryFreed() })
	c.manager = New(Options{
		Ledger: c.ledger, Release: func(uid gpu.PodUID) { c.ledger.Release(uid) },
		View: ledger.View{Card: placement.Binpack, Node: placement.Binpack},
		Hold: testHold, Patience: testPatience, OnFailure: Evict, Observer: discard{},
		Failures: &queue.Failures{}, AwaitsTurn: never,
		EligibleNodes: func(gpu.PodUID) []string { return c.nodes },
	})
	for i := range nodes {
		name := fmt.Sprintf("node-%04d", i)
		c.nodes = append(c.nodes, name)
		var cards []gpu.Card
		for card := range 8 {
			cards = append(cards, gpu.Card{Index: card, Memory: 80})
		}
		c.ledger.SetNode(name, ledger.NodeSpec{Unit: gpu.GiB, Cards: cards})
		for card := range 8 {
			c.use(i, card)
		}
	}
	c.manager.StartLeading(c.now)
	return c
}

func (c *benchCluster) use(node, card int) {
	pod := gpu.Pod{UID: gpu.PodUID(fmt.Sprintf("used-%d-%d", node, card)), Request: 70}
	c.ledger.SetBound(c.nodes[node], pod, gpu.Placement{{Card: card, Memory: 70}}, time.Time{})
}

// member returns a member of a group. With volumes, each has its own template.
func (c *benchCluster) member(group, i, size int, volumes bool) Member {
	name := fmt.Sprintf("g%d-%d", group, i)
	m := Member{
		Pod:  gpu.Pod{UID: gpu.PodUID(name), Namespace: "default", Name: name, Request: 80},
		Gang: Key{Namespace: "default", Name: fmt.Sprint("g", group)}, Size: size, Controller: fmt.Sprint(group),
		Created: c.now.Add(time.Duration(group-100_000) * time.Second), Template: "t", Shape: "t", Scheduler: "default-scheduler",
	}
	if volumes {
		m.Template = name
	}
	return m
}

func (c *benchCluster) load(groups, size int, volumes bool) {
	for g := range groups {
		for i := range size {
			c.manager.SetMember(c.member(g, i, size, volumes), c.now)
		}
	}
}

// BenchmarkTick measures a Tick while groups wait for room. In the busy cluster memory is freed before every second
// Tick, which helps none of them.
func BenchmarkTick(b *testing.B) {
	for _, bc := range []struct {
		groups, size int
		volumes      bool
	}{{1000, 8, false}, {1000, 8, true}, {100, 512, true}} {
		for _, busy := range []bool{false, true} {
			b.Run(fmt.Sprintf("groups=%d/size=%d/volumes=%t/busy=%t", bc.groups, bc.size, bc.volumes, busy), func(b *testing.B) {
				c := newBenchCluster(200)
				c.load(bc.groups, bc.size, bc.volumes)
				for g := range bc.groups {
					for i := range bc.size {
						c.manager.filterAll(c.member(g, i, bc.size, bc.volumes).UID, c.nodes, c.now)
						if !bc.volumes {
							break
						}
					}
				}
				worst, n := time.Duration(0), 0
				for b.Loop() {
					c.now = c.now.Add(100 * time.Millisecond)
					if n++; busy && n%2 == 0 {
						c.ledger.Remove("used-0-0")
						c.use(0, 0)
					}
					start := time.Now()
					c.manager.Tick(c.now)
					worst = max(worst, time.Since(start))
					c.manager.TakeEffects()
				}
				b.ReportMetric(float64(worst.Microseconds())/1000, "ms-worst")
			})
		}
	}
}

// BenchmarkLoad measures how long the members of one group of 20,000 take to load. It must grow linearly with them.
func BenchmarkLoad(b *testing.B) {
	for _, n := range []int{5_000, 20_000} {
		b.Run(fmt.Sprint("members=", n), func(b *testing.B) {
			for b.Loop() {
				c := newBenchCluster(1)
				c.load(1, n, false)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/member")
		})
	}
}

// BenchmarkFilter measures a filter call for a member of one of many groups without room.
func BenchmarkFilter(b *testing.B) {
	for _, nodes := range []int{200, 5000} {
		b.Run(fmt.Sprint("nodes=", nodes), func(b *testing.B) {
			c := newBenchCluster(nodes)
			c.load(1000, 8, false)
			i := 0
			for b.Loop() {
				c.now = c.now.Add(time.Millisecond)
				i++
				c.manager.filterAll(c.member(i%1000, i%8, 8, false).UID, c.nodes, c.now)
			}
		})
	}
}

// BenchmarkDisplace measures the call for a pod of higher priority than all planned groups that fits nowhere even without
// them: it is larger than the cards, or its candidates are full and hold no plan.
func BenchmarkDisplace(b *testing.B) {
	c := newBenchCluster(1000)
	for node := range c.nodes {
		for card := range 8 {
			c.ledger.Remove(gpu.PodUID(fmt.Sprintf("used-%d-%d", node, card)))
		}
	}
	c.load(1000, 8, false)
	for g := range 1000 {
		c.manager.filterAll(c.member(g, 0, 8, false).UID, c.nodes, c.now)
	}
	if c.manager.Tick(c.now); c.manager.Phases()[PhasePlanned] < 900 {
		b.Fatal(c.manager.Phases())
	}
	b.Run("too large", func(b *testing.B) {
		for b.Loop() {
			c.manager.Displace(gpu.Pod{UID: "important", Request: 81, Priority: 1}, c.nodes, c.now)
		}
	})
	var others []string
	for node := range 5000 {
		others = append(others, fmt.Sprint("full-", node))
		c.ledger.SetNode(others[node], ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{{Memory: 80}}})
		if _, err := c.ledger.Reserve(others[node], gpu.Pod{UID: gpu.PodUID(others[node]), Request: 80}, placement.Binpack, c.now); err != nil {
			b.Fatal(err)
		}
	}
	b.Run("full nodes without plans", func(b *testing.B) {
		for b.Loop() {
			c.manager.Displace(gpu.Pod{UID: "important", Request: 20, Priority: 1}, others, c.now)
		}
	})
}

// BenchmarkReports is what the web page costs while it has viewers, once a second: 1,000 groups of eight.
func BenchmarkReports(b *testing.B) {
	c := newBenchCluster(1)
	c.load(1000, 8, false)
	for b.Loop() {
		if reports, _ := c.manager.Reports(); len(reports) != 1000 {
			b.Fatal(len(reports))
		}
	}
}
