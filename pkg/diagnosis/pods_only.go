package diagnosis

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/placement"
)

// PodsOnly returns a Diagnoser for programs that may read the pods of a namespace and no nodes. What depends on nodes and cards
// it takes from kube-scheduler's message.
func PodsOnly(pods []*corev1.Pod, now time.Time) *Diagnoser {
	d := FromObjects(nil, pods, now)
	d.podsOnly = true
	return d
}

// reportedReasons are the reasons that kube-scheduler's message gives by these texts, the best one of any node first, as in
// cardReasons. The first text that the message contains counts: that of Full is the beginning of that of Fragmented.
var reportedReasons = []struct {
	text   string
	reason Reason
}{
	{reasonPrefix, WaitsForGroup},
	{placement.Fragmented.String(), Fragmented},
	{placement.Full.String(), Full},
	{InsufficientMemory, Full},
	{placement.Unhealthy.String(), Unhealthy},
	{placement.TooLarge.String(), TooLarge},
}

// reportedRoom returns what kube-scheduler's message says about the nodes.
func reportedRoom(pod *Pod) room {
	if !pod.Tried {
		return room{reason: Fits, has: "nodes can't be listed"}
	}
	rejected, _ := rejectionIn(pod.Message)
	made := room{reason: OtherConstraint, message: shorten(strings.TrimSuffix(WithoutPreemption(pod.Message), "."))}
	if _, kept := placement.ReservedFor(pod.Message); kept {
		made.reason = KeptForGroup
		return made
	}
	for _, reported := range reportedReasons {
		if strings.Contains(rejected.text, reported.text) {
			made.reason = reported.reason
			if made.reason != WaitsForGroup && strings.HasSuffix(pod.largest.written, "i") { // As in "2Gi".
				made.message += fmt.Sprintf("; the request %s is %s units: write a plain number", pod.largest.written, pod.largest.amount)
			}
			return made
		}
	}
	switch {
	case pod.Failed:
		made.reason = SchedulerError
	case rejected.text != "" && rejected.others == "":
		made.reason = NoNode
	}
	return made
}
