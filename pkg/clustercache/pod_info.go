package clustercache

import (
	"cmp"
	"errors"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
	"unique"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	resourcehelper "k8s.io/component-helpers/resource"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// PodInfo is what the extender keeps of a pod. A corev1.Pod needs more than a kilobyte even if it is empty, and a cluster
// has tens of thousands of pods. A PodInfo is never changed after it was built, since pods share parts of it.
type PodInfo struct {
	eligibility.PodUse
	// Ended is true if the pod has succeeded or failed.
	Ended bool
	// Gated is true if the pod has the scheduling gate of fair shares, GatedOtherwise if it has others.
	Gated, GatedOtherwise bool
	// Mirror is true for the mirror pod of a static pod.
	Mirror bool
	// Managed is true if kube-scheduler can send the pod to the extender, see protocol.Managed.
	Managed bool
	// WithoutExtender is true if a scheduler bound the pod without calling the extender, see diagnosis.BoundWithoutExtender.
	WithoutExtender bool
	// NeverPreempts is true if spec.preemptionPolicy is Never.
	NeverPreempts bool
	// TooLarge is true if the pod is too large for its labels, constraints, conflicts and extended resources to be kept, see
	// protocol.CheckSize. They are unknown then.
	TooLarge bool
	// Unserved is true if RequestProblem is about whole cards: it is a problem only while no node offers them.
	Unserved bool
	// GraceSeconds is metadata.deletionGracePeriodSeconds, between the request for the deletion and DeletionTime.
	GraceSeconds int32
	// Created is when a pod that asks for GPU memory was created, in seconds as Unix counts them.
	Created uint32
	// DeletionTime is metadata.deletionTimestamp, the end of the grace period; zero if the pod isn't being deleted.
	DeletionTime time.Time
	// Labels are the labels of a pod that has a node and asks for GPU memory, for disruption budgets; nil for other pods.
	Labels map[string]string
	// Conflicts may keep another pod off the same node, see Interferes.
	Conflicts Conflicts
	// Placement are the cards that the annotations of a pod that asks for GPU memory name. It is nil if they name none, or
	// if they are invalid; then PlacementErr is why.
	Placement    gpu.Placement
	PlacementErr error
	// RequestError is why the pod gets no node: it is too large, or no node can give it what it asks for (protocol.CheckRequest). It is empty if
	// one can, and for a pod that has a node.
	RequestError string
	// Containers are the requests of the app containers of a pod that asks for several cards, in the order of the spec; nil for
	// other pods.
	Containers []gpu.Memory
	// AssumeTime is when the extender chose the card, according to the annotations; zero if unknown.
	AssumeTime time.Time
	// Overuse is what the annotation reports of a pod that uses more GPU memory than it requests; nil for other pods.
	Overuse *protocol.Overuse
	// LimitProblem is which limit of the pod is not in force and why, as the annotation reports it; empty if none is reported.
	LimitProblem string
	// Member is the pod as a member of its gang; nil if the pod names no group.
	Member *gang.Member
	// Pending is what the diagnosis needs; nil if the pod has a node, has ended, is being deleted, or asks for no GPU memory.
	Pending *diagnosis.Pod
	// RequestProblem is why the pod gets no GPU memory although it seems to ask for some, see diagnosis.RequestProblem; empty
	// if it asks for none, or for some in the right way.
	RequestProblem string

	// Owner is the controller of a pod that asks for GPU memory; the zero Handle if it has none.
	Owner unique.Handle[Owner]

	resourceVersion string
}

// Owner is a pod's controller. The pods of one controller share it.
type Owner struct {
	UID string
	// Kind and Name are those of the Deployment if the controller is one of its ReplicaSets.
	Kind, Name string
}

// ownerOf returns the owner of a pod with the labels. The controller of Deployments names a ReplicaSet after the Deployment and the value of
// its label pod-template-hash.
func ownerOf(ref *metav1.OwnerReference, labels map[string]string) Owner {
	owner := Owner{UID: string(ref.UID), Kind: ref.Kind, Name: ref.Name}
	if hash := labels[appsv1.DefaultDeploymentUniqueLabelKey]; owner.Kind == "ReplicaSet" && hash != "" {
		if name, ok := strings.CutSuffix(owner.Name, "-"+hash); ok {
			owner.Kind, owner.Name = "Deployment", name
		}
	}
	return owner
}

// ID identifies the owner in its namespace. The ReplicaSets of one Deployment count as one owner.
func (o Owner) ID() string {
	if o.Kind == "Deployment" {
		return o.Kind + " " + o.Name
	}
	return o.UID
}

// OwnerName returns the pod's controller as Kind/name; "" if it has none, or asks for no GPU memory.
func (p *PodInfo) OwnerName() string {
	if p.Owner == (unique.Handle[Owner]{}) {
		return ""
	}
	owner := p.Owner.Value()
	return owner.Kind + "/" + owner.Name
}

// NewPodInfo returns the pod info of a pod of a watch, a live read, or a request. It shares nothing with the argument.
func NewPodInfo(object *corev1.Pod) *PodInfo {
	pod, tooLarge := protocol.Outline(object)
	problem := cmp.Or(tooLarge, protocol.CheckRequest(pod))
	values := protocol.Pod(pod)
	p := &PodInfo{
		TooLarge: tooLarge != nil,
		PodUse:   eligibility.PodUse{Pod: values, Node: pod.Spec.NodeName, Requests: podRequests(pod)},
		Ended:    protocol.Terminal(pod), Mirror: protocol.IsMirror(pod),
		Gated: slices.ContainsFunc(pod.Spec.SchedulingGates, ofFairShare), GatedOtherwise: slices.ContainsFunc(pod.Spec.SchedulingGates, foreign),
		Managed: protocol.Managed(pod), Member: memberOf(pod, values, problem),
		NeverPreempts:   ptr.Deref(pod.Spec.PreemptionPolicy, corev1.PreemptLowerPriority) == corev1.PreemptNever,
		resourceVersion: pod.ResourceVersion,
	}
	if !p.TooLarge {
		p.Conflicts = conflictsOf(&pod.Spec)
		p.RequestProblem = diagnosis.RequestProblem(pod)
		if p.RequestProblem == "" {
			p.RequestProblem = diagnosis.UnservedRequest(pod)
			p.Unserved = p.RequestProblem != ""
		}
	}
	if p.Node == "" {
		p.NominatedNode = pod.Status.NominatedNodeName
		if problem != nil {
			p.RequestError = problem.Error()
		}
	}
	if p.Leaving {
		p.DeletionTime = pod.DeletionTimestamp.Time
		if grace := pod.DeletionGracePeriodSeconds; grace != nil {
			p.GraceSeconds = int32(min(*grace, math.MaxInt32))
		}
	}
	if p.Request == 0 {
		return p
	}
	p.Created = uint32(max(pod.CreationTimestamp.Unix(), 0))
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil { // The outline has none of a pod that is too large.
		p.Owner = unique.Make(ownerOf(owner, pod.Labels))
	}
	if p.Node == "" && p.NumCards() > 1 && !p.TooLarge {
		for i := range pod.Spec.Containers {
			p.Containers = append(p.Containers, protocol.ContainerRequest(&pod.Spec.Containers[i]))
		}
	}
	if p.Node != "" && !p.TooLarge {
		p.Labels = maps.Clone(pod.Labels)
	}
	var err error
	p.Placement, err = protocol.PodPlacement(pod)
	if err != nil && !errors.Is(err, protocol.ErrNotAssumed) {
		p.PlacementErr = errors.New(protocol.Shorten(err.Error()))
	}
	p.Overuse, _ = protocol.ParseOveruse(pod.Annotations[protocol.AnnotationOveruse]) // An invalid annotation reports nothing.
	p.WithoutExtender = diagnosis.BoundWithoutExtender(pod)
	p.LimitProblem = strings.Clone(protocol.ParsePodIsolation(pod.Annotations).Problem)
	assignment, _ := protocol.ParseAssignment(pod.Annotations)
	p.AssumeTime = assignment.AssumeTime
	switch {
	case p.Ended:
	case p.Node == "" && !p.Leaving:
		p.Pending = diagnosis.NewPodOf(pod, values, problem)
		p.Constraints = p.Pending.Constraints
	default:
		p.Constraints = eligibility.ConstraintsOf(pod)
	}
	return p
}

// Source returns what tells a pod's controller apart from others, or the pod if it has none.
func (p *PodInfo) Source() unique.Handle[string] {
	if p.Owner == (unique.Handle[Owner]{}) {
		return unique.Make(string(p.UID))
	}
	return unique.Make(p.Namespace + "/" + p.Owner.Value().ID())
}

// anyGate reports whether a scheduling gate keeps kube-scheduler from trying the pod.
func (p *PodInfo) anyGate() bool { return p.Gated || p.GatedOtherwise }

// podRequests returns what the pod uses of its node except GPU memory, by the rule of kube-scheduler (k8s.io/kubernetes
// pkg/scheduler/framework/types.go, calculateResource).
func podRequests(pod *corev1.Pod) eligibility.Amounts {
	requests := resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{
		UseStatusResources: true, InPlacePodLevelResourcesVerticalScalingEnabled: true,
	})
	delete(requests, protocol.ResourceMemory)
	return eligibility.AmountsOf(requests)
}

// GetObjectMeta implements metav1.ObjectMetaAccessor, by which client-go finds key and version. The result is a copy.
func (p *PodInfo) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{
		Namespace: p.Namespace, Name: p.Name, UID: types.UID(p.UID), ResourceVersion: p.resourceVersion,
	}
}

// IsOf reports whether the pod info is of this state of a pod without a node. kube-scheduler can send a pod with a nomination that it has not written
// yet (k8s.io/kubernetes pkg/scheduler/framework/api_calls/pod_status_patch.go, Sync).
func (p *PodInfo) IsOf(object *corev1.Pod) bool {
	return p.UID == gpu.PodUID(object.UID) && p.resourceVersion == object.ResourceVersion && p.resourceVersion != "" &&
		p.NominatedNode == object.Status.NominatedNodeName
}

// Overdue reports whether the pod still exists well after its deletion deadline, see protocol.Overdue.
func (p *PodInfo) Overdue(now time.Time) bool {
	return p.Leaving && protocol.Overdue(p.DeletionTime, now)
}

// DeletionRequested returns when the pod's deletion was requested; zero if it isn't being deleted.
func (p *PodInfo) DeletionRequested() time.Time {
	if !p.Leaving {
		return time.Time{}
	}
	return p.DeletionTime.Add(-time.Duration(p.GraceSeconds) * time.Second)
}
