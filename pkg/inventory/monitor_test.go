package inventory

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/fakenvml"
)

var twoCards = []fakenvml.Card{
	{UUID: "GPU-a", Model: "V100", MiB: 16276},
	{UUID: "GPU-b", Model: "V100", MiB: 16276},
}

// twoStates returns the state of twoCards with a reason for each card and a problem; an empty reason means healthy.
func twoStates(a, b, problem string) State {
	return State{Unit: gpu.MiB, Cards: []gpu.Card{card(0, "GPU-a", a), card(1, "GPU-b", b)}, Problem: problem}
}

// testClock advances only by step. Each call of Now sends to read if a test receives from it.
type testClock struct {
	*clocktesting.FakePassiveClock
	read chan struct{}
}

func (c testClock) Now() time.Time {
	now := c.FakePassiveClock.Now() // Before the test may advance it.
	select {
	case c.read <- struct{}{}:
	default:
	}
	return now
}

func (c testClock) step(d time.Duration) { c.SetTime(c.FakePassiveClock.Now().Add(d)) }

// monitored is a running monitor.
type monitored struct {
	t       *testing.T
	clock   testClock
	states  chan State
	cancel  context.CancelFunc
	stopped chan struct{}
	err     error // the result of Run; set when stopped is closed
}

const (
	probe = 30 * time.Second
	quiet = 5 * time.Minute
	retry = 10 * time.Second
)

// monitor starts a monitor. change changes its options.
func monitor(t *testing.T, library string, change ...func(*Options)) *monitored {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	m := &monitored{
		t:       t,
		clock:   testClock{clocktesting.NewFakePassiveClock(start), make(chan struct{})},
		states:  make(chan State, 100),
		stopped: make(chan struct{}),
	}
	ctx, cancel := context.WithCancel(context.Background())
	m.cancel = cancel
	options := Options{
		Library: library, Settings: Settings{Unit: gpu.MiB, QuietPeriod: quiet}, Clock: m.clock, ProbeInterval: probe, RetryInterval: retry,
		BootID: "this boot",
	}
	for _, f := range change {
		f(&options)
	}
	monitor := New(options)
	go func() {
		defer close(m.stopped)
		m.err = monitor.Run(ctx, func(s State) { m.states <- s })
	}()
	t.Cleanup(m.stop)
	return m
}

// asking sets the function that returns the cards of an earlier run in the same boot.
func asking(known func(context.Context) []gpu.Card) func(*Options) {
	return func(o *Options) {
		o.Known = func(ctx context.Context) ([]gpu.Card, string) { return known(ctx), "this boot" }
	}
}

func answeringWithin(timeout time.Duration) func(*Options) {
	return func(o *Options) { o.AnswerTimeout = timeout }
}

// next waits for the next published state and compares it with want.
func (m *monitored) next(why string, want State) {
	m.t.Helper()
	select {
	case got := <-m.states:
		expect(m.t, why, want, got)
	case <-time.After(time.Minute):
		m.t.Fatalf("%s: nothing was published", why)
	}
}

// round waits for a complete step of the monitor that began after the call. It fails if something was published. The
// monitor reads the clock twice in each step. round waits for five reads: the first step may have read the clock before the call,
// and the fifth read shows that the second one is complete.
func (m *monitored) round() {
	m.t.Helper()
	for range 5 {
		select {
		case <-m.clock.read:
		case <-time.After(time.Minute):
			m.t.Fatal("the monitor makes no step")
		}
	}
	select {
	case s := <-m.states:
		m.t.Fatalf("published without need: %+v", s)
	default:
	}
}

// failed waits until Run returns, and returns its error.
func (m *monitored) failed() error {
	m.t.Helper()
	select {
	case <-m.stopped:
	case <-time.After(time.Minute):
		m.t.Fatal("Run didn't return")
	}
	return m.err
}

// stop stops the monitor. It fails if a published state was not received.
func (m *monitored) stop() {
	m.t.Helper()
	m.cancel()
	select {
	case <-m.stopped:
	case <-time.After(time.Minute):
		m.t.Fatal("Run didn't return")
	}
	select {
	case s := <-m.states:
		m.t.Errorf("published without need: %+v", s)
	default:
	}
}

func xids(t *testing.T, machine fakenvml.Machine, card string, xids ...int) {
	t.Helper()
	must(t, machine.Xid(card, xids...))
}

func TestMonitorXids(t *testing.T) {
	onMachine(t, twoCards, func(t *testing.T, library string, machine fakenvml.Machine) {
		xids(t, machine, "GPU-a", 79) // before the monitor starts, so it must not receive it
		m := monitor(t, library)
		m.next("first", twoStates("", "", ""))

		xids(t, machine, "GPU-a", 13, 31, 43, 45, 68, 109)
		m.clock.step(probe)
		m.round()
		xids(t, machine, "1", 74)
		m.next("application Xids on one card, a critical one on the other", twoStates("", "Xid 74", ""))

		xids(t, machine, "GPU-b", slices.Repeat([]int{74, 48, 31}, 500)...)
		xids(t, machine, "GPU-a", slices.Repeat([]int{48, 74}, 1000)...)
		m.next("a storm", twoStates("Xid 48", "Xid 74", ""))

		m.clock.step(quiet)
		m.next("after the quiet period", twoStates("", "", ""))
	})
}

func TestMonitorBrokenCard(t *testing.T) {
	onMachine(t, twoCards, func(t *testing.T, library string, machine fakenvml.Machine) {
		m := monitor(t, library)
		m.next("first", twoStates("", "", ""))

		// The clock doesn't advance: the monitor detects this by the failed wait for events.
		setCards(t, machine, with(twoCards, 1, "lost")...)
		m.next("lost", twoStates("", "opening the card: GPU is lost", ""))
		xids(t, machine, "GPU-a", 48)
		m.next("the other one is still watched", twoStates("Xid 48", "opening the card: GPU is lost", ""))
		m.clock.step(quiet)
		m.next("the other one is healthy again", twoStates("", "opening the card: GPU is lost", ""))

		setCards(t, machine, twoCards...)
		m.clock.step(probe)
		m.round()
		m.clock.step(quiet - 1)
		m.round()
		m.clock.step(1 + probe)
		m.next("repaired for the quiet period", twoStates("", "", ""))

		setCards(t, machine, with(twoCards, 0, "nomemory")...)
		m.clock.step(probe)
		m.next("found by the probe", twoStates("reading its memory: Unknown Error", "", ""))
	})
}

func TestMonitorVanishedCard(t *testing.T) {
	onMachine(t, twoCards, func(t *testing.T, library string, machine fakenvml.Machine) {
		m := monitor(t, library)
		m.next("first", twoStates("", "", ""))

		// From the next session on, the remaining card is NVML's first card, and there is a new card.
		newCard := fakenvml.Card{UUID: "GPU-c", Model: "V100", MiB: 16276}
		setCards(t, machine, twoCards[1], newCard)
		m.next("lost for the session", twoStates("opening the card: GPU is lost", "", ""))
		m.clock.step(sessionTime)
		threeStates := func(a, b, c string) State {
			s := twoStates(a, b, "")
			s.Cards, s.Moved = append(s.Cards, card(2, "GPU-c", c)), map[int]int{1: 0, 2: 1}
			return s
		}
		m.next("a new session", threeStates("opening the card: GPU is lost", "", ""))
		xids(t, machine, "GPU-b", 48)
		m.next("an event by UUID reaches the right card", threeStates("opening the card: GPU is lost", "Xid 48", ""))
		xids(t, machine, "1", 63)
		m.next("so does one by the driver's index", threeStates("opening the card: GPU is lost", "Xid 48", "Xid 63"))

		setCards(t, machine, append(slices.Clone(twoCards), newCard)...)
		m.clock.step(quiet)
		m.next("the others are healthy again", threeStates("opening the card: GPU is lost", "", ""))
		m.clock.step(sessionTime - quiet)
		inPlace := func(s State) State { s.Moved = nil; return s }
		m.next("the first one is back", inPlace(threeStates("opening the card: GPU is lost", "", "")))
		m.clock.step(quiet)
		m.next("and has been back for the quiet period", inPlace(threeStates("", "", "")))
	})
}

func TestMonitorWithoutDriver(t *testing.T) {
	onMachine(t, nil, func(t *testing.T, library string, machine fakenvml.Machine) {
		m := monitor(t, library)
		const none = "initializing the NVIDIA driver library: Driver Not Loaded"
		m.next("no driver", State{Unit: gpu.MiB, Problem: none})
		m.clock.step(retry)
		m.round()
		m.clock.step(retry)
		m.round()
		setCards(t, machine)
		m.clock.step(retry)
		m.next("a driver without cards", State{Unit: gpu.MiB, Problem: "the driver reports no cards"})
		setCards(t, machine, twoCards...)
		m.clock.step(retry)
		m.next("cards", twoStates("", "", ""))
		xids(t, machine, "0", 48)
		m.next("and they are watched", twoStates("Xid 48", "", ""))
		must(t, os.Remove(machine.CardsFile))
		m.clock.step(probe)
		const gone = "counting the cards: Driver Not Loaded"
		m.next("the driver is unloaded", twoStates("Xid 48", gone, gone))
		m.clock.step(retry)
		m.next("and can't be opened", twoStates("Xid 48", none, none))
		setCards(t, machine, twoCards...)
		m.clock.step(retry)
		m.next("it comes back", twoStates("Xid 48", "", ""))
	})
}

// Before Known returns, a missing driver is published, but no cards are.
func TestMonitorBeforeTheCardsAreKnown(t *testing.T) {
	onMachine(t, nil, func(t *testing.T, library string, machine fakenvml.Machine) {
		asked, answer := make(chan struct{}), make(chan []gpu.Card)
		m := monitor(t, library, asking(func(context.Context) []gpu.Card {
			close(asked) // a second call panics
			return <-answer
		}))
		m.next("no driver", State{Unit: gpu.MiB, Problem: "initializing the NVIDIA driver library: Driver Not Loaded"})
		setCards(t, machine, twoCards...)
		m.clock.step(retry)
		<-asked
		select {
		case s := <-m.states:
			t.Fatalf("published before the cards were known: %+v", s)
		case <-time.After(100 * time.Millisecond):
		}
		answer <- []gpu.Card{card(0, "GPU-b", ""), card(1, "GPU-a", "")}
		m.next("cards, with their earlier indices", State{
			Unit:  gpu.MiB,
			Cards: []gpu.Card{card(0, "GPU-b", ""), card(1, "GPU-a", "")}, Moved: map[int]int{0: 1, 1: 0},
		})
		xids(t, machine, "0", 48)
		m.next("and they are watched", State{
			Unit:  gpu.MiB,
			Cards: []gpu.Card{card(0, "GPU-b", ""), card(1, "GPU-a", "Xid 48")}, Moved: map[int]int{0: 1, 1: 0},
		})
	})
}

// TestMonitorTwins: of two cards with one UUID only the first can be used, in each listing.
func TestMonitorTwins(t *testing.T) {
	onMachine(t, []fakenvml.Card{twoCards[0], twoCards[0], twoCards[1]}, func(t *testing.T, library string, machine fakenvml.Machine) {
		m := monitor(t, library)
		m.next("first", State{Unit: gpu.MiB, Cards: []gpu.Card{
			card(0, "GPU-a", ""), card(1, "", "it has the same UUID as card 0 (GPU-a)"), card(2, "GPU-b", ""),
		}})
		m.clock.step(probe)
		m.round()
		m.clock.step(quiet)
		m.round()
	})
}

// TestKnown: the reason of a card that an earlier run published is kept after a restart of the program, but not after one of
// the machine.
func TestKnown(t *testing.T) {
	const before = "Xid 48"
	for name, test := range map[string]struct{ now, then, want string }{
		"the program has restarted":   {"this boot", "this boot", before},
		"the machine has restarted":   {"this boot", "the boot before", ""},
		"the earlier boot is unknown": {"this boot", "", before},
		"the present boot is unknown": {"", "the boot before", before},
	} {
		published := twoStates("", before, "").Cards
		m := New(Options{BootID: test.now, Known: func(context.Context) ([]gpu.Card, string) { return published, test.then }})
		expect(t, name, twoStates("", test.want, "").Cards, m.known(t.Context()))
		expect(t, name+": the caller's cards", before, published[1].Unhealthy)
	}
	if BootID() == "" {
		t.Error("this machine's boot has no identity")
	}
}

// TestMonitorSettings: settings take effect when Latest returns others, without a probe that is due, and first between Known and the
// first listing. A Xid that was reported before stays known, so the driver's session stays open.
func TestMonitorSettings(t *testing.T) {
	onMachine(t, twoCards, func(t *testing.T, library string, machine fakenvml.Machine) {
		var latest atomic.Pointer[Settings]
		m := monitor(t, library, func(o *Options) {
			o.Settings, o.Latest = Settings{}, latest.Load
			o.Known = func(context.Context) ([]gpu.Card, string) {
				latest.Store(&Settings{Unit: gpu.MiB, QuietPeriod: quiet})
				return []gpu.Card{card(0, "GPU-b", ""), card(1, "GPU-a", "")}, "this boot"
			}
		})
		state := func(unit gpu.Unit, b, a gpu.Memory, reason string) State {
			cards := []gpu.Card{card(0, "GPU-b", ""), card(1, "GPU-a", reason)}
			cards[0].Memory, cards[1].Memory = b, a
			return State{Unit: unit, Cards: cards, Moved: map[int]int{0: 1, 1: 0}}
		}
		m.next("first", state(gpu.MiB, 16276, 16276, ""))
		xids(t, machine, "GPU-a", 48)
		m.next("a Xid", state(gpu.MiB, 16276, 16276, "Xid 48"))
		latest.Store(&Settings{Unit: gpu.GiB, QuietPeriod: quiet, CardMemory: CardMemory{byUUID: map[string]uint64{"GPU-b": 4 << 30}}})
		m.next("another unit, less memory", state(gpu.GiB, 4, 15, "Xid 48"))
		ignored := Settings{Unit: gpu.GiB, QuietPeriod: quiet}
		ignored.Xids.Disabled.all = true
		latest.Store(&ignored)
		m.next("Xids that don't count", state(gpu.GiB, 15, 15, ""))
		xids(t, machine, "GPU-a", 48)
		m.round()
	})
}

// TestMonitorMismatch: the driver is replaced while the program runs.
func TestMonitorMismatch(t *testing.T) {
	onMachine(t, nil, func(t *testing.T, library string, machine fakenvml.Machine) {
		m := monitor(t, library)
		m.next("unloaded", State{Unit: gpu.MiB, Problem: "initializing the NVIDIA driver library: Driver Not Loaded"})
		must(t, machine.Mismatch())
		m.clock.step(retry)
		m.next("loaded again", State{Unit: gpu.MiB, Problem: "initializing the NVIDIA driver library: Driver/library version mismatch: " + errMismatch.Error()})
		m.clock.step(retry)
		if err := m.failed(); !errors.Is(err, errMismatch) {
			t.Errorf("Run() = %v, want %v", err, errMismatch)
		}
	})
}

// TestMonitorWithoutAccess: the container has lost the driver's devices, so every call fails, also in a new session.
func TestMonitorWithoutAccess(t *testing.T) {
	onMachine(t, twoCards, func(t *testing.T, library string, machine fakenvml.Machine) {
		m := monitor(t, library, func(o *Options) { o.Patience = time.Minute })
		m.next("first", twoStates("", "", ""))
		lose := func() {
			t.Helper()
			must(t, machine.Break())
			m.clock.step(probe)
			const counting, opening = "counting the cards: Unknown Error", "initializing the NVIDIA driver library: Unknown Error"
			m.next("lost", twoStates(counting, counting, counting))
			m.clock.step(retry)
			m.next("and a new session can't be opened", twoStates(opening, opening, opening))
		}
		lose()
		setCards(t, machine, twoCards...)
		m.clock.step(retry)
		m.next("a failure that passes", twoStates("", "", ""))
		lose()
		m.clock.step(time.Minute - retry - 1)
		m.round()
		m.clock.step(retry)
		if err := m.failed(); !errors.Is(err, nvml.ERROR_UNKNOWN) || !strings.Contains(err.Error(), "docs/troubleshooting.md") {
			t.Errorf("Run() = %v, want %v with what to do", err, nvml.ERROR_UNKNOWN)
		}
	})
}

// A monitor that waits for Known can be stopped. It then publishes no cards, because their indices are unknown.
func TestMonitorStopsBeforeTheCardsAreKnown(t *testing.T) {
	onMachine(t, twoCards, func(t *testing.T, library string, _ fakenvml.Machine) {
		asked := make(chan struct{})
		m := monitor(t, library, asking(func(ctx context.Context) []gpu.Card {
			close(asked)
			<-ctx.Done()
			return nil
		}))
		<-asked
		m.stop()
	})
}

func TestMonitorWithoutLibrary(t *testing.T) {
	for name, test := range map[string]struct {
		library string
		ends    bool
	}{
		"where the linker looks":  {"", true},
		"where it may be mounted": {"/nonexistent/libnvidia-ml.so.1", false},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := openDriver(test.library)
			if err == nil {
				t.Skip("this machine has an NVIDIA driver")
			}
			if !errors.Is(err, ErrNoLibrary) {
				t.Fatalf("openDriver() = %v, want %v", err, ErrNoLibrary)
			}
			m := monitor(t, test.library, func(o *Options) { o.Patience = time.Minute })
			m.next("no library", State{Unit: gpu.MiB, Problem: err.Error()})
			m.clock.step(time.Minute - 1)
			m.round()
			m.clock.step(retry)
			if !test.ends {
				m.round()
				return
			}
			if err := m.failed(); !errors.Is(err, ErrNoLibrary) || !strings.Contains(err.Error(), "keep the pod off the node") {
				t.Errorf("Run() = %v, want %v with what to do", err, ErrNoLibrary)
			}
		})
	}
}

func TestMonitorHangingDriver(t *testing.T) {
	onMachine(t, twoCards, func(t *testing.T, library string, machine fakenvml.Machine) {
		const hangs = "the NVIDIA driver has not answered for 1s"
		m := monitor(t, library, answeringWithin(time.Second))
		m.next("first", twoStates("", "", ""))
		setCards(t, machine, with(twoCards, 0, "hang")...)
		m.next("hanging", twoStates(hangs, hangs, hangs))
		setCards(t, machine, twoCards...)
		m.next("answering again", twoStates("", "", ""))
		setCards(t, machine, with(twoCards, 1, "hang")...)
		t.Cleanup(func() { setCards(t, machine, twoCards...) })
		m.next("hanging again", twoStates(hangs, hangs, hangs))
		m.stop() // while the call into the driver still hangs
	})
}
