package scheduling

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/fake"
)

// faults are the disturbances of the API server's answers.
type faults struct {
	// rejected, busy, lost and unreachable are the probabilities of these outcomes of a write. A lost answer's write was made,
	// will be made later, or is never made. died is that of a leader that dies at a write, before or after it takes effect.
	rejected, busy, lost, unreachable, died float64
	slow                                    float64
	// moment is the probability of a disturbance while members of a group are bound or held.
	moment float64
	// stuck is the probability that a pod stays terminating after its grace period.
	stuck float64
}

// fate is the outcome of a write.
type fate int

const (
	made fate = iota
	// notSent: there is no connection. refused and busy: the API server says no.
	notSent
	refused
	busy
	// The answer is lost. The write is made at once, later, or never.
	lostMade
	lostLate
	lostNever
	// The process dies before or after the write.
	diedBefore
	diedAfter
)

// fateOf returns the outcome of a write that is sent now.
func (w *world) fateOf() fate {
	random := w.random.Float64()
	for _, o := range []struct {
		outcomes []fate
		share    float64
	}{
		{[]fate{lostMade, lostLate, lostNever}, w.faults.lost}, {[]fate{notSent}, w.faults.unreachable}, {[]fate{refused}, w.faults.rejected},
		{[]fate{busy}, w.faults.busy}, {[]fate{diedBefore, diedAfter}, w.faults.died},
	} {
		if random -= o.share; random < 0 {
			return o.outcomes[w.random.IntN(len(o.outcomes))]
		}
	}
	return made
}

// fateOfBinding returns the outcome of a Binding that the replica sends now.
func (w *world) fateOfBinding(r *replica, pod string) fate {
	lost := lostMade + fate(w.random.IntN(3))
	switch p := w.api.pods[pod]; {
	case w.fate != nil && r.apart <= w.now:
		return w.fate(pod)
	case r.apart > w.now && (w.fate != nil || w.chance(0.5)):
		return notSent
	case w.api.away > w.now:
		return lostNever
	case r.apart > w.now, w.api.mute > w.now:
		return lost
	case p != nil && p.refused > w.now && !w.calm:
		return refused
	}
	return w.fateOf()
}

// dies kills the leader if it is this replica.
func (w *world) dies(r *replica) {
	if w.answering() == r {
		w.trace("%s dies at a write", r.name)
		w.changeLeader()
	}
}

// client is what an extender sees of the API server. It implements API.
type client struct{ r *replica }

var (
	errDial = &net.OpError{Op: "dial", Err: errors.New("connection refused")}
	errEOF  = fmt.Errorf("reading the answer: %w", io.ErrUnexpectedEOF)
)

// reach lets the time of one call pass, and reports whether the API server is reachable.
func (c client) reach(ctx context.Context) error {
	w := c.r.w
	if c.r.dead {
		return errDial
	}
	if w.left(ctx) <= 0 {
		return context.DeadlineExceeded
	}
	if c.r.apart > w.now {
		if err := w.pass(ctx, w.between(time.Millisecond, 2*time.Second)); err != nil {
			return err
		}
		if w.chance(0.5) {
			return errDial
		}
		return errEOF
	}
	d := w.between(time.Millisecond, 8*time.Millisecond)
	if w.chance(w.faults.slow) {
		d = w.between(100*time.Millisecond, 2*time.Second)
	}
	if err := w.pass(ctx, d); err != nil {
		return err
	}
	if c.r.dead || c.r.apart > w.now {
		return errEOF
	}
	return nil
}

// Bind implements API.
func (c client) Bind(ctx context.Context, b *corev1.Binding) error {
	w := c.r.w
	if c.r.dead {
		return errDial
	}
	outcome := w.fateOfBinding(c.r, b.Name)
	switch outcome {
	case lostMade, lostLate, lostNever:
		w.stats.lost++
		if p := w.api.pods[b.Name]; p != nil {
			p.late = true
		}
		w.moment()
	case refused:
		w.stats.rejected++
	}
	return c.write(ctx, "the Binding of "+b.Name, outcome, func() error { return w.api.bind(b, c.r.name) })
}

// write makes a write with this outcome. The write is made while the call waits, or later if the answer is lost.
func (c client) write(ctx context.Context, what string, outcome fate, commit func() error) error {
	w := c.r.w
	latency := w.between(time.Millisecond, 15*time.Millisecond)
	if w.chance(w.faults.slow) {
		latency = w.between(100*time.Millisecond, 2500*time.Millisecond)
	}
	commitAfter := func(d time.Duration) {
		w.after(d, func() {
			if err := commit(); err != nil {
				w.trace("api: late, %s is refused: %v", what, err)
			}
		})
	}
	if outcome != made {
		w.trace("api: %s: outcome %d", what, outcome)
	}
	switch outcome {
	case notSent:
		w.sleep(w.between(time.Millisecond, time.Second))
		return errDial
	case diedBefore, diedAfter:
		if outcome == diedAfter {
			commitAfter(0)
		}
		w.dies(c.r)
		return errEOF
	case lostMade, lostLate, lostNever:
		switch outcome {
		case lostMade:
			commitAfter(w.between(time.Millisecond, 20*time.Millisecond))
		case lostLate: // The API server has not abandoned it yet.
			commitAfter(w.between(time.Millisecond, 2*simBindTimeout))
		}
		wait := w.between(5*time.Millisecond, simBindTimeout)
		if w.api.mute > w.now {
			wait = simBindTimeout
		}
		if err := w.pass(ctx, wait); err != nil {
			return err
		}
		return errEOF
	case refused:
		w.sleep(5 * time.Millisecond)
		return apierrors.NewForbidden(fake.PodResource, "it", errors.New("a webhook"))
	case busy:
		w.sleep(5 * time.Millisecond)
		return apierrors.NewTooManyRequests("busy", 1)
	}
	var answer error
	w.after(latency/2, func() { answer = commit() })
	if err := w.pass(ctx, latency); err != nil {
		return err
	}
	if c.r.dead || c.r.apart > w.now {
		return errEOF
	}
	return answer
}

// Pod implements API.
func (c client) Pod(ctx context.Context, _, name string) (*corev1.Pod, error) {
	if err := c.reach(ctx); err != nil {
		return nil, err
	}
	p := c.r.w.api.pods[name]
	if p == nil {
		return nil, notFound(name)
	}
	return p.object, nil
}

// PodsOn implements API.
func (c client) PodsOn(ctx context.Context, node string) ([]corev1.Pod, error) {
	if err := c.reach(ctx); err != nil {
		return nil, err
	}
	var out []corev1.Pod
	for _, p := range c.r.w.api.order {
		if p.bound() && p.info.Node == node {
			out = append(out, *p.object)
		}
	}
	return out, nil
}

// Claim implements API: the claims of pods are missing.
func (c client) Claim(ctx context.Context, _, name string) (*corev1.PersistentVolumeClaim, error) {
	if err := c.reach(ctx); err != nil {
		return nil, err
	}
	return nil, notFound(name)
}

// Volume implements API.
func (client) Volume(_ context.Context, name string) (*corev1.PersistentVolume, error) {
	return nil, notFound(name)
}

// Evict implements API.
func (c client) Evict(ctx context.Context, pod gpu.Pod, grace *int64, dryRun bool) error {
	if err := c.reach(ctx); err != nil {
		return err
	}
	w := c.r.w
	why, _ := ctx.Value(reasonKey{}).(evictionReason)
	if dryRun {
		return w.api.evict(pod, c.r.name, why, grace, true)
	}
	return c.write(ctx, "the eviction of "+pod.Name, w.fateOf(), func() error { return w.api.evict(pod, c.r.name, why, grace, false) })
}

// ConfigMap implements API.
func (c client) ConfigMap(ctx context.Context, _, _ string) (*corev1.ConfigMap, error) {
	if err := c.reach(ctx); err != nil {
		return nil, err
	}
	return c.r.w.api.configMap.DeepCopy(), nil
}

// CreateConfigMap implements API: the chart has created the ConfigMap.
func (client) CreateConfigMap(context.Context, string, string) (*corev1.ConfigMap, error) {
	return nil, errors.New("it exists")
}

// PatchConfigMap implements API.
func (c client) PatchConfigMap(ctx context.Context, _, name, version string, data map[string]string) (patched *corev1.ConfigMap, err error) {
	if err := c.reach(ctx); err != nil {
		return nil, err
	}
	w := c.r.w
	err = c.write(ctx, "the record of evictions", w.fateOf(), func() error {
		present := w.api.configMap
		if present.ResourceVersion != version {
			return conflict(name, "another resource version")
		}
		w.api.version++
		next := present.DeepCopy()
		next.ResourceVersion = strconv.Itoa(w.api.version)
		maps.Copy(next.Data, data)
		w.api.configMap, patched = *next, next.DeepCopy()
		return nil
	})
	return patched, err
}

// OpenGate implements API.
func (c client) OpenGate(ctx context.Context, pod gpu.Pod, gate string) error {
	if err := c.reach(ctx); err != nil {
		return err
	}
	w := c.r.w
	return c.write(ctx, "opening the gate of "+pod.Name, w.fateOf(), func() error { return w.api.openGate(pod, gate, c.r.name) })
}

// Nominate implements API.
func (c client) Nominate(ctx context.Context, pod gpu.Pod, version, node string) error {
	if err := c.reach(ctx); err != nil {
		return err
	}
	w := c.r.w
	return c.write(ctx, "the nomination of "+pod.Name, w.fateOf(), func() error { return w.api.nominate(pod, version, node, c.r.name) })
}

// AnnotateNode implements API.
func (c client) AnnotateNode(ctx context.Context, node, key, value string) error {
	if err := c.reach(ctx); err != nil {
		return err
	}
	w := c.r.w
	return c.write(ctx, "the annotation of "+node, w.fateOf(), func() error { return w.api.touchNode(node, key, value) })
}
