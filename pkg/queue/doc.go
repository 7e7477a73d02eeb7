// Package queue has the rules of the queue: which of the items that wait for memory may be placed, and when.
//
// An item is what is placed at once: a pod, or the members that a group's run needs. Without reservations, small items would take each piece of freed
// memory before there is enough for a large one. So Reserver reserves cards that are still in use for the items that wait, in their order
// (reserver.go). Failures remembers which items were placed and not bound, and limits what they keep from others (failures.go). The package uses no
// client and no clock.
package queue
