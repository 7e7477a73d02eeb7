// Package mps supervises the control daemons of NVIDIA's Multi-Process Service on a node, one for each card.
//
// A Supervisor follows those of the driver's cards that the node shares. The device plugin names them in a file (isolation.MPSDirectory). For
// each card, a daemon of the Supervisor keeps one control daemon running (daemon.go): it starts the process, asks it over its pipe, kills it
// if it doesn't answer, and starts it again after a back-off, independently of the other cards. The device plugin reads the result from a
// file (isolation.MPSStatus).
//
// No program may use a card without its limit. A client that doesn't find its daemon uses the card directly if the compute
// mode lets it. So the mode is PROHIBITED while there is no daemon, and EXCLUSIVE_PROCESS otherwise, with the MPS server as the one
// process. The former mode is restored at the end, unless a container still has the card (clients.go).
//
// The rules are those of NVIDIA's documentation "Multi-Process Service". They were never tried on a card.
package mps
