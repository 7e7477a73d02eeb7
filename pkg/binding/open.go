package binding

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

const (
	// resolveInterval is how often unconfirmed binds are read.
	resolveInterval = 500 * time.Millisecond
	// deadlineMargin allows for the network and for etcd, see Deadline.
	deadlineMargin = 5 * time.Second
	// unseenAfter is how long the watch may fail to report a successful bind before the pod is read. The watch never
	// reports a pod that came and went while it was broken.
	unseenAfter = 30 * time.Second
	// readTimeout bounds one live read.
	readTimeout = 2 * time.Second
)

// The outcomes of unconfirmed binds, as labels of metrics. A pod is gone if it was deleted or has ended.
const (
	OutcomeBound    = "bound"
	OutcomeNotBound = "not_bound"
	OutcomeGone     = "gone"
)

// openBinds tracks each write until it is rejected or the watch reports the pod. If the answer was lost, the card stays
// assumed until a live read or the watch shows the outcome: if it were released on a guess, two pods could get it. mu guards
// binds.
type openBinds struct {
	Options
	reader *reader
	// onBound is called for a pod whose unconfirmed bind turned out to have succeeded.
	onBound func(pod gpu.Pod, node string)

	mu    sync.Mutex
	binds map[gpu.PodUID]openBind
}

type openBind struct {
	pod   gpu.Pod
	node  string
	state bindState
	// at is when the last write began. For an unseen bind that was read, it is the time of the last read.
	at time.Time
	// earlier is true if an earlier write of this pod is open too. Then a rejection of the last write does not resolve the
	// bind: the earlier write may still be made.
	earlier bool
}

type bindState int

const (
	inProgress bindState = iota
	// unconfirmed means that it is not known whether the write was made.
	unconfirmed
	// unseen means that the write was made and that the watch has not reported it yet.
	unseen
)

func newOpenBinds(o Options, r *reader, onBound func(gpu.Pod, string)) *openBinds {
	return &openBinds{Options: o, reader: r, onBound: onBound, binds: map[gpu.PodUID]openBind{}}
}

// begin records that a write is about to be made. A pod without GPU memory has no allocation, but its gang must learn the outcome.
func (o *openBinds) begin(pod gpu.Pod, node string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	_, earlier := o.binds[pod.UID]
	o.binds[pod.UID] = openBind{pod: pod, node: node, at: o.Clock.Now(), earlier: earlier}
}

// written records that the write was made.
func (o *openBinds) written(uid gpu.PodUID) {
	o.Ledger.Confirm(uid)
	o.setState(uid, unseen)
}

// answerLost records that the answer was lost. It returns false if the watch has reported the pod already.
func (o *openBinds) answerLost(uid gpu.PodUID) (open bool) { return o.setState(uid, unconfirmed) }

func (o *openBinds) setState(uid gpu.PodUID, state bindState) (open bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	bind, open := o.binds[uid]
	if open {
		bind.state = state
		o.binds[uid] = bind
	}
	return open
}

// abandon releases the pod's assumed allocation unless an earlier write is open. It reports whether none is.
func (o *openBinds) abandon(uid gpu.PodUID) (none bool) {
	open := o.has(uid)
	if !open {
		o.Ledger.Release(uid)
	}
	return !open
}

// has reports whether a write of the pod is open.
func (o *openBinds) has(uid gpu.PodUID) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	_, open := o.binds[uid]
	return open
}

// rejected records that the write was rejected. It releases the allocation unless an earlier write is still open.
func (o *openBinds) rejected(uid gpu.PodUID) {
	o.mu.Lock()
	bind, ok := o.binds[uid]
	if ok && bind.earlier {
		bind.state = unconfirmed
		o.binds[uid] = bind
		o.mu.Unlock()
		return
	}
	delete(o.binds, uid)
	o.mu.Unlock()
	o.Ledger.Release(uid)
}

// foundBound records that a live read found the pod bound, perhaps to another node. If the watch has reported the pod meanwhile,
// the watch is newer and the read is ignored.
func (o *openBinds) foundBound(pod *clustercache.PodInfo) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if bind, ok := o.binds[pod.UID]; ok {
		bind.node = pod.Node
		o.recordBound(bind, pod)
	}
}

// recordBound updates the ledger with a bound pod that a live read found. The caller holds mu. A running pod stays open until
// the watch reports it: if the pod ended while the watch is broken, nothing else would detect that.
func (o *openBinds) recordBound(bind openBind, pod *clustercache.PodInfo) {
	if pod.Ended {
		delete(o.binds, bind.pod.UID)
		o.Ledger.Remove(bind.pod.UID)
		return
	}
	setBound(o.Ledger, pod)
	bind.state, bind.earlier, bind.at = unseen, false, o.Clock.Now()
	o.binds[bind.pod.UID] = bind
}

// watchReported records that the watch has reported the pod, whose bind then has this outcome. update applies the report to the
// ledger. The bind is closed before, so that the result of an earlier live read cannot be applied afterwards.
func (o *openBinds) watchReported(uid gpu.PodUID, outcome string, update func()) {
	o.mu.Lock()
	bind, open := o.binds[uid]
	delete(o.binds, uid)
	o.mu.Unlock()
	update()
	if open && bind.state == unconfirmed {
		o.reportResolved(klog.Background(), bind, outcome)
	}
}

// reportResolved reports the outcome of an unconfirmed bind. The ledger must be up to date already.
func (o *openBinds) reportResolved(logger klog.Logger, bind openBind, outcome string) {
	logger.Info("Unconfirmed bind resolved", "pod", klog.KRef(bind.pod.Namespace, bind.pod.Name), "node", bind.node, "outcome", outcome)
	o.Observer.BindResolved(outcome)
	switch outcome {
	case OutcomeBound:
		o.onBound(bind.pod, bind.node)
	case OutcomeNotBound:
		o.reader.notBound(bind.pod.UID, bind.node)
	}
}

// run reads open binds until ctx ends.
func (o *openBinds) run(ctx context.Context) error {
	ticker := o.Clock.NewTicker(resolveInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
		o.resolveDue(ctx)
	}
}

// resolveDue reads the pods of the binds that are due.
func (o *openBinds) resolveDue(ctx context.Context) {
	for _, bind := range o.due() {
		if !o.readOne(ctx, bind) {
			return // The API server is unreachable: each further read would only time out.
		}
	}
}

// due returns the binds that must be read now, the oldest first.
func (o *openBinds) due() []openBind {
	o.mu.Lock()
	defer o.mu.Unlock()
	now := o.Clock.Now()
	var due []openBind
	for uid, bind := range o.binds {
		age := now.Sub(bind.at)
		if bind.state == inProgress && age > Deadline(o.Timeout) {
			// If its goroutine were still running, it would have reported the outcome long ago.
			bind.state = unconfirmed
			o.binds[uid] = bind
		}
		if bind.state == unconfirmed || bind.state == unseen && age > unseenAfter {
			due = append(due, bind)
		}
	}
	slices.SortFunc(due, func(a, b openBind) int { return cmp.Or(a.at.Compare(b.at), cmp.Compare(a.pod.UID, b.pod.UID)) })
	return due
}

// readOne reads the pod of one bind. It reports whether the API server answered.
func (o *openBinds) readOne(ctx context.Context, bind openBind) bool {
	logger := klog.FromContext(ctx)
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	// The begin of the read counts: a write that the read does not show can have been made during the read.
	asked := o.Clock.Now()
	found, err := o.reader.read(ctx, bind.pod)
	if err != nil {
		logger.V(2).Info("Pod of an open bind not read, trying again", "pod", klog.KRef(bind.pod.Namespace, bind.pod.Name), "err", err)
		return false
	}
	outcome := o.applyRead(bind, found, asked)
	o.reader.report(bind.pod.UID, found)
	if outcome != "" && bind.state == unconfirmed {
		o.reportResolved(logger, bind, outcome)
	}
	return true
}

// applyRead updates the ledger with the result of a read that began at asked. pod is nil if there is none. It returns the
// outcome, or "" if there is none yet.
func (o *openBinds) applyRead(bind openBind, pod *clustercache.PodInfo, asked time.Time) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.binds[bind.pod.UID] != bind {
		return "" // A newer attempt began, or the watch has reported the pod.
	}
	switch {
	case pod == nil, pod.Ended:
		delete(o.binds, bind.pod.UID)
		o.Ledger.Remove(bind.pod.UID)
		return OutcomeGone
	case pod.Node != "":
		o.recordBound(bind, pod)
		return OutcomeBound
	case asked.Sub(bind.at) > Deadline(o.Timeout):
		delete(o.binds, bind.pod.UID)
		o.Ledger.Release(bind.pod.UID)
		return OutcomeNotBound
	default:
		return "" // Not bound yet: the write may still be under way.
	}
}

// addUnseen adds a pod that a live read found on a node and that the watch has not reported. The bind stays open until the
// watch reports it, so that a pod that has ended meanwhile does not stay in the ledger.
func (o *openBinds) addUnseen(pod *clustercache.PodInfo) {
	if pod.Node == "" || pod.Request == 0 || pod.Ended {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	_, open := o.binds[pod.UID]
	home, allocation, known := o.Ledger.Lookup(pod.UID)
	// Nothing is to be done for a pod that the ledger has as bound to this node, nor for one with an open bind whose allocation
	// the ledger doesn't have any more. A pod that the ledger has on another node, or only assumed on this one, was bound by
	// another leader after a bind of this process failed. The other leader may have chosen another card.
	if known && home == pod.Node && allocation.State == ledger.Bound || open && !known {
		return
	}
	o.recordBound(openBind{pod: pod.Pod, node: pod.Node}, pod)
}

// idle reports whether every write has a known outcome.
func (o *openBinds) idle() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, bind := range o.binds {
		if bind.state != unseen {
			return false
		}
	}
	return true
}
