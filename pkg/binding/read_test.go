package binding

import (
	"context"
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fake"
)

// Every result of a live read reaches the listeners, and so does the failure of an unconfirmed bind. The watch reports nothing.
func TestListener(t *testing.T) {
	pod := fake.Pod("p", 10)
	lose := func(f *fixture, pod *corev1.Pod) {
		f.loseAnswers(false)
		if _, err := f.bind(pod, "n1"); !errors.Is(err, ErrUnconfirmed) {
			f.t.Fatal(err)
		}
		f.server.Answer(fake.Answers{})
	}
	verify := func(f *fixture) { f.VerifyPod(f.t.Context(), protocol.Pod(pod)) }
	for name, test := range map[string]struct {
		do   func(f *fixture)
		want []string
		// allocation is the pod's allocation in the end.
		allocation string
	}{
		"after a lost answer, the pod is bound": {func(f *fixture) {
			f.server.Answer(fake.Answers{Bind: func(_ context.Context, b *corev1.Binding) error { f.commit(b); return errLost }})
			_, _ = f.bind(pod, "n1")
		}, []string{`p is on "n1"`}, "bound n1 card 0"},
		"after a lost answer, the pod is not bound, for certain after the deadline": {func(f *fixture) {
			f.answerBinds(errLost)
			_, _ = f.bind(pod, "n1")
			f.resolve(Deadline(timeout) + resolveInterval)
		}, []string{`p is on ""`, `p is on ""`, "uid-p is not bound"}, "none"},
		"later, the pod is bound": {func(f *fixture) {
			lose(f, pod)
			f.server.Set(fake.Edited(pod, fake.Bound("n1", 1)))
			f.resolve(resolveInterval)
		}, []string{`p is on "n1"`}, "bound n1 card 1"},
		"later, the pod is gone": {func(f *fixture) {
			lose(f, pod)
			f.server.Remove(pod)
			f.resolve(resolveInterval)
		}, []string{"uid-p is gone"}, "none"},
		"a conflict with a bind to another node": {func(f *fixture) {
			f.server.Set(fake.Edited(pod, fake.Bound("n2", 1)))
			_, _ = f.bind(pod, "n1")
		}, []string{`p is on "n2"`}, "bound n2 card 1"},
		"the cache doesn't have the pod": {func(f *fixture) {
			_, _ = f.ReadPod(f.t.Context(), protocol.Pod(pod))
		}, []string{`p is on ""`}, "none"},
		"the pods of a node are listed": {func(f *fixture) {
			f.server.Set(fake.Edited(pod, fake.Bound("n1", 1)))
			f.BeginTerm()
			_ = f.ConfirmNode(f.t.Context(), "n1")
		}, []string{`p is on "n1"`}, "bound n1 card 1"},
		"verified: it is pending": {verify, []string{`p is on ""`}, "none"},
		"verified: it is bound": {func(f *fixture) {
			f.server.Set(fake.Edited(pod, fake.Bound("n1", 1)))
			verify(f)
		}, []string{`p is on "n1"`}, "bound n1 card 1"},
		"verified: another pod has its name": {func(f *fixture) {
			f.server.Set(fake.Edited(pod, fake.Bound("n1", 1), func(pod *corev1.Pod) { pod.UID = "another" }))
			verify(f)
		}, []string{"uid-p is gone"}, "none"},
		"verified: the read fails": {func(f *fixture) {
			f.server.Answer(fake.Answers{Read: errLost})
			verify(f)
		}, nil, "none"},
		"a standby verifies nothing": {func(f *fixture) {
			f.standby = errors.New("standby")
			verify(f)
		}, nil, "none"},
		"a pod of whole cards, whose answer is lost": {func(f *fixture) {
			whole := fake.Pod("whole", 0)
			f.server.Set(whole)
			f.loseAnswers(true)
			claim := f.claim(whole)
			_, _ = claim.Write(f.t.Context(), "n1", ledger.Allocation{Pod: protocol.Pod(whole)}, nil, Membership{})
			claim.End()
			f.server.Answer(fake.Answers{})
			f.resolve(resolveInterval)
			f.want(whole, "none")
		}, []string{`whole is on "n1"`}, "none"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 0, pod)
			test.do(f)
			f.wantHeard(test.want...)
			f.want(pod, test.allocation)
		})
	}
}
