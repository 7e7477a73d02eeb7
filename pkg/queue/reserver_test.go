package queue

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// fixture is a Reserver on a ledger. Each node has cards of 16.
type fixture struct {
	*testing.T
	*Reserver
	ledger  *ledger.Ledger
	checked checks
	nodes   []string
	now     time.Time
	items   []Item
}

func newFixture(t *testing.T, cards ...int) *fixture {
	f := &fixture{T: t, checked: checks{}, now: begin}
	f.ledger = ledger.NewWithResources(f.checked, nil)
	for i, n := range cards {
		name, spec := fmt.Sprint("n", i+1), ledger.NodeSpec{Unit: gpu.GiB}
		for card := range n {
			spec.Cards = append(spec.Cards, gpu.Card{Index: card, Memory: 16})
		}
		f.ledger.SetNode(name, spec)
		f.nodes = append(f.nodes, name)
	}
	f.Reserver = NewReserver(Options{
		Ledger: f.ledger, MaxIdle: 0.1, MaxAge: time.Hour, Failures: &Failures{},
		Reserved: func() {},
	})
	return f
}

// run makes a pod run on a card since a time before now.
func (f *fixture) run(name, node string, card int, memory gpu.Memory, since time.Duration) {
	f.ledger.SetBound(node, gpu.Pod{UID: gpu.PodUID(name), Request: memory}, gpu.On(card, memory), f.now.Add(-since))
}

// wait adds an item of so many pods, which entered the queue at a time after begin.
func (f *fixture) wait(name string, pods int, memory gpu.Memory, entered time.Duration) *Item {
	f.items = append(f.items, Item{
		Item: ledger.Item{ID: name, Label: name, Entered: begin.Add(entered)}, RoomKey: fmt.Sprint(pods, " of ", memory),
		Profile: Profile{Namespace: "default", ID: name, ShapeKey: name, Size: Size{Memory: memory}},
		Requests: func() (requests []ledger.Request) {
			for i := range pods {
				uid := gpu.PodUID(name)
				if pods > 1 {
					uid = gpu.PodUID(fmt.Sprint(name, i))
				}
				requests = append(requests, ledger.Request{Pod: gpu.Pod{UID: uid, Request: memory}, Nodes: f.nodes})
			}
			return requests
		},
	})
	return &f.items[len(f.items)-1]
}

// pass makes a pass after some time, and compares what is reserved: for each item the memory by node.
func (f *fixture) pass(after time.Duration, want ...string) {
	f.Helper()
	f.now = f.now.Add(after)
	f.Pass(f.items, f.now)
	var got []string
	for id, c := range f.choices {
		if c.nodes == nil {
			continue
		}
		var nodes []string
		for node, amount := range f.ledger.AwaitedMemory(id) {
			nodes = append(nodes, fmt.Sprintf("%s:%d", node, amount))
		}
		slices.Sort(nodes)
		got = append(got, id+" "+strings.Join(nodes, " "))
	}
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		f.Errorf("after %v (-want +got):\n%s", f.now.Sub(begin), diff)
	}
}

// An item that changes while a pass lists it has no requests then. It keeps its reservation until the next pass.
func TestReserverWhileItemChanges(t *testing.T) {
	f := newFixture(t, 1)
	f.run("young", "n1", 0, 4, time.Minute)
	requests := f.wait("first", 1, 16, longAgo).Requests
	f.pass(0, "first n1:16")
	f.items[0].Requests = func() []ledger.Request { return nil }
	f.pass(time.Second, "first n1:16")
	f.items[0].Requests = requests
	f.pass(time.Second, "first n1:16")
	f.items = nil
	f.pass(time.Second)
	f.wait("second", 1, 16, longAgo).Requests = func() []ledger.Request { return nil }
	f.pass(time.Second)
}

// longAgo and earlier are before all pods were placed, as times after begin.
const longAgo, earlier = -24 * time.Hour, -90 * time.Minute

// The cards with the youngest pods are reserved, but no cards whose pods have run for too long, or were there before the item.
func TestReserverChoice(t *testing.T) {
	f := newFixture(t, 1, 2, 1)
	f.run("old", "n1", 0, 4, 30*time.Minute)
	f.run("older", "n2", 0, 4, 50*time.Minute)
	f.run("young", "n2", 1, 4, time.Minute)
	f.run("endless", "n3", 0, 4, 2*time.Hour)
	f.wait("first", 1, 16, longAgo)
	f.pass(0, "first n2:16")
	f.items = nil
	f.pass(time.Second)
	f.wait("group", 3, 16, longAgo)
	f.pass(time.Second, "group n1:16 n2:32")
	f.items = nil
	f.wait("after some", 3, 16, -40*time.Minute)
	f.pass(time.Second)
	f.items = nil
	f.wait("too large", 4, 16, longAgo)
	f.pass(time.Second)
}

// A choice lasts as long as the item had waited, although other cards are better meanwhile.
func TestReserverChoiceLasts(t *testing.T) {
	f := newFixture(t, 1, 1)
	f.run("a", "n1", 0, 4, 10*time.Second)
	f.run("b", "n2", 0, 4, 20*time.Second)
	f.wait("first", 1, 16, -40*time.Second)
	f.pass(0, "first n1:16")
	f.ledger.Remove("b")
	f.run("c", "n2", 0, 4, 0)
	f.pass(39*time.Second, "first n1:16")
	f.pass(2*time.Second, "first n2:16")
	f.pass(79*time.Second, "first n2:16")
}

// A choice is made again when one of its cards can't be used any more.
func TestReserverChoiceUnusable(t *testing.T) {
	f := newFixture(t, 1, 1)
	f.run("a", "n1", 0, 4, time.Minute)
	f.run("b", "n2", 0, 4, 2*time.Minute)
	f.wait("first", 1, 16, -time.Hour)
	f.pass(0, "first n1:16")
	f.ledger.DeleteNode("n1")
	f.pass(time.Second, "first n2:16")
}

// Behind the first item, others get reservations up to the limit. Of items that are alike, only the first does.
func TestReserverLimit(t *testing.T) {
	f := newFixture(t, 8, 8, 4)
	for i, node := range []string{"n1", "n2"} {
		for card := range 8 {
			f.run(fmt.Sprint(node, card), node, card, 4, time.Duration(1+i)*time.Minute)
		}
	}
	for card := range 4 {
		f.run(fmt.Sprint("n3", card), "n3", card, 16, 3*time.Minute)
	}
	f.wait("first", 1, 16, earlier)
	f.wait("alike", 1, 16, earlier+time.Second)
	f.wait("other", 1, 15, earlier+2*time.Second)
	f.wait("late", 1, 14, earlier+3*time.Second)
	f.MaxIdle = 0.09 // The cards have 320.
	f.pass(0, "first n1:16", "other n1:15")
	f.MaxIdle = 0.05
	f.pass(time.Minute, "first n1:16")
	f.items = f.items[1:]
	f.pass(time.Minute, "alike n1:16")
}

// What a broken run of a group still needs comes first, then priority counts, and then the time of entry. The first item may have any amount.
func TestReserverOrder(t *testing.T) {
	f := newFixture(t, 1)
	f.run("a", "n1", 0, 4, time.Minute)
	f.wait("early", 1, 16, earlier)
	f.pass(0, "early n1:16")
	f.wait("important", 1, 15, earlier+time.Second).Priority = 5
	f.pass(time.Second, "important n1:15")
	f.wait("broken", 1, 14, earlier+2*time.Second).CompletesGroup = true
	f.pass(time.Second, "broken n1:14")
	f.items = f.items[:2]
	f.pass(time.Second, "important n1:15")
}

// An item that fits keeps its reservation until it is bound. If that takes too long, it has failed.
func TestReserverArrival(t *testing.T) {
	f := newFixture(t, 1)
	f.run("a", "n1", 0, 4, time.Minute)
	item := f.wait("pod", 1, 16, earlier)
	item.ByKubeScheduler = true
	f.pass(0, "pod n1:16")
	f.ledger.Remove("a")
	f.pass(time.Minute, "pod n1:16")
	f.pass(ArrivalTimeout-time.Second, "pod n1:16")
	f.pass(time.Second)
	f.run("b", "n1", 0, 4, time.Minute)
	f.pass(time.Second)
	f.pass(time.Second, "pod n1:16")
	f.ledger.Remove("b")
	f.pass(time.Second, "pod n1:16")
	f.run("pod", "n1", 0, 16, 0)
	f.items = nil
	f.pass(time.Second)
	if failures, _ := f.Failures.CountOf(item.Profile); failures > 0 {
		t.Errorf("%d failures are counted, although it has arrived since", failures)
	}
}

// What an item gives up is reserved for the next one in the same pass.
func TestReserverGivenUp(t *testing.T) {
	f := newFixture(t, 1)
	f.run("a", "n1", 0, 4, time.Minute)
	f.wait("first", 1, 16, earlier)
	f.wait("second", 1, 15, earlier+time.Second).Profile.Namespace = "other"
	f.pass(0, "first n1:16")
	f.ledger.Remove("a")
	f.pass(time.Second, "first n1:16")
	f.pass(ArrivalTimeout, "second n1:15")
}

// A small item that fails again and again, and arrives in between, doesn't end the reservation of a large one of its namespace.
func TestReserverWhileOthersFail(t *testing.T) {
	f := newFixture(t, 8)
	f.run("runs", "n1", 0, 4, time.Minute)
	f.wait("large", 8, 16, earlier)
	flaky := Profile{Namespace: "default", ID: "flaky", ShapeKey: "flaky", Size: Size{Memory: 1}}
	f.pass(0, "large n1:128")
	for range 3 {
		f.Failures.Placed(flaky)
		f.Failures.Failed(flaky, f.now, f.now)
		f.pass(time.Millisecond, "large n1:128")
		f.Failures.Placed(flaky)
		f.Failures.Arrived(flaky)
		f.pass(time.Minute, "large n1:128")
	}
}

// An item that fits without a reservation needs none.
func TestReserverFits(t *testing.T) {
	f := newFixture(t, 1)
	f.wait("pod", 1, 16, earlier).ByKubeScheduler = true
	f.pass(0)
}

// Whether an item fits is checked only if it may get a reservation: with many kinds of pods, the check of all of them on all nodes takes long.
func TestReserverChecksFew(t *testing.T) {
	f := newFixture(t, 1, 1)
	f.run("a", "n1", 0, 4, time.Minute)
	for memory := gpu.Memory(16); memory > 0; memory-- {
		f.wait(fmt.Sprint("of ", memory), 1, memory, earlier-time.Duration(memory)).ByKubeScheduler = true
	}
	requests := f.items[0].Requests
	f.items[0].Requests = func() []ledger.Request { return []ledger.Request{{Pod: requests()[0].Pod, Nodes: f.nodes[:1]}} }
	f.pass(0, "of 16 n1:16")
	if len(f.checked["n2"]) > 0 {
		t.Errorf("checked were %v", f.checked["n2"])
	}
}

// checks are the pods of which it was checked whether a node has the resources for them, by node.
type checks map[string][]gpu.PodUID

func (c checks) Fits(q ledger.ResourceQuery) bool {
	c[q.Node] = append(c[q.Node], q.Pods...)
	return true
}
func (checks) Shape(gpu.PodUID) (placement.Shape, bool) { return placement.Shape{}, false }
func (checks) Requests(gpu.PodUID) string               { return "" }
func (checks) LargestPart(string, []gpu.PodUID) float64 { return 0 }

// With fair sharing, an item that needs no turn comes before all that wait for one.
func TestReserverTurns(t *testing.T) {
	f := newFixture(t, 1)
	f.run("runs", "n1", 0, 4, time.Minute)
	for i, name := range []string{"second tenant", "first tenant"} {
		item := f.wait(name, 1, 16, longAgo)
		item.ByTurn, item.Priority, item.Turn, item.RoomKey = true, 1000, 2-i, name
	}
	f.pass(0, "first tenant n1:16")
	f.choices["first tenant"].until = f.now.Add(time.Second) // Items whose choice lasts come before those of other tenants only.
	f.wait("exempt", 1, 16, -2*time.Hour)
	f.pass(500*time.Millisecond, "exempt n1:16")
}

// Items that never fit, and come first, delay the choices of the others, but for a bounded time: also if new ones come all the time.
func TestReserverManyNeverFit(t *testing.T) {
	const nodes, perPass = 5000, maxWork / 5000
	for name, tc := range map[string]struct {
		// waiting never fit, and in each pass so many of them are replaced by new ones.
		waiting, replaced int
		// within is the number of passes in which the last item gets its reservation. Half of each pass is for delayed choices.
		within int
	}{
		"one pass can try all":       {waiting: perPass - 1, within: 1},
		"one pass can't":             {waiting: 100, within: 100 / (perPass / 2)},
		"a controller replaces them": {waiting: 100, replaced: 2 * perPass, within: 100 / (perPass / 2)},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			for i := range nodes - 1 {
				f.nodes = append(f.nodes, fmt.Sprintf("other%04d", i))
			}
			f.run("runs", "n1", 0, 4, time.Minute)
			f.wait("fits", 1, 16, earlier)
			passes := 0
			for passes == 0 || len(f.ledger.AwaitedMemory("fits")) == 0 && passes < 10*tc.within {
				f.items = append(f.items[:1], f.items[min(len(f.items), 1+tc.replaced):]...)
				for len(f.items) < 1+tc.waiting {
					serial := 1000*passes + len(f.items)
					f.wait(fmt.Sprint("never fits ", serial), 1, gpu.Memory(100+serial), earlier).Priority = 5
				}
				passes++
				f.now = f.now.Add(time.Second / 4)
				f.Pass(f.items, f.now)
			}
			if passes > tc.within {
				t.Errorf("it has a reservation after %d passes, want %d at most", passes, tc.within)
			}
		})
	}
}
