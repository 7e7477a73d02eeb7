// Package mistakes lists mistakes that users and administrators make, and what each view must say about them. The tests of
// package diagnosis, of kubectl inspect, of the web page and of the metrics run the same rows.
package mistakes

import (
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/diagnosis"
)

// Mistake is a mistake with its objects.
type Mistake struct {
	// Name is the mistake in a short sentence. It is unique.
	Name string
	// Nodes and Pods are all objects of the cluster.
	Nodes []*corev1.Node
	Pods  []*corev1.Pod
	// Pod is the name of the pod, in the namespace default, that has the mistake.
	Pod string
	// Cause is the reason of the pod's diagnosis; empty for a pod that isn't listed as pending: Words are then its request
	// problem.
	Cause diagnosis.Reason
	// Words is the whole message.
	Words string
}

// Now is the time at which the mistakes are looked for.
var Now = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

// All returns the mistakes. Each call returns new objects.
func All() []Mistake { return nil }
