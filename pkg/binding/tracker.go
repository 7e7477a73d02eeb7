package binding

import (
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// tracker grants the claims, and tracks each write until it is rejected or the watch reports the pod. If the answer was lost, the card stays
// assumed until a live read or the watch shows the outcome: if it were released on a guess, two pods could get it.
//
// mu guards pods and what they point to. It is held while the ledger is updated, so that no bind reads an allocation that is being released, and
// no result of a live read overwrites what the watch has reported since. What the ledger calls must not call a Binder.
type tracker struct {
	ledger *ledger.Ledger
	term   *termNodes

	mu sync.Mutex
	// pods are the pods of which a bind is in flight, or a write is open, or both. The ledger keeps their allocations (BeginBind).
	pods map[gpu.PodUID]*trackedPod
}

// trackedPod is what is kept of a pod. Bind calls and writes have a state each, because a write can outlast the call that made it, and a retry can
// begin while it is open:
//
//	          no write is open                      a write is open
//	idle      nothing is kept                       Resolve or the watch finds its outcome
//	inFlight  the call decides                      the call awaits the answer; it or an earlier write can take effect
//	abandoned End releases the allocation           the outcome of the write decides
//	settled   the pod is gone, or reported bound    the pod is bound, and the watch has not reported it
type trackedPod struct {
	state bindState
	// open is the latest write that may still take effect, or that was made and the watch has not reported; nil if there is none.
	open *write
}

// bindState is whether a bind of the pod is in flight.
//
//	idle → inFlight                a bind begins
//	inFlight → abandoned           the bind fails, or the pod's place is given up
//	inFlight, abandoned → settled  the pod is found to be bound or gone, which is final
//	any → idle                     the bind ends. If it was abandoned or settled, and no write is open, an assumed allocation is released
type bindState int

const (
	idle bindState = iota
	inFlight
	abandoned
	settled
)

// abandon makes end release the allocation, unless the outcome is known or a write is open.
func (p *trackedPod) abandon() {
	if p.state == inFlight {
		p.state = abandoned
	}
}

// settle records that the ledger has the pod as bound or gone. open is the write that the watch must still report; nil if there is none.
func (p *trackedPod) settle(open *write) {
	p.open = open
	if p.state != idle {
		p.state = settled
	}
}

type write struct {
	pod   gpu.Pod
	node  string
	state writeState
	// begun is when the write began, as a moment of the term. After a read of an unreported write it is a moment of no term.
	begun termMoment
	// at is when the write began, or for an unreported write when its last read began.
	at time.Time
	// readFailed is when the latest read of Resolve that failed began; zero if none did. Only Resolve uses it.
	readFailed time.Time
	// earlier is the write before this one, if it is open too: it may still be made if this one is rejected.
	earlier *write
}

// writeState is what is known of a write.
//
//	sent → unconfirmed              the answer is lost
//	sent, unconfirmed → unreported  the write was made
type writeState int

const (
	// sent means that the answer is awaited.
	sent writeState = iota
	// unconfirmed means that it is not known whether the write was made.
	unconfirmed
	// unreported means that the write was made and that the watch has not reported it yet.
	unreported
)

// of returns what is kept of the pod. The caller holds mu, and calls dropUnused in the end.
func (t *tracker) of(uid gpu.PodUID) *trackedPod {
	pod := t.pods[uid]
	if pod == nil {
		pod = &trackedPod{}
		t.pods[uid] = pod
		t.ledger.BeginBind(uid)
	}
	return pod
}

// dropUnused removes the pod if no bind is in flight and no write is open. If release is true, an assumed allocation is released. The caller
// holds mu.
func (t *tracker) dropUnused(uid gpu.PodUID, release bool) {
	if pod := t.pods[uid]; pod.state == idle && pod.open == nil {
		delete(t.pods, uid)
		t.ledger.EndBind(uid, release)
	}
}

// claim claims the pod, see Binder.Claim.
func (t *tracker) claim(uid gpu.PodUID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	pod := t.of(uid)
	if pod.state != idle {
		return false
	}
	pod.state = inFlight
	return true
}

// end ends a claim. It reports whether the bind has failed for certain, which means that it was abandoned and that no write can take effect.
// noWrite is true if no write can, whether the bind has failed or not.
func (t *tracker) end(uid gpu.PodUID) (failed, noWrite bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	pod := t.pods[uid]
	noWrite = pod.open == nil
	failed = noWrite && pod.state == abandoned
	// A bind that is settled can have assumed a card for a pod that was gone already.
	release := pod.state != inFlight
	if !noWrite && pod.open.state == sent { // The bind ended in an unexpected way.
		pod.open.state = unconfirmed
	}
	pod.state = idle
	t.dropUnused(uid, release)
	return failed, noWrite
}

// releaseOrAbandon releases the allocation of the pod, see Binder.Release.
func (t *tracker) releaseOrAbandon(uid gpu.PodUID) (released bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	pod := t.pods[uid]
	if pod == nil {
		t.ledger.Release(uid)
		return true
	}
	pod.abandon()
	return false
}

func (t *tracker) isOpen(uid gpu.PodUID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	pod := t.pods[uid]
	return pod != nil && pod.open != nil
}

// begin records that a write of a claimed pod is about to be made. A pod without GPU memory has no allocation, but its gang must learn the
// outcome.
func (t *tracker) begin(pod gpu.Pod, node string, now time.Time) *write {
	t.mu.Lock()
	defer t.mu.Unlock()
	tracked := t.pods[pod.UID]
	tracked.open = &write{pod: pod, node: node, begun: t.term.now(), at: now, earlier: tracked.open}
	return tracked.open
}

// answered calls record for the pod of a write whose answer has arrived. It returns false if a live read or the watch has shown the outcome
// before: then the ledger is up to date, and the answer changes nothing.
func (t *tracker) answered(w *write, record func(pod *trackedPod)) (open bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	pod := t.pods[w.pod.UID]
	if pod.open != w {
		return false
	}
	record(pod)
	return true
}

// written records that the write was made. The ledger gets the allocation as it was written.
func (t *tracker) written(w *write, allocation ledger.Allocation) {
	t.answered(w, func(pod *trackedPod) {
		w.state, w.earlier = unreported, nil
		pod.settle(w)
		if allocation.Request > 0 {
			t.ledger.SetBound(w.node, allocation.Pod, allocation.Placement, allocation.AssumeTime)
		}
	})
}

// rejected records that the write was rejected.
func (t *tracker) rejected(w *write) {
	t.answered(w, func(pod *trackedPod) {
		pod.open = w.earlier
		pod.abandon()
	})
}

// foundBound records that a live read after the write found the pod bound, perhaps to another node.
func (t *tracker) foundBound(w *write, found *clustercache.PodInfo, now time.Time) {
	t.answered(w, func(pod *trackedPod) { t.recordBound(pod, found, now) })
}

// recordBound updates the ledger with a bound pod that a live read found. The caller holds mu. A running pod stays open until
// the watch reports it: if the pod ended while the watch is broken, nothing else would detect that.
func (t *tracker) recordBound(pod *trackedPod, found *clustercache.PodInfo, now time.Time) {
	if found.Ended {
		t.recordGone(pod, found.UID)
		return
	}
	setBound(t.ledger, found)
	pod.settle(&write{pod: found.Pod, node: found.Node, state: unreported, at: now})
}

// recordGone updates the ledger with a pod that has ended or was deleted. The caller holds mu.
func (t *tracker) recordGone(pod *trackedPod, uid gpu.PodUID) {
	pod.settle(nil)
	t.dropUnused(uid, false)
	t.ledger.Remove(uid)
}

// watchReported applies what the watch reports of a pod that is bound or gone to the ledger, by calling update. It returns the pod's write if
// that was unconfirmed.
func (t *tracker) watchReported(uid gpu.PodUID, update func()) (resolved *write) {
	t.mu.Lock()
	defer t.mu.Unlock()
	update()
	pod := t.pods[uid]
	if pod == nil {
		return nil
	}
	switch w := pod.open; {
	case w == nil:
	case w.state == unconfirmed:
		resolved = w
	case w.state == unreported:
		t.term.reported(w.begun)
	}
	pod.settle(nil)
	t.dropUnused(uid, false)
	return resolved
}

// addUnreported adds a pod that a live read found on a node and that the watch has not reported. The bind stays open until the
// watch reports it, so that a pod that has ended meanwhile does not stay in the ledger.
func (t *tracker) addUnreported(found *clustercache.PodInfo, now time.Time) {
	if found.Node == "" || found.Request == 0 || found.Ended {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	pod := t.of(found.UID)
	defer t.dropUnused(found.UID, false)
	home, allocation, known := t.ledger.Lookup(found.UID)
	// Nothing is to be done for a pod that the ledger has as bound to this node, nor for one with an open bind whose allocation
	// the ledger doesn't have any more. A pod that the ledger has on another node, or only assumed on this one, was bound by
	// another leader after a bind of this process failed. The other leader may have chosen another card.
	if known && home == found.Node && allocation.State == ledger.Bound || pod.open != nil && !known {
		return
	}
	t.recordBound(pod, found, now)
}

// drained reports whether no bind is in flight and every write has a known outcome.
func (t *tracker) drained() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, pod := range t.pods {
		if pod.state != idle || pod.open.state != unreported {
			return false
		}
	}
	return true
}
