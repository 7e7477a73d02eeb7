package protocol

import (
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

// prefixLimit and suffixLimit enclose the container's name in an annotation of a pod that lets the container use more GPU memory than it requests, as
// long as its card has memory to spare. The value is the container's limit, a quantity of bytes. The form is that of NVIDIA's Run:ai and
// KAI-Scheduler.
const (
	prefixLimit = "nvidia.com/container."
	suffixLimit = ".gpu-memory.limit"
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
	texts := map[string]string{}
	for key, text := range pod.Annotations {
		if name, ok := LimitedContainer(key); ok {
			texts[name] = text
		}
	}
	if len(texts) == 0 {
		return nil, nil
	}
	requests := map[string]gpu.Memory{}
	for _, container := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		requests[container.Name] = ContainerRequest(&container)
	}
	limits := map[string]MemoryLimit{}
	for _, name := range slices.Sorted(maps.Keys(texts)) { // The error is the same each time.
		request, exists := requests[name]
		switch {
		case !exists:
			return nil, fmt.Errorf("a limit of GPU memory is annotated for container %.64q, which the pod doesn't have", name)
		case request == 0:
			return nil, fmt.Errorf("container %s has an annotated limit of GPU memory, and doesn't ask for any: set %s in its resource limits", name, ResourceMemory)
		}
		bytes, err := parseLimit(texts[name])
		if err != nil {
			return nil, fmt.Errorf("annotated limit of GPU memory of container %s: %w: write an amount of bytes such as 16Gi", name, err)
		}
		limits[name] = MemoryLimit{bytes, request}
	}
	return limits, nil
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
