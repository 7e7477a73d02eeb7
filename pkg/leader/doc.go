// Package leader elects one of several replicas of the extender, which answers kube-scheduler; the others are standbys.
//
// client-go's leader election does the election with a Lease. This package decides when the leader may answer. Each call
// compares the clock with the start of the last renewal, so a goroutine that was paused can't give a stale answer. A new
// leader answers only when all writes of the former one are visible. A replica that stops releases the Lease only after
// its in-flight binds have ended. The leader's address is published in an EndpointSlice.
package leader
