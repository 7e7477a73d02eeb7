// Package ledger remembers who holds how much of which card.
//
// It knows nodes with their cards, and holders by pod UID. A holder is Reserved while its bind is in flight and Bound
// once the API server has the pod on its node; it leaves when the pod is gone or has ended, never earlier. What is
// promised is decided under one lock, so no two requests can be promised the same memory.
//
// It imports no client, no HTTP and no clock: package cluster feeds it from the API server and asks it for places.
package ledger
