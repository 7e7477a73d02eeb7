package inventory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
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
	// CardMemory is the memory of cards by the administrator's word.
	CardMemory CardMemory
	// Xids are the Xid errors that count.
	Xids XidChecks
	// Known returns the cards as they were published before, as by an earlier run, and the boot in which that was. They keep
	// their index; those that the driver doesn't list are published as unhealthy with the memory that they had; those that a
	// Xid had made unhealthy are so for another QuietPeriod, or until they are reset, unless the machine has restarted since.
	// Run calls it once, when the driver first answers, be it that it has no cards, and publishes none before it has returned.
	// It returns when its context ends, at the latest. Nil: there were none.
	Known func(context.Context) (cards []gpu.Card, bootID string)

	// ProbeInterval is how often each card is asked whether it still answers; 30 s, or QuietPeriod if less, by default.
	ProbeInterval time.Duration
	// QuietPeriod is how long a card must have been without trouble to be healthy again; DefaultQuietPeriod by default. After
	// that time a card that can't be reached is looked for through a new session with the driver, then after twice that
	// time, and so on up to an hour.
	QuietPeriod time.Duration
	// RetryInterval is how often a driver that isn't there, or has no cards, is looked for again; 10 s by default.
	RetryInterval time.Duration
	// AnswerTimeout is how long a driver may keep silent before its cards count as unusable; a minute by default, which
	// cards that have to be woken up first can come near.
	AnswerTimeout time.Duration

	// LibraryPatience is how long Run goes on without a library, where Library is empty; 5 minutes by default.
	LibraryPatience time.Duration

	// BootID is the kernel's identity of the machine's boot; empty where it isn't known.
	BootID string
	// Clock is what the intervals are measured by, except AnswerTimeout; the real one by default.
	Clock clock.PassiveClock
}

func (o Options) withDefaults() Options {
	o.QuietPeriod = cmp.Or(o.QuietPeriod, DefaultQuietPeriod)
	o.ProbeInterval = cmp.Or(o.ProbeInterval, min(30*time.Second, o.QuietPeriod))
	o.RetryInterval = cmp.Or(o.RetryInterval, 10*time.Second)
	o.AnswerTimeout = cmp.Or(o.AnswerTimeout, time.Minute)
	o.LibraryPatience = cmp.Or(o.LibraryPatience, 5*time.Minute)
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	return o
}

// BootID returns the kernel's identity of the machine's boot, empty where there is none.
func BootID() string {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
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
//
// It returns an error where only a restart of the program helps: the driver was exchanged under the loaded library, or
// there has been no library for LibraryPatience and none is mounted later (ErrNoLibrary). The reason is published first.
func (m *Monitor) Run(ctx context.Context, publish func(State)) error {
	logger := klog.FromContext(ctx)
	reader := &reader{options: m.options, logger: logger}
	roster := newRoster(m.options)
	numbered := m.options.Known == nil
	hopeless := hopeless{options: m.options}

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
	var failure error
	for ctx.Err() == nil && failure == nil {
		unreachable := roster.unreachable()
		step := beside(func() observation { return reader.step(ctx, unreachable) })
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
				return nil
			}
			break
		}

		if o.listed && !numbered {
			roster.expect(m.known(ctx), m.options.Clock.Now())
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
			failure = hopeless.after(o.err, now)
		}
	}
	closed := beside(func() struct{} { reader.close(); return struct{}{} })
	if _, answered := await(context.WithoutCancel(ctx), closed, stopGrace); !answered {
		logger.Info("Leaving the NVIDIA driver before it is closed: it doesn't answer")
	}
	return failure
}

// known returns the cards of an earlier run. The restart of a machine resets its cards, so what was wrong with them before
// says nothing any more. Their pods come back with the machine, and the kubelet fails those whose card is unhealthy
// (k8s.io/kubernetes pkg/kubelet/cm/devicemanager/manager.go, devicesToAllocate).
func (m *Monitor) known(ctx context.Context) []gpu.Card {
	cards, bootID := m.options.Known(ctx)
	if bootID == "" || m.options.BootID == "" || bootID == m.options.BootID {
		return cards
	}
	cards = slices.Clone(cards)
	for i := range cards {
		cards[i].Unhealthy = ""
	}
	return cards
}

// hopeless finds out that waiting for the driver doesn't help.
type hopeless struct {
	options Options
	// mismatch and noLibrary are since when the driver has failed so without a break, zero where it hasn't.
	mismatch, noLibrary time.Time
}

// after takes how the driver was asked, nil for success, and returns an error where the program is to end. A mismatch has
// to last until the driver was asked again, so that it is published and can be read meanwhile.
func (h *hopeless) after(err error, now time.Time) error {
	since := func(at time.Time, is bool) time.Time {
		switch {
		case !is:
			return time.Time{}
		case at.IsZero():
			return now
		}
		return at
	}
	h.mismatch = since(h.mismatch, errors.Is(err, errMismatch))
	h.noLibrary = since(h.noLibrary, errors.Is(err, ErrNoLibrary) && h.options.Library == "")
	switch {
	case !h.mismatch.IsZero() && now.After(h.mismatch):
		return err
	case !h.noLibrary.IsZero() && now.Sub(h.noLibrary) >= h.options.LibraryPatience:
		return fmt.Errorf("%w; none for %v, and a container gets one only when it starts: if this node has an NVIDIA GPU, "+
			"run this pod by NVIDIA's container runtime or mount the library (--nvml-library), else keep the pod off the node",
			err, h.options.LibraryPatience)
	}
	return nil
}

// List asks the driver once, whatever the cards were known as before. The error says why it couldn't be asked, or that ctx ended first.
func List(ctx context.Context, options Options) (State, error) {
	options = options.withDefaults()
	reader := &reader{options: options, logger: klog.FromContext(ctx)}
	step := beside(func() observation {
		defer reader.close()
		return reader.step(ctx, nil)
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
	roster := newRoster(options)
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
