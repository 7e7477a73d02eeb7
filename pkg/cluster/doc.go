// Package cluster joins the ledger to the API server.
//
// Informers feed nodes and pods into the ledger; Bind reserves a card and makes the one write that binds a pod with its
// annotations; what a lost answer leaves open, the settler looks up; and when memory comes free after kube-scheduler
// had already asked, the waker makes it ask again. All state is the API server's: Cluster rebuilds itself from there.
package cluster
