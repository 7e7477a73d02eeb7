// Package gang decides when and where the members of a gang are placed and bound. A gang is a group of pods that are
// bound all together or not at all.
//
// A run is one such start of a group, and the unit of everything here. Its phase changes only in move, and only as the
// table in state.go permits. A run passes four steps:
//
//   - Count: enough members must exist (tally.go counts them, run.go does what follows from a change of a member).
//   - Plan: memory is reserved for all of them in the ledger, or for none (plan.go; order.go says which run goes first).
//   - Permit: a barrier holds each member's bind call until all have arrived (permit.go, RequestPermit and openBarrier).
//   - Bind: all members but one are bound at once, the last one after the others (permit.go, advance). The outcome of a
//     bind can be unknown for a while: the run waits until it is known.
//
// Before the barrier opens, dropping the plan undoes everything (endRound). A round that failed puts the run behind the
// others (fail) and costs the budget (budget.go), unless it yields. Afterwards binds are in flight. If some of them fail
// the run is broken: it goes before all others. If it is still broken after the patience, and every missing member was read from the API
// server and is not bound, its bound members are evicted, or stay if the policy is Keep. If another leader bound them and
// members may have been deleted since, the run counts as whole instead (broken.go, giveUp).
//
// Once a run is running, pods of its controllers join it alone; pods of other controllers begin the next run (run.go,
// home and findOrBegin). A new leader finds out which runs there are (partition.go). filter.go answers filter calls, status.go says what
// a pod waits for, starvation.go keeps single pods from starving groups.
//
// A Manager reads no clock and does no I/O: its caller passes in the events and the time, and performs the Effects that
// it returns.
package gang
