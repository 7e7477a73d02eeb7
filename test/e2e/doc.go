// Package e2e tests the parts together on a real control plane: etcd, kube-apiserver and kube-scheduler with the shipped
// configuration, the extender and the device plugin as processes, and nodes that are simulated kubelets with a fake driver
// library, or Node objects where nothing needs to run on them.
//
// After every scene no card has allocated more than its memory, and the extender's ledger equals the sum of the API
// server's pods (scene.CheckLedger).
package e2e
