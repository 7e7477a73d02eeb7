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

// LimitedContainer returns the name of the container whose limit an annotation with this key has.
func LimitedContainer(key string) (name string, ok bool) {
	if rest, prefixed := strings.CutPrefix(key, prefixLimit); prefixed {
		return strings.CutSuffix(rest, suffixLimit)
	}
	return "", false
}

// MemoryLimit is the annotated limit of a container, in bytes, beside what it requests. Both are over all of the container's cards.
type MemoryLimit struct {
	Bytes   uint64
	Request gpu.Memory
}

// MemoryLimits returns the annotated limits of the pod's containers. It returns an error that says
// what to write if an annotation names no container that asks for GPU memory, or has no quantity of at least 1 MiB. Users can change
// annotations at any time; what a container was given at its start is in its environment (EnvMemoryLimit).
func MemoryLimits(pod *corev1.Pod) (map[string]MemoryLimit, error) {
	texts, err := listedLimits(pod)
	if err != nil {
		return nil, err
	}
	names := slices.Collect(maps.Keys(texts))
	for key := range pod.Annotations {
		if name, ok := LimitedContainer(key); ok {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil, nil
	}
	requests := map[string]gpu.Memory{}
	for _, container := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		requests[container.Name] = ContainerRequest(&container)
	}
	limits := map[string]MemoryLimit{}
	slices.Sort(names) // The error is the same each time.
	for _, name := range names {
		request, exists := requests[name]
		text, listed := texts[name]
		other, annotated := pod.Annotations[AnnotationLimit(name)]
		switch {
		case listed && annotated:
			return nil, fmt.Errorf("the limit of GPU memory of container %.64q is annotated twice: remove %s or its entry there", name, AnnotationLimits)
		case !exists:
			return nil, fmt.Errorf("a limit of GPU memory is annotated for container %.64q, which the pod doesn't have", name)
		case request == 0:
			return nil, fmt.Errorf("container %s has an annotated limit of GPU memory, and doesn't ask for any: set %s in its resource limits", name, ResourceMemory)
		}
		bytes, err := parseLimit(text + other) // One of them is empty.
		if err != nil {
			return nil, fmt.Errorf("annotated limit of GPU memory of container %s: %w: write an amount of bytes such as 16Gi", name, err)
		}
		limits[name] = MemoryLimit{bytes, request}
	}
	return limits, nil
}

// listedLimits returns the values of AnnotationLimits by container.
func listedLimits(pod *corev1.Pod) (texts map[string]string, err error) {
	text, ok := pod.Annotations[AnnotationLimits]
	if !ok {
		return nil, nil
	}
	if len(text) > MaxSize {
		return nil, fmt.Errorf("annotation %s: %d bytes, want %d at most", AnnotationLimits, len(text), MaxSize)
	}
	if err := json.Unmarshal([]byte(text), &texts); err != nil {
		return nil, fmt.Errorf(`annotation %s: want {"CONTAINER": "QUANTITY"}, such as {"trainer": "16Gi"}: %w`, AnnotationLimits, err)
	}
	return texts, nil
}

// shortQuantity matches quantities with few digits. resource.Quantity computes the power of ten of any exponent, which takes hours for nine
// digits.
var shortQuantity = regexp.MustCompile(`^[+-]?[0-9.]{1,32}([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?$`)

func parseLimit(text string) (uint64, error) {
	quantity, err := resource.Quantity{}, resource.ErrFormatWrong
	if shortQuantity.MatchString(text) {
		quantity, err = resource.ParseQuantity(text)
	}
	switch {
	case err != nil:
		return 0, fmt.Errorf("%.32q is not a quantity", text)
	case quantity.CmpInt64(int64(gpu.MiB)) < 0:
		return 0, fmt.Errorf("%.32q is less than 1 MiB", text)
	case quantity.CmpInt64(math.MaxInt64) >= 0:
		return 0, errors.New("it is more than any card has")
	}
	return uint64(quantity.Value()), nil
}
