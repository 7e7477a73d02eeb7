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

// reportedReasons are the reasons that kube-scheduler's message gives by these texts, the best one of any node first, as in
// cardReasons. The first text that the message contains counts: that of Full is the beginning of that of Fragmented.
var reportedReasons = []struct {
	texts  []string
	reason reasons.Reason
}{
	{[]string{reasonPrefix}, reasons.WaitsForGroup},
	{reasons.Crowded.AllTexts(), reasons.Crowded},
	{reasons.Fragmented.AllTexts(), reasons.Fragmented},
	{reasons.Full.AllTexts(), reasons.Full},
	{[]string{InsufficientMemory, InsufficientCores}, reasons.Full},
	{reasons.Unhealthy.AllTexts(), reasons.Unhealthy},
	{reasons.TooLarge.AllTexts(), reasons.TooLarge},
}

// reportedRoom returns what kube-scheduler's message says about the nodes.
func reportedRoom(pod *Pod) room {
	if !pod.Tried {
		return room{reason: reasons.Fits, has: "nodes can't be listed"}
	}
	rejected, _ := rejectionIn(pod.Message)
	made := room{reason: reasons.OtherConstraint, message: shorten(strings.TrimSuffix(WithoutPreemption(pod.Message), "."))}
	if _, kept := reasons.ReservedFor(pod.Message); kept {
		made.reason = reasons.KeptForGroup
		return made
	}
	for _, reported := range reportedReasons {
		if slices.ContainsFunc(reported.texts, func(text string) bool { return strings.Contains(rejected.text, text) }) {
			made.reason = reported.reason
			if made.reason != reasons.WaitsForGroup && strings.HasSuffix(pod.largest.written, "i") { // As in "2Gi".
				made.message += fmt.Sprintf("; the request %s is %s units: write a plain number", pod.largest.written, pod.largest.amount)
			}
			return made
		}
	}
	switch {
	case pod.Failed:
		made.reason = reasons.SchedulerError
	case rejected.text != "" && rejected.others == "":
		made.reason = reasons.NoNode
	}
	return made
}
