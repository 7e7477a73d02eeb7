// Package queue has the rules of the queue: which of the items that wait for memory may be placed, and when.
//
// An item is what is placed at once: a pod, or the members that a group's run needs. The package uses no client and no clock.
package queue
