package deviceplugin

import (
	"cmp"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// snapshot is the complete input of one decision. It isn't shared, and a decision changes nothing outside it.
type snapshot struct {
	Cards []gpu.Card
	// Pods are this node's pods that ask for GPU memory, in any phase.
	Pods []podView
	// Served is what each container was given.
	Served served
	// Refused are the pods that got a rejection. The kubelet fails such a pod; the API server may not know it yet.
	Refused map[gpu.PodUID]bool
	// Preferred is the result of the preceding GetPreferredAllocation call. If a card must be selected, it is the hint's card
	// as long as that has room. Otherwise the kubelet's checkpoint would name another card than the container has.
	Preferred hint
}

// candidate is a container for which the kubelet may be calling Allocate.
type candidate struct {
	Pod       *podView
	Container containerView
	// Again is true if the container was served before. The kubelet asks for it again only if it has lost its checkpoint.
	Again bool
	// Next is true if no other container of the pod must be served before this one.
	Next bool
	// Begun is true if another container of the pod was served and this one is next. The kubelet admits one pod at a time, so
	// it is unlikely to ask for another pod.
	Begun bool
	// Refused is true if the pod got a rejection.
	Refused bool
}

// Candidates returns the containers with exactly this request for which the kubelet may need a response. The order is by
// likelihood if nothing else is known: the pod that was assumed first comes first.
func (s *snapshot) Candidates(request gpu.Memory) []candidate { return s.candidates(request, false) }

// Interrupted returns the same for containers that the API server reports as running. A kubelet that has lost its checkpoint
// asks for them again too: after a restart of the machine none of them runs, and a pod that is resized in place is admitted
// again.
func (s *snapshot) Interrupted(request gpu.Memory) []candidate { return s.candidates(request, true) }

func (s *snapshot) candidates(request gpu.Memory, running bool) []candidate {
	var out []candidate
	for i := range s.Pods {
		pod := &s.Pods[i]
		if pod.Terminal || pod.Mirror {
			continue // Static pods get no card.
		}
		given, next, begun := s.Served[pod.UID], true, false
		for _, serving := range given {
			begun = begun || !serving.Lost
		}
		for _, container := range pod.Containers {
			serving, served := given[container.Name]
			c := candidate{
				Pod: pod, Container: container, Next: next, Refused: s.Refused[pod.UID],
				// All containers were allocated before the first one ran. A pod of which no container has run is admitted from
				// the start, init containers first, by a kubelet that doesn't have it in its checkpoint.
				Again: (serving.Lost || !served) && pod.Ran,
			}
			c.Begun = next && !c.Again && begun
			if served && !serving.Lost || container.Running != running {
				continue
			}
			if !c.Again {
				next = false
			}
			if container.Request == request {
				out = append(out, c)
			}
		}
	}
	slices.SortStableFunc(out, byAssumeTime)
	return out
}

// Admitted returns one container each of up to most pods that have run, so the kubelet has admitted them.
func (s *snapshot) Admitted(most int) []candidate {
	var out []candidate
	for i := range s.Pods {
		if pod := &s.Pods[i]; len(out) < most && pod.Ran && !pod.Terminal && !pod.Deleting && len(pod.Containers) > 0 {
			out = append(out, candidate{Pod: pod, Container: pod.Containers[0]})
		}
	}
	return out
}

// byAssumeTime is the order of the existing plugin: of the pods that are assumed and not assigned, the earliest comes first.
// The other keys are for cases that the existing plugin doesn't have.
func byAssumeTime(a, b candidate) int {
	return cmp.Or(
		byReadiness(a, b),
		first(a.Pod.Assumed, b.Pod.Assumed),
		first(!a.Pod.Assigned, !b.Pod.Assigned),
		a.Pod.Assignment.AssumeTime.Compare(b.Pod.Assignment.AssumeTime),
		a.Pod.Created.Compare(b.Pod.Created),
		cmp.Compare(a.Pod.UID, b.Pod.UID),
	)
}

// byBinding is the order in which the kubelet admits pods. Queries in this order find the pod after few of them. The kubelet's
// watch delivers pods one by one, so in the order in which they were bound.
func byBinding(a, b candidate) int {
	return cmp.Or(byReadiness(a, b), cmp.Compare(a.Pod.Version, b.Pod.Version), byCreation(a, b))
}

// byCreation is the order of the pods that the kubelet finds when it starts. They are one batch, ordered by creation time in
// whole seconds (k8s.io/kubernetes pkg/kubelet/kubelet.go, HandlePodAdditions).
func byCreation(a, b candidate) int {
	return cmp.Or(byReadiness(a, b), a.Pod.Created.Compare(b.Pod.Created), cmp.Compare(a.Pod.Version, b.Pod.Version), byAssumeTime(a, b))
}

// byReadiness puts the candidates first for which the kubelet is likely to ask at all.
func byReadiness(a, b candidate) int {
	return cmp.Or(
		first(!a.Again, !b.Again),
		first(!a.Refused, !b.Refused),
		first(a.Begun, b.Begun),
		first(a.Next, b.Next),
		first(!a.Pod.Deleting, !b.Pod.Deleting),
	)
}

// first orders true before false.
func first(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// standing is the state of a candidate in the kubelet.
type standing int

const (
	// unknown means that the kubelet gave no answer.
	unknown standing = iota
	// absent means that the kubelet doesn't know the pod: not yet, or no longer.
	absent
	// holding means that the container has its devices.
	holding
	// waiting means that the kubelet has admitted the pod and that the container has no devices. The kubelet calls Allocate for
	// such a container.
	waiting
)

// match is how a candidate was found, for logs and metrics.
type match string

const (
	byKubelet match = "kubelet"
	byOrder   match = "order"
	byNobody  match = "none"
)

// maxAsked bounds the number of candidates about which the kubelet is queried. In the kubelet's own order the first one is
// nearly always the right one. In a batch, however, the order of pods of the same second is random, and half a second of the
// kubelet's time costs less than a wrong card.
const maxAsked = 48

// maxAdmitted bounds the number of pods that have run about which the kubelet is queried. One would be enough, but a pod can be
// deleted at any time.
const maxAdmitted = 3

// resolve finds the candidate for which the kubelet calls Allocate. It queries the kubelet as long as the answers help, and
// otherwise takes the first of the candidates that remain possible. answers reports whether absent is meaningful: kubelets
// without the call return it for every pod.
//
// Containers that were served before and pods that got a rejection are candidates only as a lastResort. A kubelet that has lost
// its checkpoint shows each of the former without devices, and kubelets 1.34 and 1.35 show each of the latter without devices.
// The kubelet may also be asking for a pod that is not among the candidates yet.
func resolve(candidates []candidate, ask func(candidate) standing, answers func() bool, lastResort bool) (candidate, match, bool) {
	if !lastResort {
		candidates = slices.DeleteFunc(candidates, func(c candidate) bool { return c.Again || c.Refused })
	}
	excluded := map[containerKey]bool{}
	order := slices.SortedStableFunc(slices.Values(candidates), byBinding)
	if len(order) > 2 {
		slices.SortStableFunc(order[1:], byCreation) // If the first one doesn't match, the pods came as a batch.
	}
	for _, c := range order[:min(len(order), maxAsked)] {
		switch ask(c) {
		case waiting:
			return latest(c, candidates, ask), byKubelet, true
		case absent, holding:
			excluded[c.key()] = true
		}
	}
	for _, c := range candidates {
		if excluded[c.key()] && answers() {
			continue
		}
		return c, byOrder, true
	}
	return candidate{}, byNobody, false
}

// latest returns, of the candidates that are waiting, the one that the kubelet reached last. Kubelets 1.34 and 1.35 show a pod
// that they have rejected like the one that they admit (k8s.io/kubernetes v1.34 pkg/kubelet/apis/podresources/server_v1.go,
// Get), until the API server knows that it has failed. Pods arrive in the order in which they were bound, or as a batch by
// creation. In each of the two orders the search goes on to the first pod that the kubelet doesn't know.
func latest(found candidate, candidates []candidate, ask func(candidate) standing) candidate {
	likely := func(c candidate) bool { return !c.Again && !c.Refused && c.Next }
	if !likely(found) {
		return found
	}
	version := func(a, b candidate) int { return cmp.Compare(a.Pod.Version, b.Pod.Version) }
	created := func(a, b candidate) int { return cmp.Or(a.Pod.Created.Compare(b.Pod.Created), version(a, b)) }
	passed := map[containerKey]bool{}
	for _, order := range []func(a, b candidate) int{version, created} {
		for _, c := range slices.SortedStableFunc(slices.Values(candidates), order) {
			if !likely(c) || passed[c.key()] || order(c, found) <= 0 {
				continue
			}
			where := ask(c)
			if where == waiting {
				passed[found.key()], found = true, c
			} else if where != holding {
				break
			}
		}
	}
	return found
}

// sole finds the container for which the kubelet calls Allocate if the waiting containers belong to one pod. If they belong to
// several pods, there is no result: after the kubelet has lost its checkpoint, containers that still run are waiting too. The
// kubelet doesn't ask for these. It does ask for init containers that have ended, for each one when it starts and admits the
// pod again (k8s.io/kubernetes pkg/kubelet/cm/devicemanager/manager.go, isContainerAlreadyRunning), so init containers come
// first. Pods that got a rejection come last.
func sole(candidates []candidate, ask func(candidate) standing) (found candidate, ok bool) {
	var groups [4][]candidate
	for _, c := range candidates[:min(len(candidates), maxAsked)] {
		group := 0
		if !c.Container.Init {
			group = 1
		}
		if c.Refused {
			group += 2
		}
		groups[group] = append(groups[group], c)
	}
	for _, group := range groups {
		for _, c := range group {
			switch {
			case ask(c) != waiting:
			case !ok:
				found, ok = c, true
			case found.Pod.UID != c.Pod.UID:
				return candidate{}, false
			}
		}
		if ok {
			return found, true
		}
	}
	return candidate{}, false
}

// interruptedOne finds the container for which the kubelet calls Allocate among those that the API server reports as running.
// resized are those of pods with a resize on which the kubelet has not reported yet. restarted is true if the kubelet has just
// started, perhaps with the machine.
func interruptedOne(interrupted, resized []candidate, ask func(candidate) standing, restarted bool) (candidate, bool) {
	alone, isAlone := sole(interrupted, ask)
	if isAlone && restarted {
		return alone, true
	}
	if c, ok := sole(resized, ask); ok {
		return c, true
	}
	// A resize can be deferred for hours. During this time the kubelet can start other containers again.
	return alone, isAlone && alone.Pod.ResizePending
}

// containerKey identifies a container of this node.
type containerKey struct {
	UID  gpu.PodUID
	Name string
}

func (c candidate) key() containerKey { return containerKey{c.Pod.UID, c.Container.Name} }
