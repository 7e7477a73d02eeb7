package extender

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/gang"
)

// answerMember answers for a pod whose group decides. Where it may go nowhere the reason is told of one node for all:
// kube-scheduler shows reasons by their text, and takes nodes that nobody speaks of for such that no other pod's leaving
// would help (k8s.io/kubernetes pkg/scheduler/framework, NodeToStatus).
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
