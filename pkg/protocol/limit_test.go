package protocol

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// TestMemoryLimits has the words that users see for annotations of limits that no node can serve.
func TestMemoryLimits(t *testing.T) {
	trainer := AnnotationLimit("trainer")
	const such = ": write an amount of bytes such as 16Gi"
	for name, test := range map[string]struct {
		annotations map[string]string
		label       string
		want        gpu.Limits
		err         string
	}{
		"none":                     {},
		"a limit":                  {annotations: map[string]string{trainer: "16Gi"}, want: gpu.Limits{Largest: 16 << 10, MaxUnit: 2 << 10}},
		"decimal":                  {annotations: map[string]string{trainer: "16G"}, want: gpu.Limits{Largest: 15258, MaxUnit: 1907}},
		"the least":                {annotations: map[string]string{trainer: "1Mi"}, want: gpu.Limits{Largest: 1}},
		"the least over two cards": {annotations: map[string]string{trainer: "1Mi"}, label: "2", want: gpu.Limits{Largest: 1}},
		"over two cards":           {annotations: map[string]string{trainer: "16Gi"}, label: "2", want: gpu.Limits{Largest: 8 << 10, MaxUnit: 2 << 10}},
		"of two containers": {
			annotations: map[string]string{trainer: "12Gi", AnnotationLimit("helper"): "16Gi"}, want: gpu.Limits{Largest: 16 << 10, MaxUnit: 1536},
		},
		"of another kind":    {annotations: map[string]string{"nvidia.com/container.trainer.gpu-memory.request": "1Gi"}},
		"less than 1 MiB":    {annotations: map[string]string{trainer: "1023Ki"}, err: `annotated limit of GPU memory of container trainer: "1023Ki" is less than 1 MiB` + such},
		"nothing":            {annotations: map[string]string{trainer: ""}, err: `annotated limit of GPU memory of container trainer: "" is not a quantity` + such},
		"negative":           {annotations: map[string]string{trainer: "-1Gi"}, err: `annotated limit of GPU memory of container trainer: "-1Gi" is less than 1 MiB` + such},
		"no quantity":        {annotations: map[string]string{trainer: "16GB"}, err: `annotated limit of GPU memory of container trainer: "16GB" is not a quantity` + such},
		"a huge exponent":    {annotations: map[string]string{trainer: "1e999999999"}, err: `annotated limit of GPU memory of container trainer: "1e999999999" is not a quantity` + such},
		"a tiny exponent":    {annotations: map[string]string{trainer: "1e-999999999"}, err: `annotated limit of GPU memory of container trainer: "1e-999999999" is not a quantity` + such},
		"many digits":        {annotations: map[string]string{trainer: strings.Repeat("9", 33)}, err: `annotated limit of GPU memory of container trainer: "` + strings.Repeat("9", 32) + `" is not a quantity` + such},
		"an exponent":        {annotations: map[string]string{trainer: "2e10"}, want: gpu.Limits{Largest: 19073, MaxUnit: 2384}},
		"past 64 bits":       {annotations: map[string]string{trainer: "16E"}, err: `annotated limit of GPU memory of container trainer: it is more than any card has` + such},
		"no such container":  {annotations: map[string]string{AnnotationLimit("training"): "16Gi"}, err: `a limit of GPU memory is annotated for container "training", which the pod doesn't have`},
		"no container named": {annotations: map[string]string{"nvidia.com/container..gpu-memory.limit": "16Gi"}, err: `a limit of GPU memory is annotated for container "", which the pod doesn't have`},
		"a container without GPU memory": {
			annotations: map[string]string{AnnotationLimit("proxy"): "16Gi"},
			err:         "container proxy has an annotated limit of GPU memory, and doesn't ask for any: set aliyun.com/gpu-mem in its resource limits",
		},
	} {
		pod := counted(test.label, wants("trainer", "8", ""), wants("proxy", "", ""))
		pod.Spec.InitContainers = []corev1.Container{wants("helper", "4", "")}
		pod.Annotations = test.annotations
		expect(t, name, test.err, message(CheckRequest(pod)))
		expect(t, name+": limits", test.want, Pod(pod).Limits)
	}
}

// FuzzMemoryLimits: no annotation makes the extender fail. Those that are accepted give each named container what they say.
func FuzzMemoryLimits(f *testing.F) {
	f.Add("16Gi", "1Gi")
	f.Add("1e3", "")
	f.Fuzz(func(t *testing.T, trainer, helper string) {
		pod := counted("", wants("trainer", "8", ""), wants("helper", "4", ""))
		want := map[string]string{"trainer": trainer, "helper": helper}
		pod.Annotations = map[string]string{AnnotationLimit("trainer"): trainer, AnnotationLimit("helper"): helper}
		limits, err := MemoryLimits(pod)
		if err != nil {
			return
		}
		if len(limits) != len(want) {
			t.Errorf("%q give %v", want, limits)
		}
		for name, l := range limits {
			limit := l.Bytes
			quantity, err := resource.ParseQuantity(want[name])
			if err != nil || limit < uint64(gpu.MiB) || quantity.CmpInt64(int64(limit)) > 0 || quantity.CmpInt64(int64(limit)-1) <= 0 {
				t.Errorf("container %s has %d by %q", name, limit, want[name])
			}
		}
		if demand := Pod(pod).Limits; demand == (gpu.Limits{}) {
			t.Errorf("%v demand nothing of a node", limits)
		}
	})
}
