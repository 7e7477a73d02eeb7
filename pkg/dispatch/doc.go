// Package dispatch decides when pods of tenants that share a cluster fairly may be scheduled.
//
// Such a pod has a scheduling gate, so kube-scheduler ignores it. A Manager takes the pods in the order of a fairshare.Queue and
// grants them. To grant a pod is to reserve a place for it in the ledger, charge its tenant, and request that its caller opens the
// gate. A pod that fits nowhere now is passed over, and blocks no other pod. A group is granted as a whole.
//
// A gate can't be closed again, users can remove gates, and a few are opened for an autoscaler (provision.go). So a pod
// without a gate needs a charge too: until its turn, filter rejects it (Admit). A charge ends when the pod is bound, is deleted, or isn't
// bound in time. In the last case pods of its shape wait for their next turn, for longer after each failure (queue.Failures).
//
// A Manager keeps no state that can't be rebuilt. A new leader derives from the pods what each tenant has. It grants pods again
// that have neither a gate nor a node.
//
// Tick, in round.go, makes a step: it ends charges, makes a round, looks for tenants below their share, and requests the writes that
// open gates. A round makes units of the pods that wait (units.go), offers them in the order of the queue (turns.go), and reserves
// places (reserve.go). An attempt to reclaim memory (attempt.go) is for tenants below their share (starving.go). It lists what may be evicted
// (search.go, candidates.go), and holds places until the victims are gone (hold.go). Shares and this search are computed from
// snapshots (status.go, allocated.go), without the lock. The memory of a pod that ended is kept for its tenant's next pod for a while
// (kept.go). Units that lack only memory are items of package queue (waiting.go).
//
// A Manager reads no clock and does no I/O: its caller passes in the events and the time, and performs the Effects that it
// returns.
package dispatch
