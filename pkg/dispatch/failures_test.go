package dispatch

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// TestNeverBound: pods that are never bound keep the places of one of them for a small part of the time, although a CronJob replaces them by
// other pods. Smaller pods of their namespace run meanwhile, and each waits only until the first one of them has run.
func TestNeverBound(t *testing.T) {
	for name, tc := range map[string]struct {
		// memory returns what the pod of this number requests.
		memory func(n int) gpu.Memory
	}{
		"all alike":            {func(int) gpu.Memory { return 16 }},
		"each of another size": {func(n int) gpu.Memory { return gpu.Memory(64 + n%192) }},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, []gpu.Memory{256, 256, 256, 256}, nil)
			serial, kept, late := 0, 0, 0
			var never []string
			healthy := map[string]time.Time{}
			const hours = 6
			for second := range hours * 3600 {
				if second%(5*60) == 0 {
					f.delete(never...)
					never = nil
					for range 4 {
						serial++
						never = append(never, fmt.Sprint("alice/never-", serial))
						f.pod(never[len(never)-1], tc.memory(serial), func(p *Pod) { p.Created = f.now })
					}
				}
				if second%30 == 0 {
					serial++
					name := fmt.Sprint("alice/small-", serial)
					f.pod(name, 1, func(p *Pod) { p.Created = f.now })
					healthy[name] = f.now
				}
				f.tick(time.Second)
				for _, name := range f.admitted() {
					if strings.Contains(name, "never") {
						if second >= 3600 {
							kept++
						}
						continue
					}
					if f.now.Sub(healthy[name]) > 5*time.Second && second > 3600 {
						late++
					}
					f.bind(name)
					f.delete(name)
				}
			}
			if limit := (hours - 1) * 3600 / 15; kept == 0 || kept > limit {
				t.Errorf("places for %d s in %d hours, want %d at most", kept, hours-1, limit)
			}
			if late > 2 {
				t.Errorf("%d small pods were late", late)
			}
		})
	}
}

// TestFailedGoesBehind: a pod that was not bound in time goes behind another one of its tenant.
func TestFailedGoesBehind(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4}, nil)
	f.pod("alice/stuck", 4)
	f.pod("alice/next", 3, age(1))
	f.tick(0)
	want(t, "first", []string{"alice/stuck"}, f.admitted())
	f.tick(patience)
	f.tick(firstPause)
	want(t, "after its pause", []string{"alice/next"}, f.admitted())
}
