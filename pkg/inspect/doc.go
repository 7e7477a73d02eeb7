// Package inspect implements `kubectl inspect gpushare`: it shows the cards that a cluster shares, the pods that use them,
// and why other pods are pending.
//
// It reads from the API server only, so it also works while the extender is down. gather.go reads nodes and pods, build.go
// turns them into a Report without side effects, and table.go, details.go and structured.go write it as a table, in detail,
// or as JSON and YAML. watch.go repeats this after each change.
package inspect
