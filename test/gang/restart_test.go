package gang

import (
	"fmt"
	"testing"

	"github.com/gpushare/gpushare/test/framework"
)

// TestOverlappingRestart starts the next pods of jobs whose last pod still runs. They are bound all together or not at all,
// like those of the first run.
func TestOverlappingRestart(t *testing.T) {
	c := hasty.Start(t)
	job := func(f *fixture, gang, run string) (pods []*framework.PodWrapper) {
		for i := range 4 {
			pod := f.Pod(fmt.Sprintf("%s-%s-%d", gang, run, i), card).Group(gang, 4)
			pods = append(pods, pod.ControlledBy(gang+"-"+run))
		}
		return pods
	}

	t.Run("there is room for three of four", func(t *testing.T) {
		f := newFixture(t, c, 4)
		f.Create(job(f, "train", "old")...)
		f.waitBound(map[string]int{"train": 4})
		f.Delete("train-old-0", "train-old-1", "train-old-2")
		f.Create(job(f, "train", "new")...)
		f.staysPending(4, map[string]int{"train": 1})
		f.DeleteWithGrace("train-old-3", 60)
		f.staysPending(4, map[string]int{})
		f.Delete("train-old-3")
		f.waitBound(map[string]int{"train": 4})
		f.CheckLedger()
	})

	// Four of eight cards go to other pods, so one of the two can run again.
	t.Run("two jobs compete", func(t *testing.T) {
		f := newFixture(t, c, 4, 4)
		f.Create(append(job(f, "a", "old"), job(f, "b", "old")...)...)
		f.waitBound(map[string]int{"a": 4, "b": 4})
		for i := range 3 {
			f.Delete(fmt.Sprintf("a-old-%d", i), fmt.Sprintf("b-old-%d", i))
		}
		for i := range 4 {
			f.Place(f.Pod(fmt.Sprintf("other-%d", i), card))
		}
		a, b := job(f, "a", "new"), job(f, "b", "new")
		for i := range a {
			f.Create(a[i])
			f.Create(b[i])
		}
		f.staysPending(8, map[string]int{"": 4, "a": 1, "b": 1})
		f.Delete("a-old-3", "b-old-3")
		f.waitCounts("one of them is whole", func(counts map[string]int) bool {
			if counts["a"] > 0 && counts["b"] > 0 {
				t.Fatalf("both hold cards: %v", counts)
			}
			return counts["a"]+counts["b"] == 4
		})
		f.CheckLedger()
	})
}
