package clustercache

import (
	"fmt"
	"maps"
	"runtime"
	"strings"
	"testing"
	"time"
	"unique"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fake"
)

// exported ignores what only client-go and the diagnosis read. An error is compared by its text.
var exported = []cmp.Option{
	cmpopts.IgnoreUnexported(PodInfo{}, diagnosis.Pod{}), cmpopts.EquateComparable(unique.Handle[string]{}, unique.Handle[Owner]{}),
	cmp.Comparer(func(a, b error) bool { return fmt.Sprint(a) == fmt.Sprint(b) }),
}

// TestOwnerName: a pod of a Deployment names the Deployment, not the ReplicaSet.
func TestOwnerName(t *testing.T) {
	controller := true
	for want, test := range map[string]struct {
		kind, name string
		labels     map[string]string
	}{
		"":                           {},
		"Job/train":                  {kind: "Job", name: "train"},
		"Deployment/web":             {"ReplicaSet", "web-6d4cf56db6", map[string]string{"pod-template-hash": "6d4cf56db6"}},
		"ReplicaSet/web-6d4cf56db6":  {kind: "ReplicaSet", name: "web-6d4cf56db6"},
		"StatefulSet/web-6d4cf56db6": {"StatefulSet", "web-6d4cf56db6", map[string]string{"pod-template-hash": "6d4cf56db6"}},
	} {
		pod := fake.Pod("p", 4)
		pod.Labels = test.labels
		if test.kind != "" {
			pod.OwnerReferences = []metav1.OwnerReference{{Kind: test.kind, Name: test.name, UID: "u", Controller: &controller}}
		}
		if got := NewPodInfo(pod).OwnerName(); got != want {
			t.Errorf("owner %q, want %q", got, want)
		}
	}
}

func TestNewPodInfo(t *testing.T) {
	const priority = 7
	const labelsTooLarge = "the pod is too large for gpushare: of the 16 KiB that labels, constraints, resources and ports of a pod can take in the " +
		"extender's memory, its labels alone would take 36 KiB: use fewer of them"
	labelled := fake.Label("a")
	cpu := func(pod *corev1.Pod) {
		requests := fake.Amount(corev1.ResourceCPU, 3)
		maps.Copy(requests, pod.Spec.Containers[0].Resources.Limits) // As the API server does.
		pod.Spec.Containers[0].Resources.Requests = requests
	}
	pending := func(p gpu.Pod, nominated string) *diagnosis.Pod {
		return &diagnosis.Pod{Pod: p, NominatedNode: nominated, Scheduler: "default-scheduler", Message: `scheduler "default-scheduler" has not tried it yet`}
	}
	p := gpu.Pod{Namespace: "default", Name: "p", UID: "uid-p", Request: 5}
	leaving, bare, important := p, p, p
	leaving.Leaving, bare.Request, important.Priority = true, 0, priority
	for name, test := range map[string]struct {
		edits []fake.PodEdit
		want  PodInfo
	}{
		"pending": {
			[]fake.PodEdit{fake.Priority(priority), fake.Nominated("n1"), labelled},
			PodInfo{PodUse: eligibility.PodUse{Pod: important, NominatedNode: "n1"}, Pending: pending(important, "n1")},
		},
		"bound with a card": {
			[]fake.PodEdit{fake.Bound("n1", 2), fake.Nominated("n2"), cpu, labelled},
			PodInfo{PodUse: eligibility.PodUse{Pod: p, Node: "n1", Requests: eligibility.AmountsOf(fake.Amount(corev1.ResourceCPU, 3))}, Labels: map[string]string{"app": "a"}, Placement: gpu.On(2, 5), AssumeTime: time.Unix(1, 0)},
		},
		"bound by another scheduler, on several cards": {
			[]fake.PodEdit{fake.Bound("n1", 0), fake.Annotation(protocol.AnnotationIndex, "0,1"), fake.Annotation(protocol.AnnotationAllocation, `{"c":{"0":2,"1":3}}`)},
			PodInfo{PodUse: eligibility.PodUse{Pod: p, Node: "n1"}, Placement: gpu.Placement{{Card: 0, Memory: 2, Containers: 1}, {Card: 1, Memory: 3, Containers: 1}}, AssumeTime: time.Unix(1, 0)},
		},
		"bound without a card": {
			[]fake.PodEdit{fake.On("n1")}, PodInfo{PodUse: eligibility.PodUse{Pod: p, Node: "n1"}},
		},
		"a card that can't be read": {
			[]fake.PodEdit{fake.Bound("n1", 0), fake.Annotation(protocol.AnnotationIndex, "x")},
			PodInfo{PodUse: eligibility.PodUse{Pod: p, Node: "n1"}, PlacementErr: fmt.Errorf(`annotation %s: "x" is not a card index`, protocol.AnnotationIndex)},
		},
		"terminating": {
			[]fake.PodEdit{fake.Terminating(begin)}, PodInfo{PodUse: eligibility.PodUse{Pod: leaving}, DeletionTime: begin},
		},
		"pending and too large": {
			[]fake.PodEdit{tooLarge, cpu}, PodInfo{
				PodUse: eligibility.PodUse{Pod: p, Requests: eligibility.AmountsOf(fake.Amount(corev1.ResourceCPU, 3))}, TooLarge: true, RequestError: labelsTooLarge, Pending: &diagnosis.Pod{Pod: p, Scheduler: "default-scheduler", Message: `scheduler "default-scheduler" has not tried it yet`, RequestError: labelsTooLarge},
			},
		},
		"bound and too large": {
			[]fake.PodEdit{tooLarge, fake.Bound("n1", 2)}, PodInfo{PodUse: eligibility.PodUse{Pod: p, Node: "n1"}, TooLarge: true, Placement: gpu.On(2, 5), AssumeTime: time.Unix(1, 0)},
		},
		"ended":    {[]fake.PodEdit{fake.Phase(corev1.PodFailed)}, PodInfo{PodUse: eligibility.PodUse{Pod: p}, Ended: true}},
		"a mirror": {[]fake.PodEdit{fake.Bound("n1", 0), fake.Mirror}, PodInfo{PodUse: eligibility.PodUse{Pod: p, Node: "n1"}, Mirror: true, Placement: gpu.On(0, 5), AssumeTime: time.Unix(1, 0)}},
		"without a request for GPU memory": {
			[]fake.PodEdit{fake.Bound("n1", 2), labelled, func(pod *corev1.Pod) {
				pod.Spec.Containers[0].Resources.Limits[protocol.ResourceMemory] = *resource.NewQuantity(0, resource.DecimalSI)
			}},
			PodInfo{PodUse: eligibility.PodUse{Pod: bare, Node: "n1"}, RequestProblem: "the pod asks for 0 of aliyun.com/gpu-mem, so it gets no card"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			pod := fake.Pod("p", 5, test.edits...)
			before := pod.DeepCopy()
			got := NewPodInfo(pod)
			wantEqual(t, "the argument", before, pod)
			clear(pod.Labels) // Nothing is shared.
			clear(pod.Spec.Containers[0].Resources.Requests)
			if test.want.Request > 0 && !test.want.Ended {
				outline, _ := protocol.Outline(before)
				test.want.Constraints = eligibility.ConstraintsOf(outline)
				if test.want.Pending != nil {
					test.want.Pending.Constraints = test.want.Constraints
				}
			}
			test.want.Managed = true
			if test.want.Requests == nil {
				test.want.Requests = eligibility.Amounts{}
			}
			wantEqual(t, "pod info", &test.want, got, exported...)
		})
	}
	if NewPodInfo(fake.Pod("p", 0, func(pod *corev1.Pod) { pod.Spec.Containers = nil })).Managed {
		t.Error("a pod that names no managed resource is managed")
	}
}

// TestGangMember checks how a pod is read as a member of a gang.
func TestGangMember(t *testing.T) {
	inGroup := func(size string) fake.PodEdit {
		return func(pod *corev1.Pod) {
			pod.CreationTimestamp = metav1.NewTime(begin)
			pod.Labels = map[string]string{protocol.LabelGroupName: "job", protocol.LabelGroupSize: size}
		}
	}
	scheduled := func(pod *corev1.Pod) {
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(begin)}}
	}
	owned := func(pod *corev1.Pod) {
		yes := true
		pod.OwnerReferences = []metav1.OwnerReference{{UID: "other"}, {Kind: "Job", Name: "job-1", UID: "owner", Controller: &yes}}
	}
	ofDeployment := func(pod *corev1.Pod) {
		yes := true
		pod.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "serve-v2-7d9f8c", UID: "owner", Controller: &yes}}
		metav1.SetMetaDataLabel(&pod.ObjectMeta, "pod-template-hash", "7d9f8c")
	}
	ofReplicaSet := func(pod *corev1.Pod) {
		ofDeployment(pod)
		delete(pod.Labels, "pod-template-hash")
	}
	ofReplica := func(pod *corev1.Pod) {
		pod.Labels["leaderworkerset.sigs.k8s.io/group-key"] = "2f1a"
	}
	gated := func(gates ...string) fake.PodEdit {
		return func(pod *corev1.Pod) {
			for _, gate := range gates {
				pod.Spec.SchedulingGates = append(pod.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: gate})
			}
		}
	}
	unschedulable := func(message string) fake.PodEdit {
		return func(pod *corev1.Pod) {
			pod.Status.Conditions = []corev1.PodCondition{{
				Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: message,
			}}
		}
	}
	marked := func(value string) fake.PodEdit { return fake.Annotation(protocol.AnnotationGroupWhole, value) }
	inPodGroup := func(pod *corev1.Pod) {
		pod.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: new("train")}
	}
	type changes = func(*gang.Member)
	for name, test := range map[string]struct {
		edits []fake.PodEdit
		want  changes
	}{
		"pending":                    {nil, func(*gang.Member) {}},
		"gated":                      {[]fake.PodEdit{gated("g")}, func(m *gang.Member) { m.GatedOtherwise = true }},
		"gated until its fair share": {[]fake.PodEdit{gated(protocol.GateFairShare)}, func(m *gang.Member) { m.Gated = true }},
		"gated by both":              {[]fake.PodEdit{gated(protocol.GateFairShare, "g")}, func(m *gang.Member) { m.GatedOtherwise, m.Gated = true, true }},
		"of another scheduler":       {[]fake.PodEdit{func(pod *corev1.Pod) { pod.Spec.SchedulerName = "other" }}, func(m *gang.Member) { m.Scheduler = "other" }},
		"nodes lack GPU memory":      {[]fake.PodEdit{unschedulable("0/3 nodes are available: 1 Insufficient aliyun.com/gpu-mem, 2 Insufficient cpu.")}, func(m *gang.Member) { m.ShortOfResources = true }},
		"nodes lack CPU":             {[]fake.PodEdit{unschedulable("0/3 nodes are available: 3 Insufficient cpu.")}, func(m *gang.Member) { m.ShortOfResources = true }},
		"nodes have too many pods":   {[]fake.PodEdit{unschedulable("0/3 nodes are available: 3 Too many pods.")}, func(m *gang.Member) { m.ShortOfResources = true }},
		"a claim is missing":         {[]fake.PodEdit{unschedulable(`0/3 nodes are available: persistentvolumeclaim "x" not found.`)}, func(*gang.Member) {}},
		"nodes lacked GPU memory":    {[]fake.PodEdit{unschedulable("1 Insufficient aliyun.com/gpu-mem."), fake.Bound("n1", 0)}, func(m *gang.Member) { m.Node = "n1" }},
		"a run of its gang":          {[]fake.PodEdit{fake.Annotation(protocol.AnnotationGroupRun, "uid-a")}, func(m *gang.Member) { m.Run = "uid-a" }},
		"too large": {[]fake.PodEdit{tooLarge, inGroup("2"), func(pod *corev1.Pod) {
			pod.Spec.NodeSelector = map[string]string{"a": strings.Repeat("b", protocol.MaxSize)}
		}}, func(m *gang.Member) {
			m.Problem = "the pod is too large for gpushare: of the 16 KiB that labels, constraints, resources and ports of a pod can take in the " +
				"extender's memory, its node selector alone would take 17 KiB: use fewer of them"
		}},
		"an invalid size": {[]fake.PodEdit{inGroup("x")}, func(m *gang.Member) {
			m.Size, m.Problem = 0, protocol.ErrGroupSize.Error()+": label pod-group.scheduling.sigs.k8s.io/min-available is \"x\""
		}},
		"owned by a controller":                {[]fake.PodEdit{owned}, func(m *gang.Member) { m.Controller, m.Kind = "owner", "Job" }},
		"of a Deployment":                      {[]fake.PodEdit{ofDeployment}, func(m *gang.Member) { m.Controller, m.Kind = "Deployment serve-v2", "ReplicaSet" }},
		"of a ReplicaSet without a Deployment": {[]fake.PodEdit{ofReplicaSet}, func(m *gang.Member) { m.Controller, m.Kind = "owner", "ReplicaSet" }},
		"of a LeaderWorkerSet":                 {[]fake.PodEdit{ofReplica}, func(m *gang.Member) { m.Gang.Name, m.Kind = "job/2f1a", gang.LeaderWorkerSet }},
		"bound":                                {[]fake.PodEdit{fake.Bound("n1", 0), scheduled}, func(m *gang.Member) { m.Node, m.BoundAt = "n1", begin }},
		"bound, the time is unknown":           {[]fake.PodEdit{fake.Bound("n1", 0)}, func(m *gang.Member) { m.Node = "n1" }},
		"a condition without a node":           {[]fake.PodEdit{scheduled}, func(*gang.Member) {}},
		"succeeded":                            {[]fake.PodEdit{fake.Phase(corev1.PodSucceeded)}, func(m *gang.Member) { m.Ended, m.Succeeded = true, true }},
		"failed":                               {[]fake.PodEdit{fake.Phase(corev1.PodFailed)}, func(m *gang.Member) { m.Ended = true }},
		"terminating":                          {[]fake.PodEdit{fake.Terminating(begin)}, func(m *gang.Member) { m.Leaving = true }},
		"it marks its gang as whole":           {[]fake.PodEdit{fake.Bound("n1", 0), marked("true")}, func(m *gang.Member) { m.Node, m.MarkedWhole = "n1", true }},
		"bound before the others":              {[]fake.PodEdit{fake.Bound("n1", 0), marked("false")}, func(m *gang.Member) { m.Node = "n1" }},
		"with a copied mark":                   {[]fake.PodEdit{marked("true")}, func(*gang.Member) {}},
		"it asks for whole cards":              {[]fake.PodEdit{limits(fake.Amount(protocol.ResourceWholeCard, 1))}, func(m *gang.Member) { m.Request = 0 }},
		"it asks for neither":                  {[]fake.PodEdit{limits(nil)}, func(m *gang.Member) { m.Request, m.Cardless = 0, true }},
		"in a PodGroup besides":                {[]fake.PodEdit{inPodGroup}, func(m *gang.Member) { m.PodGroup = "train" }},
		"in a PodGroup": {[]fake.PodEdit{inPodGroup, func(pod *corev1.Pod) { pod.Labels, pod.Annotations = nil, nil }}, func(m *gang.Member) {
			m.Gang, m.PodGroup, m.Size = gang.Key{Namespace: "default", Name: "train", Native: true}, "train", 0
		}},
		"by annotations, without a name": {[]fake.PodEdit{func(pod *corev1.Pod) {
			pod.Labels, pod.Annotations = nil, map[string]string{protocol.AnnotationGroupSize: "2"}
		}}, func(m *gang.Member) {
			m.Gang.Name, m.Size, m.Problem = "", 0, protocol.ErrGroupUnnamed.Error()+": annotation scheduling.k8s.io/group-name is missing"
		}},
	} {
		t.Run(name, func(t *testing.T) {
			pod := fake.Pod("p", 5, append([]fake.PodEdit{inGroup("2")}, test.edits...)...)
			outline, _ := protocol.Outline(pod)
			want := gang.Member{
				Pod:  gpu.Pod{Namespace: "default", Name: "p", UID: "uid-p", Request: 5},
				Gang: gang.Key{Namespace: "default", Name: "job"}, Size: 2, Created: begin, Template: protocol.TemplateHash(outline), Shape: protocol.ShapeHash(outline),
			}
			test.want(&want)
			wantEqual(t, "member", &want, NewPodInfo(pod).Member)
		})
	}
	if m := NewPodInfo(fake.Pod("p", 5)).Member; m != nil {
		t.Errorf("a pod without a group is the member %+v", m)
	}
}

func limits(list corev1.ResourceList) fake.PodEdit {
	return func(pod *corev1.Pod) { pod.Spec.Containers[0].Resources.Limits = list }
}

// client-go finds the key and the version of a pod info.
func TestObjectMeta(t *testing.T) {
	pod := fake.Pod("p", 5)
	pod.ResourceVersion = "41"
	info := NewPodInfo(pod)
	if key, err := cache.MetaNamespaceKeyFunc(info); key != "default/p" || err != nil {
		t.Errorf("key %q, %v", key, err)
	}
	if meta := info.GetObjectMeta(); meta.GetResourceVersion() != "41" || meta.GetUID() != "uid-p" {
		t.Errorf("%+v", meta)
	}
}

// A pod info is small enough that a large cluster fits into a small process.
func TestPodInfoMemory(t *testing.T) {
	const pods = 10_000
	s, kept := new(sharing), make([]any, pods)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range kept {
		pod := fake.Pod(fmt.Sprintf("training-7d9f8c6b5-%05d", i), 1+int64(i), fake.Bound(fmt.Sprint("n", i%1000), i%8))
		pod.Labels = map[string]string{"app.kubernetes.io/name": "training", "pod-template-hash": fmt.Sprint(i / 100)}
		pod.UID = types.UID(fmt.Sprintf("%036d", i))
		pod.Spec.Containers[0].Image = strings.Repeat("image", 1000)
		var err error
		if kept[i], err = s.transform(pod); err != nil {
			t.Fatal(err)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	each := (int64(after.HeapAlloc) - int64(before.HeapAlloc)) / pods
	t.Logf("%d bytes a pod", each)
	if each > 520 {
		t.Errorf("%d bytes a pod, want at most 520", each)
	}
	runtime.KeepAlive(kept)
}

// Filter must not decide from the cache for a pod that kube-scheduler has changed since, or is about to change.
func TestIsOf(t *testing.T) {
	version := func(v string) fake.PodEdit { return func(pod *corev1.Pod) { pod.ResourceVersion = v } }
	pod := fake.Pod("p", 60, version("7"))
	for name, test := range map[string]struct {
		object *corev1.Pod
		want   bool
	}{
		"the same state":                      {fake.Edited(pod), true},
		"another version":                     {fake.Edited(pod, version("8")), false},
		"another pod of the name":             {fake.Edited(pod, func(pod *corev1.Pod) { pod.UID = "other" }), false},
		"a nomination that isn't written yet": {fake.Edited(pod, fake.Nominated("n1")), false},
	} {
		if got := NewPodInfo(pod).IsOf(test.object); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
	if unknown := fake.Edited(pod, version("")); NewPodInfo(unknown).IsOf(unknown) {
		t.Error("of a pod without a version")
	}
}
