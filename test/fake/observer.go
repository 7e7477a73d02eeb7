package fake

import (
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Observer counts what metrics count, by a text such as "bind bound". Its methods are safe for concurrent use.
type Observer struct {
	mu     sync.Mutex
	counts map[string]int
}

func (o *Observer) add(what string, n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.counts == nil {
		o.counts = map[string]int{}
	}
	o.counts[what] += n
}

// Count returns one count.
func (o *Observer) Count(what string) int { return o.Counts()[what] }

// Counts returns all counts.
func (o *Observer) Counts() map[string]int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.counts)
}

// Filtered counts "filtered" and the reason.
func (o *Observer) Filtered(reason reasons.Reason, nodes int) {
	o.add("filtered "+reason.Text(), nodes)
}

// BindFinished counts "bind" and the result.
func (o *Observer) BindFinished(result reasons.Result) { o.add("bind "+string(result), 1) }

// BindResolved counts "resolved" and the outcome.
func (o *Observer) BindResolved(outcome reasons.Result) { o.add("resolved "+string(outcome), 1) }

// CacheSynced counts "synced".
func (o *Observer) CacheSynced(time.Duration) { o.add("synced", 1) }

// Evicted counts "evicted" and the result.
func (o *Observer) Evicted(result reasons.Result) { o.add("evicted "+string(result), 1) }

// EvictionRecordFailed counts "record failed".
func (o *Observer) EvictionRecordFailed() { o.add("record failed", 1) }

// OveruserEvicted counts "overuser" and the result.
func (o *Observer) OveruserEvicted(result reasons.Result) { o.add("overuser "+string(result), 1) }

// BoundWithoutExtender counts "bound without the extender".
func (o *Observer) BoundWithoutExtender() { o.add("bound without the extender", 1) }

// Requeued counts "requeued".
func (o *Observer) Requeued() { o.add("requeued", 1) }

// APIWrite counts "write" and the kind.
func (o *Observer) APIWrite(kind string) { o.add("write "+kind, 1) }

// PodGranted counts "granted".
func (o *Observer) PodGranted(time.Duration) { o.add("granted", 1) }

// ChargeExpired counts "charge expired".
func (o *Observer) ChargeExpired() { o.add("charge expired", 1) }

// ReclaimFailed counts "reclaim failed".
func (o *Observer) ReclaimFailed() { o.add("reclaim failed", 1) }

// Reclaimed counts "reclaimed" and the result.
func (o *Observer) Reclaimed(result reasons.Result) { o.add("reclaimed "+string(result), 1) }

// PodReclaimed counts "reclaimed memory" and "reclaimed pods".
func (o *Observer) PodReclaimed(memory gpu.Memory) {
	o.add("reclaimed pods", 1)
	o.add("reclaimed memory", int(memory))
}

// Nominated counts "nomination" and the result.
func (o *Observer) Nominated(result reasons.Result) { o.add("nomination "+string(result), 1) }

// GateOpened counts "gate opened" and the result.
func (o *Observer) GateOpened(ok bool) { o.add(fmt.Sprintf("gate opened %v", ok), 1) }

// BarrierOpened counts "barriers opened".
func (o *Observer) BarrierOpened(time.Duration) { o.add("barriers opened", 1) }

// GangBound counts "gang bound".
func (o *Observer) GangBound() { o.add("gang bound", 1) }

// GangFailed counts "gang" and the label of the reason.
func (o *Observer) GangFailed(reason reasons.Group) { o.add("gang "+reasons.GroupFailures[reason], 1) }

// GangEvicted counts "gang evicted".
func (o *Observer) GangEvicted() { o.add("gang evicted", 1) }

// Reserved counts "reserved".
func (o *Observer) Reserved() { o.add("reserved", 1) }
