package binding

import (
	"context"
	"fmt"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/apiserver"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Claim is the sole right to write, to move and to release a pod's allocation until the pod is bound. A bind holds it from before it reads the
// allocation until its end. So no card is released, and given to another pod, while a bind is about to write it.
type Claim struct {
	binder *Binder
	uid    gpu.PodUID
}

// Claim claims the pod for a bind. It returns false if another bind of the pod is in flight: then an attempt would take the outcome of the other
// one for its own. The caller calls End when the bind has ended.
func (b *Binder) Claim(uid gpu.PodUID) (*Claim, bool) {
	return &Claim{b, uid}, b.tracker.claim(uid)
}

// End ends the claim. It reports whether no write of the pod can take effect any more. If the allocation was abandoned then, End releases it, and
// the listeners receive NotBound.
func (c *Claim) End() (noWrite bool) {
	failed, noWrite := c.binder.tracker.end(c.uid)
	if failed {
		c.binder.notBound(c.uid)
	}
	return noWrite
}

// Abandon makes End release the allocation, unless a write was made or is unconfirmed.
func (c *Claim) Abandon() { c.binder.tracker.releaseOrAbandon(c.uid) }

// HasOpenWrite reports whether an earlier write of the pod may still take effect, with the cards that the pod has in the ledger.
func (c *Claim) HasOpenWrite() bool { return c.binder.tracker.isOpen(c.uid) }

// Write binds the pod to the node in one write that carries the annotations of the allocation, which the ledger assumes for
// the pod on that node; it has no placement if the pod asks for no GPU memory. containers are the requests of the pod's app
// containers if it asks for several cards. Write updates the ledger with the outcome. An allocation whose bind has failed is abandoned, see End;
// until then it can be written again.
func (c *Claim) Write(ctx context.Context, node string, allocation ledger.Allocation, containers []gpu.Memory, member Membership) (reasons.Result, error) {
	b, pod := c.binder, allocation.Pod
	cards, unit, err := b.cards(node, allocation)
	if err != nil {
		c.Abandon()
		return reasons.ResultNoRoom, err
	}
	if err := ctx.Err(); err != nil { // Nothing would be sent, and the answer would count as lost.
		c.Abandon()
		return reasons.ResultUnreachable, fmt.Errorf("no time is left of --bind-timeout to write the Binding: %w", err)
	}
	// The last check before the write. If the process freezes between the check and the write, the node's Allocate
	// catches the late bind.
	if err := b.Leading(); err != nil {
		c.Abandon()
		return reasons.ResultNotLeading, err
	}
	// Before the write, so that the bind is resolved even if this function ends in an unexpected way.
	w := b.tracker.begin(pod, node, b.Clock.Now())
	err = b.API.Bind(ctx, &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: pod.Name, UID: types.UID(pod.UID), Annotations: annotations(allocation, cards, containers, member),
		},
		Target: corev1.ObjectReference{Kind: "Node", Name: node},
	})
	b.Observer.APIWrite("binding")
	switch apiserver.OutcomeOf(err) {
	case apiserver.Done:
		b.tracker.written(w, allocation)
		b.reportCard(klog.FromContext(ctx), node, allocation, cards, unit)
		return reasons.ResultBound, nil
	case apiserver.Rejected:
		b.tracker.rejected(w)
		return reasons.ResultRejected, fmt.Errorf("binding the pod: %w", err)
	}
	return b.confirm(ctx, w, err)
}

// confirm reads the pod after a write whose answer was lost, or that met a conflict: this write or an earlier one may still
// have been made.
func (b *Binder) confirm(ctx context.Context, w *write, err error) (reasons.Result, error) {
	conflict := apiserver.OutcomeOf(err) == apiserver.Conflict
	live, readErr := b.read(ctx, w.pod)
	if readErr == nil {
		defer b.notify(w.pod.UID, live)
	}
	switch {
	case readErr == nil && live != nil && live.Node == w.node:
		b.tracker.foundBound(w, live, b.Clock.Now()) // Another process may have bound the pod, to another card.
		return reasons.ResultBound, nil
	case conflict && readErr == nil && live != nil && live.Node != "":
		b.tracker.foundBound(w, live, b.Clock.Now())
		return reasons.ResultRejected, fmt.Errorf("%w: the pod is bound to node %s already", ErrBadRequest, live.Node)
	case conflict && readErr == nil:
		b.tracker.rejected(w)
		return reasons.ResultRejected, fmt.Errorf("binding the pod: %w", err)
	}
	if !b.tracker.answerLost(w) && b.isBound(w) {
		return reasons.ResultBound, nil // The watch has reported the pod meanwhile.
	}
	return reasons.ResultUnconfirmed, fmt.Errorf("%w: %w", ErrUnconfirmed, err)
}

// isBound reports whether the ledger has the pod as bound to the node of the write.
func (b *Binder) isBound(w *write) bool {
	node, allocation, known := b.Ledger.Lookup(w.pod.UID)
	return known && node == w.node && allocation.State == ledger.Bound
}

// Membership is what a Binding records about the pod's gang. The zero value is for a pod without a gang.
type Membership struct {
	// Run is the run of the gang in which the pod is bound.
	Run string
	// Whole is true if the bind completes the gang, or if the gang is complete already.
	Whole bool
}

// annotations returns the annotations of a Binding.
func annotations(allocation ledger.Allocation, cards []protocol.AssignedCard, containers []gpu.Memory, member Membership) map[string]string {
	out := map[string]string{}
	if allocation.Request > 0 {
		out = protocol.Assignment{
			Cards: cards, Request: allocation.Request, Containers: containers, AssumeTime: allocation.AssumeTime,
		}.Annotations()
	}
	if member.Run != "" {
		out[protocol.AnnotationGroupRun] = member.Run
		// Always: a pod that was copied from a bound one carries that one's mark.
		out[protocol.AnnotationGroupWhole] = strconv.FormatBool(member.Whole)
	}
	return out
}
