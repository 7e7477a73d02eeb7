package allocation

import (
	"time"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// DueAnnotations returns the changes to a pod's annotations: a new value, or nil for an annotation to remove. It returns nil if
// the annotations are correct. repair is true if they named another card than the one that the containers got. An existing
// assume time is never overwritten, whatever its value.
func DueAnnotations(pod *Pod, given PodAllocations) (annotations map[string]any, repair bool) {
	if pod.Terminal {
		return nil, false
	}
	lasting, has := given.Lasting(pod)
	complete, at := true, time.Time{}
	for _, container := range pod.Containers {
		a, ok := given[container.Name]
		if !ok || !a.HasCard() {
			complete = false
			continue
		}
		if a.At.After(at) {
			at = a.At
		}
	}
	annotations = map[string]any{}
	repair = has && pod.Assumed && pod.Assignment.Cards[0].Index != lasting.Card
	if has && (!pod.Assumed || repair) {
		right := protocol.Assignment{Cards: protocol.OneCard(lasting.Card, lasting.CardMemory), Request: pod.Request, AssumeTime: lasting.At}
		for key, value := range right.Annotations() {
			annotations[key] = value
		}
		if pod.HasAssumeTime {
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
