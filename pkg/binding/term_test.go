package binding

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/fake"
)

// Another leader has bound a pod to card 1 of n1, and the watch has not reported it. Before the first bind to n1 in its term,
// the leader learns of that bind, even after an own attempt to bind the pod.
func TestLeaderLearnsOfEarlierBinds(t *testing.T) {
	for name, tried := range map[string]string{
		"it never tried to bind the pod":  "",
		"it tried to bind it to the node": "n1",
		"it tried to bind it to another":  "n2",
	} {
		t.Run(name, func(t *testing.T) {
			theirs, ours, large := fake.Pod("theirs", 60), fake.Pod("ours", 60), fake.Pod("large", 60)
			f := newFixture(t, 0, theirs, ours, large)
			if tried != "" {
				f.loseAnswers(false)
				if _, err := f.bind(theirs, tried); !errors.Is(err, ErrUnconfirmed) {
					t.Fatal(err)
				}
				f.want(theirs, "assumed "+tried+" card 0")
			}
			f.server.Answer(fake.Answers{})
			f.server.Set(fake.Edited(theirs, fake.Bound("n1", 1)))
			f.BeginTerm()
			if _, err := f.bind(ours, "n1"); err != nil {
				t.Error(err)
			}
			f.want(theirs, "bound n1 card 1")
			f.want(ours, "bound n1 card 0")
			if result, err := f.bind(large, "n1"); result != reasons.ResultNoRoom {
				t.Errorf("a bind to a full node: %s, %v", result, err)
			}
			// If the pod ends before the watch reports it, a live read detects that.
			f.server.Remove(theirs)
			f.resolve(unreportedAfter + resolveInterval)
			f.want(theirs, "none")
		})
	}
}

func TestNodeIsListedOncePerTerm(t *testing.T) {
	a, b, c := fake.Pod("a", 1), fake.Pod("b", 1), fake.Pod("c", 1)
	f := newFixture(t, 0, a, b, c)
	wantReads := func(pod *corev1.Pod, want int) {
		t.Helper()
		before := f.server.Calls().Reads
		if _, err := f.bind(pod, "n1"); err != nil {
			t.Fatal(err)
		}
		if n := f.server.Calls().Reads - before; n != want {
			t.Errorf("%d reads, want %d", n, want)
		}
	}
	wantReads(a, 0) // There are no terms without replicas.
	f.BeginTerm()
	f.server.Answer(fake.Answers{Read: errLost})
	if result, err := f.bind(b, "n1"); result != reasons.ResultUnreachable || !errors.Is(err, errLost) {
		t.Errorf("a node that can't be listed: %s, %v", result, err)
	}
	f.want(b, "none")
	f.server.Answer(fake.Answers{})
	wantReads(b, 1)
	wantReads(c, 0)
}

// Once the watch has reported a bind of the term and then another one, which was begun after that report, no node is listed any more. A bind that was
// begun before the report could be in the same list of an interrupted watch, and one of an earlier term could precede the former leader's binds.
func TestNoListOnceTheWatchHasCaughtUp(t *testing.T) {
	pods, nodes := map[string]*corev1.Pod{}, 0
	for _, name := range []string{"earlier", "first", "beside", "second", "third", "next"} {
		pods[name] = fake.Pod(name, 1)
	}
	f := newFixture(t, 0, slices.Collect(maps.Values(pods))...)
	bind := func(name string, wantReads int) { // To a node of its own.
		t.Helper()
		nodes++
		node := fmt.Sprint("node-", nodes)
		f.ledger.SetNode(node, ledger.NodeSpec{Unit: gpu.MiB, Cards: []gpu.Card{{Memory: 100}}})
		before := f.server.Calls().Reads
		if _, err := f.bind(pods[name], node); err != nil {
			t.Fatal(err)
		}
		if n := f.server.Calls().Reads - before; n != wantReads {
			t.Errorf("%s: %d reads, want %d", name, n, wantReads)
		}
	}
	f.BeginTerm()
	bind("earlier", 1)
	f.BeginTerm()
	bind("first", 1)
	bind("beside", 1)
	f.report(pods["earlier"])
	f.report(pods["first"])
	f.report(pods["beside"])
	bind("second", 1)
	bind("third", 1)
	f.report(pods["second"])
	bind("next", 0)
	f.BeginTerm()
	if _, confirmed := f.term.isConfirmed("n1"); confirmed {
		t.Error("a new term confirms a node without a list")
	}
}

func TestListFromEarlierTermConfirmsNothing(t *testing.T) {
	var terms termNodes
	terms.begin()
	earlier, _ := terms.isConfirmed("n1")
	terms.begin()
	terms.confirm("n1", earlier)
	now, confirmed := terms.isConfirmed("n1")
	if confirmed {
		t.Error("a list that began in the earlier term confirmed the node")
	}
	terms.confirm("n1", now)
	if _, confirmed := terms.isConfirmed("n1"); !confirmed {
		t.Error("a list of this term didn't confirm the node")
	}
}

// Drain waits for binds in flight and for unconfirmed binds. Each pod has at most one bind in flight.
func TestDrain(t *testing.T) {
	pod := fake.Pod("p", 10)
	f := newFixture(t, 0, pod)
	drained := func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 3*drainInterval)
		defer cancel()
		return f.Drain(ctx) == nil
	}
	claim := f.claim(pod)
	if _, again := f.Claim("uid-p"); again {
		t.Error("the pod was claimed twice")
	}
	if drained() {
		t.Error("drained while a bind is in flight")
	}
	f.loseAnswers(true)
	if _, err := claim.Write(t.Context(), "n1", f.reserve(pod, "n1"), nil, Membership{}); !errors.Is(err, ErrUnconfirmed) {
		t.Fatal(err)
	}
	claim.End()
	if drained() {
		t.Error("drained while a bind is unconfirmed")
	}
	f.server.Answer(fake.Answers{})
	f.resolve(resolveInterval)
	if !drained() {
		t.Error("not drained")
	}
	f.claim(pod).End() // The bind that has ended isn't in flight any more.
}
