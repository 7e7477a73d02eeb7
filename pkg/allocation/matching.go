package allocation

import (
	"cmp"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Candidate is a container that the kubelet may be calling Allocate for.
type Candidate struct {
	Pod       *Pod
	Container Container
	// Next is true if no other container of the pod must be served before this one.
	Next bool
	// Begun is true if the pod has not run, another of its containers was served and this one is next. The kubelet admits one pod
	// at a time, so it is unlikely to ask for another pod.
	Begun bool
	// Rejected is true if an allocation of the pod was rejected. Lost is true if the container was served, and the kubelet's checkpoint
	// no longer shows it.
	Rejected, Lost bool
}

// Key returns the container's key.
func (c Candidate) Key() ContainerKey { return ContainerKey{c.Pod.UID, c.Container.Name} }

// KubeletState is the state of a container in the kubelet.
type KubeletState int

// The states.
const (
	// StateUnknown means that the kubelet gave no answer.
	StateUnknown KubeletState = iota
	// StateAbsent means that the kubelet doesn't know the pod: not yet, or no longer.
	StateAbsent
	// StateAllocated means that the container has its devices.
	StateAllocated
	// StateWaiting means that the kubelet has admitted the pod, and calls Allocate for the container, which has no devices.
	StateWaiting
)

// Kubelet answers questions about single containers. The kubelet's state doesn't change while it waits for a decision.
type Kubelet interface {
	// State returns the state of a candidate; StateUnknown if the kubelet can't be asked.
	State(c Candidate) KubeletState
}

// Match is how the pod was found, for logs and metrics.
type Match string

// The ways to find a pod. Their values are labels of a metric.
const (
	ByKubelet Match = "kubelet" // The kubelet's answers show it.
	ByOrder   Match = "order"   // It is the most likely one. This can be wrong.
	ByNone    Match = "none"    // It was not found.
)

// Matches returns all ways.
func Matches() []Match { return []Match{ByKubelet, ByOrder, ByNone} }

// MaxQuestions bounds the number of candidates about which the kubelet is asked. In the kubelet's own order the first one is
// nearly always the right one. In a batch, however, the order of pods of the same second is random, and half a second of the
// kubelet's time costs less than a wrong card.
const MaxQuestions = 48

// matching is the search for the container of one call.
type matching struct {
	*Snapshot
	request gpu.Memory
}

// find returns the container that the kubelet calls Allocate for, or ByNone. Of the candidates, which are the containers with this request that have
// no card, it returns the first that there is in this list:
//
//   - the one for which the kubelet has called GetPreferredAllocation with the same devices;
//   - the first that waits for devices by the kubelet's PodResources;
//   - if the kubelet can't be asked, the one whose card the scheduler chose first;
//   - after pods and checkpoint were read again, one that had a card and starts again (recovery.go).
func (m *matching) find() (Candidate, Match) {
	candidates := m.candidates()
	preferred := slices.IndexFunc(candidates, func(c Candidate) bool { return c.Key() == m.Preferred.Container })
	if preferred >= 0 && m.preferenceHolds(candidates[preferred]) {
		return candidates[preferred], m.Preferred.Match
	}
	found, match := m.resolve(candidates, m.Freshness != Cached)
	switch {
	case match == ByNone && m.Freshness != Cached:
		return m.findInterrupted()
	case match == ByOrder && m.Freshness == Cached && m.Preferred.Match != "" && preferred < 0:
		// GetPreferredAllocation was matched to a container that isn't a candidate in this snapshot: perhaps its pod is not known
		// here yet. The first candidate by order would be another pod's container.
		return Candidate{}, ByNone
	}
	return found, match
}

// preferenceHolds reports whether the container for which GetPreferredAllocation was called is the one of this call too. A match
// by order is checked again: there may have been no time to ask the kubelet.
func (m *matching) preferenceHolds(c Candidate) bool {
	if m.Preferred.Match != ByOrder {
		return true
	}
	state := m.Kubelet.State(c)
	return state != StateAbsent && state != StateAllocated
}

// candidates returns the containers with exactly this request for which the kubelet may need a response. The order is by
// likelihood if nothing else is known: the pod that was assumed first comes first.
func (m *matching) candidates() []Candidate { return m.containers(false) }

// differ reports whether what the function reads differs between the candidates.
func (m *matching) differ(read func(Candidate) any) bool {
	all := m.candidates()
	return slices.ContainsFunc(all, func(c Candidate) bool { return read(c) != read(all[0]) })
}

// containers returns the candidates that run, or those that don't, according to the API server.
func (m *matching) containers(running bool) []Candidate {
	var out []Candidate
	for i := range m.Pods {
		pod := &m.Pods[i]
		if pod.Ended || pod.Mirror {
			continue // Static pods get no card.
		}
		given, next, begun := m.Given[pod.UID], true, false
		for _, a := range given {
			begun = begun || !a.Lost
		}
		for _, container := range pod.Containers {
			allocation, served := given[container.Name]
			if served && !allocation.Lost || container.Running != running {
				continue
			}
			if allocation.HasCard() { // What it was given first counts, whatever is annotated now.
				container.Limit = allocation.Allowed * uint64(len(allocation.Cards))
			}
			c := Candidate{
				Pod: pod, Container: container, Next: next, Begun: next && !pod.Ran && begun, Rejected: m.Rejected[pod.UID], Lost: served,
			}
			next = next && pod.Ran
			if container.Request == m.request {
				out = append(out, c)
			}
		}
	}
	slices.SortStableFunc(out, byAssumeTime)
	return out
}

// resolve finds the container among the candidates. It asks the kubelet as long as the answers help, and otherwise takes the
// first of the candidates that remain possible.
//
// Pods that have run, containers that were served, and pods of which an allocation was rejected are candidates only if lastResort is set.
// The kubelet can show all of them without devices, as if they were being admitted: the first two after it has lost its checkpoint or if
// the pod has ended, the last in 1.34 and 1.35. The pod that it really admits may not be known here yet, so a match with one of
// these would be wrong.
func (m *matching) resolve(candidates []Candidate, lastResort bool) (Candidate, Match) {
	if !lastResort {
		candidates = slices.DeleteFunc(slices.Clone(candidates), func(c Candidate) bool { return c.Pod.Ran || c.Rejected || c.Lost })
	}
	excluded := map[ContainerKey]bool{}
	order := slices.SortedStableFunc(slices.Values(candidates), byBinding)
	if len(order) > 2 {
		slices.SortStableFunc(order[1:], byCreation) // If the first one doesn't match, the pods came as a batch.
	}
	for _, c := range order[:min(len(order), MaxQuestions)] {
		switch m.Kubelet.State(c) {
		case StateWaiting:
			return m.latest(c, candidates), ByKubelet
		case StateAbsent, StateAllocated:
			excluded[c.Key()] = true
		}
	}
	for _, c := range candidates {
		if !excluded[c.Key()] {
			return c, ByOrder
		}
	}
	return Candidate{}, ByNone
}

// latest returns the candidate that the kubelet reached last, of those that it shows as waiting; found is one of them. Several can
// be: until the API server knows that a rejected pod has failed, kubelets 1.34 and 1.35 show it like the pod that they admit
// (k8s.io/kubernetes v1.34 pkg/kubelet/apis/podresources/server_v1.go, Get). Pods reach the kubelet in the order of their binds,
// or as a batch in the order of their creation. So latest asks about the pods after found in both orders, in each until the first
// pod that the kubelet doesn't know.
func (m *matching) latest(found Candidate, candidates []Candidate) Candidate {
	likely := func(c Candidate) bool { return !c.Pod.Ran && !c.Rejected && c.Next }
	if !likely(found) {
		return found
	}
	version := func(a, b Candidate) int { return cmp.Compare(a.Pod.Version, b.Pod.Version) }
	created := func(a, b Candidate) int { return cmp.Or(a.Pod.Created.Compare(b.Pod.Created), version(a, b)) }
	passed := map[ContainerKey]bool{}
	for _, order := range []func(a, b Candidate) int{version, created} {
		for _, c := range slices.SortedStableFunc(slices.Values(candidates), order) {
			if !likely(c) || passed[c.Key()] || order(c, found) <= 0 {
				continue
			}
			state := m.Kubelet.State(c)
			if state == StateWaiting {
				passed[found.Key()], found = true, c
			} else if state != StateAllocated {
				break
			}
		}
	}
	return found
}

// byAssumeTime is the order of the existing plugin: of the pods that are assumed and not assigned, the earliest comes first. The
// other keys are for cases that the existing plugin doesn't have.
func byAssumeTime(a, b Candidate) int {
	return cmp.Or(
		byReadiness(a, b),
		gpu.TrueFirst(a.Pod.Assumed, b.Pod.Assumed),
		gpu.TrueFirst(!a.Pod.Assigned, !b.Pod.Assigned),
		a.Pod.Assignment.AssumeTime.Compare(b.Pod.Assignment.AssumeTime),
		a.Pod.Created.Compare(b.Pod.Created),
		cmp.Compare(a.Pod.UID, b.Pod.UID),
	)
}

// byBinding is the order in which the kubelet admits pods. Questions in this order find the pod after few of them. The kubelet's
// watch delivers pods one by one, so in the order in which they were bound.
func byBinding(a, b Candidate) int {
	return cmp.Or(byReadiness(a, b), cmp.Compare(a.Pod.Version, b.Pod.Version), byCreation(a, b))
}

// byCreation is the order of the pods that the kubelet finds when it starts. They are one batch, ordered by creation time in
// whole seconds (k8s.io/kubernetes pkg/kubelet/kubelet.go, HandlePodAdditions).
func byCreation(a, b Candidate) int {
	return cmp.Or(byReadiness(a, b), a.Pod.Created.Compare(b.Pod.Created), cmp.Compare(a.Pod.Version, b.Pod.Version), byAssumeTime(a, b))
}

// byReadiness puts the candidates first for which the kubelet is likely to ask at all.
func byReadiness(a, b Candidate) int {
	return cmp.Or(
		gpu.TrueFirst(!a.Pod.Ran, !b.Pod.Ran),
		gpu.TrueFirst(!a.Rejected, !b.Rejected),
		gpu.TrueFirst(a.Begun, b.Begun),
		gpu.TrueFirst(a.Next, b.Next),
		gpu.TrueFirst(!a.Pod.Leaving, !b.Pod.Leaving),
	)
}
