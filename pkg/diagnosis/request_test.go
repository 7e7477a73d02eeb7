package diagnosis

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// A resource is taken for one of ours by what its name says, and never a common one of other vendors.
func TestLooksLikeOurs(t *testing.T) {
	for name, want := range map[string]corev1.ResourceName{
		"aliyun.com/gpumem":         protocol.ResourceMemory,
		"aliyun.com/GPU-MEM":        protocol.ResourceMemory,
		"aliyun.com/gpu":            protocol.ResourceMemory,
		"aliyun.com/gpu-memory-mib": protocol.ResourceMemory,
		"aliyun.com/gpucount":       protocol.ResourceCount,
		"aliyun.io/gpu-mem":         protocol.ResourceMemory,
		"alibaba.com/gpu-mem":       protocol.ResourceMemory,
		"aliyun.com/gpu-cores":      protocol.ResourceCores,
		"aliyun.com/gpu-profile":    "",
	} {
		if got, looks := looksLikeOurs(name); got != want || !looks {
			t.Errorf("%s: %q, %v, want %q", name, got, looks, want)
		}
	}
	for _, name := range []string{
		"aliyun.com/gpu-core.percentage", "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/gpumem", "amd.com/gpu", "gpu.intel.com/i915", "example.com/gpu-mem",
	} {
		if got, looks := looksLikeOurs(name); looks {
			t.Errorf("%s: taken for %q", name, got)
		}
	}
}

// Only a pod that gets no memory has a problem with its request.
func TestNoRequestProblem(t *testing.T) {
	amounts := func(of ...corev1.ResourceList) *corev1.Pod {
		p := &corev1.Pod{}
		for _, list := range of {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Resources: corev1.ResourceRequirements{Limits: list}})
		}
		return p
	}
	of := func(name corev1.ResourceName, n int64) corev1.ResourceList {
		return corev1.ResourceList{name: *resource.NewQuantity(n, resource.DecimalSI)}
	}
	named := amounts(of(protocol.ResourceMemory, 2))
	named.Annotations = map[string]string{string(protocol.ResourceMemory): "2"}
	byDefault := amounts(of(protocol.ResourceMemory, 0))
	byDefault.Annotations = map[string]string{"kubernetes.io/limit-ranger": "LimitRanger plugin set: cpu request for container c; aliyun.com/gpu-mem limit for container c"}
	for what, pod := range map[string]*corev1.Pod{
		"no containers":                    amounts(),
		"CPU":                              amounts(of(corev1.ResourceCPU, 1)),
		"GPU memory":                       amounts(of(protocol.ResourceMemory, 2)),
		"0 in one of two containers":       amounts(of(protocol.ResourceMemory, 0), of(protocol.ResourceMemory, 2)),
		"memory and a number of cards":     amounts(of(protocol.ResourceMemory, 2), of(protocol.ResourceCount, 1)),
		"a whole card":                     amounts(of(protocol.ResourceWholeCard, 1)),
		"the amount also as an annotation": named,
		"0 by a LimitRange's default":      byDefault,
	} {
		if problem := RequestProblem(pod); problem != "" {
			t.Errorf("%s: %s", what, problem)
		}
	}
}

// A request in bytes is recognized by its suffix or its size.
func TestBytesMistake(t *testing.T) {
	for amount, mistaken := range map[string]bool{
		"2Gi": true, "2500Mi": true, "200Ki": true, "1073741824": true, "24G": true, "17": false, "16384": false, "20k": false,
	} {
		p := pod(0, func(p *corev1.Pod) {
			p.Spec.Containers[0].Name = "c"
			p.Spec.Containers[0].Resources.Limits[protocol.ResourceMemory] = resource.MustParse(amount)
		})
		if (p.mistake != "") != mistaken {
			t.Errorf("%s: %q", amount, p.mistake)
		}
		if want := "; container c asks for 2Gi: write a number of units, not of bytes"; amount == "2Gi" && p.mistake != want {
			t.Errorf("%q, want %q", p.mistake, want)
		}
	}
}
