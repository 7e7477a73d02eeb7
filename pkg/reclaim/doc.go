// Package reclaim decides which pods are evicted so that a tenant below its share gets room for its next pod, or for its next
// group as a whole.
//
// No tenant falls below its share by an eviction, so a reclaim never causes another one. The package imports no client and no
// HTTP, and reads no clock.
package reclaim
