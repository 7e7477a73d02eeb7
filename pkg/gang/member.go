package gang

import (
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Key identifies a gang.
type Key struct{ Namespace, Name string }

// String returns namespace/name.
func (k Key) String() string { return k.Namespace + "/" + k.Name }

// Member is a pod of a gang, as read from its object.
type Member struct {
	// Request is 0 for a pod that asks for whole cards. It is counted and held like others, but only kube-scheduler
	// knows where it fits.
	gpu.Pod
	Gang Key
	// Size is the size of the gang according to this pod.
	Size int
	// Problem is why the gang or its size can't be read; empty if they can.
	Problem string
	// Created is truncated to seconds.
	Created time.Time
	// Controller is the UID of the pod's controller; empty if it has none.
	Controller string
	// Template is equal for pods that get the same candidate nodes.
	Template string
	// Node is the node that the pod is bound to; empty if it isn't bound.
	Node string
	// BoundAt is when the pod was bound, truncated to seconds; zero if unknown.
	BoundAt time.Time
	// MarkedWhole is true if the pod marks its gang as whole: it was bound last, or later.
	MarkedWhole bool
	// Ended is true if the pod has succeeded or failed, Succeeded if it has succeeded.
	Ended, Succeeded bool
	// Run is the run that the pod was bound in, from its annotation gpushare.aliyun.com/group-run; empty if it has none.
	Run string
	// Scheduler is the name of the scheduler that the pod is assigned to.
	Scheduler string
	// ShortOfMemory is true if kube-scheduler's message on the pod says that nodes lack GPU memory.
	ShortOfMemory bool
	// Gated is true if the pod has scheduling gates other than that of fair shares.
	Gated bool
	// Cardless is true if the pod asks for no cards. kube-scheduler doesn't call the extender for it, and it doesn't
	// count.
	Cardless bool
}

// pending reports whether the member is to be placed.
func (m *Member) pending() bool {
	return m.Node == "" && m.Problem == "" && !m.Ended && !m.Leaving && !m.Gated && !m.Cardless
}

// ineligible reports whether the member exists, but can't be placed because of its gates or its problem.
func (m *Member) ineligible() bool {
	return m.Node == "" && (m.Problem != "" || m.Gated) && !m.Ended && !m.Leaving && !m.Cardless
}

// running reports whether the member is bound and neither ended nor terminating.
func (m *Member) running() bool {
	return m.Node != "" && !m.Ended && !m.Leaving && !m.Cardless
}
