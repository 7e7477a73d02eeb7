// Package leader lets several replicas of the extender run of which one answers.
//
// A Lease elects it. The elections are client-go's; what this package adds is when to answer: never on the word of a
// goroutine that may have slept, but by a comparison, made at each call, of the clock with the begin of the last
// renewal; never before what the former leader wrote is sure to be visible; and not while stopping, which hands the
// Lease over only after the binds in flight have ended. The leader's address is published in an EndpointSlice.
package leader
