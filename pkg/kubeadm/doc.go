// Package kubeadm gives the kube-scheduler of a kubeadm control-plane node the configuration with the extender, and takes
// it away again. The kubelet runs kube-scheduler from a file; that file is edited, once, by a rename.
//
// What decides (Edit, Merge) works on bytes. Install and Undo act: they keep the file as it was outside the folder that
// the kubelet watches, see to it that the scheduler comes back with what it was given, and restore the file if it doesn't.
package kubeadm
