// Package gpu holds the values that every other package speaks in: amounts of GPU memory, the unit they are counted
// in, cards, pods and placements.
//
// It imports nothing but the standard library, and its types carry no behaviour beyond arithmetic that cannot go
// wrong: what decides lives in package placement, what remembers in package ledger, what travels in package protocol.
package gpu
