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

// ErrNotAssumed says that a pod carries no assignment: nobody has chosen a card for it.
var ErrNotAssumed = errors.New("the pod carries no card assignment")

// Assignment is what the annotations of a pod say: the scheduler's choice, and whether the node has acted on it.
type Assignment struct {
	// Card is the index of the chosen card.
	Card int
	// Request is the pod's whole request. As read from annotations it is a claim; see PodRequest for the truth.
	Request gpu.Memory
	// CardMemory is the card's total.
	CardMemory gpu.Memory
	// AssumeTime is when the card was chosen.
	AssumeTime time.Time
	// Assigned says whether the node has handed the card to every GPU container of the pod.
	Assigned bool
	// AssignTime is when it did so, zero before.
	AssignTime time.Time
}

// Annotations returns the assignment as pod annotations. An assignment that isn't assigned leaves
// AnnotationAssignTime out.
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

// AssignedAnnotations returns the annotations that turn an assumed pod into an assigned one, and no others: what the
// extender wrote stays.
func AssignedAnnotations(at time.Time) map[string]string {
	return map[string]string{
		AnnotationAssigned:   "true",
		AnnotationAssignTime: formatTime(at),
	}
}

// ParseAssignment reads the annotations of a pod on a single card. It returns ErrNotAssumed where there is no card
// index, and another error where the index can't be read. Times and amounts that can't be read are zero: they came
// from elsewhere, and the card is known all the same.
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

// PodPlacement returns where the pod's annotations say that it sits. The card in AnnotationIndex comes first: bind
// writes it over whatever the pod brought along. AnnotationAllocation, another scheduler's, is read where there is no
// such card. It returns ErrNotAssumed where there is neither, and another error where what is there can't be read.
//
// Annotations say where, never how much: the placement's total is always the pod's request as its spec has it.
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

// parseAllocation reads {"container": {"card": memory}}, both keys being numbers, and adds up each card. A single card
// has the whole request; the amounts on several must add up to it.
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
		return nil, fmt.Errorf("annotation %s: %d in all, the pod asks for %d", AnnotationAllocation, placement.Total(), request)
	}
	return placement, nil
}

// maxCard bounds what is taken for a card index: no machine comes near it, and a forged one can't grow anything.
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

// formatTime is parseTime's inverse. The zero time has no Unix nanoseconds, they are outside of 64 bits.
func formatTime(t time.Time) string {
	if t.IsZero() {
		return "0"
	}
	return strconv.FormatInt(t.UnixNano(), 10)
}
