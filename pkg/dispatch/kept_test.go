package dispatch

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// A pod of alice ends while bob's pods wait. Its controller creates the next one some seconds later.
func TestMemoryKeptForNextPod(t *testing.T) {
	for name, tc := range map[string]struct {
		alice, bob int // What they have, in pods of 1. One of alice's ends.
		scene      func(f *fixture)
		want       []string
	}{
		"before the next pod comes":                  {2, 2, func(f *fixture) { f.run(keepFor - 3*time.Second) }, nil},
		"the next pod comes":                         {2, 2, func(f *fixture) { f.run(5 * time.Second); f.pod("alice/next", 1, age(99)) }, []string{"alice/next"}},
		"it comes late":                              {2, 2, func(f *fixture) { f.run(keepFor) }, []string{"bob/waits"}},
		"it needs more":                              {2, 2, func(f *fixture) { f.pod("alice/next", 2, age(99)); f.run(time.Second) }, []string{"bob/waits"}},
		"alice would still have as much as bob then": {3, 1, func(*fixture) {}, []string{"bob/waits"}},
		"another leader doesn't know of it":          {2, 2, func(f *fixture) { f.StopLeading(); f.StartLeading() }, []string{"bob/waits"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, []gpu.Memory{4}, nil)
			for i := range tc.alice {
				f.pod(fmt.Sprint("alice/", i), 1, on("n0"))
			}
			for i := range tc.bob {
				f.pod(fmt.Sprint("bob/", i), 1, on("n0"))
			}
			f.pod("bob/waits", 1)
			f.tick(time.Second)
			f.delete("alice/0")
			f.tick(time.Second)
			tc.scene(f)
			f.tick(time.Second)
			want(t, "admitted", tc.want, f.admitted())
			f.tick(keepFor + time.Second)
			want(t, "kept in the end", 0, len(f.kept))
		})
	}
}

// Alice runs jobs whose pods of two minutes are replaced some seconds after they have ended, beside bob's endless pods. She keeps her share, and pods
// are evicted only until she has it. Without kept memory, bob's pods take what each of alice's pods leaves, and are evicted again some minutes later.
func TestShortPodsBesideEndlessOnes(t *testing.T) {
	const cards, hours = 8, 6
	f := newFixture(t, []gpu.Memory{cards / 2, cards / 2}, func(o *Options) { o.ReclaimAfter, o.MinRuntime = 5*time.Minute, 10*time.Minute })
	ends, comes, serial, bobs, has := map[string]time.Time{}, []time.Time{}, 0, 0, gpu.Memory(0)
	for range cards / 2 {
		comes = append(comes, begin.Add(time.Hour))
	}
	for second := range hours * 3600 {
		for name, end := range ends {
			if !f.now.Before(end) {
				delete(ends, name)
				f.delete(name)
				comes = append(comes, f.now.Add(time.Duration(1+serial%4)*time.Second))
			}
		}
		comes = slices.DeleteFunc(comes, func(at time.Time) bool {
			if f.now.Before(at) {
				return false
			}
			serial++
			f.pod(fmt.Sprint("alice/", serial), 1, func(p *Pod) { p.Created = f.now })
			return true
		})
		for ; bobs < 2*cards+len(f.evicted); bobs++ {
			f.pod(fmt.Sprint("bob/", bobs), 1, age(bobs))
		}
		f.tick(time.Second)
		f.finish()
		for _, name := range f.admitted() {
			f.bind(name)
			if f.pods[name].Namespace == "alice" {
				ends[name] = f.now.Add(2 * time.Minute)
			}
		}
		if second >= 2*3600 {
			has += gpu.Memory(len(ends))
		}
	}
	part := float64(has) / float64((hours-2)*3600*cards/2)
	t.Logf("alice has %.0f%% of her share, %d evictions in %d hours", 100*part, len(f.evicted), hours)
	if part < 0.95 || len(f.evicted) > cards {
		t.Errorf("alice has %.0f%% of her share, %d evictions in %d hours", 100*part, len(f.evicted), hours)
	}
}
