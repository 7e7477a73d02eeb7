package binding

import (
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// Claim is the sole right to write, to move and to release a pod's allocation until the pod is bound. A bind holds it from before it reads the
// allocation until its end. So no card is released, and given to another pod, while a bind is about to write it.
type Claim struct {
	binder *Binder
	uid    gpu.PodUID
}

// Claim claims the pod for a bind. It returns false if another bind of the pod is in flight: then an attempt would take the outcome of the other
// one for its own. The caller calls End when the bind has ended.
func (b *Binder) Claim(uid gpu.PodUID) (*Claim, bool) {
	return &Claim{b, uid}, b.claims.take(uid)
}

// End ends the claim. It reports whether no write of the pod can take effect any more. If the allocation was abandoned then, End releases it, and
// the listeners receive NotBound.
func (c *Claim) End() (noWrite bool) {
	failed, noWrite := c.binder.claims.end(c.uid)
	if failed {
		c.binder.reader.notBound(c.uid)
	}
	return noWrite
}

// Abandon makes End release the allocation, unless a write was made or is unconfirmed.
func (c *Claim) Abandon() { c.binder.claims.abandon(c.uid) }

// IsOpen reports whether an earlier write of the pod may still take effect, with the cards that the pod has in the ledger.
func (c *Claim) IsOpen() bool { return c.binder.claims.isOpen(c.uid) }

// Abandon gives up the pod's allocation if it is assumed. If no bind of the pod is in flight and none of its writes is open, Abandon releases the
// allocation and returns true. An in-flight bind abandons the allocation at its end, see Claim.Abandon. Otherwise the outcome of the open write
// decides.
func (b *Binder) Abandon(uid gpu.PodUID) (released bool) { return b.claims.abandon(uid) }

// claims grants the claims, and tracks each write until it is rejected or the watch reports the pod. If the answer was lost, the card stays
// assumed until a live read or the watch shows the outcome: if it were released on a guess, two pods could get it.
//
// mu guards pods and what they point to. It is held while the ledger is updated, so that no bind reads an allocation that is being released, and
// no result of a live read overwrites what the watch has reported since. What the ledger calls must not call a Binder.
type claims struct {
	ledger *ledger.Ledger
	term   *termNodes

	mu sync.Mutex
	// pods are the pods of which a bind is in flight, or a write is open, or both. The ledger keeps their allocations (BeginBind).
	pods map[gpu.PodUID]*claimed
}

// claimed is what is kept of a pod. Bind calls and writes have a state each, because a write can outlast the call that made it, and a retry can
// begin while it is open:
//
//	          no write is open                      a write is open
//	idle      nothing is kept                       Resolve or the watch finds its outcome
//	inFlight  the call decides                      the call awaits the answer; it or an earlier write can take effect
//	abandoned End releases the allocation           the outcome of the write decides
//	settled   the pod is gone, or reported bound    the pod is bound, and the watch has not reported it
type claimed struct {
	state claimState
	// open is the latest write that may still take effect, or that was made and the watch has not reported; nil if there is none.
	open *write
}

// claimState is whether a bind of the pod is in flight.
//
//	idle → inFlight                a bind begins
//	inFlight → abandoned           the bind fails, or the pod's place is given up
//	inFlight, abandoned → settled  the pod is found to be bound or gone, which is final
//	any → idle                     the bind ends. If it was abandoned or settled, and no write is open, an assumed allocation is released
type claimState int

const (
	idle claimState = iota
	inFlight
	abandoned
	settled
)

func (p *claimed) abandon() {
	if p.state == inFlight {
		p.state = abandoned
	}
}

// settle records that the ledger has the pod as bound or gone. open is the write that the watch must still report; nil if there is none.
func (p *claimed) settle(open *write) {
	p.open = open
	if p.state != idle {
		p.state = settled
	}
}

type write struct {
	pod   gpu.Pod
	node  string
	state writeState
	// begun is when the write began. It is no moment of a term for an unseen one that was read.
	begun termMoment
	// at is when the write began. For an unseen one that was read, it is when the last read began.
	at time.Time
	// earlier is the write before this one, if it is open too: it may still be made if this one is rejected.
	earlier *write
}

// writeState is what is known of a write.
//
//	sent → unconfirmed         the answer is lost
//	sent, unconfirmed → unseen the write was made
type writeState int

const (
	// sent means that the answer is awaited.
	sent writeState = iota
	// unconfirmed means that it is not known whether the write was made.
	unconfirmed
	// unseen means that the write was made and that the watch has not reported it yet.
	unseen
)

func newClaims(l *ledger.Ledger, term *termNodes) *claims {
	return &claims{ledger: l, term: term, pods: map[gpu.PodUID]*claimed{}}
}

// of returns what is kept of the pod. The caller holds mu, and calls dropUnused in the end.
func (c *claims) of(uid gpu.PodUID) *claimed {
	pod := c.pods[uid]
	if pod == nil {
		pod = &claimed{}
		c.pods[uid] = pod
		c.ledger.BeginBind(uid)
	}
	return pod
}

// dropUnused removes the pod if no bind is in flight and no write is open. If release is true, an assumed allocation is released. The caller
// holds mu.
func (c *claims) dropUnused(uid gpu.PodUID, release bool) {
	if pod := c.pods[uid]; pod.state == idle && pod.open == nil {
		delete(c.pods, uid)
		c.ledger.EndBind(uid, release)
	}
}

func (c *claims) take(uid gpu.PodUID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	pod := c.of(uid)
	if pod.state != idle {
		return false
	}
	pod.state = inFlight
	return true
}

// end ends a claim. It reports whether the bind has failed for certain, which means that it was abandoned and that no write can take effect.
// noWrite is true if no write can, whether the bind has failed or not.
func (c *claims) end(uid gpu.PodUID) (failed, noWrite bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	pod := c.pods[uid]
	noWrite = pod.open == nil
	failed = noWrite && pod.state == abandoned
	// A bind that is settled can have assumed a card for a pod that was gone already.
	release := pod.state != inFlight
	if !noWrite && pod.open.state == sent { // The bind ended in an unexpected way.
		pod.open.state = unconfirmed
	}
	pod.state = idle
	c.dropUnused(uid, release)
	return failed, noWrite
}

func (c *claims) abandon(uid gpu.PodUID) (released bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	pod := c.pods[uid]
	if pod == nil {
		c.ledger.Release(uid)
		return true
	}
	pod.abandon()
	return false
}

func (c *claims) isOpen(uid gpu.PodUID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	pod := c.pods[uid]
	return pod != nil && pod.open != nil
}

// begin records that a write of a claimed pod is about to be made. A pod without GPU memory has no allocation, but its gang must learn the
// outcome.
func (c *claims) begin(pod gpu.Pod, node string, now time.Time) *write {
	c.mu.Lock()
	defer c.mu.Unlock()
	claimed := c.pods[pod.UID]
	claimed.open = &write{pod: pod, node: node, begun: c.term.now(), at: now, earlier: claimed.open}
	return claimed.open
}

// answered calls record for the pod of a write whose answer has arrived. It returns false if a live read or the watch has shown the outcome
// before: then the ledger is up to date, and the answer changes nothing.
func (c *claims) answered(w *write, record func(pod *claimed)) (open bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	pod := c.pods[w.pod.UID]
	if pod.open != w {
		return false
	}
	record(pod)
	return true
}

// written records that the write was made. The ledger gets the allocation as it was written.
func (c *claims) written(w *write, allocation ledger.Allocation) {
	c.answered(w, func(pod *claimed) {
		w.state, w.earlier = unseen, nil
		pod.settle(w)
		if allocation.Request > 0 {
			c.ledger.SetBound(w.node, allocation.Pod, allocation.Placement, allocation.AssumeTime)
		}
	})
}

// rejected records that the write was rejected.
func (c *claims) rejected(w *write) {
	c.answered(w, func(pod *claimed) {
		pod.open = w.earlier
		pod.abandon()
	})
}

// foundBound records that a live read after the write found the pod bound, perhaps to another node.
func (c *claims) foundBound(w *write, found *clustercache.PodInfo, now time.Time) {
	c.answered(w, func(pod *claimed) { c.recordBound(pod, found, now) })
}

// recordBound updates the ledger with a bound pod that a live read found. The caller holds mu. A running pod stays open until
// the watch reports it: if the pod ended while the watch is broken, nothing else would detect that.
func (c *claims) recordBound(pod *claimed, found *clustercache.PodInfo, now time.Time) {
	if found.Ended {
		c.recordGone(pod, found.UID)
		return
	}
	setBound(c.ledger, found)
	pod.settle(&write{pod: found.Pod, node: found.Node, state: unseen, at: now})
}

// recordGone updates the ledger with a pod that has ended or was deleted. The caller holds mu.
func (c *claims) recordGone(pod *claimed, uid gpu.PodUID) {
	pod.settle(nil)
	c.dropUnused(uid, false)
	c.ledger.Remove(uid)
}

// watchReported applies what the watch reports of a pod that is bound or gone to the ledger, by calling update. It returns the pod's write if
// that was unconfirmed.
func (c *claims) watchReported(uid gpu.PodUID, update func()) (resolved *write) {
	c.mu.Lock()
	defer c.mu.Unlock()
	update()
	pod := c.pods[uid]
	if pod == nil {
		return nil
	}
	switch w := pod.open; {
	case w == nil:
	case w.state == unconfirmed:
		resolved = w
	case w.state == unseen:
		c.term.reported(w.begun)
	}
	pod.settle(nil)
	c.dropUnused(uid, false)
	return resolved
}

// addUnseen adds a pod that a live read found on a node and that the watch has not reported. The bind stays open until the
// watch reports it, so that a pod that has ended meanwhile does not stay in the ledger.
func (c *claims) addUnseen(found *clustercache.PodInfo, now time.Time) {
	if found.Node == "" || found.Request == 0 || found.Ended {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	pod := c.of(found.UID)
	defer c.dropUnused(found.UID, false)
	home, allocation, known := c.ledger.Lookup(found.UID)
	// Nothing is to be done for a pod that the ledger has as bound to this node, nor for one with an open bind whose allocation
	// the ledger doesn't have any more. A pod that the ledger has on another node, or only assumed on this one, was bound by
	// another leader after a bind of this process failed. The other leader may have chosen another card.
	if known && home == found.Node && allocation.State == ledger.Bound || pod.open != nil && !known {
		return
	}
	c.recordBound(pod, found, now)
}

// drained reports whether no bind is in flight and every write has a known outcome.
func (c *claims) drained() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, pod := range c.pods {
		if pod.state != idle || pod.open.state != unseen {
			return false
		}
	}
	return true
}
