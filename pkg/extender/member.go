package extender

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/gang"
)

// answerMember returns filter's answer for a pod that its gang places. If no node passes, the answer gives the reason for
// one node only. kube-scheduler groups reasons by their text, and assumes that preemption can't help on a node without a
// reason (k8s.io/kubernetes pkg/scheduler/framework, NodeToStatus).
func (a *nodesArgs) answerMember(answer gang.FilterResult) any {
	result := &extenderv1.ExtenderFilterResult{}
	if a.NodeNames != nil || a.Nodes == nil {
		names := slices.Clip(append([]string{}, answer.Nodes...))
		result.NodeNames = &names
	} else {
		items := slices.DeleteFunc(slices.Clone(a.Nodes.Items), func(node corev1.Node) bool {
			return !slices.Contains(answer.Nodes, node.Name)
		})
		result.Nodes = &corev1.NodeList{Items: items}
	}
	if offered := a.names(); len(answer.Nodes) == 0 && len(offered) > 0 {
		result.FailedAndUnresolvableNodes = extenderv1.FailedNodesMap{offered[0]: answer.Reason.Text}
	}
	return result
}
