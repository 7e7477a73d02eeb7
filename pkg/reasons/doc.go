// Package reasons holds why pods are not placed: the values, their labels for metrics, their words for users, their form on the wire and
// its parser.
//
// The wire is kube-scheduler: it puts the texts of filter's answers into the pod's Event and condition PodScheduled, from where
// other programs and replicas of the extender read them. Other versions read them too, so texts don't change.
//
// A pending pod is explained by texts of five origins. The first three are in filter's answer, so Events, the condition PodScheduled and views show
// them. The last two are made for views, which are the page, kubectl inspect and, by reason, the metrics:
//
//	text                       words                                     used by
//	why a node was rejected    Reason.TextFor                            appendJSON in pkg/extender/answer.go, which encodes the answer
//	why a group waits          Group.Text                                groups.filter in pkg/scheduling/groups.go; diagnosis.GroupWait for views
//	that fair sharing decides  AwaitsTurn                                Filter in pkg/scheduling/filter.go
//	what the pod waits for     Diagnose, findVerdict in pkg/diagnosis    Explain in pkg/scheduling/explain.go, pkg/inspect
//	what such a cause means    pkg/webui/assets/causes.js                the page
package reasons
