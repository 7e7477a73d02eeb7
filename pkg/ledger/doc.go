// Package ledger keeps the allocations of GPU memory by card, for all nodes of a cluster.
//
// An allocation belongs to a pod UID. It is Assumed from the moment that a card is chosen, by bind or earlier: by the plan
// of a gang, by fair sharing, or for a pod that displaced gangs. It is Bound once the API server has the pod on its node. An assumed one is removed if the bind has failed for certain or the
// place is given up, a bound one when the pod's object is gone or its phase is terminal, never earlier.
// All decisions are made under one lock, so the same memory can't be given to two pods.
//
// The package imports no client and no HTTP, and reads no clock: its callers update it from the API server.
package ledger
