package framework

import (
	"maps"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/protocol"
)

const (
	// MainContainer is the name of a pod's first container.
	MainContainer = "main"
	// Image is the image of all containers. No program runs it.
	Image = "registry.example/app:1"
	// LabelGroup has the name of a pod's group, however the pod names its group to the extender.
	LabelGroup = "group"
)

// PodWrapper builds a pod. Its methods change the pod and return the wrapper.
type PodWrapper struct{ corev1.Pod }

// MakePod returns a pod with one container, which requests nothing.
func MakePod(name string) *PodWrapper {
	return &PodWrapper{corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{MakeContainer(MainContainer, 0)}},
	}}
}

// MakeContainer returns a container that requests GPU memory, in units of the cluster, or nothing if memory is 0.
func MakeContainer(name string, memory int64) corev1.Container {
	c := corev1.Container{Name: name, Image: Image}
	if memory != 0 {
		c.Resources.Limits = corev1.ResourceList{protocol.ResourceMemory: *resource.NewQuantity(memory, resource.DecimalSI)}
	}
	return c
}

// Obj returns the pod.
func (p *PodWrapper) Obj() *corev1.Pod { return &p.Pod }

// FairShareGate adds the scheduling gate of fair sharing.
func (p *PodWrapper) FairShareGate() *PodWrapper {
	p.Spec.SchedulingGates = append(p.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: protocol.GateFairShare})
	return p
}

// Clone returns a wrapper of a copy.
func (p *PodWrapper) Clone() *PodWrapper { return &PodWrapper{*p.DeepCopy()} }

// Namespace sets the namespace.
func (p *PodWrapper) Namespace(name string) *PodWrapper {
	p.ObjectMeta.Namespace = name
	return p
}

// UID sets the UID, for pods that the API server doesn't create.
func (p *PodWrapper) UID(uid types.UID) *PodWrapper {
	p.ObjectMeta.UID = uid
	return p
}

// Label sets a label.
func (p *PodWrapper) Label(key, value string) *PodWrapper {
	metav1.SetMetaDataLabel(&p.ObjectMeta, key, value)
	return p
}

// Annotation sets an annotation.
func (p *PodWrapper) Annotation(key, value string) *PodWrapper {
	metav1.SetMetaDataAnnotation(&p.ObjectMeta, key, value)
	return p
}

// Annotations sets several annotations.
func (p *PodWrapper) Annotations(annotations map[string]string) *PodWrapper {
	if p.ObjectMeta.Annotations == nil {
		p.ObjectMeta.Annotations = map[string]string{}
	}
	maps.Copy(p.ObjectMeta.Annotations, annotations)
	return p
}

// Group makes the pod a member of a group by annotations.
func (p *PodWrapper) Group(name string, size int) *PodWrapper {
	return p.Label(LabelGroup, name).
		Annotation(protocol.AnnotationGroupName, name).Annotation(protocol.AnnotationGroupSize, strconv.Itoa(size))
}

// GroupLabels makes the pod a member of a group by labels.
func (p *PodWrapper) GroupLabels(name string, size int) *PodWrapper {
	return p.Label(LabelGroup, name).
		Label(protocol.LabelGroupName, name).Label(protocol.LabelGroupSize, strconv.Itoa(size))
}

// PodGroup makes the pod a member of a native group.
func (p *PodWrapper) PodGroup(name string) *PodWrapper {
	p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: &name}
	return p.Label(LabelGroup, name)
}

// GPUMem sets the GPU memory that the first container requests, in units of the cluster.
func (p *PodWrapper) GPUMem(memory int64) *PodWrapper {
	return p.Limit(protocol.ResourceMemory, memory)
}

// Cards sets the number of cards over which the pod's request is divided.
func (p *PodWrapper) Cards(n int) *PodWrapper {
	return p.Label(protocol.LabelCount, strconv.Itoa(n))
}

// Cores sets the computing that the first container requests, in percent of one card.
func (p *PodWrapper) Cores(percent int64) *PodWrapper {
	return p.Limit(protocol.ResourceCores, percent)
}

// WholeCards sets the number of whole cards (nvidia.com/gpu) that the first container requests.
func (p *PodWrapper) WholeCards(n int64) *PodWrapper {
	return p.Limit(protocol.ResourceWholeCard, n)
}

// Limit sets a limit of the first container.
func (p *PodWrapper) Limit(name corev1.ResourceName, amount int64) *PodWrapper {
	setQuantity(&p.Spec.Containers[0].Resources.Limits, name, amount)
	return p
}

// CPU sets the CPUs that the first container requests.
func (p *PodWrapper) CPU(n int64) *PodWrapper {
	setQuantity(&p.Spec.Containers[0].Resources.Requests, corev1.ResourceCPU, n)
	return p
}

// Container adds a container that requests GPU memory, or nothing if memory is 0.
func (p *PodWrapper) Container(name string, memory int64) *PodWrapper {
	p.Spec.Containers = append(p.Spec.Containers, MakeContainer(name, memory))
	return p
}

// InitContainer adds an init container that requests GPU memory, or nothing if memory is 0.
func (p *PodWrapper) InitContainer(name string, memory int64) *PodWrapper {
	p.Spec.InitContainers = append(p.Spec.InitContainers, MakeContainer(name, memory))
	return p
}

// Sidecar adds an init container that is restarted always, which requests GPU memory, or nothing if memory is 0.
func (p *PodWrapper) Sidecar(name string, memory int64) *PodWrapper {
	sidecar := MakeContainer(name, memory)
	sidecar.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
	p.Spec.InitContainers = append(p.Spec.InitContainers, sidecar)
	return p
}

// Node sets spec.nodeName, so that no scheduler handles the pod.
func (p *PodWrapper) Node(name string) *PodWrapper {
	p.Spec.NodeName, p.Spec.NodeSelector = name, nil
	return p
}

// OnNode makes the scheduler choose this node. It replaces the node selector.
func (p *PodWrapper) OnNode(name string) *PodWrapper {
	p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: name}
	return p
}

// NodeSelector adds a label that the node must have.
func (p *PodWrapper) NodeSelector(key, value string) *PodWrapper {
	if p.Spec.NodeSelector == nil {
		p.Spec.NodeSelector = map[string]string{}
	}
	p.Spec.NodeSelector[key] = value
	return p
}

// SeparateFrom requires that no pod with the label runs on the pod's node.
func (p *PodWrapper) SeparateFrom(key, value string) *PodWrapper {
	p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
			LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{key: value}}, TopologyKey: corev1.LabelHostname,
		}},
	}}
	return p
}

// Tolerate makes the pod tolerate all taints with the key.
func (p *PodWrapper) Tolerate(key string) *PodWrapper {
	p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists})
	return p
}

// HostPort makes the first container use a port of the node. No two pods with the same port fit one node.
func (p *PodWrapper) HostPort(port int32) *PodWrapper {
	c := &p.Spec.Containers[0]
	c.Ports = append(c.Ports, corev1.ContainerPort{ContainerPort: port, HostPort: port})
	return p
}

// ControlledBy names a Job as the pod's controller. No Job with that name needs to exist, unless a garbage collector runs.
func (p *PodWrapper) ControlledBy(job string) *PodWrapper {
	p.OwnerReferences = []metav1.OwnerReference{{
		APIVersion: "batch/v1", Kind: "Job", Name: job, UID: types.UID(job), Controller: new(true),
	}}
	return p
}

// Gate adds a scheduling gate. Namespace.Ungate removes it.
func (p *PodWrapper) Gate() *PodWrapper {
	p.Spec.SchedulingGates = append(p.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: LabelNamespace})
	return p
}

// Scheduler sets the scheduler's name.
func (p *PodWrapper) Scheduler(name string) *PodWrapper {
	p.Spec.SchedulerName = name
	return p
}

// PriorityClass sets the priority class.
func (p *PodWrapper) PriorityClass(name string) *PodWrapper {
	p.Spec.PriorityClassName = name
	return p
}

// GracePeriod sets the termination grace period.
func (p *PodWrapper) GracePeriod(seconds int64) *PodWrapper {
	p.Spec.TerminationGracePeriodSeconds = &seconds
	return p
}

func setQuantity(list *corev1.ResourceList, name corev1.ResourceName, amount int64) {
	if *list == nil {
		*list = corev1.ResourceList{}
	}
	(*list)[name] = *resource.NewQuantity(amount, resource.DecimalSI)
}
