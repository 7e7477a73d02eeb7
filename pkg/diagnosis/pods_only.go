package diagnosis

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/reasons"
)

// PodsOnly returns a Diagnoser for programs that may read the pods of a namespace and no nodes. What depends on nodes and cards
// it takes from kube-scheduler's message.
func PodsOnly(pods []*corev1.Pod, now time.Time) *Diagnoser {
	d := FromObjects(nil, pods, now)
	d.podsOnly = true
	return d
}

// reportedReasons are the reasons that kube-scheduler's message gives, the best one of any node first, as in cardReasons.
var reportedReasons = []reasons.Reason{
	reasons.WaitsForGroup, reasons.Crowded, reasons.Fragmented, reasons.Full, reasons.Unhealthy, reasons.TooLarge,
}

// reportedRoom returns what kube-scheduler's message says about the nodes.
func reportedRoom(pod *Pod) room {
	if !pod.Tried {
		return room{reason: reasons.Fits, has: "nodes can't be listed"}
	}
	rejected, _ := reasons.ParseRejection(pod.Message)
	made := room{reason: reasons.OtherConstraint, message: Excerpt(strings.TrimSuffix(reasons.WithoutPreemption(pod.Message), "."))}
	if rejected.ReservedText() != "" {
		made.reason = reasons.ReservedForOther
		return made
	}
	if i := slices.IndexFunc(reportedReasons, rejected.Has); i >= 0 {
		made.reason = reportedReasons[i]
		if made.reason != reasons.WaitsForGroup && strings.HasSuffix(pod.largest.written, "i") { // As in "2Gi".
			made.message += fmt.Sprintf("; the request %s is %s units: write a plain number", pod.largest.written, pod.largest.amount)
		}
		return made
	}
	switch {
	case pod.Failed:
		made.reason = reasons.SchedulerError
	case rejected.Text != "" && rejected.Others == "":
		made.reason = reasons.NoNode
	}
	return made
}
