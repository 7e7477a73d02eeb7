package eviction

import (
	"maps"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// pauses holds the current pause of each pod, which doubles with each failure. The lock of its owner guards it.
type pauses map[gpu.PodUID]pause

type pause struct {
	until  time.Time
	length time.Duration
}

// extend begins a pause of the pod, twice as long as its last one, between least and most.
func (p pauses) extend(uid gpu.PodUID, now time.Time, least, most time.Duration) {
	length := min(max(least, 2*p[uid].length), most)
	p[uid] = pause{until: now.Add(length), length: length}
}

func (p pauses) has(uid gpu.PodUID, now time.Time) bool { return now.Before(p[uid].until) }

// prune removes the pods whose last pause ended longer than longestPause ago.
func (p pauses) prune(now time.Time) {
	maps.DeleteFunc(p, func(_ gpu.PodUID, last pause) bool { return now.Sub(last.until) > longestPause })
}
