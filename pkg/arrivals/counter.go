package arrivals

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"sync"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/placement"
)

const (
	// halfLife is the age of a pod at which it counts half as much as a new one.
	halfLife = 24 * time.Hour
	// maxPerOwner is how many new pods of one shape and one owner count at most, and how many that wait, so that neither retries nor one huge
	// Deployment are mistaken for what comes.
	maxPerOwner = 20
	// maxSources is how many sources are kept, the latest ones, and maxAge how much older than the latest pod they can be.
	maxSources = 1 << 14
	maxAge     = 7 * halfLife
	// assumed is how many pods are counted from the start as if each of them had been placed and had ended. With fewer, the first pods of a new
	// cluster are spread over its nodes, and those that run for long keep large pods from them. With more, a small cluster that is filled once holds
	// less (test/packing).
	assumed = 5
)

// Counter counts pods by shape. The age of pods is counted from their creation, not from when they are seen, so replicas and a restarted process
// agree about the same pods, in whatever order they see them. Its methods are safe for concurrent use; mu guards the fields.
type Counter struct {
	mu      sync.Mutex
	sources map[source]count
	// waiting is how many pods of each source wait for room.
	waiting map[source]int
	// latest is the latest creation of a pod, seen the number of pods.
	latest time.Time
	seen   int
	// placed and ended are how many pods with GPU memory were placed, and ended, since the Counter began.
	placed, ended int
}

// source is one owner's pods of one shape.
type source struct {
	shape placement.Shape
	owner unique.Handle[string]
}

// count is a number of pods, each of which counts by its age at that time.
type count struct {
	pods float64
	at   time.Time
}

// NewCounter returns a Counter that has seen no pod.
func NewCounter() *Counter {
	return &Counter{sources: map[source]count{}, waiting: map[source]int{}}
}

// Add counts a pod, which must not have been counted before. The shape of a pod that asks for no GPU memory has no cards; it isn't kept. owner
// tells controllers apart, of which each counts only up to a limit. Add reports whether enough has changed since the last time that Kinds should
// be asked again, see due.
func (c *Counter) Add(shape placement.Shape, owner unique.Handle[string], created time.Time) (changed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if shape.Cards > 0 {
		from := source{shape, owner}
		c.sources[from] = c.sources[from].with(created)
		if created.After(c.latest) {
			c.latest = created
		}
	}
	c.seen++
	return due(c.seen)
}

// due reports whether it is time for a new outlook after that many pods: after 20, 50, and each 200.
func due(pods int) bool { return pods == 20 || pods == 50 || pods%200 == 0 }

// Wait counts a pod with GPU memory that found no room: change is 1 if it begins to wait for some, and -1 if it waits no more.
func (c *Counter) Wait(shape placement.Shape, owner unique.Handle[string], change int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	from := source{shape, owner}
	if c.waiting[from] += change; c.waiting[from] <= 0 {
		delete(c.waiting, from)
	}
}

// Place counts a pod with GPU memory that gets its node now. One that had it when the Counter began must not be counted: those that were placed
// before and have ended aren't known. Place reports whether Turnover should be asked again, see due.
func (c *Counter) Place() (changed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.placed++
	return due(c.placed)
}

// End counts the end of a pod with GPU memory that had a node.
func (c *Counter) End() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended++
}

// Turnover returns how many pods with GPU memory end for each one that is placed, at most 1. It begins with 1. Of the pods that were placed, all that
// don't run have ended. So in a full cluster it is a half when twice as many were placed as there is room for, whatever the cluster's size.
func (c *Counter) Turnover() float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return min(float64(c.ended+assumed)/float64(c.placed+assumed), 1)
}

// with returns the count with one more pod.
func (c count) with(created time.Time) count {
	switch {
	case c.pods == 0:
		return count{1, created}
	case created.After(c.at):
		return count{c.pods*weight(created.Sub(c.at)) + 1, created}
	default:
		return count{c.pods + weight(c.at.Sub(created)), c.at}
	}
}

// weight returns how much a pod of that age counts.
func weight(age time.Duration) float64 { return math.Exp2(-float64(age) / float64(halfLife)) }

// Kinds returns the kinds that come most frequently, at most placement.MaxKinds, the most frequent first.
func (c *Counter) Kinds() []placement.Kind {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forget()
	const precision = 1 << 30 // Sums of whole numbers don't depend on the map's order.
	frequencies := map[placement.Shape]int64{}
	for from, count := range c.sources {
		frequencies[from.shape] += int64(precision * min(count.pods, maxPerOwner) * weight(c.latest.Sub(count.at)))
	}
	waiting := map[placement.Shape]int{}
	for from, pods := range c.waiting {
		waiting[from.shape] += min(pods, maxPerOwner)
	}
	kinds := make([]placement.Kind, 0, len(frequencies))
	for shape, frequency := range frequencies {
		kinds = append(kinds, placement.Kind{Shape: shape, Frequency: float64(frequency) / precision, Waiting: waiting[shape]})
	}
	slices.SortFunc(kinds, func(a, b placement.Kind) int {
		return cmp.Or(cmp.Compare(b.Frequency, a.Frequency), a.Compare(&b.Shape))
	})
	return kinds[:min(len(kinds), placement.MaxKinds)]
}

// forget drops the oldest sources.
func (c *Counter) forget() {
	maps.DeleteFunc(c.sources, func(_ source, count count) bool { return c.latest.Sub(count.at) > maxAge })
	excess := len(c.sources) - maxSources
	if excess <= 0 {
		return
	}
	times := make([]time.Time, 0, len(c.sources))
	for _, count := range c.sources {
		times = append(times, count.at)
	}
	slices.SortFunc(times, time.Time.Compare)
	maps.DeleteFunc(c.sources, func(_ source, count count) bool { return !count.at.After(times[excess-1]) })
}
