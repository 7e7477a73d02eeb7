package queue

import (
	"maps"
	"time"
)

// The times that several packages share. Others are options that users know, such as the patience.
const (
	// ArrivalTimeout is how long memory that is free is kept for an item whose pods don't come: longer than kube-scheduler's longest back-off by default
	// (podMaxBackoffSeconds), also if many pods wait. Then something unknown keeps them away. It is also for how long evictions are awaited after
	// the deletion timestamps of the victims.
	ArrivalTimeout = time.Minute
	// Retry is the time between two attempts of what failed and can succeed at any moment: a write that was rejected, a choice of nodes that are full.
	// It is the first pause of most Pauses.
	Retry = 5 * time.Second
	// LongestPause is the longest pause after failures, but for reclaims that were of no use (package dispatch).
	LongestPause = 10 * time.Minute
	// KubeSchedulerRetries is the time in which kube-scheduler retries each rejected pod by itself (pkg/scheduler/backend/queue,
	// DefaultPodMaxInUnschedulablePodsDuration, which it checks twice a minute).
	KubeSchedulerRetries = 6 * time.Minute
)

// Pauses holds the pause of each key after its latest failure. It doubles with each failure.
type Pauses[K comparable] map[K]pause

// pause is a time in which nothing is tried.
type pause struct {
	until  time.Time
	length time.Duration
}

// began returns when the pause began, with the latest failure.
func (p pause) began() time.Time { return p.until.Add(-p.length) }

// next returns the pause after another failure, twice as long, between least and most.
func (p pause) next(now time.Time, least, most time.Duration) pause {
	length := min(max(least, 2*p.length), most)
	return pause{until: now.Add(length), length: length}
}

// Extend begins a pause, twice as long as the latest one of the key, between least and most.
func (p Pauses[K]) Extend(key K, now time.Time, least, most time.Duration) {
	p[key] = p[key].next(now, least, most)
}

// Has reports whether the key pauses.
func (p Pauses[K]) Has(key K, now time.Time) bool { return now.Before(p[key].until) }

// Prune forgets pauses that ended longer ago than most, the longest of them.
func (p Pauses[K]) Prune(now time.Time, most time.Duration) {
	maps.DeleteFunc(p, func(_ K, last pause) bool { return now.Sub(last.until) > most })
}
