package protocol

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// ErrNotAssumed is returned for a pod without an assignment: no card has been chosen for it.
var ErrNotAssumed = errors.New("the pod has no card assignment")

// Assignment is the content of a pod's annotations: the card that bind chose, and whether the node has allocated it.
type Assignment struct {
	Card int
	// Request is the pod's total request. A value read from annotations is not trusted; PodRequest computes it from the spec.
	Request    gpu.Memory
	CardMemory gpu.Memory
	// AssumeTime is when the card was chosen.
	AssumeTime time.Time
	// Assigned is true once the node has allocated the card to every GPU container of the pod.
	Assigned bool
	// AssignTime is when Assigned became true; zero before.
	AssignTime time.Time
}

// Annotations returns the assignment as pod annotations. AnnotationAssignTime is omitted unless Assigned is true.
func (a Assignment) Annotations() map[string]string {
	annotations := map[string]string{
		AnnotationIndex:      strconv.Itoa(a.Card),
		AnnotationPod:        a.Request.String(),
		AnnotationDevice:     a.CardMemory.String(),
		AnnotationAssumeTime: formatTime(a.AssumeTime),
		AnnotationAssigned:   strconv.FormatBool(a.Assigned),
	}
	if a.Assigned {
		annotations[AnnotationAssignTime] = formatTime(a.AssignTime)
	}
	return annotations
}

// AssignedAnnotations returns the annotations that turn an assumed pod into an assigned one. The extender's are kept.
func AssignedAnnotations(at time.Time) map[string]string {
	return map[string]string{
		AnnotationAssigned:   "true",
		AnnotationAssignTime: formatTime(at),
	}
}

// ParseAssignment parses the annotations of a pod on a single card. It returns ErrNotAssumed if there is no card index,
// and another error if the index is invalid. Invalid times and amounts become zero, because the card is what matters.
func ParseAssignment(annotations map[string]string) (Assignment, error) {
	index, ok := annotations[AnnotationIndex]
	if !ok {
		return Assignment{}, ErrNotAssumed
	}
	card, err := parseCard(index)
	if err != nil {
		return Assignment{}, fmt.Errorf("annotation %s: %w", AnnotationIndex, err)
	}
	return Assignment{
		Card:       card,
		Request:    parseMemory(annotations[AnnotationPod]),
		CardMemory: parseMemory(annotations[AnnotationDevice]),
		AssumeTime: parseTime(annotations[AnnotationAssumeTime]),
		Assigned:   annotations[AnnotationAssigned] == "true",
		AssignTime: parseTime(annotations[AnnotationAssignTime]),
	}, nil
}

// PodPlacement returns the placement that the pod's annotations name. AnnotationIndex takes precedence, since bind always
// overwrites it. AnnotationAllocation, which other schedulers write, is used if AnnotationIndex names no single card.
// PodPlacement returns ErrNotAssumed if the pod has neither, and another error if the value is invalid.
//
// Annotations determine the cards, never the amount: the placement's total is always the request in the pod's spec.
func PodPlacement(pod *corev1.Pod) (gpu.Placement, error) {
	assignment, err := ParseAssignment(pod.Annotations)
	if err == nil {
		return gpu.On(assignment.Card, PodRequest(pod)), nil
	}
	if text, ok := pod.Annotations[AnnotationAllocation]; ok {
		return parseAllocation(text, PodRequest(pod))
	}
	return nil, err
}

// parseAllocation parses {"container": {"card": memory}}, where both keys are numbers, and sums the memory by card. A
// single card gets the whole request. Amounts on several cards must add up to the request.
func parseAllocation(text string, request gpu.Memory) (gpu.Placement, error) {
	var containers map[string]map[string]int64
	if err := json.Unmarshal([]byte(text), &containers); err != nil {
		return nil, fmt.Errorf("annotation %s: %w", AnnotationAllocation, err)
	}
	sums := map[int]gpu.Memory{}
	for _, cards := range containers {
		for index, memory := range cards {
			card, err := parseCard(index)
			if err != nil {
				return nil, fmt.Errorf("annotation %s: %w", AnnotationAllocation, err)
			}
			if memory < 0 {
				return nil, fmt.Errorf("annotation %s: negative memory on card %d", AnnotationAllocation, card)
			}
			sums[card] = sums[card].Add(gpu.Memory(memory))
		}
	}
	var placement gpu.Placement
	for _, card := range slices.Sorted(maps.Keys(sums)) {
		if sums[card] > 0 {
			placement = append(placement, gpu.Share{Card: card, Memory: sums[card]})
		}
	}
	switch {
	case len(placement) == 0:
		return nil, ErrNotAssumed
	case len(placement) == 1:
		return gpu.On(placement[0].Card, request), nil
	case placement.Total() != request:
		return nil, fmt.Errorf("annotation %s: %d in total, the pod requests %d", AnnotationAllocation, placement.Total(), request)
	}
	return placement, nil
}

// maxCard is the largest accepted card index. No machine has as many cards, and a forged index can't cost memory.
const maxCard = 1 << 16

func parseCard(s string) (int, error) {
	card, err := strconv.Atoi(strings.TrimSpace(s))
	if err != nil || card < 0 || card > maxCard {
		return 0, fmt.Errorf("%.32q is not a card index", s)
	}
	return card, nil
}

func parseMemory(s string) gpu.Memory {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return 0
	}
	return gpu.NewMemory(n)
}

func parseTime(s string) time.Time {
	nanoseconds, err := strconv.ParseInt(s, 10, 64)
	if err != nil || nanoseconds <= 0 {
		return time.Time{}
	}
	return time.Unix(0, nanoseconds)
}

// formatTime is the inverse of parseTime. The zero time is a special case: its Unix nanoseconds don't fit in 64 bits.
func formatTime(t time.Time) string {
	if t.IsZero() {
		return "0"
	}
	return strconv.FormatInt(t.UnixNano(), 10)
}
