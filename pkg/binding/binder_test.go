package binding

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/fake"
)

// TestWrite covers every outcome of one write to node n1. The watch reports nothing.
func TestWrite(t *testing.T) {
	pod := fake.Pod("p", 10)
	removed := func(f *fixture) { f.server.Remove(pod) }
	ended := func(f *fixture) { f.server.Set(fake.Edited(pod, fake.Bound("n1", 0), fake.Phase(corev1.PodSucceeded))) }
	// boundBy makes another writer bind a pod of the name to card 1.
	boundBy := func(node string, uid types.UID) func(*fixture) {
		return func(f *fixture) {
			f.server.Set(fake.Edited(pod, fake.Bound(node, 1), func(pod *corev1.Pod) { pod.UID = uid }))
		}
	}
	errHangs := context.Canceled
	type binds struct {
		// commits is true if the write is made. answer is the API server's answer, errHangs if it comes only when the bind's
		// time is over. read is the error of reads.
		commits      bool
		answer, read error
		// before happens before the answer.
		before func(f *fixture)

		// outcome is how the bind is resolved, if it is unconfirmed. Otherwise wantResult and wantErr are its result.
		outcome    reasons.Result
		wantResult reasons.Result
		wantErr    error
		// want is the allocation in the end.
		want string
	}
	for name, test := range map[string]binds{
		"the write is made":                                 {commits: true, wantResult: reasons.ResultBound, want: "bound n1 card 0"},
		"the write is made, the answer is lost":             {commits: true, answer: errLost, wantResult: reasons.ResultBound, want: "bound n1 card 0"},
		"the write is made, the answer is a server error":   {commits: true, answer: errServer, wantResult: reasons.ResultBound, want: "bound n1 card 0"},
		"the write is made, answer and read fail":           {commits: true, answer: errLost, read: errLost, outcome: reasons.ResultBound, want: "bound n1 card 0"},
		"the write is made and hangs":                       {commits: true, answer: errHangs, outcome: reasons.ResultBound, want: "bound n1 card 0"},
		"the write hangs and isn't made":                    {answer: errHangs, outcome: reasons.ResultNotBound, want: "none"},
		"the answer is lost and the write isn't made":       {answer: errLost, outcome: reasons.ResultNotBound, want: "none"},
		"a server error is no rejection":                    {answer: errServer, outcome: reasons.ResultNotBound, want: "none"},
		"the answer is lost and the pod is deleted":         {before: removed, answer: errLost, outcome: reasons.ResultGone, want: "none"},
		"the answer is lost and the pod has ended":          {before: ended, answer: errLost, read: errLost, outcome: reasons.ResultGone, want: "none"},
		"the answer is lost and the pod is on another node": {before: boundBy("n2", "uid-p"), answer: errLost, outcome: reasons.ResultBound, want: "bound n2 card 1"},
		"a rejection": {answer: errForbidden, wantResult: reasons.ResultRejected, wantErr: errForbidden, want: "none"},
		"a conflict with another writer's bind to the node": {before: boundBy("n1", "uid-p"), answer: errConflict, wantResult: reasons.ResultBound, want: "bound n1 card 1"},
		"a conflict with a bind to another node":            {before: boundBy("n2", "uid-p"), answer: errConflict, wantResult: reasons.ResultRejected, wantErr: ErrBadRequest, want: "bound n2 card 1"},
		"a conflict, and the pod is gone":                   {before: removed, answer: errConflict, wantResult: reasons.ResultRejected, wantErr: errConflict, want: "none"},
		"a conflict, and another pod has the name":          {before: boundBy("n1", "another"), answer: errConflict, wantResult: reasons.ResultRejected, wantErr: errConflict, want: "none"},
		"a conflict, and the pod isn't bound":               {answer: errConflict, wantResult: reasons.ResultRejected, wantErr: errConflict, want: "none"},
		"a conflict, and the read fails":                    {commits: true, answer: errConflict, read: errServer, outcome: reasons.ResultBound, want: "bound n1 card 0"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 0, pod)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			f.server.Answer(fake.Answers{Read: test.read, Bind: func(_ context.Context, b *corev1.Binding) error {
				if test.commits {
					f.commit(b)
				}
				if test.before != nil {
					test.before(f)
				}
				if errors.Is(test.answer, errHangs) {
					cancel()
				}
				return test.answer
			}})
			result, err := f.bindUntil(ctx, pod, "n1")
			if f.observer.Count("write binding") != 1 || f.server.Calls().Binds != 1 {
				t.Errorf("%d writes, counted: %v", f.server.Calls().Binds, f.observer.Counts())
			}
			if test.outcome == "" {
				if result != test.wantResult || !errors.Is(err, test.wantErr) {
					t.Errorf("%s, %v, want %s, %v", result, err, test.wantResult, test.wantErr)
				}
				f.want(pod, test.want)
				if result == reasons.ResultBound && test.answer == nil {
					f.wantEvents(assumedEvent(test.want))
				} else {
					f.wantEvents()
				}
				return
			}
			if result != reasons.ResultUnconfirmed || !errors.Is(err, ErrUnconfirmed) || !errors.Is(err, test.answer) {
				t.Errorf("%s, %v", result, err)
			}
			// While reads fail, nothing changes.
			f.server.Answer(fake.Answers{Read: errLost})
			f.resolve(resolveInterval)
			f.want(pod, "assumed n1 card 0")
			f.server.Answer(fake.Answers{})
			if test.outcome == reasons.ResultNotBound {
				f.resolve(2 * timeout) // The API server may still be writing.
				f.want(pod, "assumed n1 card 0")
				f.clock.Step(deadlineMargin)
			}
			f.resolve(resolveInterval)
			f.want(pod, test.want)
			if f.observer.Count("resolved "+string(test.outcome)) != 1 {
				t.Errorf("counted %v", f.observer.Counts())
			}
			f.wantEvents()
		})
	}
}

// The watch resolves a bind whose answer is lost. There is no Event, and no other outcome, when kube-scheduler retries the bind.
func TestWatchResolves(t *testing.T) {
	pod := fake.Pod("p", 10)
	f := newFixture(t, 0, pod)
	f.loseAnswers(true)
	if result, err := f.bind(pod, "n1"); result != reasons.ResultUnconfirmed || !errors.Is(err, ErrUnconfirmed) {
		t.Fatalf("%s, %v", result, err)
	}
	f.report(pod)
	f.want(pod, "bound n1 card 0")
	f.report(pod)
	f.wantEvents()
	if f.isOpen(pod) || f.observer.Count("resolved "+string(reasons.ResultBound)) != 1 {
		t.Errorf("counted %v", f.observer.Counts())
	}

	gone := fake.Pod("gone", 10)
	f.server.Set(gone)
	f.loseAnswers(false)
	if _, err := f.bind(gone, "n1"); !errors.Is(err, ErrUnconfirmed) {
		t.Fatal(err)
	}
	f.PodGone("uid-gone")
	f.want(gone, "none")
	f.wantEvents()
	if f.isOpen(gone) || f.observer.Count("resolved "+string(reasons.ResultGone)) != 1 {
		t.Errorf("counted %v", f.observer.Counts())
	}
}

// The watch reports that the pod was bound, and perhaps deleted, before the answer of the write arrives.
func TestWatchBeforeAnswer(t *testing.T) {
	for name, test := range map[string]struct {
		commits, deleted bool
		answer           error
		// oldRead is true if the read after a lost answer still finds the pod.
		oldRead    bool
		wantResult reasons.Result
		want       string
	}{
		"bound":                                     {commits: true, wantResult: reasons.ResultBound, want: "bound n1 card 0"},
		"bound, and the answer is lost":             {commits: true, answer: errLost, wantResult: reasons.ResultBound, want: "bound n1 card 0"},
		"bound and deleted":                         {commits: true, deleted: true, wantResult: reasons.ResultBound, want: "none"},
		"bound and deleted, an old read":            {commits: true, deleted: true, answer: errLost, oldRead: true, wantResult: reasons.ResultBound, want: "none"},
		"bound and deleted, and the answer is lost": {commits: true, deleted: true, answer: errLost, wantResult: reasons.ResultUnconfirmed, want: "none"},
		"deleted, and the answer is lost":           {deleted: true, answer: errLost, wantResult: reasons.ResultUnconfirmed, want: "none"},
		"deleted, and a rejection":                  {deleted: true, answer: errForbidden, wantResult: reasons.ResultRejected, want: "none"},
	} {
		t.Run(name, func(t *testing.T) {
			pod := fake.Pod("p", 10)
			f := newFixture(t, 0, pod)
			answers := fake.Answers{Bind: func(_ context.Context, b *corev1.Binding) error {
				if test.commits {
					f.commit(b)
					f.report(pod)
				}
				if test.deleted {
					f.PodGone("uid-p")
				}
				if test.deleted && !test.oldRead {
					f.server.Remove(pod)
				}
				return test.answer
			}}
			if !test.deleted {
				answers.Read = errLost
			}
			f.server.Answer(answers)
			if result, err := f.bind(pod, "n1"); result != test.wantResult || (err == nil) != (result == reasons.ResultBound) {
				t.Errorf("%s, %v, want %s", result, err, test.wantResult)
			}
			f.want(pod, test.want)
			if f.isOpen(pod) {
				t.Error("the bind is open, although the watch has reported the pod")
			}
			f.resolve(unreportedAfter + resolveInterval)
			f.want(pod, test.want)
		})
	}
}

// A retry after a lost answer writes the same card. The pod must not go to another node: the first write may still be made.
func TestRetryAfterLostAnswer(t *testing.T) {
	pod := fake.Pod("p", 10)
	f := newFixture(t, 0, pod)
	f.answerBinds(errLost)
	if _, err := f.bind(pod, "n1"); !errors.Is(err, ErrUnconfirmed) {
		t.Fatal(err)
	}
	f.clock.Step(time.Second)
	f.server.Answer(fake.Answers{})
	if result, err := f.bind(pod, "n2"); result != reasons.ResultNoRoom {
		t.Errorf("to another node: %s, %v", result, err)
	}
	if _, err := f.bind(pod, "n1"); err != nil {
		t.Fatal(err)
	}
	assignment, err := protocol.ParseAssignment(f.server.Get(pod).Annotations)
	if err != nil || assignment.Cards[0].Index != 0 || !assignment.AssumeTime.Equal(begin) {
		t.Errorf("the retry wrote %+v (%v), want card 0 assumed at %s", assignment, err, begin)
	}
}

// Only the API server's state resolves an open write, not a later attempt that fails.
func TestOpenWriteKeepsCard(t *testing.T) {
	reject := func(f *fixture, pod *corev1.Pod) {
		f.server.Answer(fake.Answers{Read: errLost, Bind: func(context.Context, *corev1.Binding) error { return errForbidden }})
		if result, err := f.bind(pod, "n1"); result != reasons.ResultRejected {
			f.t.Errorf("the later bind: %s, %v", result, err)
		}
	}
	cards := func(f *fixture, index int) {
		f.ledger.SetNode("n1", ledger.NodeSpec{Unit: gpu.MiB, Cards: []gpu.Card{{Index: index, Memory: 100}}})
	}
	for name, test := range map[string]struct {
		lost  bool
		later func(f *fixture, pod *corev1.Pod)
		want  string
	}{
		"the answer is lost, then a rejection":    {true, reject, "assumed n1 card 0"},
		"the answer is lost, then two":            {true, func(f *fixture, pod *corev1.Pod) { reject(f, pod); reject(f, pod) }, "assumed n1 card 0"},
		"not seen by the watch, then a rejection": {false, reject, "bound n1 card 0"},
		"the answer is lost, then the card is missing for a while": {true, func(f *fixture, pod *corev1.Pod) {
			cards(f, 5)
			if result, err := f.bind(pod, "n1"); result != reasons.ResultNoRoom {
				f.t.Errorf("the later bind: %s, %v", result, err)
			}
			cards(f, 0)
		}, "assumed n1 card 0"},
	} {
		t.Run(name, func(t *testing.T) {
			pod := fake.Pod("p", 10)
			f := newFixture(t, 0, pod)
			if test.lost {
				f.loseAnswers(true)
			}
			if _, err := f.bind(pod, "n1"); (err != nil) != test.lost {
				t.Fatal(err)
			}
			test.later(f, pod)
			f.want(pod, test.want)
			if !f.isOpen(pod) {
				t.Error("the bind is no longer open")
			}
			f.server.Answer(fake.Answers{})
			f.resolve(unreportedAfter + resolveInterval)
			f.want(pod, "bound n1 card 0")
			f.server.Remove(pod) // It is deleted while the watch is broken.
			f.resolve(unreportedAfter + resolveInterval)
			f.want(pod, "none")
		})
	}
}

// A bind that the watch does not report is read from time to time.
func TestUnseenBindIsRead(t *testing.T) {
	pod := fake.Pod("p", 10)
	f := newFixture(t, 0, pod)
	if _, err := f.bind(pod, "n1"); err != nil {
		t.Fatal(err)
	}
	for reads := range 3 { // The pod still runs: no read changes anything.
		f.resolve(unreportedAfter)
		if got := f.server.Calls().Reads; got != reads {
			t.Errorf("%d reads, want %d", got, reads)
		}
		f.resolve(resolveInterval)
		f.want(pod, "bound n1 card 0")
	}
	f.server.Remove(pod)
	f.resolve(unreportedAfter + resolveInterval)
	f.want(pod, "none")
	if got := f.observer.Counts(); got["resolved "+string(reasons.ResultBound)]+got["resolved "+string(reasons.ResultGone)] != 0 {
		t.Errorf("its answer wasn't lost, yet counted so: %v", got)
	}
}

// If a bind call ends in an unexpected way, the bind is resolved after the deadline.
func TestPanickedBindIsResolved(t *testing.T) {
	pod := fake.Pod("p", 10)
	f := newFixture(t, 0, pod)
	f.server.Answer(fake.Answers{Bind: func(context.Context, *corev1.Binding) error { panic("a defect") }})
	func() {
		defer func() { _ = recover() }()
		_, _ = f.bind(pod, "n1")
	}()
	f.resolve(Deadline(timeout))
	f.want(pod, "assumed n1 card 0")
	f.resolve(resolveInterval)
	f.want(pod, "none")
}

// refusesReads answers no read of pods of one name.
type refusesReads struct {
	API
	name string
}

func (r refusesReads) Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	if name == r.name {
		return nil, errForbidden
	}
	return r.API.Pod(ctx, namespace, name)
}

// If the reads of one pod always fail, as if a webhook forbade them, the binds of later pods are resolved nevertheless.
func TestForbiddenReadDelaysNoOther(t *testing.T) {
	first, later := fake.Pod("first", 10), fake.Pod("later", 10)
	f := newFixture(t, 0, first, later)
	f.loseAnswers(true)
	for _, pod := range []*corev1.Pod{first, later} {
		if _, err := f.bind(pod, "n1"); !errors.Is(err, ErrUnconfirmed) {
			t.Fatal(err)
		}
		f.clock.Step(time.Second)
	}
	f.server.Answer(fake.Answers{})
	f.API = refusesReads{f.server, "first"}
	f.resolve(resolveInterval)
	f.resolve(resolveInterval)
	f.want(first, "assumed n1 card 0")
	f.want(later, "bound n1 card 0")
}

// Each pod gets an Event in normal operation. If many pods are bound, only a few do.
func TestEventsAreLimited(t *testing.T) {
	f := newFixture(t, 0)
	bind := func(i int) {
		pod := fake.Pod(fmt.Sprint(i), 1)
		f.server.Set(pod)
		if _, err := f.bind(pod, "n1"); err != nil {
			t.Fatal(err)
		}
	}
	for i := range eventsBurst + 30 {
		bind(i)
	}
	if got := len(f.events); got != eventsBurst {
		t.Errorf("%d Events, want %d", got, eventsBurst)
	}
	f.clock.Step(time.Second)
	bind(eventsBurst + 30)
	if got := len(f.events); got != eventsBurst+1 {
		t.Errorf("%d Events a second later, want one more", got-eventsBurst)
	}
}
