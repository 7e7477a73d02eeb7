// Package dispatch decides when pods of tenants that share a cluster fairly may be scheduled.
//
// Such a pod has a scheduling gate, so that kube-scheduler doesn't see it. A Manager grants pods in the order of a
// fairshare.Queue: it reserves a place for the pod in the ledger, charges the tenant, and asks its caller to open the gate. What
// fits nowhere now is passed over, and blocks nothing. A group is granted as a whole.
//
// A gate can't be closed again, and users can remove gates. So a pod without a gate needs a charge too: filter rejects it until
// its turn comes (Admit). A charge ends when the pod is bound, deleted, or not bound in time; then the pod waits for its next
// turn, for longer after each failure.
//
// A Manager keeps no state that can't be rebuilt: a new leader knows from the pods what each tenant has, and grants those again
// that are neither gated nor bound.
//
// Tick, in round.go, makes a step: it ends charges, makes a round, looks for tenants below their share, and requests the writes that
// open gates. A round makes units of the pods that wait (units.go), offers them in the order of the queue (turns.go), and reserves
// places (reserve.go). An attempt to reclaim memory (attempt.go) is for tenants that starve (starving.go). It lists what may be evicted
// (candidates.go, moves.go), and holds places until the victims are gone (hold.go).
//
// A Manager reads no clock and does no I/O: its caller passes in the events and the time, and performs the Effects that it
// returns.
package dispatch
