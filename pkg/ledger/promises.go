package ledger

import (
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// promiseLife bounds how long a promise counts: far above the time from a filter to its bind, and little enough that a
// pod which is not bound after all is no burden for long.
const promiseLife = 2 * time.Second

// promises are what filter told kube-scheduler and no bind has come for yet. A bind takes a moment to arrive, and
// meanwhile other pods are filtered: they are to find the card taken that the first is about to get. A promise holds
// nothing: it counts in Rank only, where that is asked for, and ends with the pod's reservation. It names each node that
// the pod may come to; on all but one of them it is counted for nothing, for some milliseconds.
type promises struct {
	// open are ordered by age.
	open []promise
}

type promise struct {
	pod   gpu.Pod
	nodes []*node
	at    time.Time
}

// promised is a promise as one of its nodes knows it.
type promised struct {
	gpu.Pod
	at time.Time
}

// Promise records that the pod was told of the named nodes. It replaces an earlier promise to the same pod.
func (l *Ledger) Promise(pod gpu.Pod, names []string, at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.promises.end(func(p promise) bool { return p.pod.UID == pod.UID || at.Sub(p.at) > promiseLife })
	if _, held := l.homes[pod.UID]; held {
		return
	}
	made := promise{pod: pod, at: at}
	for _, name := range names {
		if n := l.nodes[name]; n != nil {
			n.promised = append(n.promised, promised{pod, at})
			made.nodes = append(made.nodes, n)
		}
	}
	l.promises.open = append(l.promises.open, made)
}

// keep ends the promise to a pod that has its place, or needs none any more. It needs the lock.
func (p *promises) keep(uid gpu.PodUID) {
	p.end(func(made promise) bool { return made.pod.UID == uid })
}

func (p *promises) end(which func(promise) bool) {
	p.open = slices.DeleteFunc(p.open, func(made promise) bool {
		if !which(made) {
			return false
		}
		for _, n := range made.nodes {
			n.promised = slices.DeleteFunc(n.promised, func(p promised) bool { return p.UID == made.pod.UID })
		}
		return true
	})
}

// count says whether there are any that the view counts.
func (p *promises) count(view View) bool {
	return !view.Promised.IsZero() && slices.ContainsFunc(p.open, func(made promise) bool { return view.counts(made.at) })
}

// counts says whether a promise of that time counts.
func (v View) counts(at time.Time) bool { return v.Promised.Sub(at) <= promiseLife }

// withPromised are the cards as the pod finds them once others have got what they were promised. It needs the lock.
func (n *node) withPromised(cards []placement.Card, view View, pod gpu.Pod) []placement.Card {
	copied := false
	for _, other := range n.promised {
		if other.UID == pod.UID || !view.counts(other.at) {
			continue
		}
		if !copied {
			cards, copied = slices.Clone(cards), true
		}
		where, _ := placement.Place(view.Card, cards, other.Request)
		add(cards, where)
	}
	return cards
}
