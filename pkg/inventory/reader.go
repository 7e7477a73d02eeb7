package inventory

import (
	"context"
	"slices"
	"time"

	"k8s.io/klog/v2"
)

// slice is how long a step may wait inside NVML, which can't be interrupted: stopping takes up to this long.
const slice = 250 * time.Millisecond

// reader decides when to ask the driver what. Its steps come one after the other, each within moments as long as the
// driver answers.
type reader struct {
	options Options
	logger  klog.Logger

	driver *driver // nil while there is none
	opened time.Time
	// missing are the cards that the session is to be opened again for, and patience is how long it lasts before that.
	missing  []int
	patience time.Duration
	// due is when the cards are to be listed next, or the driver to be opened.
	due time.Time
}

// observation is what one step found out.
type observation struct {
	// events are the Xid errors reported since the last step.
	events []event
	// devices are the cards, if they were listed.
	listed  bool
	devices []device
	// err is why the driver couldn't be asked.
	err error
}

// maxPatience is how long a session with the driver lasts at most while a card is missing.
const maxPatience = time.Hour

// step asks the driver what is due, or else waits a moment for events. unreachable are the cards that the driver can't
// reach.
func (r *reader) step(ctx context.Context, unreachable []int) observation {
	now := r.options.Clock.Now()
	var o observation
	due := !now.Before(r.due)
	if r.driver != nil {
		o.events, due = r.wait(ctx, due)
	} else if !due {
		pause(ctx, slice)
	}
	if !due {
		return o
	}

	if r.driver != nil && r.stale(unreachable, now) {
		r.close()
	}
	o.devices, o.err = r.list(now)
	o.listed = o.err == nil
	r.due = now.Add(r.options.ProbeInterval)
	if o.err != nil || len(o.devices) == 0 {
		r.close()
		r.due = now.Add(r.options.RetryInterval)
	}
	return o
}

// stale reports whether the session is to be opened again: NVML sees cards come back (and new ones) only then. Xid errors of
// the other cards are lost meanwhile, and without persistence mode cards are reset, so each session for the same missing
// cards lasts twice as long as the one before: a card that is gone for good costs next to nothing.
func (r *reader) stale(unreachable []int, now time.Time) bool {
	if !slices.Equal(r.missing, unreachable) {
		r.missing, r.patience = slices.Clone(unreachable), r.options.QuietPeriod
	}
	if len(unreachable) == 0 || now.Sub(r.opened) < r.patience {
		return false
	}
	r.patience = min(2*r.patience, max(maxPatience, r.options.QuietPeriod))
	return true
}

// wait collects events, and says whether it is time to list the cards.
func (r *reader) wait(ctx context.Context, due bool) ([]event, bool) {
	timeout := slice
	if due {
		timeout = 0
	}
	if !r.driver.watching() {
		pause(ctx, timeout)
		return nil, due
	}
	events, err := r.driver.wait(timeout)
	if err != nil {
		// Mostly, a card is lost: asking each tells which.
		r.logger.Info("Waiting for Xid errors failed, asking each GPU", "err", err)
		return events, true
	}
	return events, due
}

// list opens the driver if need be, and asks it for its cards.
func (r *reader) list(now time.Time) ([]device, error) {
	if r.driver == nil {
		d, err := openDriver(r.options.Library)
		if err != nil {
			return nil, err
		}
		r.driver, r.opened = d, now
	}
	devices, err := r.driver.devices()
	if err != nil {
		return nil, err
	}
	if err := r.driver.watch(devices); err != nil {
		// The probe goes on without.
		r.logger.Error(err, "Xid errors aren't watched")
	}
	return devices, nil
}

// close ends the session with the driver, if there is one.
func (r *reader) close() {
	if r.driver == nil {
		return
	}
	if err := r.driver.close(); err != nil {
		r.logger.Error(err, "Leaving the NVIDIA driver library")
	}
	r.driver = nil
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
