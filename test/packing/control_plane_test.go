package main

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// TestTried: pods that are bound after they were rejected count once, and the end is when all were tried and nothing has changed for a while.
func TestTried(t *testing.T) {
	_, pods := small()
	tried := newTried(pods[:2])
	pod := func(number int, node string, rejected bool) *corev1.Pod {
		object := pods[number].request(number)
		object.Spec.NodeName = node
		if rejected {
			object.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse}}
		}
		return object
	}
	later := time.Now().Add(2 * settled)
	for i, step := range []struct {
		pod       *corev1.Pod
		allocated int
		settled   bool
	}{
		{pod(0, "", false), 0, false},
		{pod(0, "", true), 0, false},
		{pod(1, "n1", false), pods[1].gpu(), true},
		{pod(0, "n1", true), pods[0].gpu() + pods[1].gpu(), true},
		{pod(0, "n1", true), pods[0].gpu() + pods[1].gpu(), true},
	} {
		tried.update(step.pod)
		if tried.allocated != step.allocated || tried.settled(later) != step.settled || tried.settled(time.Now()) {
			t.Errorf("step %d: %d allocated, settled later: %v, now: %v", i, tried.allocated, tried.settled(later), tried.settled(time.Now()))
		}
	}
}
