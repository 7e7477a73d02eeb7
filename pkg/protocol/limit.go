package protocol

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// The annotations of a pod that let a container use more GPU memory than it requests, as long as its card has memory to spare.
const (
	// prefixLimit and suffixLimit enclose the container's name in an annotation whose value is the container's limit, a quantity of bytes. The
	// form is that of NVIDIA's Run:ai and KAI-Scheduler.
	prefixLimit = "nvidia.com/container."
	suffixLimit = ".gpu-memory.limit"
	// AnnotationLimits has the limits of containers whose names are too long for a key: {"CONTAINER": "QUANTITY"}.
	AnnotationLimits = "gpushare.aliyun.com/gpu-memory-limits"
)

// AnnotationLimit returns the name of the annotation with the limit of a container.
func AnnotationLimit(container string) string { return prefixLimit + container + suffixLimit }

// limitedContainer returns the name of the container whose limit an annotation with this key has.
func limitedContainer(key string) (name string, ok bool) {
	if rest, prefixed := strings.CutPrefix(key, prefixLimit); prefixed {
		return strings.CutSuffix(rest, suffixLimit)
	}
	return "", false
}

// LimitLabel returns the first label of the pod that would be a container's limit as an annotation, and isn't one too; empty if there is none.
func LimitLabel(pod *corev1.Pod) (first string) {
	for key := range pod.Labels {
		_, isLimit := limitedContainer(key)
		if _, annotated := pod.Annotations[key]; isLimit && !annotated && (first == "" || key < first) {
			first = key
		}
	}
	return first
}

// MemoryLimits returns the annotated limits of the pod's containers, in bytes over all of the container's cards. It returns an error that says
// what to write if an annotation names no container that asks for GPU memory, or has no quantity of at least 1 MiB. Users can change
// annotations at any time; what a container was given at its start is in its environment (EnvMemoryLimit).
func MemoryLimits(pod *corev1.Pod) (map[string]uint64, error) {
	texts, err := limitTexts(pod)
	if len(texts) == 0 || err != nil {
		return nil, err
	}
	requests := map[string]gpu.Memory{}
	for _, containers := range [...][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			requests[containers[i].Name] = ContainerRequest(&containers[i])
		}
	}
	limits := map[string]uint64{}
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		request, exists := requests[name]
		switch {
		case !exists:
			return nil, fmt.Errorf("a limit of GPU memory is annotated for container %.64q, which the pod doesn't have", name)
		case request == 0:
			return nil, fmt.Errorf("container %s has an annotated limit of GPU memory, and doesn't ask for any: set %s in its resource limits", name, ResourceMemory)
		}
		if limits[name], err = parseLimit(texts[name]); err != nil {
			return nil, fmt.Errorf("annotated limit of GPU memory of container %s: %w", name, err)
		}
	}
	return limits, nil
}

// limitTexts returns the annotated values by container.
func limitTexts(pod *corev1.Pod) (texts map[string]string, err error) {
	set := func(name, text string) error {
		if _, twice := texts[name]; twice {
			return fmt.Errorf("the limit of GPU memory of container %.64q is annotated twice: remove %s or its entry there", name, AnnotationLimits)
		}
		if texts == nil {
			texts = map[string]string{}
		}
		texts[name] = text
		return nil
	}
	for key, text := range pod.Annotations {
		if name, ok := limitedContainer(key); ok {
			_ = set(name, text) // Keys are different.
		}
	}
	text, ok := pod.Annotations[AnnotationLimits]
	if !ok {
		return texts, nil
	}
	var listed map[string]string
	if len(text) > MaxSize {
		return nil, fmt.Errorf("annotation %s: %d bytes, want %d at most", AnnotationLimits, len(text), MaxSize)
	}
	if err := json.Unmarshal([]byte(text), &listed); err != nil {
		return nil, fmt.Errorf(`annotation %s: want {"CONTAINER": "QUANTITY"}, such as {"trainer": "16Gi"}: %w`, AnnotationLimits, err)
	}
	for _, name := range slices.Sorted(maps.Keys(listed)) {
		if err := set(name, listed[name]); err != nil {
			return nil, err
		}
	}
	return texts, nil
}

// shortQuantity matches quantities with few digits. resource.Quantity computes the power of ten of any exponent, which takes hours for nine
// digits.
var shortQuantity = regexp.MustCompile(`^[+-]?[0-9.]{1,32}([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?$`)

func parseLimit(text string) (uint64, error) {
	if !shortQuantity.MatchString(text) {
		return 0, notQuantity(text)
	}
	quantity, err := resource.ParseQuantity(text)
	switch {
	case err != nil:
		return 0, notQuantity(text)
	case quantity.CmpInt64(int64(gpu.MiB)) < 0:
		return 0, fmt.Errorf("%.32q is less than 1 MiB: write an amount of bytes such as 16Gi", text)
	case quantity.CmpInt64(math.MaxInt64) >= 0:
		return 0, errors.New("it is more than any card has: write an amount of bytes such as 16Gi")
	}
	return uint64(quantity.Value()), nil
}

func notQuantity(text string) error {
	return fmt.Errorf("%.32q is not a quantity: write an amount of bytes such as 16Gi", text)
}

// limitsOf returns what the annotated limits of a pod demand of a node; the zero value if there are none, or invalid ones: such a pod gets no
// node (CheckRequest).
func limitsOf(pod *corev1.Pod, cards int) (of gpu.Limits) {
	limits, err := MemoryLimits(pod)
	if err != nil {
		return of
	}
	for _, containers := range [...][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			if limit, ok := limits[containers[i].Name]; ok {
				of = of.With(limit, ContainerRequest(&containers[i]), cards)
			}
		}
	}
	return of
}
