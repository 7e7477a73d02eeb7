package gang

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/testbed"
)

// TestTheWholeGroupOrNone is the story that asked for groups: a hundred pods of a card each, and ninety-nine cards.
func TestTheWholeGroupOrNone(t *testing.T) {
	bed := testbed.StartForTest(t, testbed.Options{MemoryUnit: "GiB"})
	s := newStage(t, bed, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4)

	s.create("single", card)
	s.awaitBound(map[string]int{"": 1})

	s.createMembers("qj-1", 100, 0, 60, card)
	s.refused("qj-1", 60, "members exist")
	s.createMembers("qj-1", 100, 60, 100, card)
	s.refused("qj-1", 100, "no room for all members at once")
	s.awaitBound(map[string]int{"": 1})

	start := time.Now()
	for _, name := range []string{"other-0", "other-1", "other-2"} {
		s.create(name, card)
	}
	s.awaitBound(map[string]int{"": 4})
	t.Logf("three others ran on within %v", time.Since(start).Round(time.Millisecond))
	s.remove("other-0", "other-1", "other-2")
	s.awaitBound(map[string]int{"": 1})

	start = time.Now()
	s.remove("single")
	s.awaitBound(map[string]int{"qj-1": 100})
	t.Logf("all 100 were bound %v after the last card came free", time.Since(start).Round(time.Millisecond))
	s.checkCards()
}

// TestMembers plays what can be the matter with single members.
func TestMembers(t *testing.T) {
	bed := testbed.StartForTest(t, testbed.Options{MemoryUnit: "GiB"})
	s := newStage(t, bed, 2, 2)

	// A member that was lost is replaced while there is room for one card only.
	s.createGroup("job", 3, card)
	s.awaitBound(map[string]int{"job": 3})
	s.create("single", card)
	s.awaitBound(map[string]int{"job": 3, "": 1})
	s.remove("job-1")
	s.createMembers("job", 3, 1, 2, card)
	s.awaitBound(map[string]int{"job": 3, "": 1})
	// And so is it by an extender that was started since.
	must(t, bed.Extender.Kill())
	must(t, bed.Extender.Start(t.Context()))
	s.remove("job-0")
	s.createMembers("job", 3, 0, 1, card)
	s.awaitBound(map[string]int{"job": 3, "": 1})
	// Whoever is one too many joins when there is room.
	s.createMembers("job", 3, 3, 4, card)
	s.refused("job", 1, "Insufficient")
	s.remove("single")
	s.awaitBound(map[string]int{"job": 4})
	s.removeGroup("job")
	s.awaitBound(map[string]int{})

	// Members that disagree, annotations against labels, and a launcher that asks for no card.
	s.create("x-0", card, in("x", 2))
	s.create("x-1", card, in("x", 3))
	s.refused("x", 2, "the members disagree on the group's size")
	s.create("y-0", card, labelled("y", 1), func(pod *corev1.Pod) {
		pod.Annotations = map[string]string{protocol.AnnotationGroupName: "z", protocol.AnnotationGroupSize: "1"}
	})
	s.refused("y", 1, "annotations and labels disagree")
	s.create("mpi-launcher", 0, labelled("mpi", 2))
	s.create("mpi-worker", card, labelled("mpi", 2))
	s.refused("mpi", 1, "1 of 2 members exist")
	s.event("mpi-worker", "GangIncomplete", "1 ask for none")
	s.event("x-0", "GangInvalid", "disagree")
	s.event("y-0", "GangInvalid", "disagree")
	s.remove("x-1")
	s.createMembers("x", 2, 1, 2, card)
	s.create("mpi-worker-1", card, labelled("mpi", 2))
	s.awaitBound(map[string]int{"x": 2, "mpi": 3}) // The launcher never waited for anybody.
	s.checkCards()
}
