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

	"github.com/gpushare/gpushare/test/testbed"
)

// TestRivals: two groups that each fit alone but not together are created pod by pod in turns. One of them runs whole, then
// the other; nobody is left with half of what it needs.
func TestRivals(t *testing.T) {
	bed := testbed.StartForTest(t, testbed.Options{MemoryUnit: "GiB"})
	s := newStage(t, bed, 4, 4, 4, 4)
	const size = 10 // Of 16 cards.
	var took []time.Duration
	random := rand.New(rand.NewPCG(7, 7))
	for round := range form(10, 100) {
		a, b := fmt.Sprintf("a%d", round), fmt.Sprintf("b%d", round)
		start := time.Now()
		turns := append(slices.Repeat([]string{a}, size), slices.Repeat([]string{b}, size)...)
		random.Shuffle(len(turns), func(i, j int) { turns[i], turns[j] = turns[j], turns[i] })
		made := map[string]int{}
		for _, group := range turns {
			s.create(fmt.Sprintf("%s-%d", group, made[group]), card, in(group, size))
			made[group]++
		}
		first := s.awaitWhole(size, a, b)
		s.checkCards()
		s.removeGroup(first)
		second := s.awaitWhole(size, a, b)
		if first == second {
			t.Fatalf("round %d: %s ran twice", round, first)
		}
		s.removeGroup(second)
		s.awaitBound(map[string]int{})
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	t.Logf("%d rounds: half of them took at most %v, the longest %v", len(took),
		took[len(took)/2].Round(time.Millisecond), took[len(took)-1].Round(time.Millisecond))
}

// awaitWhole waits until one of the groups is bound, all of it, and nobody else; and returns it.
func (s *stage) awaitWhole(size int, groups ...string) (whole string) {
	s.Helper()
	s.eventually("one whole group of "+strings.Join(groups, ", ")+" runs, and nobody else", func(ctx context.Context) error {
		counts, err := s.bound(ctx)
		if err != nil {
			return err
		}
		for group, n := range counts {
			if n == size && len(counts) == 1 {
				whole = group
				return nil
			}
		}
		return errors.New(fmt.Sprint(counts, s.waiting(ctx)))
	})
	return whole
}
