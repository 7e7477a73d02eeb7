package binding

import (
	"context"
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/fake"
)

var binpack = ledger.View{Card: placement.Binpack, Node: placement.Binpack}

// While a bind has the allocation of a pod, or its write may still take effect, nothing else releases or moves it. p asks for a whole card of n1,
// and its place there is on card 0.
func TestClaimKeepsAllocation(t *testing.T) {
	p := fake.Pod("p", 100)
	uid := gpu.PodUID(p.UID)
	lost := func(f *fixture) {
		f.loseAnswers(false)
		if _, err := f.bind(p, "n1"); !errors.Is(err, ErrUnconfirmed) {
			f.t.Fatal(err)
		}
		f.server.Answer(fake.Answers{})
		f.clock.Step(Deadline(timeout) + 1)
		f.due = f.tracker.due(f.clock.Now())
	}
	binds := map[string]func(f *fixture) *Claim{
		"no bind":               func(*fixture) *Claim { return nil },
		"a bind":                func(f *fixture) *Claim { return f.claim(p) },
		"an unconfirmed bind":   func(f *fixture) *Claim { lost(f); return nil },
		"a retry of such a one": func(f *fixture) *Claim { lost(f); return f.claim(p) },
	}
	others := map[string]func(f *fixture){
		"a give-up": func(f *fixture) { f.Release(uid) },
		"a move": func(f *fixture) {
			request := ledger.Request{Pod: protocol.Pod(p), Nodes: []string{"n2"}}
			f.ledger.Move(request, binpack, f.clock.Now())
		},
		"a group that takes it": func(f *fixture) {
			request := ledger.Request{Pod: gpu.Pod{UID: "other", Request: 200, Cards: 2}, Nodes: []string{"n1"}}
			f.ledger.ReserveAll([]ledger.Request{request}, [][]gpu.PodUID{{uid}}, binpack, f.clock.Now())
		},
		"a live read after the deadline": func(f *fixture) { f.Resolve(f.t.Context()) },
		"a live read that began before": func(f *fixture) {
			for _, w := range f.due {
				f.Binder.resolve(f.t.Context(), w)
			}
		},
	}
	// released are those that may release it.
	released := map[string]map[string]string{
		"no bind":             {"a give-up": "none", "a move": "assumed n2 card 0", "a group that takes it": "none"},
		"an unconfirmed bind": {"a live read after the deadline": "none", "a live read that began before": "none"},
	}
	for bind, begin := range binds {
		for other, do := range others {
			t.Run(bind+", "+other, func(t *testing.T) {
				f := newFixture(t, 0, p)
				f.reserve(p, "n1")
				claim := begin(f)
				do(f)
				want, may := released[bind][other]
				if !may {
					want = "assumed n1 card 0"
				}
				f.want(p, want)
				if claim == nil {
					return
				}
				if result, err := claim.Write(t.Context(), "n1", f.reserve(p, "n1"), nil, Membership{}); result != reasons.ResultBound {
					t.Error(result, err)
				}
				claim.End()
				f.want(p, "bound n1 card 0")
				f.Resolve(t.Context())
				f.want(p, "bound n1 card 0")
				f.wantNotBound(0)
			})
		}
	}
}

// A place that is given up while a bind is in flight is released at the end of that bind, unless the pod is bound or that is unconfirmed.
func TestGivenUpDuringBind(t *testing.T) {
	p := fake.Pod("p", 10)
	uid := gpu.PodUID(p.UID)
	write := func(answer error, commits bool) func(f *fixture, claim *Claim) {
		return func(f *fixture, claim *Claim) {
			f.server.Answer(fake.Answers{Bind: func(_ context.Context, b *corev1.Binding) error {
				if commits {
					f.commit(b)
				}
				return answer
			}})
			_, _ = claim.Write(f.t.Context(), "n1", f.reserve(p, "n1"), nil, Membership{})
			f.server.Answer(fake.Answers{})
		}
	}
	for name, test := range map[string]struct {
		bind  func(f *fixture, claim *Claim)
		after string
		// later is the allocation after a live read, when no write can take effect any more.
		later    string
		notBound int
	}{
		"it fails before its write":             {func(*fixture, *Claim) {}, "none", "none", 1},
		"it is rejected":                        {write(errForbidden, false), "none", "none", 1},
		"it is written":                         {write(nil, true), "bound n1 card 0", "bound n1 card 0", 0},
		"its answer is lost, and it isn't made": {write(errLost, false), "assumed n1 card 0", "none", 1},
		"its answer is lost, and it is made":    {write(errLost, true), "bound n1 card 0", "bound n1 card 0", 0},
		"the watch reports it as bound": {func(f *fixture, _ *Claim) {
			f.server.Set(fake.Edited(p, fake.Bound("n2", 1)))
			f.report(p)
		}, "bound n2 card 1", "bound n2 card 1", 0},
		"the pod is deleted": {func(f *fixture, _ *Claim) {
			f.server.Remove(p)
			f.PodGone(uid)
		}, "none", "none", 0},
		"the pod is deleted before the bind reads its allocation": {func(f *fixture, claim *Claim) {
			f.server.Remove(p)
			f.PodGone(uid)
			f.reserve(p, "n1")
		}, "none", "none", 0},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 0, p)
			f.reserve(p, "n1")
			claim := f.claim(p)
			if f.Release(uid) {
				t.Error("Release says that nothing can take effect")
			}
			test.bind(f, claim)
			claim.End()
			f.want(p, test.after)
			f.resolve(Deadline(timeout) + 1)
			f.want(p, test.later)
			f.wantNotBound(test.notBound)
			if !f.Release(uid) && test.later == "none" {
				t.Error("the bind that has ended is still in flight")
			}
		})
	}
}

// The claim of a bind that has found room, and then fails to be written, doesn't keep the card.
func TestEndReleasesAbandoned(t *testing.T) {
	p := fake.Pod("p", 10)
	f := newFixture(t, 0, p)
	claim := f.claim(p)
	f.reserve(p, "n1")
	claim.Abandon()
	f.want(p, "assumed n1 card 0")
	claim.End()
	f.want(p, "none")
	if _, err := f.bind(p, "n2"); err != nil {
		t.Error(err)
	}
	f.want(p, "bound n2 card 0")
}

// A rejected write can be repeated with the same card before the claim ends.
func TestRepeatRejectedWrite(t *testing.T) {
	p, q := fake.Pod("p", 100), fake.Pod("q", 200, fake.Cards(2))
	f := newFixture(t, 0, p, q)
	claim := f.claim(p)
	for _, answer := range []error{errForbidden, nil} {
		f.server.Answer(fake.Answers{Bind: func(_ context.Context, b *corev1.Binding) error {
			if answer == nil {
				f.commit(b)
			}
			return answer
		}})
		if _, err := claim.Write(t.Context(), "n1", f.reserve(p, "n1"), nil, Membership{}); !errors.Is(err, answer) {
			t.Error(err)
		}
		if result, _ := f.bind(q, "n1"); result != reasons.ResultNoRoom {
			t.Errorf("%s: another pod got the card", result)
		}
	}
	claim.End()
	f.want(p, "bound n1 card 0")
	f.wantNotBound(0)
}

// A card that was written is counted as used even if the ledger has lost the allocation meanwhile.
func TestWrittenIsCounted(t *testing.T) {
	p := fake.Pod("p", 10)
	for name, lose := range map[string]func(f *fixture){
		"it was removed": func(f *fixture) { f.ledger.Remove("uid-p") },
		"it was moved": func(f *fixture) {
			f.ledger.Move(ledger.Request{Pod: protocol.Pod(p), Nodes: []string{"n2"}, Binding: true}, binpack, begin)
		},
	} {
		f := newFixture(t, 0, p)
		f.server.Answer(fake.Answers{Bind: func(_ context.Context, b *corev1.Binding) error {
			lose(f)
			return f.server.Commit(b)
		}})
		if result, err := f.bind(p, "n1"); result != reasons.ResultBound {
			t.Errorf("%s: %s, %v", name, result, err)
		}
		f.want(p, "bound n1 card 0")
	}
}
