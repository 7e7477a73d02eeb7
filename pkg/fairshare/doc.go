// Package fairshare divides GPU memory between tenants. Shares computes the share of each tenant. A Queue returns the pod that is
// next.
//
// Both follow one rule. A tenant below its guaranteed amount goes before tenants that aren't. Above their guaranteed amounts,
// tenants get memory in proportion to their weights. Memory that a tenant doesn't ask for is divided among the others.
//
// The package imports no client and no HTTP, and reads no clock.
package fairshare
