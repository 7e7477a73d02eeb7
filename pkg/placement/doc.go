// Package placement chooses the card of a node for a request. It is pure: the input is the cards with their free memory
// and the request, the output is a placement or the reason why there is none.
//
// It is the only place that chooses cards: the extender calls it for every node at filter and again at bind, the device
// plugin for pods that were not scheduled by the extender.
package placement
