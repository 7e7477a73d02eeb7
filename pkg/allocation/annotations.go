package allocation

import (
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// DueAnnotations returns the changes to a pod's annotations: a new value, or nil for an annotation to remove. It returns nil if
// the annotations are correct. repair is true if they named other cards than those that the containers got. Only a pod whose cards
// the node chose gets an assume time, equal to the assign time (protocol.Assignment.ChosenByNode). An existing one is never overwritten.
func DueAnnotations(pod *Pod, given PodAllocations) (annotations map[string]any, repair bool) {
	if pod.Ended {
		return nil, false
	}
	lasting, has := given.FirstWithCard(pod)
	complete, at, byNode := true, time.Time{}, false
	for _, container := range pod.Containers {
		a, ok := given[container.Name]
		if !ok || !a.HasCard() {
			complete = false
			continue
		}
		byNode = byNode || a.At.Equal(pod.Assignment.AssumeTime)
		if a.At.After(at) {
			at = a.At
		}
	}
	if byNode { // Its annotations were written when the first of its containers was served.
		at = pod.Assignment.AssumeTime
	}
	annotations = map[string]any{}
	repair = has && pod.Assumed && !slices.Equal(pod.Assignment.Indexes(), lasting.Cards.Cards())
	if has && (!pod.Assumed || repair) {
		right := protocol.Assignment{Cards: lasting.assigned(), Request: pod.Request, Containers: pod.AppRequests, AssumeTime: at}
		for key, value := range right.Annotations() {
			annotations[key] = value
		}
		if len(lasting.Cards) == 1 && len(pod.Assignment.Cards) > 1 {
			annotations[protocol.AnnotationAllocation] = nil // It is for pods with several cards only.
		}
		if pod.HasAssumeTime || repair {
			delete(annotations, protocol.AnnotationAssumeTime)
		}
		if pod.Assigned {
			delete(annotations, protocol.AnnotationAssigned)
		}
	}
	switch {
	case complete && !pod.Assigned:
		for key, value := range protocol.AssignedAnnotations(at) {
			annotations[key] = value
		}
	case !complete && pod.Assigned && !pod.Ran:
		// An allocation for another pod was matched to this one, or the annotation was forged. If the pod has run, the
		// annotation stays: the record can be less complete than the annotations.
		annotations[protocol.AnnotationAssigned], annotations[protocol.AnnotationAssignTime] = "false", nil
	}
	if len(annotations) == 0 {
		return nil, false
	}
	return annotations, repair
}

// assigned returns the cards of the allocation as annotations name them.
func (a Allocation) assigned() []protocol.AssignedCard {
	out := make([]protocol.AssignedCard, len(a.Cards))
	for i, share := range a.Cards {
		out[i] = protocol.AssignedCard{Index: share.Card, Memory: a.CardMemory[i]}
	}
	return out
}
