// Package reasons holds why pods are not placed: the values, their labels for metrics, their words for users, their form on the wire and
// its parser.
//
// The wire is kube-scheduler: it puts the texts of filter's answers into the pod's Event and condition PodScheduled, from where
// other programs and replicas of the extender read them. Other versions read them too, so texts don't change.
package reasons
