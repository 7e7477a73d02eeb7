package scheduling

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/sampling"
	"github.com/gpushare/gpushare/test/fake"
)

// nominateFixture is a Scheduler that doesn't run, of a cluster of the nodes n1 to n3 with one card of 100 each. n1 has the label
// "pool: first".
type nominateFixture struct {
	*fixture
	handlers *eventHandlers
	pending  reportedPods
	requeued atomic.Int64
}

// reportedPods is a cache that has the pods that a test reports.
type reportedPods struct {
	clusterCache
	pods map[gpu.PodUID]*clustercache.PodInfo
}

func (c reportedPods) Ready() error { return nil }

func (c reportedPods) PodsOn(node string) (pods []*clustercache.PodInfo) {
	for _, pod := range c.pods {
		if pod.Node == node {
			pods = append(pods, pod)
		}
	}
	return pods
}

func (c reportedPods) PendingPod(uid gpu.PodUID) (*clustercache.PodInfo, bool) {
	pod, known := c.pods[uid]
	return pod, known
}

func startNominating(t *testing.T, o Options) *nominateFixture {
	o.SampleSize = sampledOptions.SampleSize
	if o.newGroup == nil {
		o.newGroup = func(int) background.Group { return before{func() {}} }
	}
	f := &nominateFixture{fixture: newFixture(t, o)}
	f.handlers = (*eventHandlers)(f.Scheduler)
	f.pending = reportedPods{f.cache, map[gpu.PodUID]*clustercache.PodInfo{}}
	for _, name := range []string{"n1", "n2", "n3"} {
		node := fake.Node(name, 100)
		if name == "n1" {
			node.Labels = map[string]string{"pool": "first"}
		}
		f.handlers.NodeUpdated(node)
	}
	f.nominator.Cache, f.nominator.Requeue = f.pending, func(string) { f.requeued.Add(1) }
	return f
}

// report makes the watch report the pods.
func (f *nominateFixture) report(pods ...*corev1.Pod) {
	for _, pod := range pods {
		info := clustercache.NewPodInfo(pod)
		f.pending.pods[info.UID] = info
		f.handlers.PodUpdated(nil, info)
	}
}

// request reports pods for which a sample has no room.
func (f *nominateFixture) request(pods ...*corev1.Pod) {
	f.report(pods...)
	for _, pod := range pods {
		f.nominator.Request(clustercache.NewPodInfo(pod), []string{"n4", "n5"})
	}
}

// step nominates what is due, and returns the nominations that were written since the start.
func (f *nominateFixture) step() []string {
	f.clock.Step(2 * sampling.TickInterval)
	f.nominator.Tick(f.t.Context())
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

// kept reports whether the memory of n1 is kept for the nominated pod.
func (f *nominateFixture) kept() bool { return !f.fits(gpu.Pod{UID: "other", Request: 60}, "n1") }

// Each pod is nominated to a node that it may use and where those before it leave room, once. The pods are requeued: also one for which
// no node has room, and which isn't nominated any more.
func TestNominate(t *testing.T) {
	f := startNominating(t, Options{})
	a, b := fake.Pod("a", 60), fake.Pod("b", 60, func(pod *corev1.Pod) { pod.Spec.NodeSelector = map[string]string{"pool": "first"} })
	c, d := fake.Pod("c", 60), fake.Pod("d", 60)
	f.request(b, d, c, a)
	f.wantNominated("at first", "a=n1", "c=n2", "d=n3")
	if got := f.requeued.Load(); got != 4 {
		t.Errorf("%d requeues, want 4", got)
	}
	f.report(a, b, c, d)
	f.wantNominated("while the watch shows none", "a=n1", "c=n2", "d=n3")
	for _, node := range []string{"n1", "n2"} {
		if got := f.nominator.Nominated(gpu.PodUID(a.UID), node); got != (node == "n1") {
			t.Errorf("pod a is nominated to %s: %t", node, got)
		}
	}
}

// A pod to which fair sharing has granted a place is nominated to that.
func TestNominateToPlace(t *testing.T) {
	f := startNominating(t, Options{})
	pod := fake.Pod("p", 60)
	if _, err := f.ledger.Reserve("n2", protocol.Pod(pod), placement.Binpack, f.clock.Now()); err != nil {
		t.Fatal(err)
	}
	f.request(pod)
	f.wantNominated("of a pod with a place", "p=n2")
}

// As for kube-scheduler, the CPU of nodes is free for a pod of higher priority than the pods that are nominated to them.
func TestNominateBesideNominated(t *testing.T) {
	for priority, want := range map[int32][]string{0: nil, 1: {"p=n1"}} {
		f := startNominating(t, Options{})
		for _, name := range []string{"n1", "n2", "n3"} {
			node := fake.Node(name, 100)
			node.Status.Allocatable[corev1.ResourceCPU] = resource.MustParse("4")
			f.handlers.NodeUpdated(node)
		}
		pod := fake.Pod("p", 10, fake.CPU(4), fake.Priority(priority))
		f.request(pod)
		for _, name := range []string{"n1", "n2", "n3"} {
			f.report(fake.Pod("on-"+name, 10, fake.CPU(4), fake.Nominated(name)))
		}
		f.wantNominated(fmt.Sprintf("of a pod of priority %d", priority), want...)
	}
}

// Of two pods of one search that need the same CPU, the one with the higher priority gets it.
func TestNominateByPriority(t *testing.T) {
	f := startNominating(t, Options{})
	for _, name := range []string{"n1", "n2", "n3"} {
		node := fake.Node(name, 100)
		node.Status.Allocatable[corev1.ResourceCPU] = resource.MustParse(map[string]string{"n1": "1", "n2": "1", "n3": "4"}[name])
		f.handlers.NodeUpdated(node)
	}
	f.request(fake.Pod("a", 10, fake.CPU(4)), fake.Pod("b", 10, fake.CPU(4), fake.Priority(1)))
	f.wantNominated("of both pods", "b=n3")
}

func TestNominationOutcomes(t *testing.T) {
	failed := errors.New("the connection is gone")
	for name, test := range map[string]struct {
		answer error
		then   func(f *nominateFixture, pod *corev1.Pod)
		// kept is whether the memory is still kept for the pod, and again whether another pod is nominated next.
		kept, again bool
		result      reasons.Result
	}{
		"written": {kept: true, again: true, result: reasons.ResultMade},
		"the watch reports another change of the pod first": {kept: true, again: true, result: reasons.ResultMade,
			then: func(f *nominateFixture, pod *corev1.Pod) { f.report(pod) }},
		"the watch shows it": {kept: true, again: true, result: reasons.ResultMade,
			then: func(f *nominateFixture, pod *corev1.Pod) { f.report(fake.Edited(pod, fake.Nominated("n1"))) }},
		"kube-scheduler nominates it to another node": {again: true, result: reasons.ResultMade,
			then: func(f *nominateFixture, pod *corev1.Pod) { f.report(fake.Edited(pod, fake.Nominated("n3"))) }},
		"kube-scheduler removes it": {again: true, result: reasons.ResultMade,
			then: func(f *nominateFixture, pod *corev1.Pod) {
				f.report(fake.Edited(pod, fake.Nominated("n1")), pod)
			}},
		"the watch never shows it": {again: true, result: reasons.ResultMade,
			then: func(f *nominateFixture, _ *corev1.Pod) { f.clock.Step(2 * f.nominator.AnswerLost) }},
		"the pod was deleted": {again: true, result: reasons.ResultMade,
			then: func(f *nominateFixture, pod *corev1.Pod) { f.handlers.PodDeleted(clustercache.NewPodInfo(pod)) }},
		"the pod has changed": {answer: apierrors.NewConflict(fake.PodResource, "p", nil), again: true, result: reasons.ResultConflict},
		"no answer":           {answer: failed, result: reasons.ResultFailed},
	} {
		t.Run(name, func(t *testing.T) {
			f := startNominating(t, Options{})
			f.server.Answer(fake.Answers{Nominate: test.answer})
			pod := fake.Pod("p", 60)
			f.request(pod)
			f.wantNominated("at first", "p=n1")
			if test.then != nil {
				test.then(f, pod)
			}
			f.nominator.Tick(t.Context())
			if f.kept() != test.kept {
				t.Errorf("memory is kept for the pod: %t, want %t", f.kept(), test.kept)
			}
			if f.observer.Count("nomination "+string(test.result)) != 1 {
				t.Errorf("counted %v, want one nomination %s", f.observer.Counts(), test.result)
			}
			f.server.Answer(fake.Answers{})
			f.request(fake.Pod("next", 60))
			if got := slices.ContainsFunc(f.step(), func(made string) bool { return strings.HasPrefix(made, "next") }); got != test.again {
				t.Errorf("the next pod is nominated: %t, want %t", got, test.again)
			}
		})
	}
}

// A nomination that leads nowhere is removed after a while, but not one that kube-scheduler has made.
func TestExpiredNomination(t *testing.T) {
	for name, test := range map[string]struct {
		requested bool
		reported  []*corev1.Pod
		want      []string
	}{
		"the pod is still pending": {true, []*corev1.Pod{fake.Pod("p", 60, fake.Nominated("n1"))}, []string{"p=", "p=n1"}},
		"the pod has become a member of a group": {true, []*corev1.Pod{fake.Pod("p", 60, fake.Nominated("n1")), fake.Pod("p", 60, fake.Nominated("n1"), func(pod *corev1.Pod) {
			pod.Annotations = map[string]string{protocol.AnnotationGroupName: "g", protocol.AnnotationGroupSize: "2"}
		})}, []string{"p=", "p=n1"}},
		"a pod of lower priority is leaving the node": {true, []*corev1.Pod{
			fake.Pod("p", 60, fake.Nominated("n1")), fake.Pod("low", 10, fake.Bound("n1", 0), fake.Priority(-1), fake.Terminating(begin.Add(time.Hour))),
		}, []string{"p=n1"}},
		"kube-scheduler has removed it":                {true, []*corev1.Pod{fake.Pod("p", 60, fake.Nominated("n1")), fake.Pod("p", 60)}, []string{"p=n1"}},
		"kube-scheduler has moved it to another node":  {true, []*corev1.Pod{fake.Pod("p", 60, fake.Nominated("n1")), fake.Pod("p", 60, fake.Nominated("n2"))}, []string{"p=n1"}},
		"kube-scheduler has nominated a pod by itself": {false, []*corev1.Pod{fake.Pod("p", 60, fake.Nominated("n1"))}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			f := startNominating(t, Options{})
			if test.requested {
				f.request(fake.Pod("p", 60))
				f.wantNominated("at first", "p=n1")
			}
			f.report(test.reported...)
			f.clock.Step(2 * queue.ArrivalTimeout)
			f.wantNominated("and removed", test.want...)
		})
	}
}

// No memory is kept for a nominated pod with a gate: it may wait for long.
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
}

// before runs functions at once, each after another one.
type before struct{ first func() }

func (g before) Go(run func() error) {
	g.first()
	_ = run()
}

func (before) Wait() error { return nil }

// A standby writes nothing, and a former leader doesn't either.
func TestStandbyNominatesNothing(t *testing.T) {
	var s standby
	afterChoice := func(int) background.Group { return before{func() { s.Store(true) }} }
	f := startNominating(t, Options{Leading: s.leading, newGroup: afterChoice})
	f.request(fake.Pod("p", 60))
	f.wantNominated("of a former leader")
	if f.kept() {
		t.Error("memory is kept for a pod that was not nominated")
	}
	f.request(fake.Pod("q", 60))
	f.wantNominated("of a standby")
}

// A nomination whose write got no answer can take effect: then it ends like the others.
func TestNominationWithoutAnswerExpires(t *testing.T) {
	f := startNominating(t, Options{})
	f.server.Answer(fake.Answers{Nominate: errors.New("the connection is gone")})
	pod := fake.Pod("p", 60)
	f.request(pod)
	f.wantNominated("at first", "p=n1")
	f.report(fake.Edited(pod, fake.Nominated("n1")))
	f.clock.Step(2 * queue.ArrivalTimeout)
	f.server.Answer(fake.Answers{})
	f.wantNominated("and removed", "p=", "p=n1")
}
