// Package arrivals counts which kinds of pods come to a cluster, for the node policy least-waste. It keeps nothing of a pod but its shape and its
// owner, has no client, and reads no clock.
package arrivals
