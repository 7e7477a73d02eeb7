package ledger_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// follower builds its copy of the ledger only from changes.
type follower struct {
	revision uint64
	nodes    map[string]ledger.Node
}

// follow applies the changes and returns all nodes, sorted by name, and the number of nodes in the changes.
func (f *follower) follow(l *ledger.Ledger) ([]ledger.Node, int) {
	changes := l.ChangesSince(f.revision)
	if changes.Full {
		f.nodes = map[string]ledger.Node{}
	}
	for _, n := range changes.Nodes {
		f.nodes[n.Name] = n
	}
	f.revision = changes.Revision
	var nodes []ledger.Node
	for _, name := range slices.Sorted(maps.Keys(f.nodes)) {
		nodes = append(nodes, f.nodes[name])
	}
	return nodes, len(changes.Nodes)
}

func TestChangesReproduceLedger(t *testing.T) {
	for seed := range uint64(30) {
		s := &simulation{
			random: rand.New(rand.NewPCG(seed, 3)), recorder: newRecorder(t), model: newModel(),
			nodes: []string{"n0", "n1", "n2", "n3"}, clock: at,
		}
		for i := range 14 {
			s.pods = append(s.pods, pod(fmt.Sprintf("p%02d", i), gpu.Memory(1+s.random.IntN(13))))
		}
		f := &follower{}
		for range 300 {
			did, _, _ := s.step()
			if s.random.IntN(3) == 0 {
				continue // Several changes at once.
			}
			got, _ := f.follow(s.recorder.Ledger)
			if diff := cmp.Diff(s.recorder.Nodes(), got, cmpopts.EquateEmpty()); diff != "" {
				t.Fatalf("seed %d, after %s (-ledger +follower):\n%s", seed, did, diff)
			}
		}
	}
}

func TestChangesMinimal(t *testing.T) {
	b, f := newRecorder(t), &follower{}
	for i := range 5 {
		b.SetNode(fmt.Sprintf("n%d", i), spec(16, 16))
	}
	changed := func(what string, want int) {
		t.Helper()
		if _, got := f.follow(b.Ledger); got != want {
			t.Errorf("%s: %d nodes in the changes, want %d", what, got, want)
		}
	}
	changed("first call", 5)
	changed("no change", 0)
	if _, err := b.Reserve("n1", pod("p", 4), placement.Binpack, time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	changed("a reservation", 1)
	b.Confirm(pod("p", 4).UID)
	changed("a confirmed bind", 1)
	b.SetBound("n2", pod("p", 4), gpu.On(1, 4), time.Unix(1, 0))
	changed("a pod on another node", 2)
	b.Remove(pod("p", 4).UID)
	changed("a removed pod", 1)
	b.DeleteNode("never there")
	changed("deletion of an unknown node", 0)
	b.DeleteNode("n3")
	changed("deletion of a node", 4)
	changed("no change after that", 0)
}

func TestChangesDuringWrites(t *testing.T) {
	l, f := ledger.New(), &follower{}
	l.SetNode("n0", spec(30, 30))
	l.SetNode("n1", spec(30, 30))
	concurrently(t, l, func(random *rand.Rand, pods []gpu.Pod) {
		for range rounds {
			p := pods[random.IntN(len(pods))]
			switch random.IntN(4) {
			case 0:
				_, _ = l.Reserve(fmt.Sprintf("n%d", random.IntN(2)), p, placement.Binpack, at) // An error for a full node is expected.
			case 1:
				l.Confirm(p.UID)
			case 2:
				l.Remove(p.UID)
			case 3:
				l.ChangesSince(uint64(random.IntN(100)))
			}
		}
	}, func(n ledger.Node) error {
		f.follow(l)
		return checkSums(n)
	})
	got, _ := f.follow(l)
	if diff := cmp.Diff(l.Nodes(), got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("-ledger +follower:\n%s", diff)
	}
}
