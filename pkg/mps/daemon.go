package mps

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/isolation"
)

// State is the state of a daemon.
//
//	from      to        when
//	starting  ready     it answers and has a server
//	ready     failing   it doesn't answer, its server has failed, or it has none
//	failing   ready     it takes clients again
//	any       waiting   its process has ended, or was killed because it stayed without an answer or a server
//	waiting   starting  the back-off is over
//	any       stopped   the supervisor ends, or the card can have no daemon any more
type State string

// The states.
const (
	Starting State = "starting"
	Ready    State = isolation.MPSReady
	Failing  State = "failing"
	Waiting  State = "waiting"
	Stopped  State = isolation.MPSStopped
)

// States returns all states.
func States() []State { return []State{Starting, Ready, Failing, Waiting, Stopped} }

// daemon keeps the control daemon of one card running.
type daemon struct {
	Options
	uuid    string
	driver  *sharedDriver
	metrics *Metrics
	// end makes Run return.
	end context.CancelFunc
	// missed is how many listings in a row have not had the card. The supervisor's mu guards it.
	missed int

	// mu guards status, which is what the file has.
	mu     sync.Mutex
	status isolation.MPSStatus
	// prepared is true once the status and its file have the former compute mode.
	prepared bool
	// unused is true if no container had the card when the daemon was asked to end.
	unused bool
}

func newDaemon(uuid string, o Options, driver *sharedDriver, metrics *Metrics, end context.CancelFunc) *daemon {
	d := &daemon{Options: o, uuid: uuid, driver: driver, metrics: metrics, end: end}
	d.status.State = string(Starting)
	metrics.set(uuid, Starting)
	return d
}

// State returns the state, and the reason if it isn't Ready.
func (d *daemon) State() (State, string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return State(d.status.State), d.status.Reason
}

// Run keeps the daemon running until ctx ends, and then ends it. The kernel ends the daemon with the thread that started it, so
// Run has one for itself.
func (d *daemon) Run(ctx context.Context) {
	runtime.LockOSThread()
	defer d.end()
	logger := klog.FromContext(ctx)
	backoff := d.Backoff
	for ctx.Err() == nil {
		wasReady, err := d.serve(ctx)
		if ctx.Err() != nil {
			break
		}
		if wasReady {
			backoff = d.Backoff
		}
		pause := backoff.Step()
		logger.Error(err, "The MPS daemon has ended", "startsAgainIn", pause.String())
		d.metrics.restarts.WithLabelValues(d.uuid).Inc()
		d.wait(ctx, pause, err)
	}
	if err := d.release(ctx); err != nil {
		logger.Error(err, "Could not restore the card's compute mode")
	}
	logger.Info("Stopped the MPS daemon")
}

// wait waits for the end of a back-off, and renews the status meanwhile.
func (d *daemon) wait(ctx context.Context, pause time.Duration, reason error) {
	deadline := time.Now().Add(pause)
	for left := pause; left > 0 && ctx.Err() == nil; left = time.Until(deadline) {
		d.set(ctx, Waiting, reason, nil)
		sleep(ctx, min(left, d.Interval))
	}
}

func sleep(ctx context.Context, pause time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(pause):
	}
}

// set sets the state, and writes the status for the device plugin.
func (d *daemon) set(ctx context.Context, state State, reason error, servers []int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	before := d.status.State
	d.status.State, d.status.Reason, d.status.At, d.status.Servers = string(state), "", time.Now(), servers
	d.status.Served = d.status.Served || state == Ready
	if reason != nil {
		d.status.Reason = reason.Error()
	}
	if before != d.status.State {
		klog.FromContext(ctx).Info("The state of the MPS daemon has changed", "state", state, "before", before, "reason", d.status.Reason)
	}
	d.metrics.set(d.uuid, state)
	if !d.prepared {
		return // The file may have the former compute mode, which an earlier supervisor has not restored.
	}
	if err := d.Directory.WriteStatus(d.uuid, d.status); err != nil {
		klog.FromContext(ctx).Error(err, "The device plugin can't see the state of the MPS daemon")
	}
}

// serve runs one process of the daemon, from its start to its end. It returns why the process has ended, and whether it was ready.
func (d *daemon) serve(ctx context.Context) (wasReady bool, err error) {
	if err := d.prepare(); err != nil {
		return false, err
	}
	d.set(ctx, Starting, errors.New("it has not answered yet"), nil)
	if err := d.driver.SetMode(d.uuid, inventory.ComputeProhibited); err != nil {
		return false, err
	}
	if err := d.endUnlimited(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Could not end the programs that use the card without a daemon")
	}
	p, err := d.start(ctx)
	if err != nil {
		return false, err
	}
	state, answered := Starting, time.Now()
	defer func() {
		if ctx.Err() != nil && state == Ready {
			d.unused = !usesDirectory(d.Proc, d.Directory.Pipe(d.uuid)) // Before the programs of these containers end with the daemon.
		}
		err = errors.Join(err, d.stop(p))
	}()
	for {
		servers, err := d.check(ctx)
		switch {
		case ctx.Err() != nil:
			return wasReady, nil
		case err == nil:
			state, wasReady, answered = Ready, true, time.Now()
		case errors.Is(err, errFault), errors.Is(err, errMode):
			state, answered = Failing, time.Now()
		case time.Since(answered) > d.Patience:
			return wasReady, fmt.Errorf("killed after %s: %w", d.Patience, err)
		case wasReady:
			state = Failing
		}
		d.set(ctx, state, err, servers)
		if err := trimLogs(d.Directory.Log(d.uuid)); err != nil {
			klog.FromContext(ctx).Error(err, "The log files of the MPS daemon grow")
		}
		pause := d.Interval
		if state == Starting { // Clients wait for it.
			pause /= 10
		}
		select {
		case <-ctx.Done():
			return wasReady, nil
		case <-p.ended:
			return wasReady, p.err()
		case <-time.After(pause):
		}
	}
}

// endUnlimited ends the programs in containers with a share of the card that use it although it has no daemon. They run without a limit:
// they have started after a supervisor was killed, or before a server took the card. The card is PROHIBITED, so there will be no others.
func (d *daemon) endUnlimited(ctx context.Context) error {
	processes, err := d.driver.Processes(d.uuid)
	for _, process := range processes {
		if !mounted(filepath.Join(d.Proc, strconv.Itoa(process.PID), "mountinfo"), d.Directory.Pipe(d.uuid)) {
			continue
		}
		klog.FromContext(ctx).Info("Ending a program that uses the card without a daemon, and so without a limit", "process", process.PID)
		if kill := unix.Kill(process.PID, unix.SIGKILL); kill != nil && !errors.Is(kill, unix.ESRCH) {
			err = errors.Join(err, fmt.Errorf("ending process %d: %w", process.PID, kill))
		}
	}
	return err
}

// prepare makes the daemon's directories, and notes the compute mode that the card had before. Clients have the pipe directory mounted,
// so it stays, but not what an earlier daemon has left there.
func (d *daemon) prepare() error {
	for _, dir := range []string{d.Directory.Pipe(d.uuid), d.Directory.Log(d.uuid)} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := empty(d.Directory.Pipe(d.uuid)); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.prepared {
		return nil
	}
	before, failed := d.Directory.ReadStatus(d.uuid)
	if failed == nil {
		d.status.FormerMode, d.status.Served = before.FormerMode, before.Served // An earlier supervisor has not restored it.
	} else {
		mode, err := d.driver.Mode(d.uuid)
		if err != nil {
			return err
		}
		d.status.FormerMode, d.status.Served = int(mode), !errors.Is(failed, fs.ErrNotExist)
	}
	err := d.Directory.WriteStatus(d.uuid, d.status) // Before the mode is changed.
	d.prepared = err == nil
	return err
}

var (
	// errNoServer means that the daemon answers, but has no server on the card yet.
	errNoServer = errors.New("it has no server on the card: see the log files")
	// errFault means that a program has failed in a way that ends all clients. The server goes on once they have ended.
	errFault = errors.New("its server has the status FAULT until all its clients have ended")
	// errMode means that the driver fails. The daemon answers, and ending it would end its clients.
	errMode = errors.New("the card's compute mode is not known")
)

// check asks the daemon for its servers, and has it start one if there is none: the server takes the card before another process
// can. It returns why the daemon doesn't take clients.
func (d *daemon) check(ctx context.Context) (servers []int, err error) {
	servers, err = d.servers(ctx)
	if err != nil {
		return nil, err
	}
	if err := d.driver.SetMode(d.uuid, inventory.ComputeExclusiveProcess); err != nil {
		return servers, fmt.Errorf("%w: %w", errMode, err)
	}
	if len(servers) == 0 {
		if _, err := d.ask(ctx, "start_server -uid 0"); err != nil {
			return nil, err
		}
		servers, err = d.servers(ctx)
		if err != nil || len(servers) == 0 {
			return nil, errors.Join(err, errNoServer)
		}
	}
	for _, server := range servers {
		status, err := d.ask(ctx, fmt.Sprintf("get_server_status %d", server))
		if err != nil {
			return nil, err
		}
		if status == "FAULT" {
			return servers, errFault
		}
	}
	return servers, nil
}

// release restores the card's compute mode if no container can have the card: there was none when a daemon that was ready ended, or
// never a daemon that was ready. Otherwise the mode stays PROHIBITED: the programs of these containers, which end with the daemon and start
// again, would run without a limit.
func (d *daemon) release(ctx context.Context) error {
	if !d.prepared {
		return nil
	}
	d.mu.Lock()
	former, served := inventory.ComputeMode(d.status.FormerMode), d.status.Served
	d.mu.Unlock()
	if served && !d.unused {
		d.set(ctx, Stopped, errors.New("containers still have the card"), nil)
		return nil
	}
	if err := d.driver.SetMode(d.uuid, former); err != nil {
		d.set(ctx, Stopped, err, nil) // It keeps the former mode for the next supervisor.
		return err
	}
	d.metrics.set(d.uuid, Stopped)
	return d.Directory.RemoveStatus(d.uuid)
}
