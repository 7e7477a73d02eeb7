package inventory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// DefaultQuietPeriod is the default of Options.QuietPeriod.
const DefaultQuietPeriod = 5 * time.Minute

// Settings are the options that can change while a Monitor runs.
type Settings struct {
	// Unit is the unit in which the cards' memory is counted.
	Unit       gpu.Unit
	CardMemory CardMemory
	// Xids selects the Xid errors that make a card unhealthy.
	Xids XidChecks
	// QuietPeriod is how long a card must be without errors before it is healthy again; DefaultQuietPeriod by default.
	QuietPeriod time.Duration
}

// Options configure a Monitor or a call of List. Only Unit is required.
type Options struct {
	// Library is the path of NVIDIA's management library. If it is empty, the dynamic linker searches for libnvidia-ml.so.1.
	Library string
	// Settings apply until Latest returns others.
	Settings
	// Latest returns the settings to use from now on, and nil for those in use. Run calls it often. It lists the cards again if
	// it gets another pointer than before. If Latest is nil, the settings never change.
	Latest func() *Settings
	// Known returns the cards as an earlier run published them, and the boot ID of that run. These cards keep their index. A
	// card that the driver doesn't list is published as unhealthy, with the memory that it had. A card that a Xid had made
	// unhealthy stays unhealthy for another QuietPeriod, or until it is reset, unless the machine has restarted since.
	//
	// Run calls Known once, when the driver first answers, even if the driver has no cards. Run publishes no card before Known
	// has returned. Known must return when its context ends. If Known is nil, there was no earlier run. Latest is called after
	// Known and before its cards are used: both count in the same unit.
	Known func(context.Context) (cards []gpu.Card, bootID string)

	// ProbeInterval is the time between two probes of each card. The default is 30 s, or QuietPeriod if that is shorter.
	ProbeInterval time.Duration
	// RetryInterval is the time between two attempts to open a driver that can't be opened or has no cards; 10 s by default.
	RetryInterval time.Duration
	// AnswerTimeout is how long the driver may take to answer before its cards count as unusable. The default is one minute,
	// because cards that must first be woken up can take nearly that long.
	AnswerTimeout time.Duration

	// Visit, if it is set, is called with the driver's session about every VisitInterval (10 s by default), as long as the
	// driver answers; for the first time before any card is published. The session is valid during the call only. The calls never
	// overlap, and Run calls the driver from no other goroutine meanwhile: Visit must be quick, and ends with the calls into the
	// driver if that hangs.
	Visit         func(*Session)
	VisitInterval time.Duration

	// Patience is how long Run continues without a library, or without access to the driver, although only a restart of the container can help. The
	// default is 5 minutes.
	Patience time.Duration

	// SysfsRoot is the directory in which sysfs is mounted, where RDMA adapters are found; if it is empty, none are.
	SysfsRoot string
	// BootID is the kernel's ID of the machine's current boot; empty if unknown.
	BootID string
	// Clock measures all intervals except AnswerTimeout. The default is the real clock.
	Clock clock.PassiveClock
}

func (o Options) withDefaults() Options {
	o.QuietPeriod = cmp.Or(o.QuietPeriod, DefaultQuietPeriod)
	o.ProbeInterval = cmp.Or(o.ProbeInterval, min(30*time.Second, o.QuietPeriod))
	o.RetryInterval = cmp.Or(o.RetryInterval, 10*time.Second)
	o.AnswerTimeout = cmp.Or(o.AnswerTimeout, time.Minute)
	o.VisitInterval = cmp.Or(o.VisitInterval, 10*time.Second)
	o.Patience = cmp.Or(o.Patience, 5*time.Minute)
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	return o
}

// BootID returns the kernel's ID of the machine's current boot. It returns an empty string if the ID can't be read.
func BootID() string {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// State is the state of a node's cards at one time.
type State struct {
	// Unit is the unit in which the cards' memory is counted.
	Unit gpu.Unit
	// Cards are all cards that were ever listed, by index. A card that can't be used carries the reason.
	Cards []gpu.Card
	// Adapters are the RDMA adapters at the last listing, by name.
	Adapters []gpu.Adapter
	// Moved maps the index of a card to the driver's own index of it, for the cards for which the two differ.
	Moved map[int]int
	// Problem is why no card of the node can be used, such as a missing driver; empty if there is no such reason.
	Problem string
}

func (s State) equal(o State) bool {
	return s.Unit == o.Unit && s.Problem == o.Problem && slices.Equal(s.Cards, o.Cards) &&
		reflect.DeepEqual(s.Adapters, o.Adapters) && maps.Equal(s.Moved, o.Moved)
}

// Monitor watches a node's cards and their health.
type Monitor struct {
	options Options
}

// New returns a monitor. It does nothing until Run is called.
func New(options Options) *Monitor {
	return &Monitor{options: options}
}

// Run watches the cards until ctx ends. It then returns at once, also in the middle of a call into the driver, which the end of the program closes. It
// calls publish with the first result, even if that is a missing driver, and then with each change. The calls of publish never overlap, and the callee may
// keep the state, but must not change it.
//
// Run returns an error if only a restart of the program can help: in two steps in a row the driver was replaced while the old library was loaded, or for
// Options.Patience there was no library although Library is empty (ErrNoLibrary), or no access to the driver. The reason is published first.
func (m *Monitor) Run(ctx context.Context, publish func(State)) error {
	r := m.newRun(klog.FromContext(ctx), publish)
	var failure error
	for ctx.Err() == nil && failure == nil {
		if r.numbered {
			r.configure()
		}
		o := r.step(ctx)
		if o == nil {
			break // ctx has ended.
		}
		if o.listed && !r.numbered {
			r.restoreIndexes(ctx, o)
			if ctx.Err() != nil {
				break
			}
		}
		failure = r.apply(o)
	}
	return failure
}

// run is the state of one Run.
//
// A call into a faulty driver may never return, so each step runs in its own goroutine. Only Run's loop uses the roster. Only the running step uses
// the reader; the loop may use it between steps.
type run struct {
	monitor *Monitor
	logger  klog.Logger
	reader  *reader
	roster  *roster
	// hopelessSince is since when steps have failed in a way that a retry can't fix; zero if the last one didn't.
	hopelessSince time.Time
	// settings are the latest ones that were returned by Options.Latest; nil before.
	settings *Settings
	// numbered is true once the cards of an earlier run are known, or if there was none.
	numbered bool
	// last was published last; nil if nothing was.
	last    *State
	publish func(State)
}

func (m *Monitor) newRun(logger klog.Logger, publish func(State)) *run {
	reader := &reader{options: m.options.withDefaults(), logger: logger}
	roster := newRoster(reader.options)
	return &run{
		monitor: m, logger: logger, reader: reader, roster: roster,
		numbered: m.options.Known == nil, publish: publish,
	}
}

// step makes a step of the reader, and returns what it has observed; nil if ctx has ended before. While the driver doesn't answer, step publishes that.
func (r *run) step(ctx context.Context) *observation {
	unreachable := r.roster.unreachable()
	step := beside(func() observation { return r.reader.step(ctx, unreachable) })
	o, answered := await(ctx, step, r.reader.options.AnswerTimeout)
	if !answered && ctx.Err() == nil {
		r.roster.silence(fmt.Sprintf("the NVIDIA driver has not answered for %v", r.reader.options.AnswerTimeout))
		r.publishChange()
		o, answered = await(ctx, step, 0)
		if answered {
			r.reader.due = time.Time{} // The step's result may be old: list the cards in the next step.
		}
	}
	if !answered {
		return nil
	}
	return &o
}

// restoreIndexes gives the cards of an earlier run to the roster, so that cards keep their indexes.
func (r *run) restoreIndexes(ctx context.Context, o *observation) {
	if len(o.devices) == 0 {
		// Not published yet: an empty inventory would replace the cards that Known returns.
		r.logger.Info("No GPU cards, reading those of an earlier run", "reason", problemNoCards)
	}
	known := r.monitor.known(ctx)
	r.configure()
	r.roster.expect(known, r.reader.options.Clock.Now())
	r.numbered = true
}

// apply applies what a step has observed to the roster, and publishes the change. It returns an error if the program must end.
func (r *run) apply(o *observation) error {
	now := r.reader.options.Clock.Now()
	r.roster.report(o.events, now)
	switch {
	case o.listed:
		r.roster.adapters = o.adapters
		r.roster.list(o.devices, now)
	case o.err != nil:
		r.roster.silence(o.err.Error())
	}
	if !o.listed && o.err == nil && len(o.events) == 0 {
		return nil
	}
	r.publishChange()
	return r.checkHopeless(o.err, now)
}

func (r *run) publishChange() {
	state := r.roster.state()
	if r.last != nil && r.last.equal(state) {
		return
	}
	logChanges(r.logger, r.last, state)
	r.last = &state
	r.publish(state)
}

// configure changes the settings of reader and roster to the latest ones. It is called between steps.
func (r *run) configure() {
	options := r.monitor.options
	if options.Latest == nil {
		return
	}
	latest := options.Latest()
	if latest == nil || latest == r.settings {
		return
	}
	r.settings, options.Settings = latest, *latest
	r.reader.options, r.reader.due = options.withDefaults(), time.Time{}
	r.roster.configure(r.reader.options.Settings)
}

// known returns the cards of an earlier run, without the reasons why they were unhealthy if the machine has restarted since,
// which resets its cards. That matters: the pods restart with the machine, and the kubelet fails a pod whose card is
// unhealthy (k8s.io/kubernetes pkg/kubelet/cm/devicemanager/manager.go, devicesToAllocate).
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

// checkHopeless returns an error if the program must end, because steps have failed for Options.Patience in a way that a retry can't fix, or two in a row
// if the driver was replaced: only a new container gets the driver's library, or its devices, which a container can lose while it runs
// (https://github.com/NVIDIA/nvidia-container-toolkit/issues/48). err is that of the last step; nil for success.
func (r *run) checkHopeless(err error, now time.Time) error {
	noLibrary := errors.Is(err, ErrNoLibrary) && r.reader.options.Library == ""
	noAccess := errors.Is(err, nvml.ERROR_UNKNOWN) || errors.Is(err, nvml.ERROR_NO_PERMISSION)
	replaced, patience := errors.Is(err, errMismatch), r.reader.options.Patience
	if replaced { // Nothing else ends it.
		patience = 0
	}
	switch {
	case !noLibrary && !noAccess && !replaced:
		r.hopelessSince = time.Time{}
	case r.hopelessSince.IsZero():
		r.hopelessSince = now
	case now.Sub(r.hopelessSince) >= patience:
		return fmt.Errorf("%w; a container gets the driver's library and devices only when it starts: this program ends to be restarted. If this node has no "+
			"NVIDIA GPU, keep the pod off the node. For other causes see docs/troubleshooting.md", err)
	}
	return nil
}

// List lists the cards once. It doesn't call Options.Known. It returns an error if the driver can't be used, if it doesn't
// answer within AnswerTimeout, or if ctx ends first.
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
		return State{}, fmt.Errorf("waiting for the NVIDIA driver: %w", context.Cause(ctx))
	case !answered:
		return State{}, fmt.Errorf("waiting for the NVIDIA driver: no answer for %v", options.AnswerTimeout)
	case o.err != nil:
		return State{}, o.err
	}
	roster := newRoster(options)
	roster.adapters = o.adapters
	roster.list(o.devices, options.Clock.Now())
	return roster.state(), nil
}

// beside runs f in its own goroutine and returns the channel for its result. The channel is buffered, so the goroutine ends
// with f even if the result is never received.
func beside[T any](f func() T) <-chan T {
	result := make(chan T, 1)
	go func() { result <- f() }()
	return result
}

// await receives the result. It returns false if ctx ends or the timeout passes first. A timeout of 0 means no timeout.
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

// logChanges logs each change of the problem and of a card.
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
			logger.Info("GPU found", "model", card.Model, "memory", card.Memory, "rdmaPorts", card.RDMAPorts)
		}
	}
}
