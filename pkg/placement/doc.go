// Package placement chooses the cards of a node for a demand. It is pure: the input is the cards with what they have free and
// the demand, the output is a placement or the reason why there is none.
//
// The extender calls it for every node at filter, and again where a place is reserved: at bind, for the plan of a gang, by fair
// sharing. The device plugin calls it for pods that the extender has not scheduled, and for pods whose
// card has no room. Only awaited reservations choose cards in another way (Ledger.Await).
package placement
