// Package reasons holds why pods are not placed: the values, their labels for metrics, their words for users, their form on the wire and
// its parser.
//
// The wire is kube-scheduler: it puts the texts of filter's answers into the pod's Event and condition PodScheduled, from where
// other programs and replicas of the extender read them. Other versions read them too, so texts don't change.
//
// A pending pod is explained by texts of five origins:
//
//	text                            made by                                  shown in
//	why a node was rejected         Reason.TextFor                           Events, PodScheduled, by node in views
//	why a group waits               Group.Text                               Events, PodScheduled; in views by diagnosis.GroupWait
//	that fair sharing decides       AwaitsTurn                               Events, PodScheduled
//	what the pod waits for          diagnosis.Diagnose, findVerdict          page, kubectl inspect
//	what such a cause means         pkg/webui/assets/causes.js               page
package reasons
