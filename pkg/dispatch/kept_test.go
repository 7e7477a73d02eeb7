package dispatch

import (
	"fmt"
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
		"before the next pod comes":                  {2, 2, func(f *fixture) { f.run(keptFor - 3*time.Second) }, nil},
		"the next pod comes":                         {2, 2, func(f *fixture) { f.run(5 * time.Second); f.pod("alice/next", 1, age(99)) }, []string{"alice/next"}},
		"it comes late":                              {2, 2, func(f *fixture) { f.run(keptFor) }, []string{"bob/waits"}},
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
			f.tick(keptFor + time.Second)
			want(t, "kept in the end", 0, len(f.kept))
		})
	}
}
