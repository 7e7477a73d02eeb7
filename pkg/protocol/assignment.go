package protocol

import (
	"cmp"
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

// Assignment is the content of a pod's annotations: the cards that bind chose, and whether the node has allocated them.
type Assignment struct {
	// Cards are the cards in the order of AnnotationIndex, each once. A pod that is assigned has one at least.
	Cards []AssignedCard
	// Request is the pod's total request. A value read from annotations is not trusted; PodRequest computes it from the spec.
	Request gpu.Memory
	// Containers are the requests of the pod's app containers, in the order of the spec. They are written if there are several
	// cards, and never read.
	Containers []gpu.Memory
	// AssumeTime is when the cards were chosen.
	AssumeTime time.Time
	// Assigned is true once the node has allocated the cards to every GPU container of the pod.
	Assigned bool
	// AssignTime is when Assigned became true; zero before.
	AssignTime time.Time
}

// AssignedCard is a card of an assignment.
type AssignedCard struct {
	Index int
	// Memory is the card's total memory; zero if unknown.
	Memory gpu.Memory
}

// ChosenByNode reports whether the device plugin chose the cards, because no scheduler had. It writes the time of the allocation as both
// times; an extender's assume time is earlier.
func (a Assignment) ChosenByNode() bool {
	return a.Assigned && !a.AssignTime.IsZero() && a.AssignTime.Equal(a.AssumeTime)
}

// Indexes returns the indexes of the cards.
func (a Assignment) Indexes() []int {
	indexes := make([]int, len(a.Cards))
	for i, card := range a.Cards {
		indexes[i] = card.Index
	}
	return indexes
}

// Sorted returns the cards, ordered by index.
func (a Assignment) Sorted() []AssignedCard {
	return slices.SortedFunc(slices.Values(a.Cards), func(x, y AssignedCard) int { return cmp.Compare(x.Index, y.Index) })
}

// Annotations returns the assignment as pod annotations. AnnotationAssignTime is omitted unless Assigned is true.
func (a Assignment) Annotations() map[string]string {
	indexes, memories := make([]string, len(a.Cards)), make([]string, len(a.Cards))
	for i, card := range a.Cards {
		indexes[i], memories[i] = strconv.Itoa(card.Index), card.Memory.String()
	}
	annotations := map[string]string{
		AnnotationIndex:      strings.Join(indexes, separator),
		AnnotationPod:        a.Request.String(),
		AnnotationDevice:     strings.Join(memories, separator),
		AnnotationAssumeTime: formatTime(a.AssumeTime),
		AnnotationAssigned:   strconv.FormatBool(a.Assigned),
	}
	if len(a.Cards) > 1 {
		annotations[AnnotationAllocation] = a.allocation()
	}
	if a.Assigned {
		annotations[AnnotationAssignTime] = formatTime(a.AssignTime)
	}
	return annotations
}

// separator separates the cards in annotations and environment variables.
const separator = ","

// allocation returns the value of AnnotationAllocation: each container's request, divided evenly over the cards.
func (a Assignment) allocation() string {
	containers := map[int]map[int]gpu.Memory{}
	for i, request := range a.Containers {
		if request == 0 {
			continue
		}
		containers[i] = map[int]gpu.Memory{}
		for _, card := range a.Cards {
			containers[i][card.Index] = request / gpu.Memory(len(a.Cards))
		}
	}
	text, _ := json.Marshal(containers) // Maps of integers can always be written.
	return string(text)
}

// AssignedAnnotations returns the annotations that turn an assumed pod into an assigned one. The extender's are kept.
func AssignedAnnotations(at time.Time) map[string]string {
	return map[string]string{
		AnnotationAssigned:   "true",
		AnnotationAssignTime: formatTime(at),
	}
}

// ParseAssignment parses a pod's annotations. It returns ErrNotAssumed if there is no card index, and another error if the
// indexes are invalid. Invalid times and amounts become zero, because the cards are what matters.
func ParseAssignment(annotations map[string]string) (Assignment, error) {
	index, ok := annotations[AnnotationIndex]
	if !ok {
		return Assignment{}, ErrNotAssumed
	}
	cards, err := parseCards(index, annotations[AnnotationDevice])
	if err != nil {
		return Assignment{}, fmt.Errorf("annotation %s: %w", AnnotationIndex, err)
	}
	return Assignment{
		Cards:      cards,
		Request:    parseMemory(annotations[AnnotationPod]),
		AssumeTime: parseTime(annotations[AnnotationAssumeTime]),
		Assigned:   annotations[AnnotationAssigned] == "true",
		AssignTime: parseTime(annotations[AnnotationAssignTime]),
	}, nil
}

// parseCards parses the values of AnnotationIndex and AnnotationDevice. Memory that isn't listed for each card is unknown.
func parseCards(index, device string) ([]AssignedCard, error) {
	if n := strings.Count(index, separator) + 1; n > gpu.MaxCards {
		return nil, fmt.Errorf("%d cards, want %d at most", n, gpu.MaxCards)
	}
	indexes, memories := strings.Split(index, separator), strings.SplitN(device, separator, gpu.MaxCards+1)
	cards := make([]AssignedCard, len(indexes))
	for i, text := range indexes {
		card, err := parseCard(text)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(cards[:i], func(c AssignedCard) bool { return c.Index == card }) {
			return nil, fmt.Errorf("card %d is listed twice", card)
		}
		cards[i].Index = card
		if len(memories) == len(indexes) {
			cards[i].Memory = parseMemory(memories[i])
		}
	}
	return cards, nil
}

// PodPlacement returns the placement that the pod's annotations name, ordered by card. An AnnotationIndex that names a single
// card takes precedence, since bind always overwrites it. Otherwise AnnotationAllocation is used: related schedulers don't divide
// the request evenly. Without it, the request is divided evenly over the cards of AnnotationIndex. PodPlacement returns ErrNotAssumed
// if the annotations name no card, and another error if they are invalid.
//
// Annotations determine the cards, never the amount: the placement's total is always the request in the pod's spec. Nor does the
// pod's label count any more, which can change at any time. The cores are divided evenly over the cards, and each
// container counts on all of them.
func PodPlacement(pod *corev1.Pod) (gpu.Placement, error) {
	where, err := memoryPlacement(pod)
	if err != nil {
		return nil, err
	}
	cores, containers := PodCores(pod), podContainers(pod)
	for i := range where {
		where[i].Cores, where[i].Containers = cores.PerCard(len(where)), containers
	}
	return where, nil
}

// memoryPlacement is PodPlacement without cores and containers.
func memoryPlacement(pod *corev1.Pod) (gpu.Placement, error) {
	assignment, err := ParseAssignment(pod.Annotations)
	if err == nil && len(assignment.Cards) == 1 {
		return gpu.On(assignment.Cards[0].Index, PodRequest(pod)), nil
	}
	if text, ok := pod.Annotations[AnnotationAllocation]; ok {
		where, invalid := parseAllocation(text, pod)
		if invalid != nil {
			return nil, fmt.Errorf("annotation %s: %w", AnnotationAllocation, invalid)
		}
		if len(where) > 0 {
			return where, nil
		}
		if err != nil {
			return nil, ErrNotAssumed
		}
	}
	if err != nil {
		return nil, err
	}
	return evenly(assignment.Cards, PodRequest(pod))
}

// evenly divides the request over the cards.
func evenly(cards []AssignedCard, request gpu.Memory) (gpu.Placement, error) {
	n := gpu.Memory(len(cards))
	if request%n != 0 {
		return nil, fmt.Errorf("annotation %s: %d cards, the request is %d", AnnotationIndex, n, request)
	}
	where := make(gpu.Placement, len(cards))
	for i, card := range cards {
		where[i] = gpu.Share{Card: card.Index, Memory: request / n}
	}
	slices.SortFunc(where, func(a, b gpu.Share) int { return a.Card - b.Card })
	return where, nil
}

// parseAllocation parses {"container": {"card": memory}} and sums the memory by card. A container's key can be anything. A
// single card gets the whole request. Amounts on several cards must add up to the request.
//
// The requests of the app containers can add up to less than the pod's, which also covers its initialization. Then they must
// be divided evenly, and so is the request. The placement is empty if the allocation names no card.
func parseAllocation(text string, pod *corev1.Pod) (gpu.Placement, error) {
	var containers map[string]map[string]int64
	if err := json.Unmarshal([]byte(text), &containers); err != nil {
		return nil, err
	}
	placement, err := sumByCard(containers)
	if err != nil {
		return nil, err
	}
	n, request, total := len(placement), PodRequest(pod), placement.Total()
	even := !slices.ContainsFunc(placement, func(s gpu.Share) bool { return s.Memory != placement[0].Memory })
	switch {
	case n == 0:
		return nil, nil
	case n == 1:
		return gpu.On(placement[0].Card, request), nil
	case n > gpu.MaxCards:
		return nil, fmt.Errorf("%d cards, want %d at most", n, gpu.MaxCards)
	case total == request:
		return placement, nil
	case total != sumOf(pod.Spec.Containers, ContainerRequest) || !even || request%gpu.Memory(n) != 0:
		return nil, fmt.Errorf("%d in total, the pod requests %d", total, request)
	}
	for i := range placement {
		placement[i].Memory = request / gpu.Memory(n)
	}
	return placement, nil
}

// sumByCard returns the memory of all containers by card, ordered by card. Cards without memory are left out.
func sumByCard(containers map[string]map[string]int64) (placement gpu.Placement, err error) {
	sums := map[int]gpu.Memory{}
	for _, cards := range containers {
		for index, memory := range cards {
			card, err := parseCard(index)
			if err != nil {
				return nil, err
			}
			if memory < 0 {
				return nil, fmt.Errorf("negative memory on card %d", card)
			}
			sums[card] = sums[card].Add(gpu.Memory(memory))
		}
	}
	for _, card := range slices.Sorted(maps.Keys(sums)) {
		if sums[card] > 0 {
			placement = append(placement, gpu.Share{Card: card, Memory: sums[card]})
		}
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
