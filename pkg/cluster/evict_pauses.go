package cluster

import (
	"maps"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// pauses leaves pods out for a time that doubles with each failure. Its user's lock guards it.
type pauses map[gpu.PodUID]pause

type pause struct {
	until  time.Time
	length time.Duration
}

// extend begins a pause, twice as long as the pod's last one, within the bounds.
func (p pauses) extend(uid gpu.PodUID, now time.Time, least, most time.Duration) {
	length := min(max(least, 2*p[uid].length), most)
	p[uid] = pause{until: now.Add(length), length: length}
}

// has reports whether a pause of the pod lasts.
func (p pauses) has(uid gpu.PodUID, now time.Time) bool { return now.Before(p[uid].until) }

// prune forgets the pods that have had no failure for as long as the longest pause lasts.
func (p pauses) prune(now time.Time) {
	maps.DeleteFunc(p, func(_ gpu.PodUID, last pause) bool { return now.Sub(last.until) > evictRest })
}
