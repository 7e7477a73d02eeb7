package diagnosis

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
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

// A request in bytes is recognized by its suffix or its size, and named in the unit of the largest card.
func TestQuantityMistakes(t *testing.T) {
	for _, test := range []struct {
		unit   gpu.Unit
		amount string
		want   string
	}{
		{gpu.MiB, "2Gi", "2147483648 units of 1 MiB (write 2048, without Gi)"},
		{gpu.GiB, "2Gi", "2147483648 units of 1 GiB (write 2, without Gi)"},
		{gpu.GiB, "2500Mi", "2621440000 units of 1 GiB (write 3, without Mi)"},
		{256 * gpu.MiB, "1Gi", "1073741824 units of 256MiB (write 4, without Gi)"},
		{gpu.MiB, "200Ki", "204800 units of 1 MiB (write the number of units, without Ki)"},
		{gpu.MiB, "1073741824", "1073741824 units of 1 MiB (write 1024, if bytes were meant)"},
		{gpu.GiB, "24G", "24000000000 units of 1 GiB (write 23, if bytes were meant)"},
		{gpu.GiB, "17", "17 GiB"},
		{gpu.GiB, "16384", "16384 GiB"},
		{gpu.MiB, "20k", "20000 MiB"},
	} {
		p := pod(0, func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits[protocol.ResourceMemory] = resource.MustParse(test.amount)
		})
		got := NewDiagnoser([]Node{node("n", test.unit, card(0, 16, 0))}, nil, now).Diagnose(p, nil)
		if want := "no card is large enough for " + test.want + ": the largest has " + test.unit.Format(16) + ", on n"; got != (Diagnosis{Reason: reasons.TooLarge, Message: want}) {
			t.Errorf("%s: %+v, want %s", test.amount, got, want)
		}
	}
}
