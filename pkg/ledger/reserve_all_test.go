package ledger_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

var binpack = ledger.View{Card: placement.Binpack, Node: placement.Binpack}

// twoNodes returns a ledger with two nodes of two cards of 16 each. freed, if not nil, is called from then on.
func twoNodes(freed func(string)) (*ledger.Ledger, []string) {
	ready := false
	l := ledger.New()
	l.AddFreedListener(func(node string) {
		if ready && freed != nil {
			freed(node)
		}
	})
	for _, name := range []string{"n1", "n2"} {
		l.SetNode(name, ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{{Index: 0, Memory: 16}, {Index: 1, Memory: 16}}})
	}
	ready = true
	return l, []string{"n1", "n2"}
}

func asking(uid string, memory gpu.Memory) gpu.Pod {
	return gpu.Pod{UID: gpu.PodUID(uid), Namespace: "default", Name: uid, Request: memory}
}

// wants returns requests for the amounts, with pods named w0, w1 and so on.
func wants(nodes []string, amounts ...gpu.Memory) (out []ledger.Request) {
	for i, memory := range amounts {
		out = append(out, ledger.Request{Pod: asking(fmt.Sprint("w", i), memory), Nodes: nodes})
	}
	return out
}

func TestReserveAll(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	t.Run("all fit, each with its own assume time", func(t *testing.T) {
		l, nodes := twoNodes(nil)
		places, released := l.ReserveAll(wants(nodes, 16, 16, 16, 16), nil, binpack, at)
		if len(places) != 4 || released != 0 {
			t.Fatalf("got %v, %d", places, released)
		}
		times := map[time.Time]bool{}
		for i, place := range places {
			node, got, held := l.Lookup(gpu.PodUID(fmt.Sprint("w", i)))
			if !held || node != place.Node || got.State != ledger.Assumed || place.Existing {
				t.Errorf("w%d: %v, %v, %v", i, place, node, got)
			}
			times[got.AssumeTime] = true
		}
		if len(times) != 4 {
			t.Errorf("%d different assume times of 4", len(times))
		}
	})
	t.Run("one too many: nothing changes", func(t *testing.T) {
		l, nodes := twoNodes(func(node string) { t.Errorf("memory of %s was freed", node) })
		before := l.Nodes()
		if places, _ := l.ReserveAll(wants(nodes, 16, 16, 16, 10, 10), nil, binpack, at); places != nil {
			t.Fatalf("got %v", places)
		}
		if diff := cmp.Diff(before, l.Nodes()); diff != "" {
			t.Errorf("(-before +after):\n%s", diff)
		}
	})
	t.Run("a member keeps its allocation", func(t *testing.T) {
		l, nodes := twoNodes(nil)
		if _, err := l.Reserve("n2", asking("w1", 16), placement.Binpack, at); err != nil {
			t.Fatal(err)
		}
		places, _ := l.ReserveAll(wants(nodes, 16, 16), nil, binpack, at)
		if len(places) != 2 || places[1] != (ledger.Reservation{Node: "n2", Existing: true}) {
			t.Errorf("got %v", places)
		}
	})
	t.Run("a member with an allocation on another node prevents the reservation", func(t *testing.T) {
		l, nodes := twoNodes(nil)
		if _, err := l.Reserve("n2", asking("w1", 16), placement.Binpack, at); err != nil {
			t.Fatal(err)
		}
		if places, _ := l.ReserveAll(wants(nodes[:1], 16, 16), nil, binpack, at); places != nil {
			t.Errorf("got %v", places)
		}
		if _, _, held := l.Lookup("w0"); held {
			t.Error("w0 has an allocation")
		}
	})
	reserved := func(l *ledger.Ledger, node string, memory gpu.Memory, uids ...string) {
		t.Helper()
		for _, uid := range uids {
			if _, err := l.Reserve(node, asking(uid, memory), placement.Binpack, at); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Run("only as many reservations as needed are released", func(t *testing.T) {
		var freed []string
		l, nodes := twoNodes(func(node string) { freed = append(freed, node) })
		reserved(l, "n1", 8, "a1", "a2", "b1", "b2")
		places, released := l.ReserveAll(wants(nodes, 16, 16, 16), [][]gpu.PodUID{{"b1", "b2"}, {"a1", "a2"}}, binpack, at)
		if len(places) != 3 || released != 1 {
			t.Fatalf("got %v, %d", places, released)
		}
		for uid, want := range map[gpu.PodUID]bool{"a1": true, "a2": true, "b1": false, "b2": false} {
			if _, _, held := l.Lookup(uid); held != want {
				t.Errorf("%s has an allocation: %t", uid, held)
			}
		}
		if len(freed) > 0 {
			t.Errorf("memory of %v was freed, although it was allocated again", freed)
		}
	})
	t.Run("if releasing all doesn't help, none is released", func(t *testing.T) {
		l, nodes := twoNodes(func(node string) { t.Errorf("memory of %s was freed", node) })
		reserved(l, "n1", 8, "a1", "a2", "b1", "b2")
		before := l.Nodes()
		if places, released := l.ReserveAll(wants(nodes, 16, 16, 16, 16, 16), [][]gpu.PodUID{{"b1", "b2"}, {"a1", "a2"}}, binpack, at); places != nil || released != 0 {
			t.Fatalf("got %v, %d", places, released)
		}
		if diff := cmp.Diff(before, l.Nodes()); diff != "" {
			t.Errorf("(-before +after):\n%s", diff)
		}
	})
	t.Run("a bound pod isn't released", func(t *testing.T) {
		l, nodes := twoNodes(nil)
		reserved(l, "n1", 16, "a1")
		l.Confirm("a1")
		if places, _ := l.ReserveAll(wants(nodes, 16, 16, 16, 16), [][]gpu.PodUID{{"a1"}}, binpack, at); places != nil {
			t.Fatalf("got %v", places)
		}
	})
	t.Run("released memory that isn't needed is freed", func(t *testing.T) {
		var freed []string
		l, nodes := twoNodes(func(node string) { freed = append(freed, node) })
		reserved(l, "n1", 16, "a1")
		reserved(l, "n2", 16, "a2")
		if places, _ := l.ReserveAll(wants(nodes[:1], 16, 16), [][]gpu.PodUID{{"a1", "a2"}}, binpack, at); places == nil {
			t.Fatal("no places")
		}
		if !slices.Equal(freed, []string{"n2"}) {
			t.Errorf("memory of %v was freed", freed)
		}
	})
}

func TestMove(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	l, nodes := twoNodes(nil)
	l.ReserveAll(wants(nodes[:1], 16), nil, binpack, at)
	if node, ok := l.Move(ledger.Request{Pod: asking("w0", 16), Nodes: nodes[1:]}, binpack, at); !ok || node != "n2" {
		t.Errorf("got %s, %t", node, ok)
	}
	if node, _, _ := l.Lookup("w0"); node != "n2" {
		t.Errorf("w0 is on %s", node)
	}
	if node, ok := l.Move(ledger.Request{Pod: asking("w0", 16), Nodes: []string{"n3"}}, binpack, at); ok {
		t.Errorf("w0 moved to %s", node)
	}
	if node, _, _ := l.Lookup("w0"); node != "n2" {
		t.Errorf("after a failed move w0 is on %q", node)
	}
}

func TestStillUsable(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	card := func(index int, unhealthy string) gpu.Card {
		return gpu.Card{Index: index, Memory: 16, Unhealthy: unhealthy}
	}
	for name, tc := range map[string]struct {
		change func(*ledger.Ledger)
		want   bool
	}{
		"no change":    {func(*ledger.Ledger) {}, true},
		"released":     {func(l *ledger.Ledger) { l.Release("w0") }, false},
		"node deleted": {func(l *ledger.Ledger) { l.DeleteNode("n1") }, false},
		"card unhealthy": {func(l *ledger.Ledger) {
			l.SetNode("n1", ledger.NodeSpec{Cards: []gpu.Card{card(0, "Xid 79"), card(1, "")}})
		}, false},
		"other card unhealthy": {func(l *ledger.Ledger) {
			l.SetNode("n1", ledger.NodeSpec{Cards: []gpu.Card{card(0, ""), card(1, "Xid 79")}})
		}, true},
		"card missing": {func(l *ledger.Ledger) { l.SetNode("n1", ledger.NodeSpec{Cards: []gpu.Card{card(1, "")}}) }, false},
		"node allocates whole cards": {func(l *ledger.Ledger) {
			l.SetNode("n1", ledger.NodeSpec{Cards: []gpu.Card{card(0, "")}, WholeCards: true})
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			l, nodes := twoNodes(nil)
			l.ReserveAll(wants(nodes[:1], 16), nil, binpack, at)
			tc.change(l)
			if got := l.StillUsable("w0"); got != tc.want {
				t.Errorf("got %t", got)
			}
		})
	}
}

// TestReserveAllRandom checks ReserveAll with random reservations: no card is overcommitted, and a failure changes
// nothing.
func TestReserveAllRandom(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 1))
		l, nodes := twoNodes(nil)
		var reservations [][]gpu.PodUID
		for i := range random.IntN(8) {
			uid := fmt.Sprint("r", i)
			if _, err := l.Reserve(nodes[random.IntN(2)], asking(uid, 1+gpu.Memory(random.IntN(16))), placement.Binpack, at); err == nil {
				reservations = append(reservations, []gpu.PodUID{gpu.PodUID(uid)})
			}
		}
		var amounts []gpu.Memory
		for range 1 + random.IntN(6) {
			amounts = append(amounts, 1+gpu.Memory(random.IntN(16)))
		}
		before := l.Nodes()
		places, released := l.ReserveAll(wants(nodes, amounts...), reservations, binpack, at)
		if places == nil {
			if diff := cmp.Diff(before, l.Nodes()); diff != "" {
				t.Fatalf("seed %d: (-before +after):\n%s", seed, diff)
			}
			continue
		}
		held := 0
		for _, node := range l.Nodes() {
			held += len(node.Allocations)
			for i, c := range node.Cards {
				if node.Used[i] > c.Memory {
					t.Fatalf("seed %d: card %d of %s has %d allocated", seed, c.Index, node.Name, node.Used[i])
				}
			}
		}
		if want := len(reservations) - released + len(amounts); held != want {
			t.Fatalf("seed %d: %d allocations, want %d", seed, held, want)
		}
	}
}
