package mistakes

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fake"
)

// age is the age of the pods.
const age = 18 * time.Minute

// pod returns a pending pod that asks for GPU memory, and that kube-scheduler rejected because no card had room.
func pod(name string, memory int64, edits ...fake.PodEdit) *corev1.Pod {
	return fake.Pod(name, memory, append([]fake.PodEdit{created(age), rejected("2 no GPU card has enough free memory")}, edits...)...)
}

func created(before time.Duration) fake.PodEdit {
	return func(p *corev1.Pod) {
		p.CreationTimestamp = metav1.NewTime(Now.Add(-before))
		p.Spec.SchedulerName = corev1.DefaultSchedulerName
	}
}

// scheduled sets kube-scheduler's condition.
func scheduled(reason, message string) fake.PodEdit {
	return func(p *corev1.Pod) {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: reason, Message: message}}
	}
}

// rejected is the condition of a pod that fits none of two nodes, for these reasons.
func rejected(reasons string) fake.PodEdit {
	return scheduled(corev1.PodReasonUnschedulable, fmt.Sprintf("0/2 nodes are available: %s. no new claims to deallocate, "+
		"preemption: 0/2 nodes are available: 2 No preemption victims found for incoming pod.", reasons))
}

// failed is the condition of a pod for which kube-scheduler met an error.
func failed(message string) fake.PodEdit { return scheduled(corev1.PodReasonSchedulerError, message) }

// untried removes kube-scheduler's condition.
func untried(p *corev1.Pod) { p.Status.Conditions = nil }

// limits replaces the resources of the first container.
func limits(amounts map[corev1.ResourceName]string) fake.PodEdit {
	return func(p *corev1.Pod) {
		list := corev1.ResourceList{}
		for name, amount := range amounts {
			list[name] = resource.MustParse(amount)
		}
		p.Spec.Containers[0].Resources.Limits = list
	}
}

// containers gives the pod containers a, b, and so on.
func containers(amounts ...int64) fake.PodEdit {
	return func(p *corev1.Pod) {
		p.Spec.Containers = nil
		for i, amount := range amounts {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{
				Name: string(rune('a' + i)), Resources: corev1.ResourceRequirements{Limits: fake.Amount(protocol.ResourceMemory, amount)},
			})
		}
	}
}

// memory replaces the amount of a container by one as its owner wrote it.
func memory(container int, amount string) fake.PodEdit {
	return func(p *corev1.Pod) {
		p.Spec.Containers[container].Resources.Limits = corev1.ResourceList{protocol.ResourceMemory: resource.MustParse(amount)}
	}
}

// cards divides the pod's request over cards.
func cards(n string) fake.PodEdit { return label(protocol.LabelCount, n) }

// limitOf annotates a limit of GPU memory of the pod's container.
func limitOf(container, text string) fake.PodEdit {
	return fake.Annotation(protocol.AnnotationLimit(container), text)
}

// limitLabel sets a limit as a label, where nothing reads it.
func limitLabel(container, text string) fake.PodEdit {
	return label(protocol.AnnotationLimit(container), text)
}

// near returns the node n1 with two cards of 8000 MiB, of which card 1 is near an adapter.
func near() []*corev1.Node {
	return []*corev1.Node{inventoried(func(i *protocol.Inventory) { i.Cards[1].RDMAPorts = "mlx5_0:1" })}
}

// coresOf makes a container ask for computing.
func coresOf(container int, percent string) fake.PodEdit {
	return func(p *corev1.Pod) {
		p.Spec.Containers[container].Resources.Limits[protocol.ResourceCores] = resource.MustParse(percent)
	}
}

// inventoried returns the node n1 with two cards of 8000 MiB, and a change of its inventory.
func inventoried(change func(*protocol.Inventory)) *corev1.Node {
	out := node("n1", 8000, 8000)
	inventory, _ := protocol.ParseInventory(out.Annotations)
	change(&inventory)
	out.Annotations[protocol.AnnotationInventory], _ = inventory.Annotation()
	return out
}

// initContainer adds an init container.
func initContainer(name string, amount int64) fake.PodEdit {
	return func(p *corev1.Pod) {
		p.Spec.InitContainers = append(p.Spec.InitContainers, corev1.Container{
			Name: name, Resources: corev1.ResourceRequirements{Limits: fake.Amount(protocol.ResourceMemory, amount)},
		})
	}
}

func tolerates(key string) fake.PodEdit {
	return func(p *corev1.Pod) {
		p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists})
	}
}

func label(key, value string) fake.PodEdit {
	return func(p *corev1.Pod) { metav1.SetMetaDataLabel(&p.ObjectMeta, key, value) }
}

func selector(key, value string) fake.PodEdit {
	return func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{key: value} }
}

func scheduler(name string) fake.PodEdit {
	return func(p *corev1.Pod) { p.Spec.SchedulerName = name }
}

// pinned is the affinity that the controller of DaemonSets sets.
func pinned(node string) fake.PodEdit {
	return fake.RequiredAffinity(fake.NodeNamed(node))
}

// terminating requests the deletion of the pod a time ago, with a grace period of 30 s.
func terminating(before time.Duration) fake.PodEdit {
	return func(p *corev1.Pod) {
		fake.Terminating(Now.Add(30*time.Second - before))(p)
		grace := int64(30)
		p.DeletionGracePeriodSeconds = &grace
	}
}

// member makes the pod a member of the group train by annotations.
func member(size string) fake.PodEdit {
	return func(p *corev1.Pod) {
		fake.Annotation(protocol.AnnotationGroupName, "train")(p)
		fake.Annotation(protocol.AnnotationGroupSize, size)(p)
	}
}

// node returns a node with cards of these sizes in MiB.
func node(name string, cards ...int64) *corev1.Node {
	n := fake.Node(name, cards...)
	n.Labels = map[string]string{corev1.LabelHostname: name}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	return n
}

// edited returns the node with a change.
func edited(n *corev1.Node, change func(*corev1.Node)) *corev1.Node {
	change(n)
	return n
}

// brokenCard returns the node n1 with two cards of the first amount and of 8,000, of which card 1 has failed; the kubelet takes its memory out
// of allocatable.
func brokenCard(first int64) *corev1.Node {
	const second = 8000
	n := node("n1", first, second)
	inventory := protocol.Inventory{Unit: gpu.MiB, Features: []string{protocol.FeatureCards, protocol.FeatureCores}, Cards: []gpu.Card{
		{Index: 0, Memory: gpu.Memory(first), NUMANode: gpu.NoNUMANode},
		{Index: 1, Memory: second, NUMANode: gpu.NoNUMANode, Unhealthy: "Xid 79"},
	}}
	n.Annotations[protocol.AnnotationInventory], _ = inventory.Annotation()
	n.Status.Allocatable[protocol.ResourceMemory] = *resource.NewQuantity(first, resource.DecimalSI)
	return n
}
