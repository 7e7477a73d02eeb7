package schedulerconfig

// minSample is the smallest number of feasible nodes at which kube-scheduler stops looking for more, adaptiveStart, adaptiveStep and
// minPercentage its default percentage (k8s.io/kubernetes pkg/scheduler/schedule_one.go, numFeasibleNodesToFind).
const minSample, adaptiveStart, adaptiveStep, minPercentage = 100, 50, 125, 5

// SampleSize returns the number of feasible nodes at which kube-scheduler stops looking for more in a cluster of so many nodes, with this
// percentageOfNodesToScore. A filter call with as many candidate nodes can be a sample.
func SampleSize(percentage, nodes int) int {
	if percentage == 0 {
		percentage = max(adaptiveStart-nodes/adaptiveStep, minPercentage)
	}
	return max(nodes*percentage/100, minSample)
}
