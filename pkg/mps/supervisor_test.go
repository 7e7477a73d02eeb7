package mps

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fakemps"
	"github.com/gpushare/gpushare/test/fakenvml"
)

// The cards of each test.
const card0, card1 = "GPU-0", "GPU-1"

// NVML's numbers of compute modes.
const modeDefault, modeProhibited, modeExclusive = 0, 2, 3

// machine is a machine with two cards, on which the stub of MPS runs.
type machine struct {
	*testing.T
	fakemps.Service
	driver    fakenvml.Machine
	directory isolation.MPSDirectory
	proc      string
	options   Options
}

// library is compiled once: a process can load only one.
var library func() (string, error)

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "nvml")
	library = sync.OnceValues(func() (string, error) {
		if err != nil {
			return "", err
		}
		return fakenvml.Build(dir)
	})
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED, not tested: only root can set a compute mode")
	}
	path, err := library()
	if errors.Is(err, fakenvml.ErrNoCompiler) {
		t.Skipf("SKIPPED, not tested: %v", err)
	}
	must(t, err)
	dir, err := os.MkdirTemp("", "mps") // The paths of sockets must be short.
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	m := &machine{T: t, driver: fakenvml.NewMachine(dir), directory: isolation.MPSDirectory(filepath.Join(dir, "run")), proc: filepath.Join(dir, "proc")}
	m.Service, err = fakemps.Build(dir)
	must(t, errors.Join(err, os.Chmod(dir, 0o755), m.driver.SetCards(
		fakenvml.Card{UUID: card0, MiB: 16384, Options: []string{"capability=8.0"}}, fakenvml.Card{UUID: card1, MiB: 16384},
		fakenvml.Card{UUID: "GPU-old", MiB: 16384, Options: []string{"capability=6.1"}}, fakenvml.Card{UUID: "GPU-mig", MiB: 16384, State: "mig"},
	), m.directory.WriteCards([]string{card0, card1, "GPU-old", "GPU-mig"})))
	for _, variable := range append(m.driver.Env(), m.Env()...) {
		name, value, _ := strings.Cut(variable, "=")
		t.Setenv(name, value)
	}
	m.options = Options{
		Directory: m.directory, Open: func() (Driver, error) { return inventory.OpenSession(path) }, Control: m.Control, Proc: m.proc, Interval: 10 * time.Millisecond,
		// On a busy machine a daemon that works takes seconds for an answer.
		Timeout: time.Minute, Patience: 4 * time.Second, Backoff: wait.Backoff{Duration: time.Millisecond, Factor: 2, Steps: 10, Cap: 50 * time.Millisecond},
	}
	return m
}

// setMode sets the compute mode, as another program does.
func (m *machine) setMode(card string, mode inventory.ComputeMode) {
	m.Helper()
	driver, err := m.options.Open()
	must(m.T, err)
	must(m.T, errors.Join(driver.SetComputeMode(card, mode), driver.Close()))
}

var must = check.Must

// supervise runs a supervisor until the test ends or stop is called.
func (m *machine) supervise() (s *Supervisor, stop func()) {
	m.Helper()
	s, err := New(m.options)
	must(m.T, err)
	return s, await.Run(m.T, s.Run)
}

// status returns the state of a card's daemon for the device plugin, or why there is none.
func (m *machine) status(card string) string {
	status, err := m.directory.ReadStatus(card)
	if err != nil {
		return err.Error()
	}
	return status.State + ": " + status.Reason
}

func (m *machine) await(card, state string) {
	m.Helper()
	await.True(m.T, "the daemon of "+card+" is "+state, func() bool { return strings.HasPrefix(m.status(card), state+": ") })
}

func (m *machine) mode(card string) int {
	m.Helper()
	mode, err := m.driver.ComputeMode(card)
	must(m.T, err)
	return mode
}

// client runs a program in a container with a share of the card, as the device plugin starts it.
func (m *machine) client(card string) (*fakemps.Process, error) {
	m.Helper()
	share := isolation.Share{Card: isolation.Card{UUID: card}, Limit: 2 << 30}
	edits, err := isolation.NewBackends(isolation.Options{MPS: m.directory}).Of(isolation.MPS).Apply([]isolation.Share{share})
	must(m.T, err)
	env := []string{"NVIDIA_VISIBLE_DEVICES=" + card}
	for name, value := range edits.Env {
		env = append(env, name+"="+value)
	}
	return m.StartClient(m.T, env...)
}

func (m *machine) mustRun(card string) *fakemps.Process {
	m.Helper()
	process, err := m.client(card)
	must(m.T, err)
	return process
}

// last returns the process ID of the last program of this kind on a card, and how many there were.
func (m *machine) last(program, card string) (pid, count int) {
	m.Helper()
	lines, err := m.Journal()
	must(m.T, err)
	for _, line := range lines {
		if line.Program == program && line.Card == card && line.Text == "starts" {
			pid = line.PID
			count++
		}
	}
	return pid, count
}

// checkLimits checks that no client ran without its limit.
func (m *machine) checkLimits() {
	m.Helper()
	lines, err := m.Journal()
	must(m.T, err)
	for _, line := range lines {
		if strings.HasPrefix(line.Text, "runs") && line.Text != "runs 2048M" {
			m.Errorf("a client ran with the wrong limit: %+v", line)
		}
	}
}

func running(p *fakemps.Process) bool {
	select {
	case <-p.Ended:
		return false
	default:
		return true
	}
}

// TestDaemonsKilled kills daemons and servers of one card while containers start there. The daemon comes back by itself, no
// program runs without its limit meanwhile, and the clients of the other card notice nothing.
func TestDaemonsKilled(t *testing.T) {
	m := newMachine(t)
	s, _ := m.supervise()
	m.await(card0, "ready")
	m.await(card1, "ready")
	if modes := [2]int{m.mode(card0), m.mode(card1)}; modes != [2]int{modeExclusive, modeExclusive} {
		t.Errorf("the compute modes are %v", modes)
	}
	neighbour := m.mustRun(card1)
	ctx, stop := context.WithCancel(t.Context())
	starting := make(chan int)
	go func() { // Containers that start again and again.
		started := 0
		for ctx.Err() == nil {
			if _, err := m.client(card0); err == nil {
				started++
			}
		}
		starting <- started
	}()
	for i := range 6 {
		client := m.mustRun(card0)
		program := []string{"control", "server"}[i%2]
		pid, before := m.last(program, card0)
		must(t, syscall.Kill(pid, syscall.SIGKILL))
		<-client.Ended
		await.True(t, "there is another "+program, func() bool {
			_, now := m.last(program, card0)
			return now > before
		})
		m.await(card0, "ready")
	}
	stop()
	if started := <-starting; started == 0 {
		t.Error("no client has started meanwhile")
	}
	m.checkLimits()
	if _, started := m.last("control", card1); started != 1 || !running(neighbour) {
		t.Errorf("the other card's daemon was started %d times, its client runs: %t", started, running(neighbour))
	}
	recorder := httptest.NewRecorder()
	s.Handler().ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for _, want := range []string{`gpushare_mps_daemon_state{state="ready",uuid="GPU-0"} 1`, `gpushare_mps_daemon_restarts_total{uuid="GPU-1"} 0`} {
		if !strings.Contains(recorder.Body.String(), want+"\n") {
			t.Errorf("the metrics lack %s", want)
		}
	}
}

// TestDaemonHangs: a daemon that doesn't answer takes no new containers, and is killed if it stays so.
func TestDaemonHangs(t *testing.T) {
	m := newMachine(t)
	m.options.Timeout = time.Second
	s, _ := m.supervise()
	m.await(card0, "ready")
	m.await(card1, "ready")
	client, neighbour := m.mustRun(card0), m.mustRun(card1)
	must(t, m.SetFault(card0, fakemps.FaultHang, true))
	m.await(card0, "failing")
	await.True(t, "the reason", func() bool {
		return slices.ContainsFunc(s.NotReady(), func(reason string) bool {
			return strings.Contains(reason, "GPU-0: the MPS daemon is failing: ") && strings.HasSuffix(reason, ": no answer within 1s")
		})
	})
	<-client.Ended // It has been killed.
	must(t, m.SetFault(card0, fakemps.FaultHang, false))
	m.await(card0, "ready")
	m.mustRun(card0)
	m.checkLimits()
	if !running(neighbour) {
		t.Error("the other card's client has ended")
	}
}

// TestDaemonFails: while a card has no daemon, no program can use it. The card's daemon is started again and again, and the reason is
// shown.
func TestDaemonFails(t *testing.T) {
	for name, test := range map[string]struct {
		fault fakemps.Fault
		want  string
	}{
		"the daemon ends at once": {fakemps.FaultStart, "the daemon has ended: exit status 1"},
		"the server ends at once": {fakemps.FaultServer, "it has no server on the card"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			m.options.Patience = time.Second
			must(t, m.SetFault(card0, test.fault, true))
			m.supervise()
			m.await(card1, "ready")
			await.True(t, "the reason is shown", func() bool {
				got := m.status(card0)
				return strings.HasPrefix(got, "waiting: ") && strings.Contains(got, test.want)
			})
			if process, err := m.client(card0); err == nil {
				t.Errorf("client %d runs without a daemon", process.PID)
			}
			must(t, m.SetFault(card0, test.fault, false))
			m.await(card0, "ready")
			m.mustRun(card0)
			m.checkLimits()
		})
	}
}

// TestServerFaults: a server whose client has failed recovers by itself, so the daemon isn't killed however long that takes.
func TestServerFaults(t *testing.T) {
	m := newMachine(t)
	m.options.Patience = time.Second
	m.supervise()
	m.await(card0, "ready")
	_, before := m.last("control", card0)
	must(t, m.SetFault(card0, fakemps.FaultServes, true))
	m.await(card0, "failing")
	since := time.Now()
	await.True(t, "the fault lasts", func() bool {
		status, err := m.directory.ReadStatus(card0)
		return err == nil && status.State != "ready" && status.At.Sub(since) > 2*m.options.Patience
	})
	must(t, m.SetFault(card0, fakemps.FaultServes, false))
	m.await(card0, "ready")
	if _, started := m.last("control", card0); started != before {
		t.Errorf("the daemon was started %d times, before the fault %d times", started, before)
	}
}

// TestModeChanged: an administrator's change of the compute mode doesn't last.
func TestModeChanged(t *testing.T) {
	m := newMachine(t)
	m.supervise()
	m.await(card0, "ready")
	m.setMode(card0, inventory.ComputeDefault)
	await.True(t, "the mode is restored", func() bool { return m.mode(card0) == modeExclusive })
}

// contain makes a program of card0 one in a container with a share of the card. Its root has many layers.
func (m *machine) contain(client *fakemps.Process) {
	m.Helper()
	container := filepath.Join(m.proc, strconv.Itoa(client.PID))
	must(m.T, errors.Join(os.MkdirAll(container, 0o755), os.WriteFile(filepath.Join(container, "mountinfo"), fmt.Appendf(nil,
		"36 35 0:31 / / rw - overlay overlay rw,lowerdir=%s\n37 36 0:26 /mps/GPU-0/pipe %s rw - tmpfs tmpfs rw\n",
		strings.Repeat("/layer:", 20_000), m.directory.Pipe(card0)), 0o600)))
}

// TestUnlimited: a program that has started without a limit after a supervisor was killed ends when there is a supervisor again. A program
// in no container with a share stays.
func TestUnlimited(t *testing.T) {
	m := newMachine(t)
	m.setMode(card0, inventory.ComputeExclusiveProcess)
	client, other := m.mustRun(card0), m.mustRun(card1)
	m.contain(client)
	must(t, m.driver.SetProcesses(fakenvml.Process{Card: card0, PID: client.PID}, fakenvml.Process{Card: card1, PID: other.PID}))
	m.supervise()
	m.await(card0, "ready")
	if running(client) || !running(other) {
		t.Errorf("the client runs: %t, the other program: %t", running(client), running(other))
	}
}

// TestStop: the former compute mode is restored, but not while containers have the card: their programs would run without a limit. The
// next supervisor still knows the former mode.
func TestStop(t *testing.T) {
	m := newMachine(t)
	_, stop := m.supervise()
	m.await(card0, "ready")
	m.await(card1, "ready")
	client := m.mustRun(card0)
	m.contain(client)
	stop()
	<-client.Ended
	if modes := [2]int{m.mode(card0), m.mode(card1)}; modes != [2]int{modeProhibited, modeDefault} {
		t.Errorf("the compute modes are %v", modes)
	}
	if _, err := m.directory.ReadStatus(card1); !errors.Is(err, fs.ErrNotExist) || !strings.HasPrefix(m.status(card0), "stopped: containers") {
		t.Errorf("%v, %s", err, m.status(card0))
	}
	if process, err := m.client(card0); err == nil {
		t.Errorf("client %d runs without a daemon", process.PID)
	}
	must(t, os.RemoveAll(m.proc))
	_, stop = m.supervise()
	m.await(card0, "ready")
	m.mustRun(card0)
	stop()
	if mode := m.mode(card0); mode != modeDefault {
		t.Errorf("the compute mode is %d", mode)
	}
	m.checkLimits()
}

// TestStopWhileWaiting: whether containers wait for their daemon is not known, so the former compute mode is restored only if the card never
// had a daemon.
func TestStopWhileWaiting(t *testing.T) {
	for name, test := range map[string]struct {
		served bool
		mode   int
	}{"it has had one": {true, modeProhibited}, "it never had one": {false, modeDefault}} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			if test.served {
				_, stop := m.supervise()
				m.await(card0, "ready")
				must(t, m.SetFault(card0, fakemps.FaultStart, true))
				pid, _ := m.last("control", card0)
				must(t, syscall.Kill(pid, syscall.SIGKILL))
				m.await(card0, "waiting")
				stop()
			} else {
				must(t, m.SetFault(card0, fakemps.FaultStart, true))
				_, stop := m.supervise()
				m.await(card0, "waiting")
				stop()
			}
			if mode := m.mode(card0); mode != test.mode {
				t.Errorf("the compute mode is %d, want %d", mode, test.mode)
			}
		})
	}
}

// TestCards: cards that can't have a daemon get none, and one that is put into MIG mode loses its own.
func TestCards(t *testing.T) {
	m := newMachine(t)
	s, _ := m.supervise()
	m.await(card0, "ready")
	m.await(card1, "ready")
	for _, card := range []string{"GPU-old", "GPU-mig"} {
		if _, err := os.Stat(filepath.Join(string(m.directory), card)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("card %s has a daemon: %v", card, err)
		}
	}
	must(t, m.driver.SetCards(fakenvml.Card{UUID: card0, MiB: 16384, State: "mig"}, fakenvml.Card{UUID: card1, MiB: 16384}))
	for range mostMissed {
		must(t, s.follow(t.Context(), new(sync.WaitGroup)))
	}
	await.True(t, "the daemon has ended", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.daemons[card0] == nil
	})
	if notReady := s.NotReady(); slices.ContainsFunc(notReady, func(reason string) bool { return strings.Contains(reason, card0) }) {
		t.Errorf("not ready: %q", notReady)
	}
}

// TestSharedCards: a card that the node doesn't share is not touched, and one that it shares no longer is set back.
func TestSharedCards(t *testing.T) {
	m := newMachine(t)
	must(t, os.RemoveAll(string(m.directory)))
	s, _ := m.supervise()
	await.True(t, "the supervisor waits for the device plugin", func() bool { return slices.Equal(s.NotReady(), []string{errNotNamed.Error()}) })
	var daemons sync.WaitGroup
	t.Cleanup(daemons.Wait) // They end with the test's context.
	follow := func(cards ...string) {
		t.Helper()
		must(t, m.directory.WriteCards(cards))
		for range mostMissed {
			must(t, s.follow(t.Context(), &daemons))
		}
	}
	follow(card0)
	m.await(card0, "ready")
	if mode := m.mode(card1); mode != modeDefault || s.NotReady() != nil {
		t.Errorf("the compute mode of the other card is %d, not ready: %q", mode, s.NotReady())
	}
	follow(card0, card1)
	m.await(card1, "ready")
	follow(card1)
	await.True(t, "the card is set back", func() bool { return m.mode(card0) == modeDefault })
	if s.NotReady() != nil {
		t.Errorf("not ready: %q", s.NotReady())
	}
}

// TestCardLeft: a supervisor was killed, and before the next one starts, its cards are excluded. A card is set back once no container has it.
func TestCardLeft(t *testing.T) {
	m := newMachine(t)
	for _, card := range []string{card0, card1} {
		must(t, os.MkdirAll(filepath.Dir(m.directory.Pipe(card)), 0o755))
		must(t, m.directory.WriteStatus(card, isolation.MPSStatus{State: isolation.MPSReady, FormerMode: modeDefault, Served: true}))
		m.setMode(card, inventory.ComputeExclusiveProcess)
	}
	client := m.mustRun(card0)
	m.contain(client)
	must(t, m.directory.WriteCards(nil))
	s, _ := m.supervise()
	await.True(t, "the other card is set back", func() bool { return m.mode(card1) == modeDefault })
	if mode := m.mode(card0); mode != modeExclusive {
		t.Errorf("the compute mode of the card of a container is %d", mode)
	}
	must(t, os.RemoveAll(m.proc))
	must(t, s.follow(t.Context(), new(sync.WaitGroup)))
	for _, card := range []string{card0, card1} {
		if _, err := m.directory.ReadStatus(card); m.mode(card) != modeDefault || !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("card %s has the compute mode %d, and its status: %v", card, m.mode(card), err)
		}
	}
}

// TestDriverFails: a card that fails to answer for a while has no ready daemon meanwhile, but its programs go on.
func TestDriverFails(t *testing.T) {
	for _, state := range []string{"lost", "nomemory"} {
		t.Run(state, func(t *testing.T) {
			m := newMachine(t)
			m.options.Patience = 3 * time.Second
			s, _ := m.supervise()
			m.await(card0, "ready")
			client := m.mustRun(card0)
			_, before := m.last("control", card0)
			must(t, m.driver.SetCards(fakenvml.Card{UUID: card0, MiB: 16384, State: state}, fakenvml.Card{UUID: card1, MiB: 16384}))
			must(t, s.follow(t.Context(), new(sync.WaitGroup)))
			if state != "nomemory" { // The compute mode can be read.
				m.await(card0, "failing")
				since := time.Now()
				await.True(t, "the failure lasts", func() bool {
					status, err := m.directory.ReadStatus(card0)
					return err == nil && status.At.Sub(since) > m.options.Patience
				})
			}
			must(t, m.driver.SetCards(fakenvml.Card{UUID: card0, MiB: 16384}, fakenvml.Card{UUID: card1, MiB: 16384}))
			must(t, s.follow(t.Context(), new(sync.WaitGroup)))
			m.await(card0, "ready")
			if _, started := m.last("control", card0); started != before || !running(client) {
				t.Errorf("the daemon was started %d times, before the failure %d times, its client runs: %t", started, before, running(client))
			}
		})
	}
}

// stubDriver is a driver with one card, which can fail. The sessions in which the card was lost don't list it any more.
type stubDriver struct {
	inventory.Session // The other methods are not called.
	failing           *error
	lost, closed      bool
}

func (d *stubDriver) Refresh() error { return nil }
func (d *stubDriver) Close() error   { d.closed = true; return nil }
func (d *stubDriver) Cards() []string {
	if d.lost {
		return nil
	}
	return []string{card0}
}
func (d *stubDriver) Compute(string) (inventory.Compute, error) {
	if d.closed {
		return inventory.Compute{}, errors.New("closed")
	}
	return inventory.Compute{Major: 8, Mode: modeExclusive}, *d.failing
}

// TestDriverOpenedAgain: a driver that fails for all cards is opened again, until that succeeds and it answers.
func TestDriverOpenedAgain(t *testing.T) {
	unknown := errors.New("unknown error")
	var failing, closed error
	var opened []*stubDriver
	shared := &sharedDriver{open: func() (Driver, error) {
		if closed != nil {
			return nil, closed
		}
		opened = append(opened, &stubDriver{failing: &failing})
		return opened[len(opened)-1], nil
	}}
	for _, test := range []struct {
		name            string
		failing, closed error
		lost            bool
		able            int
		want            error
		opened          int
	}{
		{"the first time", nil, nil, false, 1, nil, 1},
		{"it answers", nil, nil, false, 1, nil, 1},
		{"it fails for all cards", unknown, nil, false, 0, nil, 2},
		{"it can't be opened", unknown, unknown, false, 0, unknown, 2},
		{"it can again", nil, nil, false, 1, nil, 3},
		{"it has lost all cards", nil, nil, true, 1, nil, 4},
	} {
		failing, closed = test.failing, test.closed
		if test.lost {
			opened[len(opened)-1].lost = true
		}
		able, _, err := shared.Cards([]string{card0})
		if len(able) != test.able || !errors.Is(err, test.want) || len(opened) != test.opened {
			t.Errorf("%s: %d cards, %v, opened %d times; want %d, %v, %d", test.name, len(able), err, len(opened), test.able, test.want, test.opened)
		}
		if _, err := shared.Mode(card0); (err == nil) != (test.able > 0) {
			t.Errorf("%s: the compute mode: %v", test.name, err)
		}
	}
	for i, driver := range opened[:3] {
		if !driver.closed {
			t.Errorf("driver %d is still open", i)
		}
	}
}

// TestTwoSupervisors: a second supervisor waits for the end of the first one, whose clients notice nothing.
func TestTwoSupervisors(t *testing.T) {
	m := newMachine(t)
	_, stop := m.supervise()
	m.await(card0, "ready")
	client := m.mustRun(card0)
	second, _ := m.supervise()
	if want := []string{"another supervisor has not ended yet"}; !slices.Equal(second.NotReady(), want) {
		t.Errorf("the second one is not ready: %q, want %q", second.NotReady(), want)
	}
	if _, started := m.last("control", card0); started != 1 || !running(client) {
		t.Errorf("the daemon was started %d times, the client runs: %t", started, running(client))
	}
	stop()
	await.True(t, "the second one is ready", func() bool { return len(second.NotReady()) == 0 })
	if _, started := m.last("control", card0); started != 2 || m.mode(card0) != modeExclusive {
		t.Errorf("the daemon was started %d times, the compute mode is %d", started, m.mode(card0))
	}
}

// TestFormerModeKept: the former compute mode is not lost when the driver or the disk fails.
func TestFormerModeKept(t *testing.T) {
	former := isolation.MPSStatus{State: "ready", FormerMode: modeExclusive, Served: true}
	for name, fail := range map[string]func(m *machine) error{
		"at the start": func(m *machine) error { return os.WriteFile(m.directory.Pipe(card0), nil, 0o600) },
		"at the end": func(m *machine) error {
			return m.driver.SetCards(fakenvml.Card{UUID: card0, MiB: 16384, State: "lost"}, fakenvml.Card{UUID: card1, MiB: 16384})
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			must(t, os.MkdirAll(filepath.Dir(m.directory.Pipe(card0)), 0o755))
			must(t, m.directory.WriteStatus(card0, former))
			if name == "at the start" {
				must(t, fail(m))
			}
			_, stop := m.supervise()
			m.await(card1, "ready")
			if name == "at the end" {
				m.await(card0, "ready")
				must(t, fail(m))
			}
			stop()
			if got, err := m.directory.ReadStatus(card0); err != nil || got.FormerMode != modeExclusive || !got.Served {
				t.Errorf("the status is %+v, %v", got, err)
			}
		})
	}
}

// TestLogs: the log files of a daemon don't grow without end.
func TestLogs(t *testing.T) {
	m := newMachine(t)
	m.supervise()
	m.await(card0, "ready")
	path := filepath.Join(m.directory.Log(card0), "server.log")
	must(t, os.WriteFile(path, make([]byte, longestLog+1), 0o600))
	await.True(t, "the file is short", func() bool {
		info, err := os.Stat(path)
		return err == nil && info.Size() == 0
	})
}

// TestUsers: a container's user doesn't matter.
func TestUsers(t *testing.T) {
	m := newMachine(t)
	m.supervise()
	m.await(card0, "ready")
	must(t, os.Chmod(m.Dir, 0o777))
	m.User = 65534
	m.mustRun(card0)
}

// TestEmptyFollowsNoLink: programs can write to the pipe directory of their card, so a link there must not lead elsewhere.
func TestEmptyFollowsNoLink(t *testing.T) {
	elsewhere, pipe := filepath.Join(t.TempDir(), "kept"), t.TempDir()
	must(t, errors.Join(os.WriteFile(elsewhere, nil, 0o600), os.Symlink(filepath.Dir(elsewhere), filepath.Join(pipe, "dir")),
		os.Symlink(elsewhere, filepath.Join(pipe, "file")), empty(pipe)))
	if entries, err := os.ReadDir(pipe); err != nil || len(entries) > 0 {
		t.Errorf("the directory has %v, %v", entries, err)
	}
	if _, err := os.Stat(elsewhere); err != nil {
		t.Error(err)
	}
}
