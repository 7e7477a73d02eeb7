package inventory

import (
	"context"
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

// step asks the driver what is due, or else waits a moment for events. failing says that some card is in a bad way.
func (r *reader) step(ctx context.Context, failing bool) observation {
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

	// NVML sees cards come back (and new ones) only when it is initialized anew. That isn't done for a healthy set:
	// events would be lost meanwhile, and without persistence mode the cards be reset.
	if r.driver != nil && failing && now.Sub(r.opened) >= r.options.QuietPeriod {
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
