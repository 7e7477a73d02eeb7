package allocation

import (
	"slices"
	"time"
)

// A kubelet that has lost its checkpoint (the file was deleted, or is invalid) knows no allocation of the containers that it
// finds. It then calls Allocate again for containers that have their cards:
//
//   - While it starts, for init containers that have ended. Containers that run at its start are skipped
//     (k8s.io/kubernetes pkg/kubelet/cm/devicemanager/manager.go, isContainerAlreadyRunning). After a restart of the machine
//     none runs, but the API server still reports them as running.
//   - For each container that it starts again, from several workers at once (manager.go, GetDeviceRunContainerOptions).
//   - For each container of a pod that is resized in place, although it runs (pkg/kubelet/allocation/allocation_manager.go); not
//     since 1.37 (pkg/kubelet/cm/devicemanager/manager.go, Allocate).
//
// The container must keep its cards in all cases, so an allocation for a running container is rejected except while the kubelet starts.
// PodResources shows every container of such a kubelet without devices until it is allocated again, so an answer "waiting" identifies a
// container only among those for which a call is possible.
//
// Where it isn't known which container is meant, the allocation is rejected: after a wrong guess the kubelet's new checkpoint
// would not have the cards of the running container. The kubelet repeats the call for a resize and for a start.

// statusLag is how long after a kubelet's start the API server may report containers as running that ended before.
const statusLag = 5 * time.Minute

// interrupted returns the running containers with this request, for which the kubelet may ask again.
func (m *matching) interrupted() []Candidate { return m.containers(true) }

// findInterrupted finds the container among those that the API server reports as running, while the kubelet starts.
func (m *matching) findInterrupted() (Candidate, Match) {
	if m.KubeletAge < statusLag {
		if c, ok := m.onlyWaiting(); ok {
			return c, ByKubelet
		}
	}
	return Candidate{}, ByNone
}

// onlyWaiting returns the interrupted container that waits, if all that wait belong to one pod. Init containers come first, because the
// kubelet asks for them while containers that run are shown as waiting. Rejected pods come last.
func (m *matching) onlyWaiting() (found Candidate, ok bool) {
	var groups [4][]Candidate
	candidates := m.interrupted()
	for _, c := range candidates[:min(len(candidates), MaxQuestions)] {
		group := 0
		if !c.Container.Init {
			group = 1
		}
		if c.Rejected {
			group += 2
		}
		groups[group] = append(groups[group], c)
	}
	for _, group := range groups {
		for _, c := range group {
			switch {
			case m.Kubelet.State(c) != StateWaiting:
			case !ok:
				found, ok = c, true
			case found.Pod.UID != c.Pod.UID:
				return Candidate{}, false
			}
		}
		if ok {
			return found, true
		}
	}
	return Candidate{}, false
}

// lose returns the allocation of a container that the kubelet's checkpoint has come to lack.
func (a Allocation) lose() Allocation {
	a.Confirmed, a.Lost = true, true
	return a
}

// keepsCards reports whether the running container still has a's cards and limit although the checkpoint has come to name those of next:
// the kubelet's repeated call for it was matched to another container. instance is the ID of the running container, or empty.
func (a Allocation) keepsCards(next Allocation, instance string) bool {
	return a.Confirmed && a.HasCard() && !a.sameAnswer(next) && instance != "" && (a.Instance == "" || a.Instance == instance)
}

// withNext returns the allocation of a running container that gets the cards and limit of next when it starts again.
func (a Allocation) withNext(next Allocation, instance string) Allocation {
	a.Instance, a.Next, a.NextLimit = instance, next.Cards, next.Limit
	a.Devices, a.Lost = next.Devices, false
	return a
}

// FirstWithCard returns the allocation of the first of the pod's containers that has a card, and false if none has one. Init
// containers come last. They are ignored once a pod with other containers has run: all cards were given out by then, so another
// container that is missing here is a gap in the record, and the cards of an init container can be later ones.
func (g PodAllocations) FirstWithCard(pod *Pod) (Allocation, bool) {
	others := slices.ContainsFunc(pod.Containers, func(c Container) bool { return !c.Init })
	for _, init := range []bool{false, true} {
		if init && others && pod.Ran {
			break
		}
		for _, c := range pod.Containers {
			if a, served := g[c.Name]; c.Init == init && served && a.HasCard() {
				return a, true
			}
		}
	}
	return Allocation{}, false
}
