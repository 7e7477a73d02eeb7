// Package reclaim decides which pods are evicted so that a tenant below its share gets room for its next pod, or for its next
// group as a whole.
//
// Evictions leave each tenant its share, with one exception: a move evicts a pod whose tenant can have its share in another region. That
// tenant is below its share until it gets room there, which can take another reclaim. The package imports no client and no HTTP, and
// reads no clock.
package reclaim
