package eviction

import (
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/test/fake"
)

// The place of a preemptor of kube-scheduler is kept: b12 is leaving for the pod that is nominated to n1.
func TestPlaceOfPreemptor(t *testing.T) {
	const grace = 30 * time.Second
	nominated := fake.Edited(newFixture(t, nil).pending, fake.Nominated("n1"))
	cleared := fake.Edited(nominated, fake.Nominated(""))
	for name, test := range map[string]struct {
		act func(f *fixture)
		// kept is true if the place is still reserved against a pod of equal priority.
		kept bool
	}{
		"the victim is leaving":     {func(f *fixture) { f.later(grace) }, true},
		"the nomination is removed": {func(f *fixture) { f.report(cleared) }, true},
		"the victim has ended":      {func(f *fixture) { f.report(cleared); f.delete(f.b12); f.later(interval) }, true},
		"the pod doesn't take the place": {func(f *fixture) {
			f.report(cleared)
			f.delete(f.b12)
			f.later(cycle)
			f.later(queue.ArrivalTimeout + 1)
		}, false},
		"the victim stays":                   {func(f *fixture) { f.report(cleared); f.later(grace + 2*time.Minute) }, false},
		"the pod is nominated elsewhere":     {func(f *fixture) { f.report(fake.Edited(nominated, fake.Nominated("n2"))) }, false},
		"the pod is gone":                    {func(f *fixture) { f.delete(nominated) }, false},
		"this replica leads no longer":       {func(f *fixture) { f.report(cleared); f.standby = errors.New("standby"); f.later(interval) }, false},
		"disruption budgets are unavailable": {func(f *fixture) { f.budgetsNotSynced = errLost; f.report(cleared); f.later(grace + 2*time.Minute) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, func(f *fixture) {
				f.pending = nominated
				fake.Terminating(begin.Add(grace))(f.b12)
			}, fake.Node("n2", 16))
			f.KeepOfferedNode(protocol.Pod(nominated), "n1", []string{"n1"}, f.clock.Now())
			test.act(f)
			f.delete(f.b12)
			if kept := !f.fitsFor(9, 9); kept != test.kept {
				t.Errorf("the place is reserved: %t, want %t", kept, test.kept)
			}
			f.wantEvicted()
		})
	}
}

// The pod waits for the CPU of a victim without GPU memory, which the ledger doesn't have. The place is kept as long as the victim is leaving, though
// that takes longer than a pod has for its bind.
func TestVictimWithoutMemory(t *testing.T) {
	const grace = 5 * time.Minute
	for name, test := range map[string]struct {
		meanwhile      func(f *fixture, cpu *corev1.Pod)
		kept, requeued bool
	}{
		"it is leaving": {func(f *fixture, _ *corev1.Pod) { f.later(2 * queue.ArrivalTimeout) }, true, false},
		"it has ended": {func(f *fixture, cpu *corev1.Pod) {
			f.later(2 * queue.ArrivalTimeout)
			f.delete(cpu)
			f.later(interval)
			f.later(queue.ArrivalTimeout)
		}, true, false},
		"the pod doesn't take the place": {func(f *fixture, cpu *corev1.Pod) { f.delete(cpu); f.later(interval); f.later(queue.ArrivalTimeout + 1) }, false, true},
		"it stays":                       {func(f *fixture, _ *corev1.Pod) { f.later(grace + 2*time.Minute) }, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			cpu := fake.Pod("cpu", 0, fake.Bound("n1", 0), fake.Terminating(begin.Add(grace)))
			f := newFixture(t, func(f *fixture) { f.pending = fake.Pod("pending", 4, fake.Priority(9)) }, cpu)
			victims := map[string]preemption.Victims{"n1": {Pods: []gpu.PodUID{"uid-cpu"}}}
			f.Proposed("uid-pending", victims)
			if !f.KeepIfRepeated(protocol.Pod(f.pending), victims) {
				t.Fatal("the victim would be evicted again")
			}
			f.later(interval)
			test.meanwhile(f, cpu)
			if kept := f.reserves(); kept != test.kept || f.requeues > 0 != test.requeued {
				t.Errorf("the place is kept: %t, want %t; %d requeues", kept, test.kept, f.requeues)
			}
		})
	}
}

// A nomination to another node, where no pods are leaving, doesn't end a preemptor. A pod that the watch doesn't show isn't one.
func TestTriedElsewhere(t *testing.T) {
	f := newFixture(t, nil, fake.Node("n2", 16))
	f.startRound()
	f.KeepOfferedNode(protocol.Pod(f.pending), "n2", []string{"n2"}, f.clock.Now())
	f.later(interval)
	if !f.reserves() || !f.VictimsSuffice("uid-pending") {
		t.Error("the place is given up")
	}
	f.report(fake.Edited(f.b12, fake.Terminating(f.clock.Now())))
	f.KeepOfferedNode(protocol.Pod(fake.Pod("unknown", 8, fake.Priority(9))), "n1", []string{"n1"}, f.clock.Now())
	if f.VictimsSuffice("uid-unknown") {
		t.Error("a place is kept for an unknown pod")
	}
}

// A place whose victims kube-scheduler is about to delete is kept by a step between filter and preempt.
func TestStepBeforeTheWatch(t *testing.T) {
	f := newFixture(t, nil)
	f.Proposed("uid-pending", map[string]preemption.Victims{"n1": {Pods: []gpu.PodUID{"uid-b12"}}})
	f.KeepOfferedNode(protocol.Pod(f.pending), "", []string{"n1"}, f.clock.Now())
	f.later(1)
	if !f.VictimsSuffice("uid-pending") {
		t.Error("the victim isn't awaited")
	}
	f.later(cycle)
	if f.reserves() {
		t.Error("the place is kept although the victim stays")
	}
}

// A new leader doesn't know the node on which pods are leaving for a pod whose nomination was cleared. kube-scheduler offers it although the pods
// that are leaving fill it.
func TestTriedWithoutNomination(t *testing.T) {
	for name, test := range map[string]struct {
		memory   int64
		priority int32
		leaving  bool
		awaits   bool
	}{
		"kube-scheduler has seen the end of a victim": {9, 9, true, true},
		"it can have seen none":                       {8, 9, true, false},
		"the pod isn't deleted":                       {9, 9, false, false},
		"the pod that is leaving has its priority":    {9, 2, true, false},
		"there is just enough room then":              {16, 9, true, true},
		"there is too little room then":               {17, 9, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, func(f *fixture) {
				f.pending = fake.Pod("pending", test.memory, fake.Priority(test.priority))
				if test.leaving {
					fake.Terminating(begin.Add(30 * time.Second))(f.b12)
				}
			})
			f.KeepOfferedNode(protocol.Pod(f.pending), "", []string{"n1"}, f.clock.Now())
			if awaits := f.VictimsSuffice("uid-pending"); awaits != test.awaits {
				t.Errorf("the victim is awaited: %t, want %t", awaits, test.awaits)
			}
		})
	}
}

// If kube-scheduler proposed no other victims because of a place, and it was of no use, the pod is requeued.
func TestRequeueAfterFailure(t *testing.T) {
	for name, test := range map[string]struct {
		act      func(f *fixture)
		requeues int
	}{
		"the victim stays":    {func(f *fixture) { f.VictimsSuffice("uid-pending"); f.later(3 * time.Minute) }, 1},
		"nothing was awaited": {func(f *fixture) { f.later(3 * time.Minute) }, 0},
		"the pod gets the card": {func(f *fixture) {
			f.VictimsSuffice("uid-pending")
			f.delete(f.b12)
			f.delete(f.pending)
			f.later(3 * time.Minute)
		}, 0},
		"another pod has taken the card": {func(f *fixture) {
			f.VictimsSuffice("uid-pending")
			f.delete(f.b12)
			f.report(fake.Pod("high", 16, fake.Bound("n1", 1), fake.Priority(10)))
			f.later(interval)
		}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, func(f *fixture) { fake.Terminating(begin.Add(30 * time.Second))(f.b12) })
			f.KeepOfferedNode(protocol.Pod(f.pending), "n1", []string{"n1"}, f.clock.Now())
			test.act(f)
			if f.requeues != test.requeues {
				t.Errorf("%d requeues, want %d", f.requeues, test.requeues)
			}
		})
	}
}
