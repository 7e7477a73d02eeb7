// Package clustercache watches pods, nodes and disruption budgets, and keeps what the extender needs of them in memory.
// It passes their changes to one Handler. It writes nothing to the API server, and it knows nothing of the ledger.
package clustercache
