package scheduling

import (
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/fake"
)

// TestLeavingPodIsForOthers: what a pod of lower priority leaves isn't kept for a member of a group that can't be placed now.
func TestLeavingPodIsForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		low := func(name string, card int, edits ...fake.PodEdit) *corev1.Pod {
			return fake.Pod(name, 16, append(edits, fake.Bound("n1", card))...)
		}
		stays, leaves, first := low("stays", 0), low("leaves", 1, fake.Terminating(begin.Add(time.Minute))), member(gangSize, 0, fake.Priority(9))
		g := startGroups(t, GangOptions{}, stays, leaves, first)
		g.filter(first, "n1")
		if g.preemptors.TryWait(gpu.PodUID(first.UID)) {
			t.Error("the card is kept for one member of three")
		}
	})
}
