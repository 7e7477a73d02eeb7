package gang

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// TestAllOrNothing is the case that gangs are made for: a hundred pods of a card each, and ninety-nine free cards.
func TestAllOrNothing(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB"})
	f := newFixture(t, bed, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4)

	f.create("single", card)
	f.awaitBound(map[string]int{"": 1})

	f.createMembers("qj-1", 100, 0, 60, card)
	f.awaitRejected("qj-1", 60, "members exist")
	f.createMembers("qj-1", 100, 60, 100, card)
	f.awaitRejected("qj-1", 100, "no room for all members at once")
	f.awaitBound(map[string]int{"": 1})

	start := time.Now()
	for _, name := range []string{"other-0", "other-1", "other-2"} {
		f.create(name, card)
	}
	f.awaitBound(map[string]int{"": 4})
	t.Logf("three single pods were bound within %v", time.Since(start).Round(time.Millisecond))
	f.deletePods("other-0", "other-1", "other-2")
	f.awaitBound(map[string]int{"": 1})

	start = time.Now()
	f.deletePods("single")
	f.awaitBound(map[string]int{"qj-1": 100})
	t.Logf("all 100 were bound %v after the last card was freed", time.Since(start).Round(time.Millisecond))
	f.checkCards()
}

// TestMembers covers replaced, surplus and invalid members.
func TestMembers(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB"})
	f := newFixture(t, bed, 2, 2)

	// A deleted member is replaced although only one card is free.
	f.createGang("job", 3, card)
	f.awaitBound(map[string]int{"job": 3})
	f.create("single", card)
	f.awaitBound(map[string]int{"job": 3, "": 1})
	f.deletePods("job-1")
	f.createMembers("job", 3, 1, 2, card)
	f.awaitBound(map[string]int{"job": 3, "": 1})
	// The same with an extender that was started after the gang was bound.
	must(t, bed.Extender.Kill())
	must(t, bed.Extender.Start(t.Context()))
	f.deletePods("job-0")
	f.createMembers("job", 3, 0, 1, card)
	f.awaitBound(map[string]int{"job": 3, "": 1})
	// A surplus member is bound when there is room.
	f.createMembers("job", 3, 3, 4, card)
	f.awaitRejected("job", 1, "Insufficient")
	f.deletePods("single")
	f.awaitBound(map[string]int{"job": 4})
	f.deleteGang("job")
	f.awaitBound(map[string]int{})

	// Members that disagree on the size, annotations that contradict labels, and a launcher that asks for no cards.
	f.create("x-0", card, inGang("x", 2))
	f.create("x-1", card, inGang("x", 3))
	f.awaitRejected("x", 2, "the members disagree on the group's size")
	f.create("y-0", card, inGangByLabels("y", 1), func(pod *corev1.Pod) {
		pod.Annotations = map[string]string{protocol.AnnotationGroupName: "z", protocol.AnnotationGroupSize: "1"}
	})
	f.awaitRejected("y", 1, "annotations and labels disagree")
	f.create("mpi-launcher", 0, inGangByLabels("mpi", 2))
	f.create("mpi-worker", card, inGangByLabels("mpi", 2))
	f.awaitRejected("mpi", 1, "1 of 2 members exist")
	f.awaitEvent("mpi-worker", "GangIncomplete", "1 ask for none")
	f.awaitEvent("x-0", "GangInvalid", "disagree")
	f.awaitEvent("y-0", "GangInvalid", "disagree")
	f.deletePods("x-1")
	f.createMembers("x", 2, 1, 2, card)
	f.create("mpi-worker-1", card, inGangByLabels("mpi", 2))
	f.awaitBound(map[string]int{"x": 2, "mpi": 3}) // The launcher isn't held.
	f.checkCards()
}
