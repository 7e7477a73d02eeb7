package scheduling

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpushare/gpushare/pkg/apiserver/fake"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// nominateFixture is a Scheduler that doesn't run, of a cluster of the nodes n1 to n9 with one card of 100 each. Pods of 60 queue:
// head-00 to head-23, which are left to kube-scheduler, and those that a test adds. kube-scheduler has just tried another pod.
type nominateFixture struct {
	*fixture
	handlers *eventHandlers
}

func startNominating(t *testing.T, o Options) *nominateFixture {
	o.NominateAhead, o.FilterBest, o.FilterBestAbove = 4, 1, 1
	f := &nominateFixture{fixture: newFixture(t, o)}
	f.handlers = f.newEventHandlers(func() {})
	nodes := map[string]*corev1.Node{}
	for i := range 9 {
		node := fake.Node(fmt.Sprint("n", i+1), 100)
		if i == 0 {
			node.Labels = map[string]string{"pool": "small"}
		}
		nodes[node.Name] = node
		f.handlers.NodeUpdated(node)
	}
	f.nominator.nodes = func() []diagnosis.Node {
		return diagnosis.Nodes(f.ledger, func(name string) (*corev1.Node, bool) { return nodes[name], true }, nil)
	}
	for i := range queueHead {
		f.report(fake.Pod(fmt.Sprintf("head-%02d", i), 60))
	}
	f.called(fake.Pod("tried", 60))
	return f
}

// report makes the watch report the pods.
func (f *nominateFixture) report(pods ...*corev1.Pod) {
	for _, pod := range pods {
		f.handlers.PodUpdated(nil, clustercache.NewPodInfo(pod))
	}
}

// called makes the filter calls for the pods.
func (f *nominateFixture) called(pods ...*corev1.Pod) {
	for _, pod := range pods {
		f.nominator.filtering(pod, []string{"n1", "n2"})
	}
}

// step nominates what is due, and returns the nominations that were written since the start.
func (f *nominateFixture) step() []string {
	f.nominator.dropUnseen()
	if pods := f.nominator.next(); len(pods) > 0 {
		f.nominator.nominate(f.t.Context(), pods, f.nominator.few)
	}
	if err := f.nominator.writes.Wait(); err != nil {
		f.t.Error(err)
	}
	nominated := f.server.Calls().Nominated
	slices.Sort(nominated)
	return nominated
}

func (f *nominateFixture) wantNominated(what string, want ...string) {
	f.t.Helper()
	if diff := cmp.Diff(want, f.step(), cmpopts.EquateEmpty()); diff != "" {
		f.t.Errorf("nominations %s (-want +got):\n%s", what, diff)
	}
}

// kept reports whether the memory of the pod's node n1 is kept for it.
func (f *nominateFixture) kept() bool { return !f.fits(gpu.Pod{UID: "other", Request: 60}, "n1") }

// The next pods after the head of the queue are nominated, each where those before it leave room, and no more at a time than allowed.
// More follow once half of them were tried.
func TestNominateAhead(t *testing.T) {
	f := startNominating(t, Options{})
	var pods []*corev1.Pod
	for i := range 8 {
		pods = append(pods, fake.Pod(fmt.Sprint("p", i), 60))
	}
	f.report(pods...)
	f.wantNominated("at first", "p0=n1", "p1=n2", "p2=n3", "p3=n4")
	f.wantNominated("without progress", "p0=n1", "p1=n2", "p2=n3", "p3=n4")
	f.called(pods[0], pods[1])
	for i := range 2 {
		f.called(fake.Pod(fmt.Sprintf("head-%02d", i), 60))
	}
	// head-02 to head-23, p2 and p3 are the head of the queue.
	f.wantNominated("after two were tried", "p0=n1", "p1=n2", "p2=n3", "p3=n4", "p4=n5", "p5=n6")
}

// A pod of higher priority comes first in the queue.
func TestNominateByPriority(t *testing.T) {
	f := startNominating(t, Options{})
	f.report(fake.Pod("last", 60), fake.Pod("first", 60, fake.Priority(1)))
	f.wantNominated("of the last two of 26", "head-23=n1", "last=n2")
}

func TestNotNominated(t *testing.T) {
	rejected := func(pod *corev1.Pod) {
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
	}
	plain := func(*corev1.Pod) {}
	for name, test := range map[string]struct {
		edit   fake.PodEdit
		before func(f *nominateFixture, pod *corev1.Pod)
		want   bool
	}{
		"nothing is special":             {edit: plain, want: true},
		"kube-scheduler has rejected it": {edit: rejected},
		"kube-scheduler is trying it": {edit: plain, before: func(f *nominateFixture, pod *corev1.Pod) {
			f.report(pod)
			f.called(pod)
		}},
		"its scheduler sends no calls": {edit: func(pod *corev1.Pod) { pod.Spec.SchedulerName = "another" }},
		"its scheduler sends none now": {edit: plain, before: func(f *nominateFixture, _ *corev1.Pod) { f.clock.Step(time.Minute) }},
		"kube-scheduler nominated it":  {edit: func(pod *corev1.Pod) { rejected(pod); fake.Nominated("n2")(pod) }},
		"it awaits its turn":           {edit: gated},
		"it has a scheduling gate":     {edit: func(pod *corev1.Pod) { pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "g"}} }},
		"fair sharing has reserved n1": {edit: plain, want: true, before: func(f *nominateFixture, pod *corev1.Pod) {
			if _, err := f.ledger.Reserve("n1", protocol.Pod(pod), placement.Binpack, f.clock.Now()); err != nil {
				f.t.Error(err)
			}
		}},
		"it is a member of a group": {edit: func(pod *corev1.Pod) {
			pod.Annotations = map[string]string{protocol.AnnotationGroupName: "g", protocol.AnnotationGroupSize: "2"}
		}},
		"kube-scheduler wouldn't end the nomination": {edit: func(pod *corev1.Pod) { pod.Spec.PreemptionPolicy = new(corev1.PreemptNever) }},
		"its host port may be taken":                 {edit: fake.HostPort(80)},
		"it fits nowhere":                            {edit: func(pod *corev1.Pod) { pod.Spec.NodeSelector = map[string]string{"pool": "none"} }},
		"few nodes are eligible for it":              {edit: func(pod *corev1.Pod) { pod.Spec.NodeSelector = map[string]string{"pool": "small"} }},
	} {
		t.Run(name, func(t *testing.T) {
			f := startNominating(t, Options{})
			pod := fake.Pod("p", 60, test.edit)
			if test.before != nil {
				test.before(f, pod)
			}
			f.report(pod)
			if got := slices.Contains(f.step(), "p=n1"); got != test.want {
				t.Errorf("nominated %t, want %t", got, test.want)
			}
		})
	}
}

func TestNominationOutcomes(t *testing.T) {
	failed := errors.New("the connection is gone")
	for name, test := range map[string]struct {
		answer error
		then   func(f *nominateFixture, pod *corev1.Pod)
		// kept is whether the memory is still kept for the pod, and again whether another pod is nominated next.
		kept, again bool
		result      string
	}{
		"written": {kept: true, again: true, result: NominationMade},
		"the watch reports another change of the pod first": {kept: true, again: true, result: NominationMade,
			then: func(f *nominateFixture, pod *corev1.Pod) { f.report(pod) }},
		"the watch shows it": {kept: true, again: true, result: NominationMade,
			then: func(f *nominateFixture, pod *corev1.Pod) { f.report(fake.Edited(pod, fake.Nominated("n1"))) }},
		"kube-scheduler nominates it to another node": {again: true, result: NominationMade,
			then: func(f *nominateFixture, pod *corev1.Pod) { f.report(fake.Edited(pod, fake.Nominated("n9"))) }},
		"kube-scheduler removes it": {again: true, result: NominationMade,
			then: func(f *nominateFixture, pod *corev1.Pod) {
				f.report(fake.Edited(pod, fake.Nominated("n1")), pod)
			}},
		"the watch never shows it": {again: true, result: NominationMade,
			then: func(f *nominateFixture, _ *corev1.Pod) { f.clock.Step(2 * nominationUnseen) }},
		"the pod was deleted": {again: true, result: NominationMade,
			then: func(f *nominateFixture, pod *corev1.Pod) { f.handlers.PodDeleted(clustercache.NewPodInfo(pod)) }},
		"the pod has changed": {answer: apierrors.NewConflict(fake.PodResource, "p", nil), again: true, result: NominationConflict},
		"no answer":           {answer: failed, result: NominationFailed},
	} {
		t.Run(name, func(t *testing.T) {
			f := startNominating(t, Options{})
			f.server.Answer(fake.Answers{Nominate: test.answer})
			pod := fake.Pod("p", 60)
			f.report(pod)
			f.wantNominated("at first", "p=n1")
			if test.then != nil {
				test.then(f, pod)
			}
			f.nominator.dropUnseen()
			if f.kept() != test.kept {
				t.Errorf("memory is kept for the pod: %t, want %t", f.kept(), test.kept)
			}
			if f.observer.Count("nomination "+test.result) != 1 {
				t.Errorf("counted %v, want one nomination %s", f.observer.Counts(), test.result)
			}
			f.server.Answer(fake.Answers{})
			f.report(fake.Pod("next", 60))
			if got := slices.ContainsFunc(f.step(), func(made string) bool { return made == "next=n1" || made == "next=n2" }); got != test.again {
				t.Errorf("the next pod is nominated: %t, want %t", got, test.again)
			}
		})
	}
}

// A nomination that leads nowhere is removed after a while: also one of an earlier leader, but not kube-scheduler's, which waits for
// pods to leave.
func TestExpiredNomination(t *testing.T) {
	for name, test := range map[string]struct {
		reported []*corev1.Pod
		want     []string
	}{
		"kube-scheduler has rejected the pod since": {[]*corev1.Pod{fake.Pod("p", 60, fake.Nominated("n1"))}, []string{"p="}},
		"kube-scheduler nominates it to the same node later": {[]*corev1.Pod{
			fake.Pod("p", 60, fake.Nominated("n1")), fake.Pod("p", 60), fake.Pod("p", 60, fake.Nominated("n1"), func(pod *corev1.Pod) {
				pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
			}),
		}, nil},
		"the leader ended before it opened the pod's gate": {[]*corev1.Pod{fake.Pod("p", 60, gated, fake.Nominated("n1"))}, []string{"p="}},
		"a gated pod is nominated for the second time": {[]*corev1.Pod{
			fake.Pod("p", 60, gated, fake.Nominated("n1")), fake.Pod("p", 60, gated), fake.Pod("p", 60, gated, fake.Nominated("n2")),
		}, []string{"p="}},
		"the gate was opened": {[]*corev1.Pod{fake.Pod("p", 60, gated, fake.Nominated("n1")), fake.Pod("p", 60, fake.Nominated("n1"))}, []string{"p="}},
		"the pod has become a member of a group": {[]*corev1.Pod{fake.Pod("p", 60, fake.Nominated("n1")), fake.Pod("p", 60, fake.Nominated("n1"), func(pod *corev1.Pod) {
			pod.Annotations = map[string]string{protocol.AnnotationGroupName: "g", protocol.AnnotationGroupSize: "2"}
		})}, []string{"p="}},
		"kube-scheduler nominated it": {[]*corev1.Pod{fake.Pod("p", 60, fake.Nominated("n1"), func(pod *corev1.Pod) {
			pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
		})}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			f := startNominating(t, Options{})
			f.report(test.reported...)
			f.clock.Step(2 * nominationLife)
			for _, pod := range f.nominator.expired() {
				f.nominator.write(t.Context(), pod, "")
			}
			if diff := cmp.Diff(test.want, f.server.Calls().Nominated, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("removed (-want +got):\n%s", diff)
			}
		})
	}
}

// A nominated pod whose gate isn't opened may wait for long. No memory is kept for it, and none is nominated without a place.
func TestGatedNomination(t *testing.T) {
	f := startNominating(t, Options{})
	pod := fake.Pod("p", 60, gated, fake.Nominated("n1"))
	f.report(pod)
	if f.kept() {
		t.Error("memory is kept for a pod with a gate")
	}
	f.report(fake.Edited(pod, ungated))
	if !f.kept() {
		t.Error("no memory is kept for the nominated pod without a gate")
	}
	f.wantNominated("of pods that are nominated already")
}

// A standby writes nothing, and a former leader doesn't either.
func TestStandbyNominatesNothing(t *testing.T) {
	var s standby
	s.Store(true)
	f := startNominating(t, Options{Leading: s.leading})
	f.report(fake.Pod("p", 60))
	f.wantNominated("of a standby")
	if f.kept() {
		t.Error("memory is kept for a pod that was not nominated")
	}
}

// A nomination whose write got no answer can take effect: then it ends like the others.
func TestNominationWithoutAnswerExpires(t *testing.T) {
	f := startNominating(t, Options{})
	f.server.Answer(fake.Answers{Nominate: errors.New("the connection is gone")})
	pod := fake.Pod("p", 60)
	f.report(pod)
	f.wantNominated("at first", "p=n1")
	f.report(fake.Edited(pod, fake.Nominated("n1")))
	f.clock.Step(2 * nominationLife)
	if got := f.nominator.expired(); len(got) != 1 {
		t.Errorf("%d nominations expire, want 1", len(got))
	}
}
