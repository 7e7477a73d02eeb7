package deviceplugin

import (
	"cmp"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// snapshot is all that a decision is made from. It is nobody else's: deciding changes nothing outside it.
type snapshot struct {
	Cards []gpu.Card
	// Pods are this node's pods that ask for GPU memory, in whatever phase.
	Pods []podView
	// Served is what the containers were given.
	Served served
	// Refused are the pods that were told no: the kubelet fails them, of which the API server may not know yet.
	Refused map[gpu.PodUID]bool
	// Preferred is what the kubelet was told a moment ago. Where a card is to be chosen it is the one whose devices it was
	// told to take, if there still is room: else the kubelet's books name another card than the container has.
	Preferred hint
}

// candidate is a container for which the kubelet may be asking.
type candidate struct {
	Pod       *podView
	Container containerView
	// Again says that the container was served before; the kubelet asks again only if it has lost its books.
	Again bool
	// Next says that no container of the pod has to be served before this one.
	Next bool
	// Begun says that another container of the pod was served and this one is next: the kubelet admits one pod at a
	// time, so it can hardly be asking for another pod.
	Begun bool
	// Refused says that the pod was told no.
	Refused bool
}

// Candidates returns the containers that ask for exactly this much and that the kubelet may have to be given an answer
// for, the likeliest first where nothing else is known: that of the pod which was assumed first.
func (s *snapshot) Candidates(request gpu.Memory) []candidate { return s.candidates(request, false) }

// Interrupted returns the same of containers that the API server calls running. A kubelet without books asks again for
// those too: after the machine has started again none of them runs, and a pod that is resized in place is admitted again.
func (s *snapshot) Interrupted(request gpu.Memory) []candidate { return s.candidates(request, true) }

func (s *snapshot) candidates(request gpu.Memory, running bool) []candidate {
	var out []candidate
	for i := range s.Pods {
		pod := &s.Pods[i]
		if pod.Terminal || pod.Mirror {
			continue // No static pod gets a card.
		}
		given, next, begun := s.Served[pod.UID], true, false
		for _, serving := range given {
			begun = begun || !serving.Lost
		}
		for _, container := range pod.Containers {
			serving, served := given[container.Name]
			c := candidate{
				Pod: pod, Container: container, Next: next, Refused: s.Refused[pod.UID],
				// Everything was allocated before the first container ran. A pod that hasn't come that far is admitted from the start
				// by a kubelet that doesn't have it in its books, init containers first.
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

// Admitted returns one container of each of some pods that have run, so the kubelet has admitted them.
func (s *snapshot) Admitted(most int) []candidate {
	var out []candidate
	for i := range s.Pods {
		if pod := &s.Pods[i]; len(out) < most && pod.Ran && !pod.Terminal && !pod.Deleting && len(pod.Containers) > 0 {
			out = append(out, candidate{Pod: pod, Container: pod.Containers[0]})
		}
	}
	return out
}

// byAssumeTime is the order of the existing plugin: of the pods that were assumed and not assigned, the earliest.
// Around it stand the cases that it doesn't know.
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

// byBinding is the order in which the kubelet admits pods: to ask in this order is to ask little. They come to it by its
// watch, each by itself, and so in the order in which they were bound.
func byBinding(a, b candidate) int {
	return cmp.Or(byReadiness(a, b), cmp.Compare(a.Pod.Version, b.Pod.Version), byCreation(a, b))
}

// byCreation is the order of what the kubelet finds when it starts: it comes as one batch, by time of creation in whole
// seconds (k8s.io/kubernetes pkg/kubelet/kubelet.go, HandlePodAdditions).
func byCreation(a, b candidate) int {
	return cmp.Or(byReadiness(a, b), a.Pod.Created.Compare(b.Pod.Created), cmp.Compare(a.Pod.Version, b.Pod.Version), byAssumeTime(a, b))
}

// byReadiness orders those before others that the kubelet can be expected to ask for at all.
func byReadiness(a, b candidate) int {
	return cmp.Or(
		first(!a.Again, !b.Again),
		first(!a.Refused, !b.Refused),
		first(a.Begun, b.Begun),
		first(a.Next, b.Next),
		first(!a.Pod.Deleting, !b.Pod.Deleting),
	)
}

// first orders what holds before what doesn't.
func first(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// standing is where a candidate stands in the kubelet's eyes.
type standing int

const (
	// unknown: the kubelet didn't say.
	unknown standing = iota
	// absent: it doesn't know the pod, or not yet, or no longer.
	absent
	// holding: the container has its devices.
	holding
	// waiting: it has admitted the pod, and the container has no devices. This is the one.
	waiting
)

// match is how a candidate was found, for logs and metrics.
type match string

const (
	byKubelet match = "kubelet"
	byOrder   match = "order"
	byNobody  match = "none"
)

// maxAsked bounds how many candidates the kubelet is asked about. In its own order the first one nearly always is the
// one; but in a batch that order is chance for pods of the same second, and half a second of its waiting costs less than
// a wrong card.
const maxAsked = 48

// maxAdmitted bounds how many pods that have run the kubelet is asked about. One would do, but a pod can go at any time.
const maxAdmitted = 3

// resolve finds the candidate that the kubelet is asking for. It asks the kubelet as long as that tells, and takes the
// first of those that remain possible otherwise. answers says whether "absent" means anything: kubelets without the
// call answer so for every pod. Containers that were served before and pods that were refused count as a lastResort only:
// a kubelet that has lost its books shows each of the former without devices, kubelets 1.34 and 1.35 each of the latter,
// and it may be asking for a pod that isn't among the candidates yet.
func resolve(candidates []candidate, ask func(candidate) standing, answers func() bool, lastResort bool) (candidate, match, bool) {
	if !lastResort {
		candidates = slices.DeleteFunc(candidates, func(c candidate) bool { return c.Again || c.Refused })
	}
	excluded := map[containerKey]bool{}
	order := slices.SortedStableFunc(slices.Values(candidates), byBinding)
	if len(order) > 2 {
		slices.SortStableFunc(order[1:], byCreation) // If it isn't the first, it is a batch.
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

// latest returns, of the candidates that wait in the kubelet's eyes, the one that it has come to last. Kubelets 1.34 and
// 1.35 show a pod that they have rejected like the one that they admit (k8s.io/kubernetes v1.34
// pkg/kubelet/apis/podresources/server_v1.go, Get), until the API server knows that it has failed. Pods come in the order
// in which they were bound, or as a batch by creation: in both the search goes on to the first that the kubelet doesn't know.
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

// sole finds the container that the kubelet is asking for where it waits for one pod alone. Those that run on while it
// has lost its books wait in its eyes, too: several pods tell nothing. But those it doesn't ask for, while it does for
// init containers that have ended, for each when it starts and admits its pod again
// (k8s.io/kubernetes pkg/kubelet/cm/devicemanager/manager.go, isContainerAlreadyRunning): so these come first. Pods that
// were refused come last.
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

// interruptedOne finds the container that the kubelet is asking for among those that the API server calls running, of which
// some are of pods whose resize the kubelet hasn't reported on. restarted reports that the kubelet has just started, perhaps
// with the machine.
func interruptedOne(interrupted, resized []candidate, ask func(candidate) standing, restarted bool) (candidate, bool) {
	alone, isAlone := sole(interrupted, ask)
	if isAlone && restarted {
		return alone, true
	}
	if c, ok := sole(resized, ask); ok {
		return c, true
	}
	// A resize can be deferred for hours, during which the kubelet starts other containers again.
	return alone, isAlone && alone.Pod.ResizePending
}

// containerKey names a container of this node.
type containerKey struct {
	UID  gpu.PodUID
	Name string
}

func (c candidate) key() containerKey { return containerKey{c.Pod.UID, c.Container.Name} }
