package scheduling

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpushare/gpushare/pkg/apiserver/fake"
	"github.com/gpushare/gpushare/pkg/gpu"
)

// faults are the disturbances of the API server's answers.
type faults struct {
	// rejected, busy, lost and unreachable are the probabilities of these outcomes of a Binding. A lost answer's write was made,
	// will be made later, or is never made.
	rejected, busy, lost, unreachable float64
	slow                              float64
	// moment is the probability of a disturbance while members of a group are bound or held.
	moment float64
}

// fate is the outcome of a Binding.
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
)

// fateOf returns the outcome of a Binding that the replica sends now.
func (w *world) fateOf(r *replica, pod string) fate {
	if w.fate != nil && r.apart <= w.now {
		return w.fate(pod)
	}
	lost := lostMade + fate(w.random.IntN(3))
	if w.api.mute > w.now {
		return lost
	}
	if r.apart > w.now {
		if w.fate != nil || w.chance(0.5) {
			return notSent
		}
		return lost
	}
	if p := w.api.pods[pod]; p != nil && p.refused > w.now && !w.calm {
		return refused
	}
	random := w.random.Float64()
	for _, o := range []struct {
		outcome fate
		share   float64
	}{{lost, w.faults.lost}, {notSent, w.faults.unreachable}, {refused, w.faults.rejected}, {busy, w.faults.busy}} {
		if random -= o.share; random < 0 {
			return o.outcome
		}
	}
	return made
}

// client is what an extender sees of the API server. It implements API.
type client struct {
	r *replica
	// member is true for the evictions of members of broken runs.
	member bool
}

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
	if err := ctx.Err(); err != nil {
		return err
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

// Bind implements API. The write is made while the call waits, or later if the answer is lost.
func (c client) Bind(ctx context.Context, b *corev1.Binding) error {
	w := c.r.w
	if c.r.dead {
		return errDial
	}
	commit := func() error { return w.api.bind(b, c.r.name) }
	switch outcome := w.fateOf(c.r, b.Name); outcome {
	case notSent:
		w.sleep(w.between(time.Millisecond, time.Second))
		w.trace("api: the Binding of %s isn't sent", b.Name)
		return errDial
	case lostMade, lostLate, lostNever:
		w.stats.lost++
		if p := w.api.pods[b.Name]; p != nil {
			p.late = true
		}
		w.moment()
		when := w.between(time.Millisecond, 20*time.Millisecond)
		if outcome == lostLate { // The API server has not abandoned it yet.
			when = w.between(time.Millisecond, 2*simBindTimeout)
		}
		if outcome != lostNever {
			w.after(when, func() {
				if err := commit(); err != nil {
					w.trace("api: the late Binding of %s is refused: %v", b.Name, err)
				}
			})
		}
		w.trace("api: the answer to the Binding of %s is lost: %d, after %v", b.Name, outcome, when)
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
		w.stats.rejected++
		w.trace("api: the Binding of %s is refused", b.Name)
		return apierrors.NewForbidden(fake.PodResource, b.Name, errors.New("a webhook"))
	case busy:
		w.sleep(5 * time.Millisecond)
		return apierrors.NewTooManyRequests("busy", 1)
	}
	latency := w.between(time.Millisecond, 15*time.Millisecond)
	if w.chance(w.faults.slow) {
		latency = w.between(100*time.Millisecond, 2500*time.Millisecond)
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
		return nil, apierrors.NewNotFound(fake.PodResource, name)
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

// Evict implements API.
func (c client) Evict(ctx context.Context, pod gpu.Pod, dryRun bool) error {
	if err := c.reach(ctx); err != nil {
		return err
	}
	if dryRun {
		return nil
	}
	return c.r.w.api.evict(pod, c.r.name, c.member)
}

// OpenGate implements API. The answer can be lost.
func (c client) OpenGate(ctx context.Context, pod gpu.Pod, gate string) error {
	if err := c.reach(ctx); err != nil {
		return err
	}
	w := c.r.w
	err := w.api.openGate(pod, gate, c.r.name)
	if w.chance(w.faults.lost) {
		return errEOF
	}
	return err
}

// Nominate implements API. The answer can be lost.
func (c client) Nominate(ctx context.Context, pod gpu.Pod, version, node string) error {
	if err := c.reach(ctx); err != nil {
		return err
	}
	w := c.r.w
	err := w.api.nominate(pod, version, node, c.r.name)
	if w.chance(w.faults.lost) {
		return errEOF
	}
	return err
}

// AnnotateNode implements API.
func (c client) AnnotateNode(ctx context.Context, node, key, value string) error {
	if err := c.reach(ctx); err != nil {
		return err
	}
	return c.r.w.api.touchNode(node, key, value)
}
