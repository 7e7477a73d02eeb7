package inspect

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/arrivals"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// addStranded adds to the nodes what of their memory is stranded, by the kinds of the pods that exist. (The extender also counts those that have
// ended.) l has the nodes and the pods. It adds nothing if not all pods were read.
func (o *Objects) addStranded(nodes []Node, l *ledger.Ledger) {
	if o.Others == nil {
		return
	}
	cluster, kinds := eligibility.NewCluster(), arrivals.NewCounter()
	for _, object := range o.Nodes {
		if spec, shares := eligibility.Spec(object, protocol.ParseNode(object)); shares {
			cluster.SetNode(object, &spec)
		}
	}
	for _, list := range [][]*corev1.Pod{o.Pods, o.Others} {
		for _, object := range list {
			if pod := clustercache.NewPodInfo(object); !pod.Ended {
				cluster.SetPod(&pod.PodUse)
				kinds.Add(pod.Shape(), pod.Source(), time.Unix(int64(pod.Created), 0))
			}
		}
	}
	for i := range nodes {
		if free, all, known := cluster.FreeResources(nodes[i].Name); known {
			l.SetNodeResources(nodes[i].Name, free, all)
		}
	}
	l.Expect(kinds.Kinds(), kinds.Turnover(), placement.Binpack, cluster.UsableNodes)
	stranded := map[string]placement.Stranded{}
	for _, node := range l.Stranded().Nodes {
		stranded[node.Name] = node.Stranded
	}
	for i := range nodes {
		nodes[i].Stranded = stranded[nodes[i].Name]
	}
}

// onlyRequests returns the pod with no more than what counts as used of a node.
func onlyRequests(pod *corev1.Pod) *corev1.Pod {
	containers := func(of []corev1.Container) (out []corev1.Container) {
		for i := range of {
			out = append(out, corev1.Container{Resources: of[i].Resources, RestartPolicy: of[i].RestartPolicy})
		}
		return out
	}
	meta, spec := &pod.ObjectMeta, &pod.Spec
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: meta.Namespace, Name: meta.Name, UID: meta.UID, CreationTimestamp: meta.CreationTimestamp},
		Spec: corev1.PodSpec{
			NodeName: spec.NodeName, Containers: containers(spec.Containers), InitContainers: containers(spec.InitContainers),
			Overhead: spec.Overhead, Resources: spec.Resources,
		},
	}
}
