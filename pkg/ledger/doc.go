// Package ledger keeps the allocations of GPU memory by card, for all nodes of a cluster.
//
// An allocation belongs to a pod UID. It is Assumed when a card is chosen: by bind, or earlier by the plan of a gang, or by fair
// sharing. It is Bound once the API server has the pod on its node. An assumed allocation is removed if the bind has
// certainly failed, or if the place is given up. A bound allocation is removed when the pod's object is deleted or its phase is terminal,
// not earlier. Memory that is kept for pods that aren't bound is a Reservation. All decisions are made under one lock, so the same memory can't be
// given to two pods.
//
// The package imports no client and no HTTP, and reads no clock: its callers update it from the API server.
package ledger
