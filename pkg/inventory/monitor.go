package inventory

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// DefaultQuietPeriod is how long a card must be without trouble to be healthy again.
const DefaultQuietPeriod = 5 * time.Minute

// Options say which driver to ask, and how often. Only Unit has to be set.
type Options struct {
	// Library is the path of NVIDIA's management library. Empty: libnvidia-ml.so.1, where the dynamic linker looks.
	Library string
	// Unit is what the cards' memory is counted in.
	Unit gpu.Unit
	// Known returns the cards as they were told before, as by an earlier run: those that the driver still has keep their
	// index, and are unhealthy for another QuietPeriod where a Xid had made them so, unless the machine has started since. Run asks once, when the driver first has cards to tell of, and tells of none until there is an answer. It
	// returns when its context ends, at the latest. Nil: there were none.
	Known func(context.Context) []gpu.Card

	// ProbeInterval is how often each card is asked whether it still answers; 30 s, or QuietPeriod if less, by default.
	ProbeInterval time.Duration
	// QuietPeriod is how long a card must have been without trouble to be healthy again; DefaultQuietPeriod by default. A card
	// that keeps failing is asked through a new session with the driver as often.
	QuietPeriod time.Duration
	// RetryInterval is how often a driver that isn't there, or has no cards, is looked for again; 10 s by default.
	RetryInterval time.Duration
	// AnswerTimeout is how long a driver may keep silent before its cards count as unusable; a minute by default, which
	// cards that have to be woken up first can come near.
	AnswerTimeout time.Duration

	// Uptime is how long ago the machine started; as the kernel has it by default.
	Uptime func() time.Duration
	// Clock is what the intervals are measured by, except AnswerTimeout; the real one by default.
	Clock clock.PassiveClock
}

func (o Options) withDefaults() Options {
	o.QuietPeriod = cmp.Or(o.QuietPeriod, DefaultQuietPeriod)
	o.ProbeInterval = cmp.Or(o.ProbeInterval, min(30*time.Second, o.QuietPeriod))
	o.RetryInterval = cmp.Or(o.RetryInterval, 10*time.Second)
	o.AnswerTimeout = cmp.Or(o.AnswerTimeout, time.Minute)
	if o.Uptime == nil {
		o.Uptime = uptime
	}
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	return o
}

// uptime reads how long ago the machine started, and says very long ago where that can't be had.
func uptime() time.Duration {
	var seconds float64
	data, err := os.ReadFile("/proc/uptime")
	if err == nil {
		_, err = fmt.Sscan(string(data), &seconds)
	}
	if err != nil {
		return math.MaxInt64
	}
	return time.Duration(seconds * float64(time.Second))
}

// State is what is known of a node's cards at one time.
type State struct {
	// Cards are all that were ever seen, by index. Those that can't be used say why.
	Cards []gpu.Card
	// Moved is where the driver itself lists the cards that it doesn't list at their index.
	Moved map[int]int
	// Problem is why no card at all can be used, such as a missing driver; empty where that is not so.
	Problem string
}

func (s State) equal(o State) bool {
	return s.Problem == o.Problem && slices.Equal(s.Cards, o.Cards) && maps.Equal(s.Moved, o.Moved)
}

// stopGrace is how long Run waits for the driver when it is to stop: longer than a step, shorter than anybody notices.
const stopGrace = 2 * slice

// Monitor follows a node's cards and their health.
type Monitor struct {
	options Options
}

// New returns a monitor; it does nothing until Run.
func New(options Options) *Monitor {
	return &Monitor{options: options.withDefaults()}
}

// Run follows the cards until ctx ends, which it obeys within a second even when the driver hangs. It calls publish
// with the first result, be it that there is no driver, and then whenever something has changed, never twice at a time;
// the state is the callee's to keep. Run may be called once at a time in a process.
func (m *Monitor) Run(ctx context.Context, publish func(State)) {
	logger := klog.FromContext(ctx)
	reader := &reader{options: m.options, logger: logger}
	roster := &roster{unit: m.options.Unit, quiet: m.options.QuietPeriod}
	numbered := m.options.Known == nil

	var last *State
	tell := func() {
		state := roster.state()
		if last != nil && last.equal(state) {
			return
		}
		logChanges(logger, last, state)
		last = &state
		publish(State{Cards: slices.Clone(state.Cards), Moved: maps.Clone(state.Moved), Problem: state.Problem})
	}

	// A call into a sick driver may never return, so the calls are made beside this loop. The roster is this loop's, the
	// reader belongs to the step under way.
	for ctx.Err() == nil {
		failing := roster.failing()
		step := beside(func() observation { return reader.step(ctx, failing) })
		o, answered := await(ctx, step, m.options.AnswerTimeout)
		if !answered && ctx.Err() == nil {
			roster.silence(fmt.Sprintf("the NVIDIA driver has not answered for %v", m.options.AnswerTimeout))
			tell()
			if o, answered = await(ctx, step, 0); answered {
				reader.due = time.Time{} // whatever that step was: how are the cards now?
			}
		}
		if !answered {
			// ctx has ended. The driver can be closed only once the step is over.
			if _, over := await(context.WithoutCancel(ctx), step, stopGrace); !over {
				logger.Info("Leaving the NVIDIA driver without closing it: it doesn't answer")
				return
			}
			break
		}

		if len(o.devices) > 0 && !numbered {
			known := slices.Clone(m.options.Known(ctx))
			if m.options.Uptime() < m.options.QuietPeriod {
				// The start of the machine has reset the cards. Their pods come back with it, and the kubelet fails those whose
				// card is unhealthy (k8s.io/kubernetes pkg/kubelet/cm/devicemanager/manager.go, devicesToAllocate).
				for i := range known {
					known[i].Unhealthy = ""
				}
			}
			roster.expect(known, m.options.Clock.Now())
			if numbered = true; ctx.Err() != nil {
				break
			}
		}
		now := m.options.Clock.Now()
		roster.report(o.events, now)
		switch {
		case o.listed:
			roster.list(o.devices, now)
		case o.err != nil:
			roster.silence(o.err.Error())
		}
		if o.listed || o.err != nil || len(o.events) > 0 {
			tell()
		}
	}
	closed := beside(func() struct{} { reader.close(); return struct{}{} })
	if _, answered := await(context.WithoutCancel(ctx), closed, stopGrace); !answered {
		logger.Info("Leaving the NVIDIA driver before it is closed: it doesn't answer")
	}
}

// List asks the driver once, whatever the cards were known as before. The error says why it couldn't be asked, or that ctx ended first.
func List(ctx context.Context, options Options) (State, error) {
	options = options.withDefaults()
	reader := &reader{options: options, logger: klog.FromContext(ctx)}
	step := beside(func() observation {
		defer reader.close()
		return reader.step(ctx, false)
	})
	o, answered := await(ctx, step, options.AnswerTimeout)
	switch {
	case !answered && ctx.Err() != nil:
		return State{}, fmt.Errorf("wait for the NVIDIA driver: %w", context.Cause(ctx))
	case !answered:
		return State{}, fmt.Errorf("wait for the NVIDIA driver: no answer for %v", options.AnswerTimeout)
	case o.err != nil:
		return State{}, o.err
	}
	roster := &roster{unit: options.Unit, quiet: options.QuietPeriod}
	roster.list(o.devices, options.Clock.Now())
	return roster.state(), nil
}

// beside runs f in a goroutine of its own, which ends when f does, whoever waits for it.
func beside[T any](f func() T) <-chan T {
	result := make(chan T, 1)
	go func() { result <- f() }()
	return result
}

// await returns what comes, unless ctx ends or the timeout (0: none) passes first.
func await[T any](ctx context.Context, result <-chan T, timeout time.Duration) (T, bool) {
	var expired <-chan time.Time
	if timeout > 0 {
		timer := time.NewTimer(timeout)
		defer timer.Stop()
		expired = timer.C
	}
	select {
	case r := <-result:
		return r, true
	case <-ctx.Done():
	case <-expired:
	}
	var none T
	return none, false
}

// logChanges writes a line for each card and problem that came or went.
func logChanges(logger klog.Logger, before *State, now State) {
	was := make(map[string]gpu.Card)
	problem := ""
	if before != nil {
		problem = before.Problem
		for _, card := range before.Cards {
			was[card.UUID] = card
		}
	}
	if now.Problem != problem {
		if now.Problem != "" {
			logger.Info("No GPU can be used", "problem", now.Problem)
		} else {
			logger.Info("The NVIDIA driver answers again")
		}
	}
	for _, card := range now.Cards {
		old, known := was[card.UUID]
		logger := klog.LoggerWithValues(logger, "card", card.Index, "uuid", card.UUID)
		switch {
		case known && old == card:
		case !card.Healthy():
			logger.Info("GPU is unhealthy", "reason", card.Unhealthy, "model", card.Model, "memory", card.Memory)
		case known && !old.Healthy():
			logger.Info("GPU is healthy again", "model", card.Model, "memory", card.Memory)
		default:
			logger.Info("GPU found", "model", card.Model, "memory", card.Memory)
		}
	}
}
