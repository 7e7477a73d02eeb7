package allocation

import (
	"fmt"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Snapshot is the complete input of a decision, beside the kubelet's answers. Decide changes nothing in it.
type Snapshot struct {
	Cards []gpu.Card
	// Adapters are the node's RDMA adapters.
	Adapters []gpu.Adapter
	// Pods are this node's pods that ask for GPU memory, in any phase.
	Pods []Pod
	// Given is what each container was given.
	Given Allocations
	// Rejected are the pods of which an allocation was rejected. The kubelet fails them; the API server may not know it yet.
	Rejected map[gpu.PodUID]bool
	// Preferred is what the preceding GetPreferredAllocation call for the same devices was matched to.
	Preferred Preference
	// Kubelet is asked which of several containers it starts.
	Kubelet Kubelet
	// Freshness is how recent Pods and Given are, and ReadError why the pods could not be read if it is Unread.
	Freshness Freshness
	ReadError error
	// KubeletAge is the time since the plugin registered with the kubelet.
	KubeletAge time.Duration
}

// Freshness is how recent a snapshot is. A call is decided from one snapshot, or from two.
//
//	Cached → Live    the decision was Outdated, and the pods were read
//	Cached → Unread  the decision was Outdated, and the pods could not be read
type Freshness int

const (
	// Cached means that Pods are those that the watch has delivered. It can be behind, so the container is only given its annotated cards.
	Cached Freshness = iota
	// Live means that Pods were read from the API server, which has no others, and that Given was read again.
	Live
	// Unread means that Given was read again, and that Pods are those that the watch has delivered.
	Unread
)

// MarkedRead returns the snapshot after Given was read again, and Pods from the API server. readError is the error if the latter failed.
func (s Snapshot) MarkedRead(readError error) Snapshot {
	s.Freshness, s.ReadError = Live, readError
	if readError != nil {
		s.Freshness = Unread
	}
	return s
}

// Preference is the container to which a GetPreferredAllocation call was matched, and how it was found. The zero value is none.
type Preference struct {
	Container ContainerKey
	Match     Match
}

// Decision is the answer to an Allocate call.
type Decision struct {
	// NeedsFreshRead is true if no pod of the snapshot matches, or if its container would be rejected or get other cards than the
	// annotated ones: that can't be undone, and the watch can be behind. Decide is then called again with a refreshed snapshot.
	NeedsFreshRead bool

	// Match is how the pod was found. Pod is nil if none was.
	Match     Match
	Pod       *Pod
	Container Container
	// Cards are what the container gets, ordered by index; its request is divided evenly over them. If it is rejected, they are the
	// cards that the pod should have, of which only the index is set, or none.
	Cards  []gpu.Card
	Result Result
	// Adapters is what it gets of the node's RDMA adapters.
	Adapters Adapters
	// NoAdapter is why it gets none, although its pod prefers cards near them and its cards are; empty otherwise.
	NoAdapter string
	// Moved is, with ResultMoved, why the container doesn't get the annotated cards.
	Moved string
	// Rejection is set if the container gets no card.
	Rejection *Rejection
}

// Rejection is why an allocation is rejected. The kubelet shows the text to the pod's owner, in the pod's status.
type Rejection struct {
	Text string
	// NoRoom is true if no usable card, or not enough of them, have room now.
	NoRoom bool
}

// Result is how the cards of a container were selected, or why it got none, for logs and metrics.
type Result string

// The results. Their values are labels of a metric.
const (
	ResultAssumed Result = "assumed" // The annotated cards, or those that the pod already has.
	ResultMoved   Result = "moved"   // Others, because an annotated one has no room.
	ResultPlaced  Result = "placed"  // The pod's annotations named no card.

	RefusedFull        Result = "refused_full"
	RefusedUnhealthy   Result = "refused_unhealthy"
	RefusedUnknownCard Result = "refused_unknown_card"
	RefusedUnknownPod  Result = "refused_unknown_pod"
	RefusedUnavailable Result = "refused_unavailable"
	RefusedInvalid     Result = "refused_invalid"
)

// Results returns all results.
func Results() []Result {
	return []Result{ResultAssumed, ResultMoved, ResultPlaced,
		RefusedFull, RefusedUnhealthy, RefusedUnknownCard, RefusedUnknownPod, RefusedUnavailable, RefusedInvalid}
}

// Decide finds the container that the kubelet calls Allocate for and selects its cards. The call has only a number of devices.
func Decide(s Snapshot, request gpu.Memory) Decision {
	m := matching{Snapshot: &s, request: request}
	found, match := m.find()
	var d Decision
	if match == ByNone {
		d = m.noMatch()
	} else {
		if match == ByOrder && m.differ(func(c Candidate) any { return c.Container.Limit }) {
			found.Container.Limit = 0 // It must not get the limit of another container.
		}
		d = s.selectCards(Decision{Match: match, Pod: found.Pod, Container: found.Container})
		d = s.withAdapters(d, match == ByOrder && m.differ(func(c Candidate) any { return c.Pod.RDMA })) // It must not get what another container asks for.
	}
	switch {
	case s.Freshness == Cached && (d.Rejection != nil || d.Result != ResultAssumed):
		return Decision{NeedsFreshRead: true}
	case s.Freshness == Unread && d.Rejection != nil && d.Rejection.NoRoom:
		d.Rejection.Text += fmt.Sprintf("; pods may have ended since, and the API server can't be asked: %v", s.ReadError)
	}
	return d
}

// noMatch rejects an allocation whose pod can't be found.
func (m *matching) noMatch() Decision {
	d := Decision{Match: ByNone}
	if m.Freshness == Unread {
		return d.Reject(RefusedUnavailable, "no pod known here waits for %s units of GPU memory, and the API server can't be asked: %v", m.request, m.ReadError)
	}
	text := "no pod that the API server has on this node waits for %s units of GPU memory, and static pods are not supported"
	if len(m.interrupted()) > 0 {
		text += "; the kubelet has lost its record of containers that run, and it is not known whether it asks for one of them"
	}
	return d.Reject(RefusedUnknownPod, text, m.request)
}

// Reject returns the decision with a rejection.
func (d Decision) Reject(result Result, text string, args ...any) Decision {
	d.Result, d.Rejection = result, &Rejection{Text: fmt.Sprintf(text, args...)}
	return d
}
