// Package webui is the extender's web page: every card as a bar, who sits on it, who waits and why, and the last hour.
//
// A Board follows the ledger and the pending pods and writes each change down once, for all viewers (board.go, view.go);
// the last hour is a ring of samples (history.go). Viewers get the whole board first and then what changes, as
// server-sent events that are compressed once for all of them (events.go, frame.go). The page itself is static files,
// embedded in the binary (static.go, assets). Nothing here changes anything, and nothing is fetched from elsewhere.
package webui
