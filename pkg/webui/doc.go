// Package webui serves the extender's web page: every card as a bar with its pods, the pending pods with their diagnosis,
// groups of pods, and the free memory of the last hour. It is read-only and loads nothing from other hosts.
//
// A Board reads the ledger and the pending pods and encodes each change once for all viewers (board.go, view.go). The last
// hour is a ring of samples (history.go). A viewer first gets the complete state, and asks each second for the changes since then. The page is
// static files, embedded in the binary (handler.go, assets).
package webui
