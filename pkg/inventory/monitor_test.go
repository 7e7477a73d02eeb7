package inventory

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
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
	return State{Cards: []gpu.Card{card(0, "GPU-a", a), card(1, "GPU-b", b)}, Problem: problem}
}

// needsReset returns the reason of a card with a Xid that only a reset ends.
func needsReset(x xid) string { return x.String() + reasonReset }

// testClock advances only by step. Each call of Now sends to read if a test receives from it.
type testClock struct {
	*clocktesting.FakePassiveClock
	read chan struct{}
}

func (c testClock) Now() time.Time {
	select {
	case c.read <- struct{}{}:
	default:
	}
	return c.FakePassiveClock.Now()
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
		Library: library, Unit: gpu.MiB, Clock: m.clock, ProbeInterval: probe, QuietPeriod: quiet, RetryInterval: retry,
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

// knowing sets the cards of an earlier run in the same boot.
func knowing(cards ...gpu.Card) func(*Options) {
	return asking(func(context.Context) []gpu.Card { return cards })
}

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
		if diff := cmp.Diff(want, got); diff != "" {
			m.t.Fatalf("%s (-want +got):\n%s", why, diff)
		}
	case <-time.After(time.Minute):
		m.t.Fatalf("%s: nothing was published", why)
	}
}

// round waits for a complete step of the monitor that began after the call. It fails if something was published. The
// monitor reads the clock twice in each step. round waits for four reads, because the first step may have begun before the
// call.
func (m *monitored) round() {
	m.t.Helper()
	for range 4 {
		select {
		case <-m.clock.read:
		case <-time.After(time.Minute):
			m.t.Fatal("the monitor makes no progress")
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
	if err := machine.Xid(card, xids...); err != nil {
		t.Fatal(err)
	}
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
		m.next("quiet for long enough", twoStates("", "", ""))
	})
}

func TestMonitorBrokenCard(t *testing.T) {
	onMachine(t, twoCards, func(t *testing.T, library string, machine fakenvml.Machine) {
		m := monitor(t, library)
		m.next("first", twoStates("", "", ""))

		// The clock doesn't advance: the monitor detects this by the failed wait for events.
		setCards(t, machine, with(twoCards, 1, "lost")...)
		m.next("lost", twoStates("", "open the card: GPU is lost", ""))
		xids(t, machine, "GPU-a", 48)
		m.next("the other is still watched", twoStates("Xid 48", "open the card: GPU is lost", ""))
		m.clock.step(quiet)
		m.next("the other is well again", twoStates("", "open the card: GPU is lost", ""))

		setCards(t, machine, twoCards...)
		m.clock.step(probe)
		m.round()
		m.clock.step(quiet - 1)
		m.round()
		m.clock.step(1 + probe)
		m.next("mended for long enough", twoStates("", "", ""))

		setCards(t, machine, with(twoCards, 0, "nomemory")...)
		m.clock.step(probe)
		m.next("found by the probe", twoStates("read its memory: Unknown Error", "", ""))
	})
}

func TestMonitorVanishedCard(t *testing.T) {
	onMachine(t, twoCards, func(t *testing.T, library string, machine fakenvml.Machine) {
		m := monitor(t, library)
		m.next("first", twoStates("", "", ""))

		// From the next session on, the remaining card is NVML's first card, and there is a new card.
		newCard := fakenvml.Card{UUID: "GPU-c", Model: "V100", MiB: 16276}
		setCards(t, machine, twoCards[1], newCard)
		m.next("lost for the session", twoStates("open the card: GPU is lost", "", ""))
		m.clock.step(quiet)
		threeStates := func(a, b, c string) State {
			s := twoStates(a, b, "")
			s.Cards, s.Moved = append(s.Cards, card(2, "GPU-c", c)), map[int]int{1: 0, 2: 1}
			return s
		}
		m.next("a new session", threeStates("open the card: GPU is lost", "", ""))
		xids(t, machine, "GPU-b", 48)
		xids(t, machine, "1", 63)
		m.next("its events reach the right cards", threeStates("open the card: GPU is lost", "Xid 48", "Xid 63"))

		setCards(t, machine, append(slices.Clone(twoCards), newCard)...)
		m.clock.step(quiet)
		m.next("the others are well", threeStates("open the card: GPU is lost", "", ""))
		m.clock.step(quiet)
		inPlace := func(s State) State { s.Moved = nil; return s }
		m.next("the first is there again", inPlace(threeStates("open the card: GPU is lost", "", "")))
		m.clock.step(quiet)
		m.next("and has been for long enough", inPlace(threeStates("", "", "")))
	})
}

func TestMonitorWithoutDriver(t *testing.T) {
	onMachine(t, nil, func(t *testing.T, library string, machine fakenvml.Machine) {
		m := monitor(t, library)
		const none = "initialize the NVIDIA driver library: Driver Not Loaded"
		m.next("no driver", State{Problem: none})
		m.clock.step(retry)
		m.round()
		m.clock.step(retry)
		m.round()
		setCards(t, machine)
		m.clock.step(retry)
		m.next("a driver without cards", State{Problem: "the driver reports no cards"})
		setCards(t, machine, twoCards...)
		m.clock.step(retry)
		m.next("cards", twoStates("", "", ""))
		xids(t, machine, "0", 48)
		m.next("and they are watched", twoStates("Xid 48", "", ""))
		if err := os.Remove(machine.CardsFile); err != nil {
			t.Fatal(err)
		}
		m.clock.step(probe)
		const gone = "count the cards: Driver Not Loaded"
		m.next("the driver goes", twoStates("Xid 48", gone, gone))
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
		m.next("no driver", State{Problem: "initialize the NVIDIA driver library: Driver Not Loaded"})
		setCards(t, machine, twoCards...)
		m.clock.step(retry)
		<-asked
		select {
		case s := <-m.states:
			t.Fatalf("published before it was known: %+v", s)
		case <-time.After(100 * time.Millisecond):
		}
		answer <- []gpu.Card{card(0, "GPU-b", ""), card(1, "GPU-a", "")}
		m.next("cards, under the numbers that they had", State{
			Cards: []gpu.Card{card(0, "GPU-b", ""), card(1, "GPU-a", "")}, Moved: map[int]int{0: 1, 1: 0},
		})
		xids(t, machine, "0", 48)
		m.next("and they are watched", State{
			Cards: []gpu.Card{card(0, "GPU-b", ""), card(1, "GPU-a", "Xid 48")}, Moved: map[int]int{0: 1, 1: 0},
		})
	})
}

// TestMonitorRestart: a card that a Xid has made unhealthy is still unhealthy after a restart of the program, but not after
// a restart of the machine.
func TestMonitorRestart(t *testing.T) {
	for name, test := range map[string]struct {
		boot        string
		first, then string // the reasons at first and after a quiet period
		xid         string
	}{
		"the program": {boot: "this boot", xid: "Xid 48", first: "Xid 48"},
		"the program, before a reset of the card": {boot: "this boot", xid: needsReset(95), first: needsReset(95), then: needsReset(95)},
		"the machine": {boot: "the boot before", xid: needsReset(95)},
		"unknown":     {xid: needsReset(95), first: needsReset(95), then: needsReset(95)},
	} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, twoCards, func(t *testing.T, library string, _ fakenvml.Machine) {
				m := monitor(t, library, func(o *Options) {
					o.Known = func(context.Context) ([]gpu.Card, string) { return twoStates("", test.xid, "").Cards, test.boot }
				})
				m.next("first", twoStates("", test.first, ""))
				m.clock.step(quiet)
				if test.then != test.first {
					m.next("quiet for long enough", twoStates("", test.then, ""))
				}
				m.round()
			})
		})
	}
	if BootID() == "" {
		t.Error("this machine's boot has no identity")
	}
}

// TestMonitorMissingAtStart: the program restarts while one card is off the bus and another one is lost.
func TestMonitorMissingAtStart(t *testing.T) {
	cards := append(slices.Clone(twoCards), fakenvml.Card{UUID: "GPU-c", Model: "V100", MiB: 16276})
	onMachine(t, with(cards[1:], 1, "lost"), func(t *testing.T, library string, machine fakenvml.Machine) {
		m := monitor(t, library, knowing(card(0, "GPU-a", ""), card(1, "GPU-b", ""), card(2, "GPU-c", "")))
		m.next("first", State{
			Cards: []gpu.Card{card(0, "GPU-a", reasonNotReported), card(1, "GPU-b", ""), card(2, "GPU-c", reasonNotReported)},
			Moved: map[int]int{1: 0},
		})
		setCards(t, machine, cards...)
		m.clock.step(quiet)
		m.next("both are back", State{
			Cards: []gpu.Card{card(0, "GPU-a", reasonNotReported), card(1, "GPU-b", ""), card(2, "GPU-c", reasonNotReported)},
		})
		m.clock.step(quiet)
		m.next("both have been back for long enough", State{
			Cards: []gpu.Card{card(0, "GPU-a", ""), card(1, "GPU-b", ""), card(2, "GPU-c", "")},
		})
	})
}

// TestMonitorNoneAtStart: the program restarts while the only card is off the bus.
func TestMonitorNoneAtStart(t *testing.T) {
	onMachine(t, []fakenvml.Card{}, func(t *testing.T, library string, machine fakenvml.Machine) {
		m := monitor(t, library, knowing(card(0, "GPU-a", "")))
		missing := []gpu.Card{card(0, "GPU-a", reasonNotReported)}
		m.next("first", State{Problem: problemNoCards, Cards: missing})
		setCards(t, machine, twoCards[0])
		m.clock.step(retry)
		m.next("it is back", State{Cards: missing})
		m.clock.step(quiet)
		m.next("it has been back for long enough", State{Cards: []gpu.Card{card(0, "GPU-a", "")}})
	})
}

// TestMonitorReset: after a Xid that only a reset ends, the card stays unhealthy beyond the quiet period, until the driver no
// longer asks for the reset.
func TestMonitorReset(t *testing.T) {
	onMachine(t, twoCards, func(t *testing.T, library string, machine fakenvml.Machine) {
		m := monitor(t, library)
		m.next("first", twoStates("", "", ""))
		xids(t, machine, "GPU-a", 95)
		m.next("the Xid", twoStates(needsReset(95), "", ""))
		m.clock.step(quiet)
		m.round()
		setCards(t, machine, with(twoCards, 0, "wantsreset")...)
		m.clock.step(probe)
		m.next("the driver asks for a reset", twoStates(needsReset(95)+reasonAsked, "", ""))
		m.clock.step(quiet)
		m.round()
		setCards(t, machine, twoCards...)
		m.clock.step(probe)
		m.round()
		m.clock.step(quiet)
		m.next("reset, and quiet for long enough", twoStates("", "", ""))

		setCards(t, machine, with(twoCards, 1, "wantsreset")...)
		m.clock.step(probe)
		m.next("no Xid was seen", twoStates("", "the driver asks for a reset of the card", ""))
		m.clock.step(quiet)
		m.round()
	})
}

// TestMonitorSessions: the monitor doesn't reopen the NVML session for a card that answers but can't be used. For a lost card
// it reopens the session at growing intervals. A card that is added to the machine appears in the next session.
func TestMonitorSessions(t *testing.T) {
	for state, test := range map[string]struct{ reason string }{
		"mig":        {string(errMIG)},
		"wantsreset": {"the driver asks for a reset of the card"},
		"unified":    {string(errNoMemory)},
	} {
		t.Run(state, func(t *testing.T) {
			onMachine(t, with(twoCards, 1, state), func(t *testing.T, library string, machine fakenvml.Machine) {
				m := monitor(t, library, knowing(twoStates("", "", "").Cards...))
				want := twoStates("", test.reason, "")
				if state == "unified" {
					want.Cards[1].Memory = 0
				}
				m.next("first", want)
				setCards(t, machine, append(with(twoCards, 1, state), fakenvml.Card{UUID: "GPU-c", Model: "V100", MiB: 16276})...)
				for range 3 {
					m.clock.step(quiet)
					m.round()
				}
			})
		})
	}
	t.Run("lost", func(t *testing.T) {
		onMachine(t, with(twoCards, 1, "lost"), func(t *testing.T, library string, machine fakenvml.Machine) {
			m := monitor(t, library, knowing(twoStates("", "", "").Cards...))
			want := twoStates("", "open the card: GPU is lost", "")
			m.next("first", want)
			cards := with(twoCards, 1, "lost")
			for i, pause := range []time.Duration{quiet, 2 * quiet, 4 * quiet, 8 * quiet, maxPatience, maxPatience} {
				uuid := fmt.Sprintf("GPU-%d", i)
				cards = append(cards, fakenvml.Card{UUID: uuid, Model: "V100", MiB: 16276})
				setCards(t, machine, cards...)
				m.clock.step(pause - probe)
				m.round()
				m.clock.step(probe)
				want.Cards = append(want.Cards, card(2+i, uuid, ""))
				m.next(fmt.Sprintf("a session after %v", pause), want)
			}
		})
	})
}

// TestMonitorMismatch: the driver is replaced while the program runs.
func TestMonitorMismatch(t *testing.T) {
	onMachine(t, nil, func(t *testing.T, library string, machine fakenvml.Machine) {
		m := monitor(t, library)
		m.next("unloaded", State{Problem: "initialize the NVIDIA driver library: Driver Not Loaded"})
		if err := machine.Mismatch(); err != nil {
			t.Fatal(err)
		}
		m.clock.step(retry)
		m.next("loaded again", State{Problem: "initialize the NVIDIA driver library: Driver/library version mismatch: " + errMismatch.Error()})
		m.round()
		m.clock.step(retry)
		if err := m.failed(); !errors.Is(err, errMismatch) {
			t.Errorf("Run() = %v, want %v", err, errMismatch)
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
			m := monitor(t, test.library, func(o *Options) { o.LibraryPatience = time.Minute })
			m.next("no library", State{Problem: err.Error()})
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
		m.next("going on", twoStates("", "", ""))
		setCards(t, machine, with(twoCards, 1, "hang")...)
		t.Cleanup(func() { setCards(t, machine, twoCards...) })
		m.next("hanging again", twoStates(hangs, hangs, hangs))
		m.stop() // while the call into the driver still hangs
	})
}
