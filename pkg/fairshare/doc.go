// Package fairshare divides GPU memory between tenants. Shares computes how much each tenant deserves, and a Queue says which
// tenant's pod is next.
//
// Both follow one rule. A tenant below its guaranteed amount comes before all that aren't. Above their guaranteed amounts,
// tenants get memory in proportion to their weights. What a tenant doesn't ask for is divided among the others.
//
// The package imports no client and no HTTP, and reads no clock.
package fairshare
