// Package reclaim decides which pods are evicted to make room for the next item of a tenant below its share: a pod, or the members of a
// group that must be bound together.
//
// After the evictions each tenant still has its share.
//
// The package imports no client and no HTTP, and reads no clock.
package reclaim
