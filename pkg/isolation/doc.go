// Package isolation makes a container's share of a card a limit. A Backend of each mode reports whether a card is ready for the
// mode, what a container gets, and later whether it was given that and whether the limit holds. Backends read the node's files and have no
// other state than the cards that mode mps shares, for its supervisor, and the specification of limits
// (limitspec.go), which running containers need when they are restarted. mps.go has what the device plugin and the supervisor of
// the MPS daemons (package mps) agree on.
//
// The device plugin chooses the mode of a node, marks cards that aren't ready as unhealthy, and checks after the start of each
// container that its limit is in force.
package isolation
