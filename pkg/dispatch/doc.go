// Package dispatch decides when pods of tenants that share a cluster fairly may be scheduled.
//
// Such a pod has a scheduling gate, so kube-scheduler ignores it. A Manager takes the pods in the order of a fairshare.Queue and
// grants them. To grant a pod is to reserve a place for it in the ledger, charge its tenant, and request that its caller opens the
// gate. A pod that fits nowhere now is passed over, and blocks no other pod. A group is granted as a whole.
//
// A gate can't be closed again, users can remove gates, and a few are opened for an autoscaler (gates.go). So a pod
// without a gate needs a charge too: until its turn, filter rejects it (IsAdmitted). A charge ends when the pod is bound, is deleted, or isn't
// bound in time. In the last case pods of its shape wait for their next turn, for longer after each failure (queue.Failures).
//
// A Manager keeps no state that can't be rebuilt. A new leader derives from the pods what each tenant has. It grants pods again
// that have neither a gate nor a node.
//
// Tick (tick.go) is called several times a second:
//
//  1. grantDue ends the charges that have lasted too long, makes a round if it can help, and requests the writes that open gates: of granted pods, and
//     of some for an autoscaler, which are chosen once a second (gates.go).
//  2. A round (makeRound in round.go) makes items of the pods that wait (items.go), offers them in the order of the queue (grantInOrder), reserves
//     places (reserve.go), and charges the tenants (charges.go).
//  3. Once a second, with reclaim, takeStandings (status.go) makes a snapshot, from which the shares are computed without the lock
//     (regions.go). reclaim (reclaim.go) begins to reclaim memory for tenants below their share.
//
// To reclaim memory for a tenant below its share takes these steps. Those that take long run without the lock:
//
//  1. beginAttempt (reclaim.go), called by Tick, selects items, and requests a Search by Effects.Reclaim.
//  2. The caller passes Search.Need (search.go) to eviction.Reclaimer.Reclaim.
//  3. It reads the cluster, and reclaim.Choose makes a plan: places for items, and victims.
//  4. Hold (hold.go) checks the plan against the present state, and makes a hold for each item: the ledger reserves its places.
//  5. eviction.Executor evicts the victims.
//  6. Reclaimed (reclaim.go) records that the evictions were made. The holds stay.
//  7. Each round grants the items whose places are free now (grantHeld), and once a second the holds end that don't help any more (endLateHolds).
//
// The memory of a pod that ended is reserved for its tenant's next pod for a while (kept.go). Items that lack only memory are passed to package queue
// (waiting.go).
//
// A Manager reads no clock and does no I/O: its caller passes in the events and the time, and performs the Effects that it
// returns.
package dispatch
