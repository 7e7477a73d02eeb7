// Package placement decides which card of a node a request goes to. It is pure: cards with their free memory and a
// request go in, a placement or the reason why there is none comes out.
//
// The extender asks it for every node at filter and again at bind, the device plugin for pods that nobody placed; so
// there is one answer to "which card" in the whole project.
package placement
