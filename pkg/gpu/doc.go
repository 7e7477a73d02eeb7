// Package gpu defines the values that all packages use: amounts of GPU memory and their unit, cards, pods and placements.
//
// It imports only the standard library. Its types have no behaviour beyond arithmetic that can't wrap. Package placement
// makes decisions, package ledger keeps state, and package protocol encodes values for the wire.
package gpu
