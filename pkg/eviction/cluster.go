package eviction

import (
	"cmp"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

// cluster returns the state in which the decision is made. It covers the nodes that the items' pods can use.
func (r *Reclaimer) cluster(need reclaim.Need) reclaim.Cluster {
	out := reclaim.Cluster{
		Cards: map[string][]placement.Card{}, Leaving: map[string][]gpu.PodUID{}, Places: map[gpu.PodUID]reclaim.Place{},
		Budgets: map[gpu.PodUID][]int{},
	}
	budgets := newBudgets(r.Cache)
	for _, v := range need.Victims {
		for _, pod := range v.Pods {
			if place, numbers, ok := r.candidate(pod, &budgets); ok {
				out.Places[pod.UID], out.Budgets[pod.UID] = place, numbers
			}
		}
	}
	out.Allowed = budgets.allowed
	var pods []reclaim.Pod
	ignored := map[string]bool{}
	for _, item := range need.Items {
		pods, ignored[item.ID] = append(pods, item.Pods...), true
	}
	out.FitsResources = func(node string, pods []gpu.Pod, gone []gpu.PodUID) bool {
		return r.Ledger.FitsResources(node, pods, gone, ignored)
	}
	slices.SortStableFunc(pods, byPriority) // Pods with a higher priority see at least as much room.
	for _, pod := range pods {
		for _, name := range pod.Nodes {
			if _, known := out.Cards[name]; !known {
				out.Cards[name] = r.cards(name, pod.Pod, ignored, nil, &out)
			}
		}
	}
	return out
}

// candidate returns the place of a pod that may be evicted, and the numbers of its budgets. ok is false if it isn't certain that the end of
// the pod frees its place, or if the eviction isn't likely to be made.
func (r *Reclaimer) candidate(pod gpu.Pod, b *budgets) (place reclaim.Place, numbers []int, ok bool) {
	info := r.cached(pod)
	node, allocation, held := r.Ledger.Lookup(pod.UID)
	if info == nil || info.Mirror || !held || !certain(&allocation) {
		return place, nil, false
	}
	numbers = b.of(info)
	return reclaim.Place{Node: node, On: allocation.Placement}, numbers, r.executor.mayEvict(pod.UID, numbers)
}

// cards returns the cards of a node as the pod sees them, without the victims and the pods that are being deleted, and without the awaited
// reservations of the items in ignored: room is made for all of these together, wherever it is. It adds the pods that are being deleted to
// cluster.Leaving, and removes them from the candidates. It returns none if the node doesn't share its cards.
func (r *Reclaimer) cards(name string, pod gpu.Pod, ignored map[string]bool, victims map[gpu.PodUID]bool, cluster *reclaim.Cluster) []placement.Card {
	available, _ := r.Ledger.Availability(name, pod, ignored)
	for i := range available.Allocations {
		a := &available.Allocations[i]
		if !a.LeavesSoon() {
			if victims[a.UID] {
				placement.Release(available.Cards, a.Placement)
			}
			continue
		}
		delete(cluster.Places, a.UID) // A candidate that is being deleted by now would count twice.
		if info := r.cached(a.Pod); !certain(a) || info != nil && !frees(info, r.Clock.Now()) {
			continue
		}
		placement.Release(available.Cards, a.Placement)
		cluster.Leaving[name] = append(cluster.Leaving[name], a.UID)
	}
	slices.Sort(cluster.Leaving[name])
	return available.Cards
}

// stillFits reports whether the places of the plan, which are held now, have room once its victims are gone.
func (r *Reclaimer) stillFits(plan reclaim.Plan) bool {
	state, gone, ignored := reclaim.Cluster{Leaving: map[string][]gpu.PodUID{}}, victimUIDs(plan), map[string]bool{}
	for _, served := range plan.Served {
		ignored[served.ID] = true
	}
	for _, served := range plan.Served {
		nodes := map[string][]placement.Card{} // As the item sees them: the places of other items count as used.
		lowest := slices.MinFunc(served.Pods, byPriority).Pod
		for _, place := range served.Places {
			cards, known := nodes[place.Node]
			if !known {
				cards = r.cards(place.Node, lowest, ignored, gone, &state)
				nodes[place.Node] = cards
			}
			for _, share := range place.On {
				if i, ok := placement.Position(cards, share.Card); !ok || cards[i].Unhealthy || !cards[i].Has(share) {
					return false
				}
			}
			placement.Use(cards, place.On)
		}
	}
	return true
}

// victimUIDs returns the pods of the plan's victims.
func victimUIDs(plan reclaim.Plan) map[gpu.PodUID]bool {
	uids := map[gpu.PodUID]bool{}
	for _, v := range plan.Victims {
		for _, pod := range v.Pods {
			uids[pod.UID] = true
		}
	}
	return uids
}

// byPriority orders pods: that with the lowest priority first.
func byPriority(a, b reclaim.Pod) int { return cmp.Compare(a.Priority, b.Priority) }
