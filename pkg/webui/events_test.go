package webui

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

// Viewers, compressed or not, reproduce data.json from deltas during random changes.
func TestViewersFollowChanges(t *testing.T) {
	for _, compressed := range []bool{false, true} {
		t.Run(fmt.Sprintf("compressed %v", compressed), func(t *testing.T) {
			var standby atomic.Int64
			s := start(t, func() error { return fmt.Errorf("another replica leads since round %d", standby.Load()) })
			s.ledger.SetNode("n0", spec(16, 16))
			v, f := s.view(compressed), &follower{}
			e, _ := v.next()
			if f.take(t, e); e.name != "whole" {
				t.Fatalf("first event %q", e.name)
			}
			random := rand.New(rand.NewPCG(1, 2))
			for round := range 8 {
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
				want := fmt.Sprintf("another replica leads since round %d", round)
				f.await(v, func() bool {
					return f.Status.Standby == want && len(f.Pending) == 1 && f.Pending[0].Name == fmt.Sprintf("pending-%d", round)
				})
				truth := s.data()
				got := slices.SortedFunc(maps.Values(f.nodes), func(a, b nodeView) int { return strings.Compare(a.Name, b.Name) })
				if diff := cmp.Diff(truth.Nodes, got); diff != "" {
					t.Fatalf("round %d: nodes (-data.json +viewer):\n%s", round, diff)
				}
				if diff := cmp.Diff(
					[]any{truth.Pending, truth.Problems, truth.Reports, truth.Tenants, truth.Groups, truth.Status, truth.Samples, truth.Seq},
					[]any{f.Pending, f.Problems, f.Reports, f.Tenants, f.Groups, f.Status, f.Samples, f.Seq},
				); diff != "" {
					t.Fatalf("round %d (-data.json +viewer):\n%s", round, diff)
				}
			}
			if f.deltas < 8 {
				t.Errorf("%d deltas for 8 rounds", f.deltas)
			}
		})
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

// A replica that doesn't lead says so, and forgets the groups that it knew.
func TestNoGroups(t *testing.T) {
	s := start(t, nil)
	s.setGroups(nil, gang.Report{Group: gang.Key{Namespace: "ns", Name: "a"}})
	v, f := s.view(false), &follower{}
	f.await(v, func() bool { return len(f.Groups) == 1 })
	s.setGroups(errors.New("this replica doesn't lead"))
	f.await(v, func() bool { return len(f.Groups) == 0 })
	if f.Status.NoGroups != "this replica doesn't lead" {
		t.Errorf("the reason is %q", f.Status.NoGroups)
	}
}

func TestLaggingViewer(t *testing.T) {
	s := start(t, nil)
	s.stop() // The test publishes changes itself.
	b := s.board
	if !b.enter() {
		t.Fatal("viewer rejected")
	}
	defer b.leave()
	_, seq, _, err := b.after(0)
	check.Must(t, err)
	change := func() {
		t.Helper()
		b.mu.Lock()
		defer b.mu.Unlock()
		check.Must(t, b.publish(delta{Removed: []string{"x"}}))
	}
	for range deltasKept {
		change()
	}
	events, now, _, err := b.after(seq)
	if err != nil || len(events) != deltasKept || now != seq+deltasKept {
		t.Errorf("%d behind: %d events up to %d, %v", deltasKept, len(events), now-seq, err)
	}
	change()
	events, now, _, err = b.after(seq)
	if err != nil || len(events) != 1 || !strings.HasPrefix(string(events[0]), "event: whole\n") || now != seq+deltasKept+1 {
		t.Errorf("%d behind: %d events up to %d, %v", deltasKept+1, len(events), now-seq, err)
	}
}

func TestMaxViewers(t *testing.T) {
	s := start(t, nil)
	for range maxViewers {
		if !s.board.enter() {
			t.Fatal("viewer rejected below the limit")
		}
	}
	if v := s.view(false); v.status != http.StatusServiceUnavailable {
		t.Errorf("above the limit: status %d", v.status)
	}
	s.board.leave()
	v := s.view(false)
	if v.status != http.StatusOK {
		t.Errorf("after one disconnected: status %d", v.status)
	}
	_ = v.body.Close()
	s.awaitViewers(maxViewers-1, 30*time.Second)
}

// A viewer that doesn't read is no viewer any more once its connection is closed.
func TestStopWithBlockedViewer(t *testing.T) {
	s := start(t, nil)
	for n := range 300 {
		name := fmt.Sprintf("node-%d", n)
		s.ledger.SetNode(name, spec(16, 16, 16, 16, 16, 16, 16, 16))
		for p := range 64 {
			s.ledger.SetBound(name, pod(fmt.Sprintf("%d-%d-%s", n, p, strings.Repeat("x", 200)), 1), gpu.On(p%8, 1), time.Time{})
		}
	}
	connection, err := net.Dial("tcp", strings.TrimPrefix(strings.TrimSuffix(s.url, Path+"/"), "http://"))
	check.Must(t, err)
	defer connection.Close()
	check.Must(t, connection.(*net.TCPConn).SetReadBuffer(4096))
	if _, err := fmt.Fprintf(connection, "GET %s/events HTTP/1.1\r\nHost: localhost\r\n\r\n", Path); err != nil {
		t.Fatal(err)
	}
	s.awaitViewers(1, 30*time.Second)
	// When a later viewer has received the complete state, the first one's write blocks or is about to.
	if _, ok := s.view(true).next(); !ok {
		t.Fatal("no event")
	}
	s.stop()
	s.awaitViewers(0, writeTimeout/2)
}

func TestStreamOutlivesServerTimeouts(t *testing.T) {
	const timeout = time.Second
	s := startWithTimeout(t, nil, timeout)
	v, f := s.view(true), &follower{}
	for begun, n := time.Now(), 0; time.Since(begun) < 3*timeout; n++ {
		name := fmt.Sprintf("n%d", n)
		s.ledger.SetNode(name, spec(16))
		f.await(v, func() bool { return f.nodes[name].Name != "" })
	}
}

func TestNotReady(t *testing.T) {
	s := start(t, nil)
	s.setReady(errors.New("the caches are not synced"))
	s.ledger.SetNode("n0", spec(16))
	v, f := s.view(true), &follower{}
	f.await(v, func() bool { return f.Status.NotReady == "the caches are not synced" })
	if len(f.nodes) > 0 {
		t.Errorf("nodes shown before the caches are synced: %v", f.nodes)
	}
	s.setReady(nil)
	f.await(v, func() bool { return f.Status.NotReady == "" })
	if len(f.nodes) != 1 {
		t.Errorf("nodes %v", f.nodes)
	}
}
