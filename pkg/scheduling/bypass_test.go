package scheduling

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// A pod that the watch shows pending, and then bound without the extender, is counted and gets an Event.
func TestBoundWithoutExtender(t *testing.T) {
	pending := fake.Pod("p", 40)
	bypassed := fake.Edited(pending, fake.BoundWithoutExtender("n1"))
	for name, test := range map[string]struct {
		states []*corev1.Pod
		want   int
	}{
		"pending, then bound without the extender":              {[]*corev1.Pod{pending, bypassed}, 1},
		"it is counted once":                                    {[]*corev1.Pod{pending, bypassed, fake.Edited(bypassed, fake.Phase(corev1.PodRunning))}, 1},
		"bound before the watch began":                          {[]*corev1.Pod{bypassed, fake.Edited(bypassed, fake.Phase(corev1.PodRunning))}, 0},
		"bound by the extender":                                 {[]*corev1.Pod{pending, fake.Edited(pending, fake.Bound("n1", 0))}, 0},
		"another pod of that name":                              {[]*corev1.Pod{pending, fake.Edited(bypassed, func(pod *corev1.Pod) { pod.UID = "another" })}, 0},
		"ended meanwhile, as if the watch had been interrupted": {[]*corev1.Pod{pending, fake.Edited(bypassed, fake.Phase(corev1.PodFailed))}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			f := newHandlersFixture(t, fake.Node("n1", 100))
			f.report(test.states...)
			if got := f.observer.Count("bound without the extender"); got != test.want || len(f.events) != test.want {
				t.Errorf("%d are counted, %d Events; want %d", got, len(f.events), test.want)
			}
		})
	}
}

// Of many such pods all are counted, and few get an Event. Only the leader writes Events.
func TestBoundWithoutExtenderEvents(t *testing.T) {
	f, replica := newHandlersFixture(t, fake.Node("n1", 100)), &standby{}
	f.Leading = replica.leading
	const pods = 3 * bypassBurst
	bind := func(round string) {
		for i := range pods {
			pending := fake.Pod(fmt.Sprintf("%s%02d", round, i), 40)
			f.report(pending, fake.Edited(pending, fake.BoundWithoutExtender("n1")))
		}
	}
	replica.Store(true)
	bind("standby")
	if len(f.events) > 0 {
		t.Errorf("a standby wrote %d Events", len(f.events))
	}
	replica.Store(false)
	bind("leader")
	f.clock.Step(bypassPause)
	bind("later")
	if got := f.observer.Count("bound without the extender"); got != 3*pods || len(f.events) != bypassBurst+1 {
		t.Errorf("%d are counted, %d Events; want %d and %d", got, len(f.events), 3*pods, bypassBurst+1)
	}
	want := "Warning GPUExtenderNotCalled The pod was bound to node n1 without the extender, so no GPU card was chosen for it: " +
		"configure its scheduler to call the extender"
	check.Equal(t, "the Event", want, <-f.events)
}
