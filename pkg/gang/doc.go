// Package gang decides when and where the members of a gang are placed and bound. A gang is a group of pods that are
// bound all together or not at all.
//
// A gang passes three steps. First, all its members must exist. Then a plan reserves memory for all of them in the
// ledger, or for none (plan.go). Then a barrier holds each member's bind until all members have arrived. When it opens,
// all members but one are bound at once, and the last one after the others (permit.go). Before the barrier opens,
// dropping the plan undoes everything. Afterwards binds are in flight. If some of them fail the gang is partial: it goes
// before all other gangs, and is evicted if it doesn't become whole in time (manager.go, endPartial).
//
// A Manager reads no clock and does no I/O: its caller passes in the events and the time, and performs the Effects that
// it returns.
package gang
