package gang

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// TestNativeRandom runs random cycles, failing binds, deletions, changes of PodGroups, and changes of the leader, for native groups and
// groups by annotations on the same cards. Afterwards nothing is reserved, and every group waits or was bound whole.
func TestNativeRandom(t *testing.T) {
	const size = 3
	for seed := range uint64(60) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			s, random := newNative(t), rand.New(rand.NewPCG(seed, 7))
			groups := []string{"a", "b", "c"}
			for _, group := range groups {
				s.setSize(group, size)
				s.add(group, size, 16, "t")
			}
			s.createMany(size, "by-annotations", size, 16, "t")
			s.create("", 0, 16, "")
			for range 80 {
				s.randomStep(random, groups[random.IntN(len(groups))], size)
			}
			for _, group := range groups {
				s.setSize(group, size)
			}
			for range 60 { // Everything is well again.
				for _, group := range groups {
					s.cycle(group, size)
				}
				s.tryOthers()
				s.bindGranted()
				s.advance(10 * time.Second)
			}
			if len(s.held) > 0 || s.reserved() > 0 {
				t.Errorf("%d binds are held, %v is reserved", len(s.held), s.reserved())
			}
			for phase, n := range s.manager.Phases() { // A group that ran can wait for the replacement of a deleted pod.
				if n > 0 && phase != PhasePending && phase != PhaseRunning {
					t.Errorf("%d groups are %v: %v", n, phase, s.memberCounts())
				}
			}
		})
	}
}

// tryOthers tries the pods of no native group.
func (s *native) tryOthers() {
	for _, p := range s.existing() {
		if !p.Gang.Native && p.Node == "" && !s.inBind(p) {
			s.try(p)
		}
	}
	s.evict()
}

// evict deletes the pods that the Manager evicts. Others replace them.
func (s *native) evict() {
	s.collectEffects()
	for _, uid := range s.evictions {
		if p := s.pods[uid]; p != nil {
			s.delete(p)
			s.fixture.add(Member{Pod: gpu.Pod{Request: p.Request}, Gang: p.Gang, Size: p.Size, Template: p.Template, PodGroup: p.PodGroup})
		}
	}
	s.evictions = nil
}

// randomStep does something that can happen at any time.
func (s *native) randomStep(random *rand.Rand, group string, size int) {
	pods := s.existing()
	p := pods[random.IntN(len(pods))]
	switch random.IntN(12) {
	case 0, 1, 2, 3:
		if random.IntN(3) == 0 {
			s.cycle(group, size, p.UID)
		} else {
			s.cycle(group, size)
		}
	case 4:
		s.tryOthers()
	case 5, 6:
		if len(s.granted) > 0 {
			bind := s.granted[0]
			s.granted = s.granted[1:]
			s.bind(bind, random.IntN(4) == 0)
		}
	case 7:
		if p.Gang.Native && !s.inBind(p) {
			s.delete(p)
			s.add(p.Gang.Name, 1, 16, "t")
		}
	case 8:
		s.setSize(group, size-1+random.IntN(2))
	case 9:
		s.manager.RemovePodGroup(nativeKey(group), s.now)
	case 10:
		if len(s.granted) == 0 {
			s.manager.StopLeading(s.now)
			s.collectDecided()
			s.manager.StartLeading(s.now)
		}
	}
	s.evict()
	s.advance(time.Duration(random.IntN(1000)) * time.Millisecond)
}
