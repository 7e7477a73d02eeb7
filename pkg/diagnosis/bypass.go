package diagnosis

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// BoundWithoutExtender reports whether a scheduler bound the pod without calling the extender. It depends on the pod alone, so the
// extender and kubectl inspect agree, also about pods that were bound while no extender ran.
//
// It is true for a pod that asks for GPU memory and has a node, if two things are certain: the pod was created without spec.nodeName,
// and no scheduler chose its cards. It is false for a pod that has ended, and for the mirror pod of a static pod.
func BoundWithoutExtender(pod *corev1.Pod) bool {
	if pod.Spec.NodeName == "" || protocol.Terminal(pod) || protocol.IsMirror(pod) || protocol.PodRequest(pod) == 0 {
		return false
	}
	return !chosenByScheduler(pod) && createdWithoutNode(pod.ManagedFields)
}

// chosenByScheduler reports whether the pod's annotations are those of an extender or a scheduler: gpushare's extender writes them in the
// Binding, others before it. The annotations of a pod without such cards are written by the device plugin, once the pod starts.
func chosenByScheduler(pod *corev1.Pod) bool {
	if _, err := protocol.PodPlacement(pod); errors.Is(err, protocol.ErrNotAssumed) {
		return false
	}
	assignment, err := protocol.ParseAssignment(pod.Annotations)
	return err != nil || !assignment.ChosenByNode()
}

// createdWithoutNode reports whether the pod was created without spec.nodeName. The API server records which client set which
// field, but a Binding sets spec.nodeName without such a record. It returns false if the record doesn't show the pod's creation.
func createdWithoutNode(managers []metav1.ManagedFieldsEntry) bool {
	created := false
	for _, manager := range managers {
		var fields struct {
			Spec struct {
				NodeName   json.RawMessage `json:"f:nodeName"`
				Containers json.RawMessage `json:"f:containers"`
			} `json:"f:spec"`
		}
		if manager.FieldsV1 == nil || manager.Subresource != "" {
			continue
		}
		if err := json.Unmarshal(manager.FieldsV1.GetRawBytes(), &fields); err != nil || fields.Spec.NodeName != nil {
			return false
		}
		created = created || fields.Spec.Containers != nil
	}
	return created
}

// BypassProblem returns the problem that pods were bound without the extender, by their number for each schedulerName; empty if there are
// none.
func BypassProblem(pods map[string]int) string {
	if len(pods) == 0 {
		return ""
	}
	n, is := 0, "is"
	for _, of := range pods {
		n += of
	}
	if len(pods) > 1 {
		is = "are"
	}
	return fmt.Sprintf("%s bound without the extender: %s %s configured to call it?", count(n, "pod was", "pods were"), is,
		FirstOf(slices.Sorted(maps.Keys(pods))))
}
