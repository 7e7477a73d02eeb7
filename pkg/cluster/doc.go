// Package cluster connects the ledger to the API server.
//
// Informers report nodes and pods to the ledger. Bind assumes a card for a pod and makes the one write that binds the
// pod and sets its annotations. The settler resolves an unconfirmed bind by a live read. The waker requeues a rejected
// pod if memory comes free after kube-scheduler's last attempt. All state belongs to the API server: a Cluster is
// rebuilt from there.
package cluster
