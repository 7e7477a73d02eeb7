// Package reasons holds why pods are not placed: the values, their labels for metrics, their words for users, their form on the wire and
// its parser.
//
// The wire is kube-scheduler: it puts the texts of filter's answers into the pod's Event and condition PodScheduled, from where
// other programs and replicas of the extender read them. Other versions read them too, so texts don't change.
//
// A pending pod is explained by texts of five origins. The first three are in filter's answer, so Events, the condition PodScheduled and views show
// them. The last two are made for views, which are the page, kubectl inspect and, by reason, the metrics:
//
//	text                       its words                                     used by
//	why a node was rejected    table in reason.go, by TextFor                the answer of filter (pkg/extender/answer.go)
//	why a group waits          group.go, by Group.Text                       Filter in pkg/scheduling; diagnosis.GroupWait for views
//	that fair sharing decides  AwaitsTurn and Turn in turn.go                Filter in pkg/scheduling; Turn.String for views
//	what the pod waits for     pkg/diagnosis/text.go; which one applies is   Explain in pkg/scheduling, pkg/inspect
//	                           decided by rules in pkg/diagnosis/diagnose.go
//	what such a reason means   pkg/webui/assets/causes.js                    the page
//
// What kube-scheduler makes of the first three is read back in scheduler_message.go.
package reasons
