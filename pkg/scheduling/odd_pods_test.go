package scheduling

import (
	"fmt"
	"maps"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/fake"
)

const (
	// etcdLimit is about the size of the largest object that an API server with etcd's default limit accepts, and annotationLimit that of all
	// annotations of an object.
	etcdLimit, annotationLimit = 1_400_000, 250_000
	// The odd pods of one kind are spread over namespaces.
	oddPods, oddNamespaces, oddNodes = 50, 10, 10
)

// oddity grows one field of a pod that the extender reads. add adds an element to it; text is different for each element and pod.
type oddity struct {
	// bound is true if the field counts for pods that have a node.
	bound bool
	// anySize is true if a pod isn't rejected for the field: what is kept of it is limited where it is read.
	anySize bool
	add     func(pod *corev1.Pod, text string)
}

func affinityOf(pod *corev1.Pod) *corev1.Affinity {
	if pod.Spec.Affinity == nil {
		pod.Spec.Affinity = &corev1.Affinity{
			NodeAffinity: &corev1.NodeAffinity{}, PodAffinity: &corev1.PodAffinity{}, PodAntiAffinity: &corev1.PodAntiAffinity{},
		}
	}
	return pod.Spec.Affinity
}

func requiredOf(pod *corev1.Pod) *corev1.NodeSelector {
	affinity := affinityOf(pod).NodeAffinity
	if affinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		affinity.RequiredDuringSchedulingIgnoredDuringExecution = &corev1.NodeSelector{}
	}
	return affinity.RequiredDuringSchedulingIgnoredDuringExecution
}

// extendAnnotation returns an oddity that makes the text of an annotation longer.
func extendAnnotation(bound bool, key string) oddity {
	return oddity{bound, true, func(pod *corev1.Pod, text string) {
		fake.Annotation(key, pod.Annotations[key]+strings.Repeat(text, 20))(pod)
	}}
}

// annotateJSON returns an oddity that adds an entry to an annotation, which is a JSON object.
func annotateJSON(key, begin, end string, entry func(n int) string) oddity {
	return oddity{true, true, func(pod *corev1.Pod, _ string) {
		inside := strings.TrimSuffix(strings.TrimPrefix(pod.Annotations[key], begin), end)
		var entries strings.Builder
		n := strings.Count(inside, "{")
		for i := range 10 {
			if n+i > 0 {
				entries.WriteByte(',')
			}
			entries.WriteString(entry(n + i))
		}
		fake.Annotation(key, begin+inside+entries.String()+end)(pod)
	}}
}

var group = map[string]string{protocol.LabelGroupName: "odd", protocol.LabelGroupSize: "2"}

var oddities = map[string]oddity{
	"labels of a bound pod": {bound: true, add: func(pod *corev1.Pod, text string) {
		metav1.SetMetaDataLabel(&pod.ObjectMeta, text, "")
	}},
	"labels of a group's member": {add: func(pod *corev1.Pod, text string) {
		metav1.SetMetaDataLabel(&pod.ObjectMeta, text, "")
		maps.Copy(pod.Labels, group)
	}},
	"group name": extendAnnotation(false, protocol.AnnotationGroupName),
	"group run":  extendAnnotation(true, protocol.AnnotationGroupRun),
	"isolation":  extendAnnotation(true, protocol.AnnotationIsolation),
	"cards":      extendAnnotation(true, protocol.AnnotationIndex),
	"over-use":   annotateJSON(protocol.AnnotationOveruse, `{"cards":{`, `}}`, func(n int) string { return fmt.Sprintf(`"%d":{"usedMiB":1}`, n) }),
	"allocation": annotateJSON(protocol.AnnotationAllocation, `{`, `}`, func(n int) string { return fmt.Sprintf(`"%d":{"%d":1}`, n, n) }),
	"number on cards": {bound: true, anySize: true, add: func(pod *corev1.Pod, _ string) {
		fake.Annotation(protocol.AnnotationAllocation, `{"0":{"0":`+strings.Repeat("1", annotationLimit)+`}}`)(pod)
	}},
	"owner's UID": {add: func(pod *corev1.Pod, text string) {
		if pod.OwnerReferences == nil {
			pod.OwnerReferences = []metav1.OwnerReference{{Controller: new(true)}}
			maps.Copy(labelsOf(pod), group)
		}
		pod.OwnerReferences[0].UID += types.UID(strings.Repeat(text, 100))
	}},
	"node selector": {add: func(pod *corev1.Pod, text string) {
		if pod.Spec.NodeSelector == nil {
			pod.Spec.NodeSelector = map[string]string{}
		}
		pod.Spec.NodeSelector[text] = ""
	}},
	"node affinity terms": {add: func(pod *corev1.Pod, text string) {
		required := requiredOf(pod)
		required.NodeSelectorTerms = append(required.NodeSelectorTerms, corev1.NodeSelectorTerm{
			MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "a", Operator: corev1.NodeSelectorOpIn, Values: []string{text}}},
		})
	}},
	"node affinity expressions": {add: func(pod *corev1.Pod, text string) {
		required := requiredOf(pod)
		if required.NodeSelectorTerms == nil {
			required.NodeSelectorTerms = make([]corev1.NodeSelectorTerm, 1)
		}
		term := &required.NodeSelectorTerms[0]
		term.MatchExpressions = append(term.MatchExpressions, corev1.NodeSelectorRequirement{Key: text, Operator: corev1.NodeSelectorOpDoesNotExist})
	}},
	"node affinity values": {add: func(pod *corev1.Pod, text string) {
		required := requiredOf(pod)
		if required.NodeSelectorTerms == nil {
			required.NodeSelectorTerms = []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "a", Operator: corev1.NodeSelectorOpNotIn}},
			}}
		}
		expression := &required.NodeSelectorTerms[0].MatchExpressions[0]
		expression.Values = append(expression.Values, text)
	}},
	"anti-affinity of a group's member": {add: func(pod *corev1.Pod, text string) {
		affinity := affinityOf(pod).PodAntiAffinity
		affinity.RequiredDuringSchedulingIgnoredDuringExecution = append(affinity.RequiredDuringSchedulingIgnoredDuringExecution,
			corev1.PodAffinityTerm{TopologyKey: "a", Namespaces: []string{text}})
		maps.Copy(labelsOf(pod), group)
	}},
	"spread": {add: func(pod *corev1.Pod, text string) {
		pod.Spec.TopologySpreadConstraints = append(pod.Spec.TopologySpreadConstraints,
			corev1.TopologySpreadConstraint{MaxSkew: 1, TopologyKey: text, WhenUnsatisfiable: corev1.DoNotSchedule})
	}},
	"host ports": {add: func(pod *corev1.Pod, text string) {
		main := &pod.Spec.Containers[0]
		main.Ports = append(main.Ports, corev1.ContainerPort{ContainerPort: 1, HostPort: int32(len(main.Ports)%65_000 + 1), Protocol: corev1.ProtocolUDP})
	}},
	"host ports of a bound pod": {bound: true, add: func(pod *corev1.Pod, text string) {
		main := &pod.Spec.Containers[0]
		main.Ports = append(main.Ports, corev1.ContainerPort{ContainerPort: 1, HostPort: int32(len(main.Ports)%65_000 + 1), HostIP: text})
	}},
	"containers": {add: func(pod *corev1.Pod, text string) {
		metav1.SetMetaDataLabel(&pod.ObjectMeta, protocol.LabelCount, "2")
		pod.Spec.Containers[0].Resources.Limits = fake.Amount(protocol.ResourceMemory, 2)
		pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{Name: text, Resources: corev1.ResourceRequirements{Limits: fake.Amount(protocol.ResourceMemory, 2)}})
	}},
	"init containers": {add: func(pod *corev1.Pod, text string) {
		pod.Spec.InitContainers = append(pod.Spec.InitContainers, corev1.Container{Name: text, Resources: corev1.ResourceRequirements{Limits: fake.Amount(corev1.ResourceCPU, 1)}})
	}},
	"resources": {add: func(pod *corev1.Pod, text string) {
		main := &pod.Spec.Containers[0]
		if main.Resources.Requests == nil {
			main.Resources.Requests = corev1.ResourceList{}
		}
		main.Resources.Requests[corev1.ResourceName("aliyun.com/gpu"+text)] = resource.MustParse("1")
	}},
	"resources of a pod without GPU memory": {bound: true, add: func(pod *corev1.Pod, text string) {
		main := &pod.Spec.Containers[0]
		delete(main.Resources.Limits, protocol.ResourceMemory)
		main.Resources.Limits[corev1.ResourceName("example.com/"+text)] = resource.MustParse("1")
		main.Resources.Requests = main.Resources.Limits
	}},
	"resources of many containers": {bound: true, add: func(pod *corev1.Pod, text string) {
		container := corev1.Container{Name: text, Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{}}}
		for i := range 7 {
			container.Resources.Requests[corev1.ResourceName(fmt.Sprint("example.com/", text, i))] = resource.MustParse("1")
		}
		pod.Spec.Containers = append(pod.Spec.Containers, container)
	}},
	"gates": {add: func(pod *corev1.Pod, text string) {
		pod.Spec.SchedulingGates = append(pod.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: text})
	}},
	"scheduler name": {add: func(pod *corev1.Pod, text string) { pod.Spec.SchedulerName += strings.Repeat(text, 100) }},
	"resource claims": {add: func(pod *corev1.Pod, text string) {
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, corev1.PodResourceClaim{Name: text})
	}},
	"volumes of a group's member": {add: func(pod *corev1.Pod, text string) {
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{
			Name: text, VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: text}},
		})
		maps.Copy(labelsOf(pod), group)
	}},
	"kube-scheduler's message": {anySize: true, add: func(pod *corev1.Pod, text string) {
		if pod.Status.Conditions == nil {
			pod.Status.Conditions = []corev1.PodCondition{{
				Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "0/100 nodes are available: ",
			}}
		}
		pod.Status.Conditions[0].Message += strings.Repeat("1 node(s) had untolerated taint {"+text+": }, ", 20)
	}},
	"environment": {anySize: true, add: func(pod *corev1.Pod, text string) {
		pod.Spec.Containers[0].Env = append(pod.Spec.Containers[0].Env, corev1.EnvVar{Name: text})
	}},
}

func labelsOf(pod *corev1.Pod) map[string]string {
	if pod.Labels == nil {
		pod.Labels = map[string]string{}
	}
	return pod.Labels
}

// element is the text of an element. All have the same length.
func element(prefix string, i int) string { return fmt.Sprintf("%s%06d", prefix, i) }

// grown returns a pod with a field that is about as large as the API server takes it or, if accepted is true, as the extender does: with one
// more element.
func (o oddity) grown(accepted bool) *corev1.Pod {
	var edits []fake.PodEdit
	if o.bound {
		edits = append(edits, fake.Bound("n0", 0))
	}
	pod := fake.Pod("odd", 1, edits...)
	for i := 0; accepted; i++ {
		next := pod.DeepCopy()
		o.add(next, element("x", i))
		o.add(next, element("x", i+1))
		if protocol.CheckSize(next) != nil {
			return pod
		}
		o.add(pod, element("x", i))
	}
	for i := 0; pod.Size() < etcdLimit && sizeOfAnnotations(pod) < annotationLimit; {
		for range 1 + i/4 { // Size needs time.
			o.add(pod, element("x", i))
			i++
		}
	}
	return pod
}

func sizeOfAnnotations(pod *corev1.Pod) (size int) {
	for key, value := range pod.Annotations {
		size += len(key) + len(value)
	}
	return size
}

// oddCluster is an extender for empty nodes. The test reports further pods by the watch.
type oddCluster struct {
	*fixture
	watch *watch.FakeWatcher
	nodes []string
}

func startOddCluster(t *testing.T) *oddCluster {
	c := &oddCluster{watch: watch.NewFake()}
	var objects []kruntime.Object
	for i := range oddNodes {
		c.nodes = append(c.nodes, fmt.Sprint("n", i))
		node := fake.Node(c.nodes[i], 100, 100)
		node.Labels = map[string]string{"a": "b", corev1.LabelHostname: node.Name}
		objects = append(objects, node)
	}
	for i := range oddNamespaces {
		objects = append(objects, namespace(fmt.Sprint("odd-", i), nil))
	}
	o := Options{
		EvictFragmented: true, SampleSize: func(nodes int) int { return nodes },
		FairShare: FairShareOptions{On: true, PriorityCutoff: 100, Observer: &fake.Observer{}},
		Gangs:     GangOptions{Hold: 10 * time.Second, Patience: 30 * time.Second, Observer: &fake.Observer{}},
	}
	c.fixture = newFixture(t, o, objects...)
	c.client.PrependWatchReactor("pods", func(clienttesting.Action) (bool, watch.Interface, error) {
		return true, c.watch, nil
	})
	c.run()
	await.True(c.t, "the cache sync", func() bool { return c.Ready() == nil && c.cache.BudgetsSynced() })
	return c
}

// report makes the watch report the pod, and waits until the extender has read it: the watch has received the next event.
func (c *oddCluster) report(pod *corev1.Pod) {
	c.watch.Add(pod)
	c.watch.Action(watch.Bookmark, &corev1.Pod{})
}

// awaitPod waits until the event handlers have the pod, and those before it.
func (c *oddCluster) awaitPod(namespace, name string) {
	c.t.Helper()
	await.True(c.t, "pod "+name, func() bool { _, known := c.cache.Pod(namespace, name); return known })
}

// reportOdd makes the watch report pods that are odd in this way, like the base, and kube-scheduler try them. remove makes it report their deletion.
func (c *oddCluster) reportOdd(name string, o oddity, base *corev1.Pod, accepted bool) (remove func()) {
	rename := func(pod *corev1.Pod, i int) {
		pod.Namespace, pod.Name = fmt.Sprint("odd-", i%oddNamespaces), fmt.Sprintf("%s-%v-%d", name, accepted, i)
		pod.UID = types.UID(pod.Name)
	}
	for i := range oddPods {
		pod := base // The extender keeps nothing of what the test changes, and a copy costs more than what the extender does with it.
		if accepted {
			pod = base.DeepCopy()
		}
		rename(pod, i)
		o.add(pod, element("y", i))
		c.report(pod)
		if !o.bound {
			result := c.filter(pod, c.nodes...)
			if rejected := strings.Contains(result.Message, "the pod is too large for gpushare"); rejected == (accepted || o.anySize) {
				c.t.Fatalf("filter answers %q", result.Message)
			}
		}
	}
	last, _ := protocol.Outline(base) // It says the same about what the pod holds.
	rename(last, oddPods-1)
	c.awaitPod(last.Namespace, last.Name)
	return func() {
		for i := range oddPods {
			rename(last, i)
			c.watch.Delete(last)
			c.watch.Action(watch.Bookmark, &corev1.Pod{})
		}
		await.True(c.t, "the deletion", func() bool { _, known := c.cache.Pod(last.Namespace, last.Name); return !known })
	}
}

// heap returns the bytes in use.
func heap() int {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// TestOddPods checks that the extender keeps at most 64 KiB of a pod, whichever of its fields is as large as the API server takes it, or as large
// as the extender does.
func TestOddPods(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // Only what is left after the collections in heap counts.
	c := startOddCluster(t)
	for _, accepted := range []bool{false, true} {
		for _, name := range slices.Sorted(maps.Keys(oddities)) {
			if accepted && oddities[name].anySize {
				continue
			}
			t.Run(fmt.Sprintf("%s, accepted: %v", name, accepted), func(t *testing.T) {
				c.t = t
				base := oddities[name].grown(accepted)
				before := heap()
				remove := c.reportOdd(name, oddities[name], base, accepted)
				c.clock.Step(minCostly)
				for _, d := range c.Explain().Diagnoses {
					if len(d.Message) > protocol.MaxText {
						t.Fatalf("a diagnosis has %d bytes: %.100s", len(d.Message), d.Message)
					}
				}
				each := (heap() - before) / oddPods
				runtime.KeepAlive(base)
				t.Logf("%d bytes are kept of a pod", each)
				if each > 64<<10 {
					t.Errorf("%d bytes are kept of a pod", each)
				}
				remove()
			})
		}
	}
}
