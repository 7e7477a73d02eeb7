package gang

import (
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Key is a group's identity.
type Key struct{ Namespace, Name string }

// String returns namespace/name.
func (k Key) String() string { return k.Namespace + "/" + k.Name }

// Member is a pod that belongs to a group, as its object tells it.
type Member struct {
	// Pod asks for no memory where it asks for whole cards: those are counted and held back like others, but
	// kube-scheduler alone knows where they fit.
	gpu.Pod
	Group Key
	// Size is how many members the pod says that its group needs.
	Size int
	// Problem is why that can't be told, empty where it can.
	Problem string
	// Created is in whole seconds.
	Created time.Time
	// Controller is the UID of the object that made the pod, if there is one.
	Controller string
	// Template is equal for pods that kube-scheduler offers the same nodes.
	Template string
	// Node is where the pod is bound, empty where it isn't.
	Node string
	// BoundAt is when that was done, in whole seconds; zero where it isn't known.
	BoundAt time.Time
	// Proof says that the pod was bound as the last of its group, or after it: all of them had been bound.
	Proof bool
	// Ended says that it has succeeded or failed, Succeeded that it has done its part.
	Ended, Succeeded bool
	// Gated says that kube-scheduler doesn't look at the pod yet.
	Gated bool
	// Cardless says that the pod asks for no cards at all: it never comes here, and doesn't count.
	Cardless bool
}

// waiting says whether the member is to be placed.
func (m *Member) waiting() bool {
	return m.Node == "" && m.Problem == "" && !m.Ended && !m.Leaving && !m.Gated && !m.Cardless
}

// hindered says whether the member is there, but can't be placed as it is.
func (m *Member) hindered() bool {
	return m.Node == "" && (m.Problem != "" || m.Gated) && !m.Ended && !m.Leaving && !m.Cardless
}

// running says whether the member has its place, and keeps it.
func (m *Member) running() bool {
	return m.Node != "" && !m.Ended && !m.Leaving && !m.Cardless
}
