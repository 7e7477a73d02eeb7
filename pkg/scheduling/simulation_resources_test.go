package scheduling

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// amounts are what a pod requests, or a node has, of the resources that kube-scheduler counts by node: the sum of GPU memory, CPUs,
// GiB of memory, and pods.
type amounts struct{ gpu, cpu, ram, pods int64 }

func (a amounts) plus(b amounts) amounts {
	return amounts{a.gpu + b.gpu, a.cpu + b.cpu, a.ram + b.ram, a.pods + b.pods}
}
func (a amounts) minus(b amounts) amounts {
	return amounts{a.gpu - b.gpu, a.cpu - b.cpu, a.ram - b.ram, a.pods - b.pods}
}

// exceeds reports whether a is larger than b in any resource.
func (a amounts) exceeds(b amounts) bool { return a.lacks(b) != nodeFits }

// lacks returns the first resource of which free is less than what is needed. What isn't requested is never lacking (k8s.io/kubernetes
// pkg/scheduler/framework/plugins/noderesources/fit.go, fitsRequest).
func (a amounts) lacks(free amounts) nodeReason {
	switch {
	case a.pods > 0 && a.pods > free.pods:
		return lacksPods
	case a.cpu > 0 && a.cpu > free.cpu:
		return lacksCPU
	case a.ram > 0 && a.ram > free.ram:
		return lacksRAM
	case a.gpu > 0 && a.gpu > free.gpu:
		return lacksGPU
	}
	return nodeFits
}

// amounts returns what the pod requests.
func (s *podSpec) amounts() amounts { return amounts{s.memory, s.cpu, s.ram, 1} }

// allocatable returns what a node has.
func allocatable(n *corev1.Node) amounts {
	list := n.Status.Allocatable
	get := func(name corev1.ResourceName) int64 {
		q := list[name]
		return q.Value()
	}
	return amounts{get(protocol.ResourceMemory), get(corev1.ResourceCPU), get(corev1.ResourceMemory) >> 30, get(corev1.ResourcePods)}
}

// nodeReason is why kube-scheduler's own filters reject a node.
type nodeReason uint8

const (
	nodeFits nodeReason = iota
	lacksPods
	lacksCPU
	lacksRAM
	lacksGPU
	nodeApart
	nodeOther
	nodeReasons
)

// nodeReasonText has the words of kube-scheduler.
var nodeReasonText = [nodeReasons]string{
	lacksPods: "Too many pods", lacksCPU: "Insufficient cpu", lacksRAM: "Insufficient memory", lacksGPU: "Insufficient aliyun.com/gpu-mem",
	nodeApart: "node(s) didn't match pod anti-affinity rules", nodeOther: "node(s) didn't match",
}

// shortage counts the nodes that kube-scheduler's own filters reject, by reason.
type shortage [nodeReasons]int

// constraints are what keeps a pod from nodes beside their resources.
type constraints struct {
	// zone is the only zone in which the pod may run; empty for any.
	zone string
	// port keeps two pods with the same port off one node. The extender doesn't count ports.
	port int
	// apart keeps two pods with the same value off one node: required anti-affinity, with this label on each of the pods.
	apart string
	// volume is the name of a claim that doesn't exist: kube-scheduler rejects the pod before it filters nodes.
	volume string
}

// labelApart is the label by which pods are kept apart.
const labelApart = "test/apart"

// hidden reports whether kube-scheduler knows constraints of the pod that the extender's plans don't.
func (c *constraints) hidden() bool { return c.port > 0 || c.apart != "" || c.volume != "" }

// apply adds the constraints to a pod.
func (c *constraints) apply(object *corev1.Pod) {
	spec := &object.Spec
	if c.zone != "" {
		spec.NodeSelector = map[string]string{"zone": c.zone}
	}
	if c.apart != "" {
		metav1.SetMetaDataLabel(&object.ObjectMeta, labelApart, c.apart)
		spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
				TopologyKey: corev1.LabelHostname, LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{labelApart: c.apart}},
			}},
		}}
	}
	if c.volume != "" {
		spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: c.volume},
		}}}
	}
}

// admits returns why the node rejects the pod whatever else it has free; nodeFits if it doesn't.
func (n *schedNode) admits(p *schedPod) nodeReason {
	switch {
	case n.closed, p.zone != "" && p.zone != n.zone, p.port > 0 && n.has(func(o *schedPod) bool { return o.port == p.port }):
		return nodeOther
	case p.apart != "" && n.has(func(o *schedPod) bool { return o.apart == p.apart }):
		return nodeApart
	}
	return nodeFits
}

// has reports whether the node has such a pod.
func (n *schedNode) has(what func(*schedPod) bool) bool { return slices.ContainsFunc(n.pods, what) }
