package protocol

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	resourcehelper "k8s.io/component-helpers/resource"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// boundPod returns a pod with two cards, in a group, that is on a node.
func boundPod() *corev1.Pod {
	main := asks("8")
	main.Resources.Requests[corev1.ResourceCPU] = list(corev1.ResourceCPU, "2")[corev1.ResourceCPU]
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: "p", Labels: map[string]string{LabelCount: "2", LabelGroupName: "job", LabelGroupSize: "2", "part": "a"},
			Annotations: Assignment{Cards: []AssignedCard{{0, 8}, {1, 8}}, Containers: []gpu.Memory{8}}.Annotations(),
		},
		Spec: corev1.PodSpec{NodeName: "n", SchedulerName: "s", Containers: []corev1.Container{main}},
	}
	pod.Annotations[AnnotationGroupLabel] = "part"
	return pod
}

// The error names the largest part. What counts for cards and groups is left in the outline, and the outline is small.
func TestOutline(t *testing.T) {
	for name, tc := range map[string]struct {
		part string
		grow func(pod *corev1.Pod, i int)
	}{
		"labels":   {"its labels alone", func(pod *corev1.Pod, i int) { pod.Labels[fmt.Sprint("k", i)] = "" }},
		"one text": {"its labels alone", func(pod *corev1.Pod, i int) { pod.Labels["k"] += strings.Repeat("a", 100) }},
		"tolerations": {"its tolerations alone", func(pod *corev1.Pod, i int) {
			pod.Spec.Tolerations = append(pod.Spec.Tolerations, corev1.Toleration{Key: "k"})
		}},
		"ports": {"its containers and their ports alone", func(pod *corev1.Pod, i int) {
			pod.Spec.Containers[0].Ports = append(pod.Spec.Containers[0].Ports, corev1.ContainerPort{HostPort: int32(i)})
		}},
		"resources": {"its extended resources alone", func(pod *corev1.Pod, i int) {
			name := corev1.ResourceName(fmt.Sprint("example.com/", i))
			pod.Spec.Containers[0].Resources.Requests[name] = list(name, "1")[name]
		}},
		"gates": {"its scheduler name and scheduling gates alone", func(pod *corev1.Pod, i int) {
			pod.Spec.SchedulingGates = append(pod.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: fmt.Sprint(i)}, corev1.PodSchedulingGate{Name: GateFairShare})
		}},
	} {
		pod := boundPod()
		if same, err := Outline(pod); same != pod || err != nil {
			t.Fatalf("a small pod: %v", err)
		}
		for i := range 1100 {
			tc.grow(pod, i)
		}
		outline, err := Outline(pod)
		if err == nil || !strings.Contains(err.Error(), tc.part) {
			t.Errorf("%s: %v, want an error about %s", name, err, tc.part)
		}
		if size := outline.Size(); name != "ports" && size > 2000 {
			t.Errorf("%s: the outline has %d bytes", name, size)
		}
		expect(t, name+": the pod", Pod(pod), Pod(outline))
		where, _ := PodPlacement(outline)
		expect(t, name+": the cards", 2, len(where))
		group, _ := GroupOf(outline)
		expect(t, name+": the group", Group{Name: "job/a", Size: 2}, group)
		expect(t, name+": gates", min(len(pod.Spec.SchedulingGates), 2), len(outline.Spec.SchedulingGates))
		cpu := outline.Spec.Containers[0].Resources.Requests[corev1.ResourceCPU]
		expect(t, name+": CPU", "2", cpu.String())
	}
}

// The outline of a pod with any containers requests the same as the pod. Of very many it has one.
func TestOutlineOfContainers(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, most := range []int{10, maxOutlined, 10 * maxOutlined} {
		for range 10 {
			pod := boundPod()
			pod.Labels["k"] = strings.Repeat("a", MaxSize)
			for range random.IntN(most) {
				container, amount := asks("1"), fmt.Sprint(random.IntN(4))
				switch random.IntN(5) {
				case 0:
					container = limited(amount)
				case 1:
					container = limitedTo(ResourceCores, amount)
				case 2:
					container = limitedTo(corev1.ResourceCPU, amount+strings.Repeat("0", random.IntN(40)))
				case 3:
					container = limitedTo("example.com/a", amount)
				}
				if random.IntN(1000) == 0 {
					container.VolumeMounts = []corev1.VolumeMount{{MountPath: SharedMemory}}
				}
				switch random.IntN(3) {
				case 0:
					pod.Spec.InitContainers = append(pod.Spec.InitContainers, container)
				case 1:
					pod.Spec.InitContainers = append(pod.Spec.InitContainers, sidecar(container))
				default:
					pod.Spec.Containers = append(pod.Spec.Containers, container)
				}
			}
			defaultRequests(pod)
			before := pod.DeepCopy()
			outline, _ := Outline(pod)
			if !reflect.DeepEqual(before, pod) {
				t.Error("the argument was changed")
			}
			want, got := Pod(pod), Pod(outline)
			if len(pod.Spec.InitContainers)+len(pod.Spec.Containers) > maxOutlined {
				expect(t, "containers", 1, len(outline.Spec.InitContainers)+len(outline.Spec.Containers))
				want.Containers, want.SharedMemory = 0, false // The one container has requests only, and no volumes.
			}
			expect(t, "the pod", want, got)
			requests := resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{})
			expect(t, "requests", usualOf(requests), resourcehelper.PodRequests(outline, resourcehelper.PodResourcesOptions{}))
		}
	}
}

// defaultRequests sets each request that is missing to the limit, as the API server does.
func defaultRequests(pod *corev1.Pod) {
	for _, containers := range [...][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			resources := &containers[i].Resources
			for name, quantity := range resources.Limits {
				if _, ok := resources.Requests[name]; !ok {
					if resources.Requests == nil {
						resources.Requests = corev1.ResourceList{}
					}
					resources.Requests[name] = quantity
				}
			}
		}
	}
}
