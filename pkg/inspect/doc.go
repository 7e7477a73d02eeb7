// Package inspect is `kubectl inspect gpushare`: which cards a cluster shares, who holds them, and what waits for memory
// and why.
//
// It asks the API server alone, so it tells the truth also when the extender is down. Nodes and pods are gathered
// (gather.go), turned into a Report by a pure function (build.go), and written as a table, in detail, or as JSON and
// YAML (table.go, details.go, structured.go); watch.go does so again whenever something changes.
package inspect
