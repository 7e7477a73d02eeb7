package inventory

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// maxWait is the longest time that a step waits inside NVML. Such a wait can't be interrupted, so a stop can take this long.
const maxWait = 250 * time.Millisecond

// reader decides when to call the driver and for what. Its steps run one after another, never concurrently. Each step is
// short as long as the driver answers.
type reader struct {
	options Options
	logger  klog.Logger

	driver *driver // nil if no session is open
	opened time.Time
	// due is when the next listing is due. The listing opens the driver if no session is open.
	due time.Time
	// devices are those of the last listing; nil if it failed. visit is when Options.Visit is due.
	devices []device
	visit   time.Time
	// adapters reads the RDMA adapters.
	adapters adapterReader
}

// observation is the result of one step.
type observation struct {
	// events are the Xid errors reported since the last step.
	events []event
	// listed is true if the step listed the cards; devices holds them.
	listed  bool
	devices []device
	// adapters are the node's RDMA adapters, if listed is true.
	adapters []gpu.Adapter
	// err is why the listing failed.
	err error
}

// sessionTime is how long a session with the driver lasts while a card is unreachable. NVML detects returned cards and new cards only in a new
// session. A new session has a cost: Xid errors of the other cards are lost while no session is open, and without persistence mode the cards are reset.
const sessionTime = 15 * time.Minute

// step observes the cards, and calls Options.Visit if that is due.
func (r *reader) step(ctx context.Context, unreachable bool) observation {
	o := r.observe(ctx, unreachable)
	if now := r.options.Clock.Now(); r.options.Visit != nil && r.driver != nil && r.devices != nil && !now.Before(r.visit) {
		r.visit = now.Add(r.options.VisitInterval)
		r.options.Visit(&Session{driver: r.driver, devices: r.devices})
	}
	return o
}

// observe collects events and lists the cards if a listing is due. If none is due, it waits for events, for at most slice.
// unreachable is true if the driver can't reach a card.
func (r *reader) observe(ctx context.Context, unreachable bool) observation {
	now := r.options.Clock.Now()
	var o observation
	due := !now.Before(r.due)
	if r.driver != nil {
		o.events, due = r.wait(ctx, due)
	} else if !due {
		pause(ctx, maxWait)
	}
	if !due {
		return o
	}

	if unreachable && now.Sub(r.opened) >= sessionTime {
		r.close()
	}
	o.devices, o.err = r.list(now)
	o.listed, r.devices = o.err == nil, o.devices
	if o.listed && r.options.SysfsRoot != "" {
		root := sysfs(r.options.SysfsRoot)
		o.adapters = root.connect(o.devices, r.adapters.adapters(ctx, root.adapters))
	}
	r.due = now.Add(r.options.ProbeInterval)
	if o.err != nil || len(o.devices) == 0 {
		r.close()
		r.due = now.Add(r.options.RetryInterval)
	}
	return o
}

// wait collects events, and reports whether the cards are to be listed now: if the listing is due, or if the wait failed.
func (r *reader) wait(ctx context.Context, due bool) ([]event, bool) {
	timeout := maxWait
	if due {
		timeout = 0
	}
	if !r.driver.watching() {
		pause(ctx, timeout)
		return nil, due
	}
	events, err := r.driver.wait(timeout)
	if err != nil {
		// The usual reason is a lost card. A listing shows which one.
		r.logger.Info("Waiting for Xid errors failed, probing each GPU", "err", err)
		return events, true
	}
	return events, due
}

// list lists the cards and sets up the watch for their events. It opens the driver if no session is open.
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
		// The probe works without events.
		r.logger.Error(err, "Xid errors not watched")
	}
	return devices, nil
}

// close ends the session with the driver, if one is open.
func (r *reader) close() {
	if r.driver == nil {
		return
	}
	if err := r.driver.close(); err != nil {
		r.logger.Error(err, "NVIDIA driver library not closed")
	}
	r.driver, r.devices = nil, nil
}

// pause waits for d or until ctx ends, whichever comes first.
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
