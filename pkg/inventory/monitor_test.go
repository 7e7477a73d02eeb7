package inventory

import (
	"context"
	"errors"
	"math"
	"os"
	"slices"
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

// twoStates are these cards, unhealthy for the given reasons, under a problem.
func twoStates(a, b, problem string) State {
	return State{Cards: []gpu.Card{card(0, "GPU-a", a), card(1, "GPU-b", b)}, Problem: problem}
}

// testClock stands still unless it is stepped, and tells on read when it is looked at.
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

// monitored is a monitor at work.
type monitored struct {
	t       *testing.T
	clock   testClock
	states  chan State
	cancel  context.CancelFunc
	stopped chan struct{}
}

const (
	probe = 30 * time.Second
	quiet = 5 * time.Minute
	retry = 10 * time.Second
)

func monitor(t *testing.T, library string, answerTimeout time.Duration) *monitored {
	return monitorKnowing(t, library, answerTimeout, nil)
}

func monitorKnowing(t *testing.T, library string, answerTimeout time.Duration, known func(context.Context) []gpu.Card) *monitored {
	return monitorUp(t, library, answerTimeout, known, nil)
}

func monitorUp(t *testing.T, library string, answerTimeout time.Duration, known func(context.Context) []gpu.Card, uptime func() time.Duration) *monitored {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	m := &monitored{
		t:       t,
		clock:   testClock{clocktesting.NewFakePassiveClock(start), make(chan struct{})},
		states:  make(chan State, 100),
		stopped: make(chan struct{}),
	}
	ctx, cancel := context.WithCancel(context.Background())
	m.cancel = cancel
	monitor := New(Options{
		Library: library, Unit: gpu.MiB, Clock: m.clock, AnswerTimeout: answerTimeout,
		ProbeInterval: probe, QuietPeriod: quiet, RetryInterval: retry, Known: known, Uptime: uptime,
	})
	go func() {
		defer close(m.stopped)
		monitor.Run(ctx, func(s State) { m.states <- s })
	}()
	t.Cleanup(m.stop)
	return m
}

// next awaits the next state that is published, and compares it.
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

// round awaits a whole step of the monitor that began after the call. It looks at the clock twice in each: four times
// are two steps' worth, of which the first may have begun before.
func (m *monitored) round() {
	m.t.Helper()
	for range 4 {
		select {
		case <-m.clock.read:
		case <-time.After(time.Minute):
			m.t.Fatal("the monitor stands still")
		}
	}
}

// stop ends the monitor, and fails if it had more to tell than was asked for.
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
		xids(t, machine, "GPU-a", 79) // before its time: not ours to know
		m := monitor(t, library, 0)
		m.next("first", twoStates("", "", ""))

		xids(t, machine, "GPU-a", 13, 31, 43, 45, 68, 109)
		m.clock.step(probe)
		m.round()
		xids(t, machine, "1", 79)
		m.next("application Xids on one card, a critical one on the other", twoStates("", "Xid 79", ""))

		xids(t, machine, "GPU-b", slices.Repeat([]int{79, 48, 31}, 500)...)
		xids(t, machine, "GPU-a", slices.Repeat([]int{48, 79}, 1000)...)
		m.next("a storm", twoStates("Xid 48", "Xid 79", ""))

		m.clock.step(quiet)
		m.next("quiet for long enough", twoStates("", "", ""))
	})
}

func TestMonitorBrokenCard(t *testing.T) {
	onMachine(t, twoCards, func(t *testing.T, library string, machine fakenvml.Machine) {
		m := monitor(t, library, 0)
		m.next("first", twoStates("", "", ""))

		// The clock stands still: this is told by the failing wait for events.
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
		m := monitor(t, library, 0)
		m.next("first", twoStates("", "", ""))

		// From the next session on, the one card left is NVML's first, and there is a new one.
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
		inPlace := func(s State) State { s.Moved = nil; return s }
		m.next("the others are well; the first is there again", inPlace(threeStates("open the card: GPU is lost", "", "")))
		m.clock.step(quiet)
		m.next("and has been for long enough", inPlace(threeStates("", "", "")))
	})
}

func TestMonitorWithoutDriver(t *testing.T) {
	onMachine(t, nil, func(t *testing.T, library string, machine fakenvml.Machine) {
		m := monitor(t, library, 0)
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
		xids(t, machine, "0", 79)
		m.next("and they are watched", twoStates("Xid 79", "", ""))
		if err := os.Remove(machine.CardsFile); err != nil {
			t.Fatal(err)
		}
		m.clock.step(probe)
		const gone = "count the cards: Driver Not Loaded"
		m.next("the driver goes", twoStates("Xid 79", gone, gone))
		m.clock.step(retry)
		m.next("and can't be opened", twoStates("Xid 79", none, none))
		setCards(t, machine, twoCards...)
		m.clock.step(retry)
		m.next("it comes back", twoStates("Xid 79", "", ""))
	})
}

// While nobody can say yet what the cards were known as, a driver that is missing or has none is told of, and cards are not.
func TestMonitorBeforeTheCardsAreKnown(t *testing.T) {
	onMachine(t, nil, func(t *testing.T, library string, machine fakenvml.Machine) {
		asked, answer := make(chan struct{}), make(chan []gpu.Card)
		m := monitorKnowing(t, library, 0, func(context.Context) []gpu.Card {
			close(asked) // panics when it is asked again
			return <-answer
		})
		m.next("no driver", State{Problem: "initialize the NVIDIA driver library: Driver Not Loaded"})
		setCards(t, machine)
		m.clock.step(retry)
		m.next("no cards", State{Problem: "the driver reports no cards"})
		setCards(t, machine, twoCards...)
		m.clock.step(retry)
		<-asked
		select {
		case s := <-m.states:
			t.Fatalf("told before it was known: %+v", s)
		case <-time.After(100 * time.Millisecond):
		}
		answer <- []gpu.Card{card(0, "GPU-b", ""), card(1, "GPU-a", "")}
		m.next("cards, under the numbers that they had", State{
			Cards: []gpu.Card{card(0, "GPU-b", ""), card(1, "GPU-a", "")}, Moved: map[int]int{0: 1, 1: 0},
		})
		xids(t, machine, "0", 79)
		m.next("and they are watched", State{
			Cards: []gpu.Card{card(0, "GPU-b", ""), card(1, "GPU-a", "Xid 79")}, Moved: map[int]int{0: 1, 1: 0},
		})
	})
}

// A card that a Xid had made unhealthy isn't well for the program's having been started anew, but for the machine's.
func TestMonitorStartedAnew(t *testing.T) {
	known := func(context.Context) []gpu.Card { return twoStates("", "Xid 79", "").Cards }
	for name, test := range map[string]struct {
		up     time.Duration
		reason string
	}{
		"the program":               {time.Hour, "Xid 79"},
		"the machine just before":   {quiet - time.Second, ""},
		"the machine not just then": {quiet, "Xid 79"},
	} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, twoCards, func(t *testing.T, library string, _ fakenvml.Machine) {
				m := monitorUp(t, library, 0, known, func() time.Duration { return test.up })
				m.next("first", twoStates("", test.reason, ""))
				if test.reason != "" {
					m.clock.step(quiet)
					m.next("quiet for long enough", twoStates("", "", ""))
				}
			})
		})
	}
	if up := uptime(); up <= 0 || up == math.MaxInt64 {
		t.Errorf("this machine has been up for %v", up)
	}
}

// Who waits to be told is stopped like anybody else, and numbers nothing by a guess.
func TestMonitorStopsBeforeTheCardsAreKnown(t *testing.T) {
	onMachine(t, twoCards, func(t *testing.T, library string, _ fakenvml.Machine) {
		asked := make(chan struct{})
		m := monitorKnowing(t, library, 0, func(ctx context.Context) []gpu.Card {
			close(asked)
			<-ctx.Done()
			return nil
		})
		<-asked
		m.stop()
	})
}

func TestMonitorWithoutLibrary(t *testing.T) {
	m := monitor(t, "/nonexistent/libnvidia-ml.so.1", 0)
	_, err := openDriver("/nonexistent/libnvidia-ml.so.1")
	if !errors.Is(err, ErrNoLibrary) {
		t.Fatalf("openDriver() = %v, want %v", err, ErrNoLibrary)
	}
	m.next("no library", State{Problem: err.Error()})
	for range 3 {
		m.clock.step(retry)
		m.round()
	}
}

func TestMonitorHangingDriver(t *testing.T) {
	onMachine(t, twoCards, func(t *testing.T, library string, machine fakenvml.Machine) {
		const hangs = "the NVIDIA driver has not answered for 1s"
		m := monitor(t, library, time.Second)
		m.next("first", twoStates("", "", ""))
		setCards(t, machine, with(twoCards, 0, "hang")...)
		m.next("hanging", twoStates(hangs, hangs, hangs))
		setCards(t, machine, twoCards...)
		m.next("going on", twoStates("", "", ""))
		setCards(t, machine, with(twoCards, 1, "hang")...)
		t.Cleanup(func() { setCards(t, machine, twoCards...) })
		m.next("hanging again", twoStates(hangs, hangs, hangs))
		m.stop() // with the call still under way
	})
}
