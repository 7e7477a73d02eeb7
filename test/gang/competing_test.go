package gang

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpushare/gpushare/test/framework"
)

// TestCompetingGangs: two gangs that fit one at a time are created alternately pod by pod. One of them runs completely,
// then the other one.
func TestCompetingGangs(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB"})
	f := newFixture(t, bed, 4, 4, 4, 4)
	const size = 10 // Of 16 cards.
	var took []time.Duration
	random := rand.New(rand.NewPCG(7, 7))
	for round := range shortOrLong(10, 100) {
		a, b := fmt.Sprintf("a%d", round), fmt.Sprintf("b%d", round)
		start := time.Now()
		turns := append(slices.Repeat([]string{a}, size), slices.Repeat([]string{b}, size)...)
		random.Shuffle(len(turns), func(i, j int) { turns[i], turns[j] = turns[j], turns[i] })
		made := map[string]int{}
		for _, gang := range turns {
			f.create(fmt.Sprintf("%s-%d", gang, made[gang]), card, inGang(gang, size))
			made[gang]++
		}
		first := f.awaitOneWhole(size, a, b)
		f.checkCards()
		f.deleteGang(first)
		second := f.awaitOneWhole(size, a, b)
		if first == second {
			t.Fatalf("round %d: %s ran twice", round, first)
		}
		f.deleteGang(second)
		f.awaitBound(map[string]int{})
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	t.Logf("%d rounds: half of them took at most %v, the longest %v", len(took),
		took[len(took)/2].Round(time.Millisecond), took[len(took)-1].Round(time.Millisecond))
}

// awaitOneWhole waits until one of the gangs is whole and no other pod is bound, and returns that gang.
func (f *fixture) awaitOneWhole(size int, gangs ...string) (whole string) {
	f.Helper()
	f.eventually("one gang of "+strings.Join(gangs, ", ")+" is whole, and no other pod is bound", func(ctx context.Context) error {
		counts, err := f.bound(ctx)
		if err != nil {
			return err
		}
		for gang, n := range counts {
			if n == size && len(counts) == 1 {
				whole = gang
				return nil
			}
		}
		return errors.New(fmt.Sprint(counts, f.pendingReasons(ctx)))
	})
	return whole
}
