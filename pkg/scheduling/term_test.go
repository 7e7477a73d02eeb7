package scheduling

import (
	"context"
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/ledger"
)

func TestALeaderLearnsOfTheLastBindsBeforeItsOwn(t *testing.T) {
	theirs, ours := newPod("theirs", 60), newPod("ours", 60)
	f := start(t, patient, newNode(t, "n1", 100), theirs, ours)
	if err := f.TakeOver(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The former leader has bound a pod to the only card, and this replica's watch has not reported it.
	f.server.with(func(s *server) {
		bound := s.pods[types.NamespacedName{Namespace: theirs.Namespace, Name: theirs.Name}]
		bound.Spec.NodeName = "n1"
		bound.Annotations = map[string]string{"ALIYUN_COM_GPU_MEM_IDX": "0"}
	})
	if err := f.bind(ours); !errors.Is(err, ledger.ErrNoRoom) {
		t.Errorf("binding to a card that the former leader gave away: %v, want ErrNoRoom", err)
	}
	f.wantHeld(theirs, "bound n1 card 0")

	// If the pod ends before the watch reports it, a live read detects that.
	f.server.remove(theirs)
	f.look(unseenAfter + settleInterval)
	f.awaitHeld(theirs, "not held")
	if err := f.bind(ours); err != nil {
		t.Errorf("binding to the card that came free: %v", err)
	}
}

// A pod has an unconfirmed bind of this replica to another node. The leader in between may have bound it.
func TestALeaderLearnsOfBindsOfPodsThatItTriedToBindElsewhere(t *testing.T) {
	theirs, ours := newPod("theirs", 60), newPod("ours", 60)
	f := start(t, patient, newNode(t, "n1", 100), newNode(t, "n2", 100), theirs, ours)
	f.server.with(func(s *server) {
		s.noReads = errLost
		s.onBind = func(context.Context, *corev1.Binding) error { return errLost }
	})
	if err := f.Bind(t.Context(), f.request(theirs, "n2")); !errors.Is(err, ErrUnsettled) {
		t.Fatalf("bind: %v, want ErrUnsettled", err)
	}
	f.server.with(func(s *server) {
		s.noReads, s.onBind = nil, nil
		bound := s.pods[types.NamespacedName{Namespace: theirs.Namespace, Name: theirs.Name}]
		bound.Spec.NodeName = "n1"
		bound.Annotations = map[string]string{"ALIYUN_COM_GPU_MEM_IDX": "0"}
	})
	if err := f.TakeOver(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := f.bind(ours); !errors.Is(err, ledger.ErrNoRoom) {
		t.Errorf("binding to a card that the leader in between gave away: %v, want ErrNoRoom", err)
	}
	f.wantHeld(theirs, "bound n1 card 0")
}

// As above, with the node of the unconfirmed bind: the leader in between may have chosen another card.
func TestALeaderLearnsWhichCardAnotherChoseForAPodThatItTriedToBind(t *testing.T) {
	theirs, ours := newPod("theirs", 60), newPod("ours", 60)
	f := start(t, patient, newNode(t, "n1", 100, 100), theirs, ours)
	f.server.with(func(s *server) {
		s.noReads = errLost
		s.onBind = func(context.Context, *corev1.Binding) error { return errLost }
	})
	if err := f.bind(theirs); !errors.Is(err, ErrUnsettled) {
		t.Fatalf("bind: %v, want ErrUnsettled", err)
	}
	f.wantHeld(theirs, "assumed n1 card 0")
	f.server.with(func(s *server) {
		s.noReads, s.onBind = nil, nil
		bound := s.pods[types.NamespacedName{Namespace: theirs.Namespace, Name: theirs.Name}]
		bound.Spec.NodeName = "n1"
		bound.Annotations = map[string]string{"ALIYUN_COM_GPU_MEM_IDX": "1"}
	})
	if err := f.TakeOver(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := f.bind(ours); err != nil {
		t.Error(err)
	}
	f.wantHeld(theirs, "bound n1 card 1")
	f.wantHeld(ours, "bound n1 card 0")
}

func TestANodeIsListedOnceATerm(t *testing.T) {
	f := start(t, patient, newNode(t, "n1", 100), newPod("a", 1), newPod("b", 1), newPod("c", 1))
	reads := func(name string) (n int) {
		before := f.server.readsSoFar()
		if err := f.bind(f.server.get(newPod(name, 1))); err != nil {
			t.Fatal(err)
		}
		return f.server.readsSoFar() - before
	}
	if n := reads("a"); n != 0 {
		t.Errorf("the only extender read %d times for a bind, want none", n)
	}
	if err := f.TakeOver(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := reads("b"); n != 1 {
		t.Errorf("the first bind of a term read %d times, want once", n)
	}
	if n := reads("c"); n != 0 {
		t.Errorf("the second bind of a term read %d times, want none", n)
	}
}

func TestAListFromAnEarlierTermConfirmsNothing(t *testing.T) {
	var terms term
	terms.begin()
	earlier, _ := terms.isConfirmed("n1")
	terms.begin()
	terms.confirm("n1", earlier)
	now, confirmed := terms.isConfirmed("n1")
	if confirmed {
		t.Error("a list that was begun in the term before confirmed the node")
	}
	terms.confirm("n1", now)
	if _, confirmed := terms.isConfirmed("n1"); !confirmed {
		t.Error("a list of this term didn't confirm the node")
	}
}

func TestANodeThatCannotBeListedIsNotBoundTo(t *testing.T) {
	pod := newPod("p", 10)
	f := start(t, patient, newNode(t, "n1", 100), pod)
	if err := f.TakeOver(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.server.with(func(s *server) { s.noReads = errLost })
	if err := f.bind(pod); !errors.Is(err, errLost) {
		t.Errorf("bind: %v, want what hindered the list", err)
	}
	f.wantHeld(pod, "not held")
	f.server.with(func(s *server) { s.noReads = nil })
	if err := f.bind(pod); err != nil {
		t.Errorf("bind once it can be listed: %v", err)
	}
}

func TestWhoDoesNotLeadDoesNotWrite(t *testing.T) {
	errStandby := errors.New("standing by")
	pod := newPod("p", 10)
	var leads leadership
	leads.set(errStandby)
	f := startWith(t, Options{BindTimeout: patient, Leading: leads.ask}, func(*Cluster) {}, newNode(t, "n1", 100), pod)
	if err := f.bind(pod); !errors.Is(err, errStandby) {
		t.Errorf("bind: %v, want %v", err, errStandby)
	}
	f.wantHeld(pod, "not held")
	if f.counts.of("write binding") != 0 {
		t.Error("a replica that doesn't lead wrote a Binding")
	}
}

func TestDrainWaitsForWritesAndForLostAnswers(t *testing.T) {
	pod := newPod("p", 10)
	f := start(t, patient, newNode(t, "n1", 100), pod)
	writing, let := make(chan struct{}), make(chan struct{})
	f.server.with(func(s *server) {
		s.noReads = errLost
		s.onBind = func(ctx context.Context, b *corev1.Binding) error {
			close(writing)
			<-let
			if err := s.commit(ctx, b); err != nil {
				t.Error(err)
			}
			return errLost
		}
	})
	drained := func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 3*drainInterval)
		defer cancel()
		return f.Drain(ctx) == nil
	}
	bound := make(chan error, 1)
	go func() { bound <- f.bind(pod) }()
	<-writing
	if drained() {
		t.Error("drained while a write was in flight")
	}
	close(let)
	if err := <-bound; !errors.Is(err, ErrUnsettled) {
		t.Fatalf("bind: %v, want ErrUnsettled", err)
	}
	if drained() {
		t.Error("drained while the outcome of the write was unknown")
	}
	f.server.with(func(s *server) { s.noReads = nil })
	f.look(settleInterval)
	f.awaitHeld(pod, "bound n1 card 0")
	await(t, "the drain", drained)
}

func TestABindDeadlineLiesBehindItsTimeout(t *testing.T) {
	f := start(t, 4*time.Second, newNode(t, "n1", 100))
	if got := f.BindDeadline(); got <= 2*4*time.Second {
		t.Errorf("BindDeadline() = %v, which a write of two timeouts' length can outlive", got)
	}
}
