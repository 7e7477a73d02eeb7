// Package gang decides when and where the members of a gang are placed and bound. A gang is a group of pods that are
// bound all together or not at all.
//
// A run is one all-or-nothing start of a group. Everything in this package is decided per run. The phase of a run changes
// only in move, and only as the table in state.go permits. A run passes four steps:
//
//   - Count: enough members must exist (tally.go counts them, run.go handles a change of a member and orders the runs, needs.go chooses those to
//     place together).
//   - Plan: memory is reserved for all of them in the ledger, or for none (plan.go). wait.go decides when a run is tried and what it waits for.
//   - Permit: each member's bind call waits at a barrier until all have arrived (permit.go, RequestPermit and openBarrier).
//   - Bind: all members but one are bound at the same time, the last one after the others (permit.go, advance). The outcome of a
//     bind can be unknown for a while: the run waits until it is known.
//
// Before the barrier opens, a plan can be dropped (abandonPlan). A failed plan puts runs of this shape behind the
// others, and delays them and others of the namespace (fail, queue.Failures). After the barrier has opened, binds are in flight. If
// some of them fail, the run is broken, and goes before all others. If it is still broken after the patience, every missing member is read
// from the API server. If none of them is bound, the bound members are evicted, or stay if the policy is Keep. There is one exception: if
// another leader bound them and members may have been deleted since, the run counts as whole (broken.go, giveUp).
//
// Once a run is running, pods of its controllers join it and are placed like single pods. Pods of other controllers begin the next run. A new leader
// derives the runs from the pods. assign.go has all of that. filter.go answers filter calls, report.go lists the runs.
//
// A Manager reads no clock and does no I/O: its caller passes in the events and the time, and performs the Effects that
// it returns.
package gang
