package scheduling

import (
	"context"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// maybeOverruns lets a pod that has started use more memory than it requests, some time later.
func (w *world) maybeOverruns(p *apiPod) {
	if w.overruns && p.memory > 0 && w.chance(0.1) {
		since := w.now + w.between(time.Second, 40*time.Second)
		w.after(since-w.now, func() { w.overrun(p, 1+w.random.Int64N(8), since) })
	}
}

// overrun lets the device plugin report that the pod uses so much more memory than it requests, again and again.
func (w *world) overrun(p *apiPod, more int64, since time.Duration) {
	if w.calm || !p.ready() {
		return
	}
	report := protocol.Overuse{Since: begin.Add(since), At: begin.Add(w.now), Cards: map[int]protocol.CardOveruse{}}
	for _, share := range p.info.Placement {
		use := protocol.CardOveruse{Used: int64(share.Memory) + more, Requested: int64(share.Memory)}
		report.Used, report.Requested, report.Cards[share.Card] = report.Used+use.Used, report.Requested+use.Requested, use
	}
	w.api.edit(p, func(object *corev1.Pod) { object.Annotations[protocol.AnnotationOveruse] = report.Annotation() })
	w.after(protocol.OveruseLife/3, func() { w.overrun(p, more, since) })
}

// MayOveruse implements clusterCache.
func (c *simCache) MayOveruse() (out []*clustercache.PodInfo) {
	for _, name := range slices.Sorted(maps.Keys(c.pods)) {
		if p := c.pods[name]; (p.Overuse != nil || p.Limits != (gpu.Limits{})) && p.Node != "" && !p.Ended {
			out = append(out, p)
		}
	}
	return out
}

// checkUse is the loop that evicts pods which use more than they request.
func (r *replica) checkUse() {
	if !r.runs(r.checkUse) {
		return
	}
	r.w.start(r, func() {
		r.scheduler.overusers.Tick(context.WithValue(r.w.context(), reasonKey{}, forOveruse))
		r.w.after(5*time.Second, r.checkUse)
	})
}

// reasonKey is the key of a context's value that says why pods are evicted.
type reasonKey struct{}

// evictionReason is why a pod is evicted.
type evictionReason int

const (
	forOthers evictionReason = iota
	forBrokenRun
	forOveruse
)

// checkEviction checks an eviction that takes effect now.
func (w *world) checkEviction(p *apiPod, why evictionReason, by string) {
	switch why {
	case forOthers:
		w.stats.reclaimed++
		w.stats.reclaimedFrom[p.tenant]++
		if w.chance(w.diesAtEviction) {
			w.after(w.between(0, 5*time.Millisecond), w.changeLeader)
		}
	case forBrokenRun:
		if p.run != nil && p.run.whole {
			w.fail("%s evicts %s, whose run %v is whole: %d of %d bound", by, p.name(), p.run.key, p.run.running(), p.run.size)
		}
	case forOveruse:
		w.stats.overruns++
		switch {
		case p.info.Overuse == nil:
			w.fail("%s evicts %s, which doesn't use more than it requests", by, p.name())
		case p.run != nil && !p.run.whole && !p.run.ambiguous && !p.run.resized:
			w.fail("%s evicts %s for its use, whose run %v isn't whole", by, p.name(), p.run.key)
		}
	}
}
