// Package gang decides about groups of pods of which all run or none: who belongs to a group, when it may be placed, where,
// and when its members may be bound.
//
// A group passes three gates. All of its members must exist. Then a plan reserves a place for each of them in the ledger,
// or for none. Then the barrier holds each member's bind until all have come, and opens for all at once. Until it opens
// everything can be undone and costs nobody anything; after it the binds are under way, and what a failure leaves behind is
// a group bound in part, which goes first from then on, and is given up when it doesn't become whole in time.
//
// A Book never reads a clock and never does anything by itself: it is told what happens, and when, and tells what is to be
// done. Package cluster is its hands.
package gang
