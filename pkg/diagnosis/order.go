package diagnosis

import (
	"cmp"
	"slices"
)

// Ahead returns how many of the pending pods come before the pod in the queue, of those that can use the same nodes by their constraints: pods of
// higher priority, and older ones of the same priority. Each pod of a group counts. ok is false if the pod isn't in this order, because it has gates
// or its request is invalid, or if the pods of other namespaces aren't known.
func (d *Diagnoser) Ahead(pod *Pod) (ahead int, ok bool) {
	if d.podsOnly || !pod.queues() {
		return 0, false
	}
	ahead, _ = slices.BinarySearchFunc(d.queues[pod.Constraints], pod, comparePods)
	return ahead, true
}

// sortQueues sets queues to those of the pods that are in an order.
func (d *Diagnoser) sortQueues(pending []*Pod) {
	for _, pod := range pending {
		if pod.queues() {
			d.queues[pod.Constraints] = append(d.queues[pod.Constraints], pod)
		}
	}
	for _, queue := range d.queues {
		slices.SortFunc(queue, comparePods)
	}
}

func (p *Pod) queues() bool { return len(p.Gates) == 0 && p.RequestError == "" }

// comparePods is the order of ledger.Item for single pods, as if none had failed.
func comparePods(a, b *Pod) int {
	return cmp.Or(cmp.Compare(b.Priority, a.Priority), a.Created.Compare(b.Created), cmp.Compare(a.UID, b.UID))
}
