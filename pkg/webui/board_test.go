package webui

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unique"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/test/await"
)

// Viewers, however often they ask, reproduce data.json from changes.
func TestViewersFollowChanges(t *testing.T) {
	var standby atomic.Int64
	s := start(t, func() error { return fmt.Errorf("another replica leads since round %d", standby.Load()) })
	s.ledger.SetNode("n0", spec(16, 16))
	often, seldom := &viewer{fixture: s}, &viewer{fixture: s}
	random := rand.New(rand.NewPCG(1, 2))
	for round := range 30 {
		for range 10 {
			node, p := fmt.Sprintf("n%d", random.IntN(3)), pod(fmt.Sprintf("p%d", random.IntN(10)), 3)
			switch random.IntN(5) {
			case 0:
				s.ledger.SetNode(node, spec(16, 16))
			case 1:
				s.ledger.DeleteNode(node)
			case 2:
				s.ledger.Remove(p.UID)
			default:
				s.ledger.SetBound(node, p, gpu.On(random.IntN(2), 3), time.Time{})
			}
		}
		s.setGroups(nil, someGroups(random)...)
		s.setPending(pending(fmt.Sprintf("pending-%d", round), 9, "no room"), wrong(fmt.Sprintf("wrong-%d", round/2)))
		s.setReported(&clustercache.PodInfo{PodUse: eligibility.PodUse{Pod: pod("unlimited", 3), Node: "n0"}, LimitProblem: fmt.Sprint("round ", round/2)})
		s.setTenants(dispatch.Tenant{Name: "vision", Allocated: gpu.Memory(round / 2)})
		standby.Store(int64(round))
		viewers := []*viewer{often}
		if random.IntN(3) == 0 {
			viewers = append(viewers, seldom)
		}
		for _, v := range viewers {
			v.ask()
			truth := s.data()
			got := slices.SortedFunc(maps.Values(v.nodes), func(a, b nodeView) int { return strings.Compare(a.Name, b.Name) })
			want := []any{truth.Nodes, truth.Pending, truth.Problems, truth.Reports, truth.Tenants, truth.Groups, truth.Status, truth.Samples, truth.Revision}
			if diff := cmp.Diff(want, []any{got, v.Pending, v.Problems, v.Reports, v.Tenants, v.Groups, v.Status, v.Samples, v.Revision}, cmpopts.EquateEmpty()); diff != "" {
				t.Fatalf("round %d (-data.json +viewer):\n%s", round, diff)
			}
		}
	}
	if often.parts != 29 || seldom.parts < 5 {
		t.Errorf("%d and %d answers with changes alone", often.parts, seldom.parts)
	}
}

// someGroups returns some of three groups, with up to two runs.
func someGroups(random *rand.Rand) (groups []gang.Report) {
	for _, name := range []string{"a", "b", "c"} {
		for run := range random.IntN(3) {
			groups = append(groups, gang.Report{Group: gang.Key{Namespace: "ns", Name: name}, Size: 2, Counted: run, Memory: gpu.Memory(random.IntN(2))})
		}
	}
	return groups
}

// Another process, such as a replica, has other revisions: its viewers get everything.
func TestRevisionsOfProcess(t *testing.T) {
	s, other := start(t, nil), start(t, nil)
	if got, changed := s.since(other.data().Revision); !changed || !got.Complete {
		t.Errorf("the revision of another process: %+v", got)
	}
	if got, changed := s.since(s.data().Revision); changed {
		t.Errorf("nothing has changed, got %+v", got)
	}
}

// Viewers that ask for everything at the same time share one answer: after a restart all ask at once, and the extender's memory is limited.
func TestCompleteStateIsShared(t *testing.T) {
	s := start(t, nil)
	s.ledger.SetNode("n0", spec(16))
	await.True(t, "one answer for two viewers", func() bool { // A second can begin between the two.
		a, b := s.board.State(""), s.board.State("of-another-process.7")
		return &a[0] == &b[0]
	})
	s.refresh()
	s.ledger.SetNode("n1", spec(16))
	if got := s.data(); len(got.Nodes) != 2 {
		t.Errorf("%d nodes, want both", len(got.Nodes))
	}
}

// A replica that doesn't lead says so, and forgets the groups that it knew.
func TestNoGroups(t *testing.T) {
	s := start(t, nil)
	s.setGroups(nil, gang.Report{Group: gang.Key{Namespace: "ns", Name: "a"}})
	v := &viewer{fixture: s}
	if v.ask(); len(v.Groups) != 1 {
		t.Errorf("groups %v", v.Groups)
	}
	s.setGroups(errors.New("this replica doesn't lead"))
	if v.ask(); len(v.Groups) != 0 || v.Status.NoGroups != "this replica doesn't lead" {
		t.Errorf("groups %v, the reason is %q", v.Groups, v.Status.NoGroups)
	}
}

func TestNotReady(t *testing.T) {
	s := start(t, nil)
	s.setReady(errors.New("the caches are not synced"))
	s.ledger.SetNode("n0", spec(16))
	v := &viewer{fixture: s}
	if v.ask(); v.Status.NotReady != "the caches are not synced" || len(v.nodes) > 0 {
		t.Errorf("not ready because of %q, nodes %v", v.Status.NotReady, v.nodes)
	}
	s.setReady(nil)
	if v.ask(); v.Status.NotReady != "" || len(v.nodes) != 1 {
		t.Errorf("not ready because of %q, nodes %v", v.Status.NotReady, v.nodes)
	}
}

// TestStranded: a viewer learns which memory is of no use as soon as that changes, although the ledger's nodes are as before.
func TestStranded(t *testing.T) {
	s := start(t, nil)
	s.ledger.SetNode("n1", spec(16, 8))
	s.ledger.SetNode("n2", spec(16))
	kind := placement.Kind{Frequency: 1, Shape: placement.Shape{Demand: gpu.Demand{Cards: 1, Memory: 1}, NodeResources: placement.NodeResources{CPU: 1000}}}
	s.ledger.Expect([]placement.Kind{kind}, 0, placement.Binpack, func(unique.Handle[string]) []string { return []string{"n1", "n2"} })
	if got := s.data().Stranded; len(got) != 0 {
		t.Errorf("nothing is stranded, got %v", got)
	}
	s.ledger.SetNodeResources("n1", placement.NodeResources{CPU: 999}, placement.NodeResources{})
	want := []strandedView{{"n1", 24 << 10, "24 GiB free, of no use: the node lacks CPU"}}
	await.True(t, "the stranded memory", func() bool { return slices.Equal(s.data().Stranded, want) })
}
