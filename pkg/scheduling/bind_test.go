package scheduling

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
)

const patient = 30 * time.Second // A bind timeout that no test reaches.

var (
	errLost    = fmt.Errorf("reading the answer: %w", io.ErrUnexpectedEOF)
	errRefused = apierrors.NewForbidden(podResource, "p", errors.New("no permission"))
	errServer  = apierrors.NewInternalError(errors.New("etcdserver: request timed out"))
	errOther   = apierrors.NewConflict(podResource, "p", errors.New("changed"))
)

func TestBindWritesTheNodeAndTheAnnotationsInOne(t *testing.T) {
	pod := newPod("p", 8138)
	// The free memory is 12207, 8138, 4069 and 16276 MiB: card 1 fits best.
	f := start(t, patient, newNode(t, "n1", 16276, 16276, 16276, 16276), pod,
		boundPod("a", 4069, "n1", 0), boundPod("b", 8138, "n1", 1), boundPod("c", 12207, "n1", 2))
	if err := f.bind(pod); err != nil {
		t.Fatal(err)
	}
	want := protocol.Assignment{Card: 1, Request: 8138, CardMemory: 16276, AssumeTime: f.clock.Now()}.Annotations()
	got := f.server.get(pod)
	if diff := cmp.Diff(want, got.Annotations); diff != "" {
		t.Errorf("annotations (-want +got):\n%s", diff)
	}
	if got.Spec.NodeName != "n1" {
		t.Errorf("bound to %q", got.Spec.NodeName)
	}
	f.wantHeld(pod, "bound n1 card 1")
	if event := <-f.events; event != "Normal GPUCardAssumed Assumed GPU card 1 of node n1: 8138 MiB of its 16276 MiB" {
		t.Errorf("event %q", event)
	}
	if writes, binds := f.counts.of("write binding"), f.server.bindsSoFar(); writes != 1 || binds != 1 {
		t.Errorf("%d writes counted, %d made, want 1", writes, binds)
	}
}

// TestBind covers every outcome of the write of one bind. The watch reports nothing.
func TestBind(t *testing.T) {
	// The bind is to node n1. answer is the API server's answer.
	commit := func(f *fixture, binding *corev1.Binding) {
		if err := f.server.commit(context.Background(), binding); err != nil {
			f.t.Errorf("commit: %v", err)
		}
	}
	bindElsewhere := func(f *fixture, node string, card int) {
		f.server.set(boundPod("p", 10, node, card))
	}
	tests := map[string]struct {
		timeout time.Duration
		answer  func(f *fixture, ctx context.Context, binding *corev1.Binding) error

		wantErr    error // nil if the pod is bound.
		wantResult string
		wantHeld   string
		// wantOutcome is what the settler finds: at once, or after the fence if late is set. wantThen is the allocation
		// afterwards.
		late        bool
		wantOutcome string
		wantThen    string
	}{
		"a write whose answer comes is a bind": {
			answer: func(f *fixture, _ context.Context, b *corev1.Binding) error {
				commit(f, b)
				return nil
			},
			wantResult: ResultBound, wantHeld: "bound n1 card 0",
		},
		"an answer lost after the write was made is a bind, since a look finds it": {
			answer: func(f *fixture, _ context.Context, b *corev1.Binding) error {
				commit(f, b)
				return errLost
			},
			wantResult: ResultBound, wantHeld: "bound n1 card 0",
		},
		"an error of the server after the write was made is a bind too": {
			answer: func(f *fixture, _ context.Context, b *corev1.Binding) error {
				commit(f, b)
				return errServer
			},
			wantResult: ResultBound, wantHeld: "bound n1 card 0",
		},
		"an answer lost and a look that fails keep the card, and the bind is found later": {
			answer: func(f *fixture, _ context.Context, b *corev1.Binding) error {
				commit(f, b)
				f.server.with(func(s *server) { s.noReads = errLost })
				return errLost
			},
			wantErr: ErrUnsettled, wantResult: ResultUnknown, wantHeld: "assumed n1 card 0",
			wantOutcome: OutcomeBound, wantThen: "bound n1 card 0",
		},
		"a write that hangs past the deadline and was made keeps the card": {
			timeout: 20 * time.Millisecond,
			answer: func(f *fixture, ctx context.Context, b *corev1.Binding) error {
				commit(f, b)
				<-ctx.Done()
				return ctx.Err()
			},
			wantErr: ErrUnsettled, wantResult: ResultUnknown, wantHeld: "assumed n1 card 0",
			wantOutcome: OutcomeBound, wantThen: "bound n1 card 0",
		},
		"a write that hangs past the deadline and wasn't made is given back after the fence": {
			timeout: 20 * time.Millisecond,
			answer: func(_ *fixture, ctx context.Context, _ *corev1.Binding) error {
				<-ctx.Done()
				return ctx.Err()
			},
			wantErr: ErrUnsettled, wantResult: ResultUnknown, wantHeld: "assumed n1 card 0",
			late: true, wantOutcome: OutcomeNotBound, wantThen: "not held",
		},
		"an answer lost before the write was made keeps the card until after the fence": {
			answer:  func(*fixture, context.Context, *corev1.Binding) error { return errLost },
			wantErr: ErrUnsettled, wantResult: ResultUnknown, wantHeld: "assumed n1 card 0",
			late: true, wantOutcome: OutcomeNotBound, wantThen: "not held",
		},
		"a server that doesn't know itself is no refusal": {
			answer:  func(*fixture, context.Context, *corev1.Binding) error { return errServer },
			wantErr: errServer, wantResult: ResultUnknown, wantHeld: "assumed n1 card 0",
			late: true, wantOutcome: OutcomeNotBound, wantThen: "not held",
		},
		"an answer lost and the pod deleted gives the card back": {
			answer: func(f *fixture, _ context.Context, _ *corev1.Binding) error {
				f.server.remove(newPod("p", 10))
				return errLost
			},
			wantErr: ErrUnsettled, wantResult: ResultUnknown, wantHeld: "assumed n1 card 0",
			wantOutcome: OutcomeGone, wantThen: "not held",
		},
		"an answer lost, the write made, and the pod ended before it is looked at": {
			answer: func(f *fixture, _ context.Context, b *corev1.Binding) error {
				commit(f, b)
				pod := f.server.get(newPod("p", 10))
				pod.Status.Phase = corev1.PodSucceeded
				f.server.set(pod)
				f.server.with(func(s *server) { s.noReads = errLost })
				return errLost
			},
			wantErr: ErrUnsettled, wantResult: ResultUnknown, wantHeld: "assumed n1 card 0",
			wantOutcome: OutcomeGone, wantThen: "not held",
		},
		"an answer lost and the pod bound to another node: it is held there": {
			answer: func(f *fixture, _ context.Context, _ *corev1.Binding) error {
				bindElsewhere(f, "n2", 1)
				return errLost
			},
			wantErr: ErrUnsettled, wantResult: ResultUnknown, wantHeld: "assumed n1 card 0",
			wantOutcome: OutcomeBound, wantThen: "bound n2 card 1",
		},
		"a refusal gives the card back at once": {
			answer:  func(*fixture, context.Context, *corev1.Binding) error { return errRefused },
			wantErr: errRefused, wantResult: ResultRefused, wantHeld: "not held",
		},
		"a conflict with a pod bound here by another writer is a bind, on its card": {
			answer: func(f *fixture, _ context.Context, _ *corev1.Binding) error {
				bindElsewhere(f, "n1", 1)
				return errOther
			},
			wantResult: ResultBound, wantHeld: "bound n1 card 1",
		},
		"a conflict with a pod bound to another node gives the card back": {
			answer: func(f *fixture, _ context.Context, _ *corev1.Binding) error {
				bindElsewhere(f, "n2", 1)
				return errOther
			},
			wantErr: ErrBadRequest, wantResult: ResultRefused, wantHeld: "not held",
		},
		"a conflict with a pod that is gone gives the card back": {
			answer: func(f *fixture, _ context.Context, _ *corev1.Binding) error {
				f.server.remove(newPod("p", 10))
				return errOther
			},
			wantErr: errOther, wantResult: ResultRefused, wantHeld: "not held",
		},
		"a conflict with a pod of the same name but another UID gives the card back": {
			answer: func(f *fixture, _ context.Context, _ *corev1.Binding) error {
				successor := boundPod("p", 10, "n1", 1)
				successor.UID = "another"
				f.server.set(successor)
				return errOther
			},
			wantErr: errOther, wantResult: ResultRefused, wantHeld: "not held",
		},
		"a conflict with a pod that isn't bound gives the card back": {
			answer:  func(*fixture, context.Context, *corev1.Binding) error { return errOther },
			wantErr: errOther, wantResult: ResultRefused, wantHeld: "not held",
		},
		"a conflict that can't be looked into keeps the card": {
			answer: func(f *fixture, _ context.Context, b *corev1.Binding) error {
				commit(f, b)
				f.server.with(func(s *server) { s.noReads = errServer })
				return errOther
			},
			wantErr: ErrUnsettled, wantResult: ResultUnknown, wantHeld: "assumed n1 card 0",
			wantOutcome: OutcomeBound, wantThen: "bound n1 card 0",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			timeout := test.timeout
			if timeout == 0 {
				timeout = patient
			}
			pod := newPod("p", 10)
			f := start(t, timeout, newNode(t, "n1", 100, 100), newNode(t, "n2", 100, 100), pod)
			f.server.with(func(s *server) {
				s.onBind = func(ctx context.Context, binding *corev1.Binding) error { return test.answer(f, ctx, binding) }
			})

			err := f.bind(pod)
			if !errors.Is(err, test.wantErr) {
				t.Errorf("error %v, want %v", err, test.wantErr)
			}
			if n := f.counts.of("bind " + test.wantResult); n != 1 {
				t.Errorf("result %s counted %d times, want once: %v", test.wantResult, n, f.counts.n)
			}
			if n := f.server.bindsSoFar(); n != 1 {
				t.Errorf("%d writes, want 1", n)
			}
			f.wantHeld(pod, test.wantHeld)
			if test.wantOutcome == "" {
				return
			}

			// The settler reads at intervals. While reads fail it must change nothing.
			f.server.with(func(s *server) { s.noReads = errLost })
			f.look(settleInterval)
			f.wantHeld(pod, test.wantHeld)
			f.server.with(func(s *server) { s.noReads = nil })
			if test.late {
				f.look(settleInterval)
				f.look(timeout + settleInterval) // The API server may still be writing after the deadline.
				f.wantHeld(pod, test.wantHeld)
				f.clock.Step(timeout + settleMargin)
			} else {
				f.clock.Step(settleInterval)
			}
			f.await("the settler", func() bool { return f.counts.of("settled "+test.wantOutcome) == 1 })
			f.awaitHeld(pod, test.wantThen)
			if test.wantOutcome == OutcomeBound && strings.Contains(test.wantThen, "n1") { // This process did not bind it to another node.
				f.wantEvent("Normal GPUCardAssumed Assumed GPU card 0 of node n1: 10 MiB of its 100 MiB")
			}
		})
	}
}

// The Event is written once, whether the watch or the bind call confirms the pod.
func TestTheWatchSettlesALostAnswer(t *testing.T) {
	for name, quicker := range map[string]bool{"after the bind was given up": false, "before the bind was given up": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pod := newPod("p", 10)
			f := start(t, patient, newNode(t, "n1", 100), pod)
			f.server.with(func(s *server) {
				s.noReads = errLost
				s.onBind = func(ctx context.Context, b *corev1.Binding) error {
					if err := s.commit(ctx, b); err != nil {
						return err
					}
					if quicker {
						f.publish(pod)
						f.await("the watch", func() bool { return !f.isOpen(pod) })
						f.awaitHeld(pod, "bound n1 card 0")
					}
					return errLost
				}
			})
			err := f.bind(pod)
			if quicker != (err == nil) || err != nil && !errors.Is(err, ErrUnsettled) {
				t.Fatalf("bind: %v", err)
			}
			if !quicker {
				f.publish(pod)
				f.await("the watch", func() bool { return f.counts.of("settled "+OutcomeBound) == 1 })
			}
			f.wantHeld(pod, "bound n1 card 0")
			f.wantEvent("Normal GPUCardAssumed Assumed GPU card 0 of node n1: 10 MiB of its 100 MiB")
			// kube-scheduler got no success, so it retries.
			f.server.with(func(s *server) { s.noReads, s.onBind = nil, nil })
			if err := f.bind(pod); err != nil {
				t.Errorf("bind again: %v", err)
			}
			if n := len(f.events); n != 0 {
				t.Errorf("%d Events more: %s", n, <-f.events)
			}
		})
	}
}

func TestAPodThatIsGoneSettlesALostAnswer(t *testing.T) {
	pod := newPod("p", 10)
	f := start(t, patient, newNode(t, "n1", 100), pod)
	f.server.with(func(s *server) {
		s.noReads = errLost
		s.onBind = func(context.Context, *corev1.Binding) error { return errLost }
	})
	if err := f.bind(pod); !errors.Is(err, ErrUnsettled) {
		t.Fatalf("bind: %v", err)
	}
	f.publishGone(pod)
	f.await("the watch", func() bool { return f.counts.of("settled "+OutcomeGone) == 1 })
	f.wantHeld(pod, "not held")
	if n := len(f.events); n != 0 {
		t.Errorf("an Event of a pod that is gone: %s", <-f.events)
	}
}

func TestBindAgainIsASuccessThatChangesNothing(t *testing.T) {
	pod := newPod("p", 10)
	f := start(t, patient, newNode(t, "n1", 100, 100), pod)
	if err := f.bind(pod); err != nil {
		t.Fatal(err)
	}
	first := f.server.get(pod)
	// The watch has not reported the bind yet: the informer has the pod unbound.
	f.clock.Step(time.Second)
	if err := f.bind(pod); err != nil {
		t.Errorf("before the watch has told: %v", err)
	}
	f.publish(pod)
	f.await("the watch", func() bool { return !f.isOpen(pod) })
	if err := f.bind(pod); err != nil {
		t.Errorf("after the watch has told: %v", err)
	}
	if err := f.Bind(t.Context(), f.request(pod, "n2")); !errors.Is(err, ErrBadRequest) {
		t.Errorf("to another node: %v, want ErrBadRequest", err)
	}
	if diff := cmp.Diff(first, f.server.get(pod)); diff != "" {
		t.Errorf("the pod changed (-before +after):\n%s", diff)
	}
	f.wantHeld(pod, "bound n1 card 0")
	if n := len(f.ledger.Nodes()[0].Allocations); n != 1 {
		t.Errorf("%d holders, want 1", n)
	}
}

func TestARetryAfterALostAnswerAsksForTheSameCard(t *testing.T) {
	pod := newPod("p", 10)
	f := start(t, patient, newNode(t, "n1", 100, 100), pod)
	f.server.with(func(s *server) {
		s.onBind = func(context.Context, *corev1.Binding) error { return errLost }
	})
	if err := f.bind(pod); !errors.Is(err, ErrUnsettled) {
		t.Fatal(err)
	}
	at := f.clock.Now()
	f.clock.Step(time.Second)
	f.server.with(func(s *server) { s.onBind = nil })
	if err := f.bind(pod); err != nil {
		t.Fatal(err)
	}
	assignment, err := protocol.ParseAssignment(f.server.get(pod).Annotations)
	if err != nil || assignment.Card != 0 || !assignment.AssumeTime.Equal(at) {
		t.Errorf("the retry wrote %+v (%v), want card 0 assumed at %s", assignment, err, at)
	}
	// The pod must not go to another node: the first write could still be made.
	other := newPod("q", 10)
	f.server.set(other)
	f.server.with(func(s *server) {
		s.onBind = func(context.Context, *corev1.Binding) error { return errLost }
	})
	if err := f.bind(other); !errors.Is(err, ErrUnsettled) {
		t.Fatal(err)
	}
	if err := f.Bind(t.Context(), f.request(other, "n2")); !errors.Is(err, ledger.ErrNoRoom) {
		t.Errorf("an unsettled pod on another node: %v, want ErrNoRoom", err)
	}
}

// Only the API server's state resolves an earlier unconfirmed bind of the pod.
func TestAnOpenWriteKeepsTheCardWhateverComesAfter(t *testing.T) {
	refuse := func(f *fixture, pod *corev1.Pod) {
		f.server.with(func(s *server) {
			s.onBind = func(context.Context, *corev1.Binding) error { return errRefused }
		})
		if err := f.bind(pod); !errors.Is(err, errRefused) {
			f.t.Errorf("the later bind: %v, want a refusal", err)
		}
	}
	tests := map[string]struct {
		// first is the answer to the first write, which is made in any case.
		first error
		later func(f *fixture, pod *corev1.Pod)
		held  string
	}{
		"its answer was lost, then a refusal": {first: errLost, later: refuse, held: "assumed n1 card 0"},
		"its answer was lost, then two refusals": {
			first: errLost, held: "assumed n1 card 0",
			later: func(f *fixture, pod *corev1.Pod) { refuse(f, pod); refuse(f, pod) },
		},
		"its answer was lost, then the card vanished": {
			first: errLost, held: "assumed n1 card 0",
			later: func(f *fixture, pod *corev1.Pod) {
				node := newNode(f.t, "n1", 100, 100)
				other := newNode(f.t, "n1", 7)
				other.Annotations[protocol.AnnotationInventory] = strings.Replace(
					other.Annotations[protocol.AnnotationInventory], `"index":0`, `"index":5`, 1)
				f.publishNode(other)
				f.await("the card to vanish", func() bool { _, _, ok := f.ledger.Card("n1", 0); return !ok })
				if err := f.bind(pod); !errors.Is(err, ledger.ErrNoRoom) {
					f.t.Errorf("the later bind: %v, want ErrNoRoom", err)
				}
				f.publishNode(node)
				f.await("the card to come back", func() bool { _, _, ok := f.ledger.Card("n1", 0); return ok })
			},
		},
		"it was made, unseen by the watch, then a refusal": {first: nil, later: refuse, held: "bound n1 card 0"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pod := newPod("p", 10)
			f := start(t, patient, newNode(t, "n1", 100, 100), pod)
			f.server.with(func(s *server) {
				s.onBind = func(ctx context.Context, b *corev1.Binding) error {
					if err := s.commit(ctx, b); err != nil {
						t.Error(err)
					}
					return test.first
				}
				if test.first != nil {
					s.noReads = errLost
				}
			})
			if err := f.bind(pod); (err != nil) != (test.first != nil) {
				t.Fatal(err)
			}
			test.later(f, pod)
			f.wantHeld(pod, test.held)
			if !f.isOpen(pod) {
				t.Error("the settler no longer waits for news of the pod")
			}
			// The live read resolves the bind.
			f.server.with(func(s *server) { s.noReads = nil })
			f.look(unseenAfter + settleInterval)
			f.awaitHeld(pod, "bound n1 card 0")
			// The pod is deleted while the watch is broken.
			f.server.remove(pod)
			f.look(unseenAfter + settleInterval)
			f.awaitHeld(pod, "not held")
		})
	}
}

func TestTheWatchMayBeQuickerThanTheAnswer(t *testing.T) {
	for name, lost := range map[string]error{"the answer comes": nil, "the answer is lost": errLost} {
		t.Run(name, func(t *testing.T) {
			pod := newPod("p", 10)
			f := start(t, patient, newNode(t, "n1", 100, 100), pod)
			f.server.with(func(s *server) {
				s.onBind = func(ctx context.Context, b *corev1.Binding) error {
					if err := s.commit(ctx, b); err != nil {
						return err
					}
					f.publish(pod)
					f.awaitHeld(pod, "bound n1 card 0")
					return lost
				}
			})
			if err := f.bind(pod); err != nil {
				t.Fatal(err)
			}
			f.wantHeld(pod, "bound n1 card 0")
			if f.isOpen(pod) {
				t.Error("the settler waits for what the watch has told")
			}
		})
	}
}

// The watch reports that a pod was bound and deleted before the answer arrives. Nothing may add it to the ledger again.
func TestAPodDeletedInFlightStaysAway(t *testing.T) {
	tests := map[string]struct {
		commits bool
		answer  error
		look    bool // true if the read after a lost answer returns the old pod
		wantErr bool
	}{
		"bound, and the answer comes":                   {commits: true},
		"bound, the answer lost, and an old look":       {commits: true, answer: errLost, look: true},
		"bound, the answer lost, and the look finds no": {commits: true, answer: errLost, wantErr: true},
		"not bound, and the answer is lost":             {answer: errLost, wantErr: true},
		"not bound, and refused":                        {answer: errRefused, wantErr: true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pod := newPod("p", 10)
			f := start(t, patient, newNode(t, "n1", 100, 100), pod)
			f.server.with(func(s *server) {
				s.onBind = func(ctx context.Context, b *corev1.Binding) error {
					if test.commits {
						if err := s.commit(ctx, b); err != nil {
							return err
						}
						f.publish(pod)
						f.awaitHeld(pod, "bound n1 card 0")
					}
					f.publishGone(pod)
					f.awaitHeld(pod, "not held")
					if !test.look {
						f.server.remove(pod)
					}
					return test.answer
				}
			})
			if err := f.bind(pod); (err != nil) != test.wantErr {
				t.Errorf("error %v", err)
			}
			f.wantHeld(pod, "not held")
			f.clock.Step(unseenAfter + settleInterval)
			if f.isOpen(pod) {
				t.Error("the settler waits for a pod that the watch has told to be gone")
			}
		})
	}
}

func TestABindThatTheWatchNeverTellsOfIsLookedUp(t *testing.T) {
	pod := newPod("p", 10)
	f := start(t, patient, newNode(t, "n1", 100, 100))
	f.server.set(pod) // Only the API server has the pod: the watch broke before the pod was created.
	if err := f.bind(pod); err != nil {
		t.Fatal(err)
	}
	// The pod still runs: no read changes anything.
	for range 3 {
		f.look(unseenAfter + settleInterval)
		f.wantHeld(pod, "bound n1 card 0")
	}
	f.server.remove(pod)
	f.look(unseenAfter + settleInterval)
	f.awaitHeld(pod, "not held")
	if f.counts.of("settled "+OutcomeBound)+f.counts.of("settled "+OutcomeGone) != 0 {
		t.Errorf("its answer wasn't lost, yet counted so: %v", f.counts.n)
	}
}

func TestBadBindRequestsChangeNothing(t *testing.T) {
	pod, bound, unmanaged := newPod("p", 10), boundPod("b", 10, "n2", 0), newPod("unmanaged", 0)
	unmanaged.Spec.Containers[0].Resources.Requests = amount(corev1.ResourceCPU, 1)
	f := start(t, patient, newNode(t, "n1", 100), newNode(t, "n2", 100), pod, bound, unmanaged)
	good := f.request(pod, "n1")
	change := func(how func(r *BindRequest)) BindRequest {
		r := good
		how(&r)
		return r
	}
	tests := map[string]struct {
		request BindRequest
		want    error
		text    string
	}{
		"no name":              {change(func(r *BindRequest) { r.Name = "" }), ErrBadRequest, "needed"},
		"no namespace":         {change(func(r *BindRequest) { r.Namespace = "" }), ErrBadRequest, "needed"},
		"no UID":               {change(func(r *BindRequest) { r.UID = "" }), ErrBadRequest, "needed"},
		"no node":              {change(func(r *BindRequest) { r.Node = "" }), ErrBadRequest, "needed"},
		"unknown pod":          {change(func(r *BindRequest) { r.Name = "nobody" }), ErrBadRequest, "not found"},
		"wrong UID":            {change(func(r *BindRequest) { r.UID = "other" }), ErrBadRequest, "has UID uid-p, not other"},
		"unknown node":         {change(func(r *BindRequest) { r.Node = "nowhere" }), ledger.ErrNoRoom, "shares no GPU memory"},
		"nothing of ours":      {f.request(unmanaged, "n1"), ErrBadRequest, "the pod asks for none of aliyun.com/gpu-mem, aliyun.com/gpu-count and nvidia.com/gpu"},
		"bound to another one": {f.request(bound, "n1"), ErrBadRequest, "bound to node n2 already"},
	}
	before := f.ledger.Nodes()
	for name, test := range tests {
		err := f.Bind(t.Context(), test.request)
		if !errors.Is(err, test.want) || !strings.Contains(err.Error(), test.text) {
			t.Errorf("%s: %v, want %v with %q", name, err, test.want, test.text)
		}
	}
	f.server.with(func(s *server) { s.noReads = errLost })
	if err := f.Bind(t.Context(), change(func(r *BindRequest) { r.Name = "nobody" })); err == nil || errors.Is(err, ErrBadRequest) {
		t.Errorf("a pod that can't be read: %v, want an error that is not ErrBadRequest", err)
	}
	if diff := cmp.Diff(before, f.ledger.Nodes()); diff != "" {
		t.Errorf("the ledger changed (-before +after):\n%s", diff)
	}
	if n := f.server.bindsSoFar(); n != 0 {
		t.Errorf("%d writes", n)
	}
}

func TestNoRoomAtBindIsToldByAnEvent(t *testing.T) {
	pod := newPod("p", 60)
	f := start(t, patient, newNode(t, "n1", 100), boundPod("a", 50, "n1", 0), pod)
	err := f.bind(pod)
	if !errors.Is(err, ledger.ErrNoRoom) {
		t.Fatalf("error %v, want ErrNoRoom", err)
	}
	want := "Warning GPUCardNotAssumed No GPU card could be assumed: node n1: no GPU card has enough free memory"
	if event := <-f.events; event != want {
		t.Errorf("event %q, want %q", event, want)
	}
	f.wantHeld(pod, "not held")
}

func TestAPodWithoutGPUMemoryIsBoundWithoutACard(t *testing.T) {
	pod := newPod("p", 0)
	pod.Spec.Containers[0].Resources.Requests = amount(protocol.ResourceMemory, 0) // Without the resource, kube-scheduler would not call the extender.
	f := start(t, patient, newNode(t, "n1", 100), pod)
	for range 2 { // The informers drop the node name of such pods: the second bind learns it from the API server.
		if err := f.bind(pod); err != nil {
			t.Fatal(err)
		}
	}
	if got := f.server.get(pod); got.Spec.NodeName != "n1" || len(got.Annotations) != 0 {
		t.Errorf("bound to %q with %v", got.Spec.NodeName, got.Annotations)
	}
	f.wantHeld(pod, "not held")
	if f.isOpen(pod) {
		t.Error("the settler waits for a pod that holds nothing")
	}
}

func TestForgedAnnotationsGainNothing(t *testing.T) {
	pod := newPod("p", 60)
	pod.Annotations = protocol.Assignment{Card: 0, Request: 1, CardMemory: 9, AssumeTime: time.Unix(1, 0), Assigned: true}.Annotations()
	pod.Annotations[protocol.AnnotationAllocation] = `{"main":{"0":1}}`
	f := start(t, patient, newNode(t, "n1", 100, 100), boundPod("a", 50, "n1", 0), pod)
	f.wantHeld(pod, "not held")
	if err := f.bind(pod); err != nil {
		t.Fatal(err)
	}
	f.publish(pod)
	f.await("the watch", func() bool { return !f.isOpen(pod) })
	f.wantHeld(pod, "bound n1 card 1")
	assignment, err := protocol.ParseAssignment(f.server.get(pod).Annotations)
	if err != nil || assignment.Card != 1 || assignment.Request != 60 || assignment.Assigned || assignment.AssumeTime.Equal(time.Unix(1, 0)) {
		t.Errorf("the pod says %+v (%v)", assignment, err)
	}
	if used := f.ledger.Nodes()[0].Used; !cmp.Equal(used, []gpu.Memory{50, 60}) {
		t.Errorf("used %v", used)
	}
}

func TestOfTwoBindsOfOnePodOneIsMade(t *testing.T) {
	pod := newPod("p", 10)
	f := start(t, patient, newNode(t, "n1", 100), newNode(t, "n2", 100), pod)
	inside, goOn := make(chan struct{}), make(chan struct{})
	f.server.with(func(s *server) {
		s.onBind = func(ctx context.Context, b *corev1.Binding) error {
			close(inside)
			<-goOn
			return s.commit(ctx, b)
		}
	})
	first := make(chan error, 1)
	go func() { first <- f.bind(pod) }()
	<-inside
	for _, node := range []string{"n1", "n2"} {
		if err := f.Bind(t.Context(), f.request(pod, node)); !errors.Is(err, ErrInFlight) {
			t.Errorf("beside the first, to %s: %v, want ErrInFlight", node, err)
		}
	}
	close(goOn)
	if err := <-first; err != nil {
		t.Fatal(err)
	}
	f.wantHeld(pod, "bound n1 card 0")
	if n := f.server.bindsSoFar(); n != 1 {
		t.Errorf("%d writes, want 1", n)
	}
}

// A bind that has begun does not end when the scheduler disconnects.
func TestABindOutlivesItsCaller(t *testing.T) {
	pod := newPod("p", 10)
	f := start(t, patient, newNode(t, "n1", 100), pod)
	ctx, cancel := context.WithCancel(t.Context())
	f.server.with(func(s *server) {
		s.onBind = func(ctx context.Context, b *corev1.Binding) error {
			cancel()
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return s.commit(ctx, b)
		}
	})
	if err := f.Bind(ctx, f.request(pod, "n1")); err != nil {
		t.Fatal(err)
	}
	f.wantHeld(pod, "bound n1 card 0")
}

// Many pods are bound in parallel by an API server that refuses writes and loses answers, and some pods end meanwhile.
// No card is ever overcommitted, and in the end the ledger equals the API server's state.
func TestParallelBindsNeverPassACardsTotal(t *testing.T) {
	const cards, memory, pods = 4, 100, 300
	names := []string{"n1", "n2", "n3"}
	sizes := make([]int64, cards)
	for i := range sizes {
		sizes[i] = memory
	}
	f := start(t, patient, newNode(t, "n1", sizes...), newNode(t, "n2", sizes...), newNode(t, "n3", sizes...))

	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	var mu sync.Mutex
	random := rand.New(rand.NewPCG(seed, 1))
	roll := func(n int) int {
		mu.Lock()
		defer mu.Unlock()
		return random.IntN(n)
	}
	f.server.with(func(s *server) {
		s.onBind = func(ctx context.Context, b *corev1.Binding) error {
			switch roll(6) {
			case 0:
				return errRefused
			case 1:
				return errLost
			case 2:
				if err := s.commit(ctx, b); err != nil {
					return err
				}
				return errServer
			}
			return s.commit(ctx, b)
		}
	})

	// overfull checks the API server's state, on which the nodes act.
	overfull := func() {
		taken := map[string]gpu.Memory{}
		f.server.mu.Lock()
		defer f.server.mu.Unlock()
		for _, pod := range f.server.pods {
			if pod.Spec.NodeName == "" {
				continue
			}
			where, err := protocol.PodPlacement(pod)
			if err != nil {
				t.Errorf("%s: %v", pod.Name, err)
				continue
			}
			key := fmt.Sprint(pod.Spec.NodeName, " ", where)
			if taken[key] += where.Total(); taken[key] > memory {
				t.Errorf("%s holds %d of %d", key, taken[key], memory)
			}
		}
	}

	var wg sync.WaitGroup
	work := make(chan *corev1.Pod)
	for range 16 {
		wg.Go(func() {
			for pod := range work {
				f.server.set(pod)
				if roll(2) == 0 {
					f.publishObject(pod)
				}
				for range 6 {
					err := f.Bind(context.Background(), f.request(pod, names[roll(len(names))]))
					overfull()
					if err == nil {
						break
					}
				}
				if now := f.server.get(pod); now.Spec.NodeName != "" {
					f.publishObject(now)
					if roll(2) == 0 { // The pod ends, and its card becomes free for others.
						f.server.remove(pod)
						f.publishGone(pod)
					}
				}
			}
		})
	}
	for i := range pods {
		work <- newPod(fmt.Sprintf("p%d", i), int64(1+roll(60)))
	}
	close(work)
	wg.Wait()
	overfull()

	// Every open bind is resolved, and the ledger equals the API server's state.
	want := map[gpu.PodUID]string{}
	f.server.with(func(s *server) {
		for _, pod := range s.pods {
			if pod.Spec.NodeName != "" {
				where, _ := protocol.PodPlacement(pod)
				want[gpu.PodUID(pod.UID)] = fmt.Sprint("bound ", pod.Spec.NodeName, " ", where)
			}
		}
	})
	if len(want) == 0 {
		t.Fatal("nothing was bound: this test shows nothing")
	}
	f.clock.Step(f.settler.fence() + settleInterval)
	f.await("the ledger to say what the server says", func() bool {
		got := map[gpu.PodUID]string{}
		for _, node := range f.ledger.Nodes() {
			for _, h := range node.Allocations {
				got[h.UID] = fmt.Sprint(h.State, " ", node.Name, " ", h.Placement)
			}
		}
		return cmp.Equal(want, got)
	})
	for _, result := range []string{ResultBound, ResultRefused, ResultUnknown, ResultNoRoom} {
		if f.counts.of("bind "+result) == 0 {
			t.Errorf("no bind came out as %s: this test shows less than it should", result)
		}
	}
}
