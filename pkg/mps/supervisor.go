package mps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/isolation"
)

// Driver is what the supervisor asks NVIDIA's driver; inventory.Session implements it. Cards are UUIDs.
type Driver interface {
	Refresh() error
	Cards() []string
	Compute(uuid string) (inventory.Compute, error)
	SetComputeMode(uuid string, mode inventory.ComputeMode) error
	Processes(uuid string) ([]inventory.Process, error)
	Close() error
}

// Options configure a Supervisor. Directory and Open are required.
type Options struct {
	Directory isolation.MPSDirectory
	// Open opens the driver, at the start and when it has failed.
	Open func() (Driver, error)
	// Control is the path of nvidia-cuda-mps-control, which is searched for in PATH by default.
	Control string
	// Interval is the time between two questions to a daemon; 3 s by default. Timeout is how long an answer may take; 2 s by default.
	Interval, Timeout time.Duration
	// Patience is how long a daemon may give no answer, or have no server, until it is killed; 15 s by default.
	Patience time.Duration
	// Backoff is the pause before a daemon is started again: one second at first, a minute at most.
	Backoff wait.Backoff
	// Proc is the mounted proc file system, with the machine's processes; /proc by default.
	Proc string
}

// Supervisor keeps the daemons running.
type Supervisor struct {
	options  Options
	driver   *sharedDriver
	metrics  *Metrics
	registry *prometheus.Registry

	// mu guards daemons, by card; nil while another supervisor has the directory. Those of cards that can't have one any more are removed once they
	// have ended.
	mu      sync.Mutex
	daemons map[string]*daemon
}

// New returns a supervisor with an open driver, which Run closes. It has no other effect until Run.
func New(o Options) (*Supervisor, error) {
	if o.Directory == "" || o.Open == nil {
		return nil, errors.New("a supervisor of MPS daemons needs a directory and a driver")
	}
	driver, err := o.Open()
	if err != nil {
		return nil, err
	}
	o.Control, o.Proc = cmp.Or(o.Control, "nvidia-cuda-mps-control"), cmp.Or(o.Proc, "/proc")
	o.Interval, o.Timeout = cmp.Or(o.Interval, 3*time.Second), cmp.Or(o.Timeout, 2*time.Second)
	o.Patience = cmp.Or(o.Patience, 15*time.Second)
	if o.Backoff.Duration == 0 {
		o.Backoff = wait.Backoff{Duration: time.Second, Factor: 2, Steps: 10, Cap: time.Minute}
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return &Supervisor{
		options: o, driver: &sharedDriver{open: o.Open, driver: driver}, metrics: NewMetrics(registry), registry: registry,
	}, nil
}

// followInterval is the time between two listings of the cards.
const followInterval = 10 * time.Second

// mostMissed is after how many listings in a row without its card a daemon ends.
const mostMissed = 3

// Run keeps the daemons running until ctx ends. It then ends all of them and returns. It waits while another supervisor has the directory.
func (s *Supervisor) Run(ctx context.Context) error {
	defer func() {
		if err := s.driver.Close(); err != nil {
			klog.FromContext(ctx).Error(err, "NVIDIA driver library not closed")
		}
	}()
	unlock, err := s.lock(ctx)
	if err != nil || unlock == nil {
		return err
	}
	defer unlock()
	s.mu.Lock()
	s.daemons = map[string]*daemon{}
	s.mu.Unlock()
	var running sync.WaitGroup
	defer running.Wait()
	ticker := time.NewTicker(followInterval)
	defer ticker.Stop()
	for {
		if err := s.follow(ctx, &running); errors.Is(err, errNotNamed) {
			klog.FromContext(ctx).Info("Waiting for the device plugin", "reason", err)
		} else if err != nil {
			klog.FromContext(ctx).Error(err, "Could not list the cards, the daemons stay as they are")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// lock waits until no other supervisor has the directory: two would take the pipes and the compute modes from each other. That happens if
// a pod is deleted by force, which doesn't wait for its end. The kernel releases the lock of a supervisor that is killed. unlock is nil if ctx has
// ended before.
func (s *Supervisor) lock(ctx context.Context) (unlock func(), err error) {
	if err := os.MkdirAll(string(s.options.Directory), 0o755); err != nil {
		return nil, err
	}
	dir, err := os.Open(string(s.options.Directory))
	if err != nil {
		return nil, err
	}
	for ctx.Err() == nil {
		err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return func() { _ = dir.Close() }, nil
		case !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR):
			return nil, errors.Join(fmt.Errorf("locking %s: %w", s.options.Directory, err), dir.Close())
		}
		klog.FromContext(ctx).Info("Waiting for the end of another supervisor", "directory", s.options.Directory)
		sleep(ctx, s.options.Interval)
	}
	return nil, dir.Close()
}

// errNotNamed means that it is not known yet which cards the node shares.
var errNotNamed = errors.New("the device plugin has not named the cards that the node shares; it does so in isolation mode mps")

// follow starts a daemon for each card that the node shares and that can have one, and ends those of other cards. A card can fail to answer
// for a moment, and the programs that use it end with its daemon: a daemon ends only after several listings without its card. Cards that were
// shared before get their compute mode back.
func (s *Supervisor) follow(ctx context.Context, running *sync.WaitGroup) error {
	shared, err := s.options.Directory.ReadCards()
	if errors.Is(err, fs.ErrNotExist) {
		return errNotNamed
	}
	if err != nil {
		return fmt.Errorf("reading which cards the node shares: %w", err)
	}
	cards, unread, err := s.driver.Cards(shared)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for uuid, d := range s.daemons {
		if slices.Contains(cards, uuid) || slices.Contains(unread, uuid) {
			d.missed = 0
		} else if d.missed++; d.missed >= mostMissed {
			d.end()
		}
	}
	for _, uuid := range cards {
		if s.daemons[uuid] != nil {
			continue
		}
		ctx, end := context.WithCancel(klog.NewContext(ctx, klog.FromContext(ctx).WithValues("card", uuid)))
		d := newDaemon(uuid, s.options, s.driver, s.metrics, end)
		s.daemons[uuid] = d
		running.Go(func() {
			d.Run(ctx)
			s.mu.Lock()
			defer s.mu.Unlock()
			delete(s.daemons, uuid)
			s.metrics.forget(uuid)
		})
	}
	for _, uuid := range s.options.Directory.WithStatus() {
		if s.daemons[uuid] != nil || slices.Contains(shared, uuid) {
			continue
		}
		if err := s.restore(uuid); err != nil {
			klog.FromContext(ctx).Error(err, "Could not restore the compute mode of a card that the node doesn't share any more", "card", uuid)
		}
	}
	return nil
}

// restore restores the compute mode of a card without a daemon that a supervisor has left in the modes of MPS: it was killed, or containers had
// the card when its daemon ended. It does nothing while one still has it, or if the driver doesn't list the card.
func (s *Supervisor) restore(uuid string) error {
	status, err := s.options.Directory.ReadStatus(uuid)
	if err != nil {
		return err
	}
	if _, unread := s.driver.Mode(uuid); unread != nil || usesDirectory(s.options.Proc, s.options.Directory.Pipe(uuid)) {
		return nil
	}
	if err := s.driver.SetMode(uuid, inventory.ComputeMode(status.FormerMode)); err != nil {
		return err
	}
	return s.options.Directory.RemoveStatus(uuid)
}

// NotReady returns why daemons are not ready, sorted; none if all are.
func (s *Supervisor) NotReady() (reasons []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.daemons == nil {
		return []string{"another supervisor has not ended yet"}
	}
	if len(s.daemons) == 0 {
		if _, err := s.options.Directory.ReadCards(); errors.Is(err, fs.ErrNotExist) {
			return []string{errNotNamed.Error()}
		}
		return []string{"no card that the node shares can have an MPS daemon"}
	}
	for _, uuid := range slices.Sorted(maps.Keys(s.daemons)) {
		if state, reason := s.daemons[uuid].State(); state != Ready {
			reasons = append(reasons, fmt.Sprintf("card %s: the MPS daemon is %s: %s", uuid, state, reason))
		}
	}
	return reasons
}

// sharedDriver is the driver for several goroutines. mu guards it.
type sharedDriver struct {
	open func() (Driver, error)

	mu sync.Mutex
	// driver is nil if it could not be opened again.
	driver Driver
}

// errClosed means that the driver has failed and could not be opened again yet.
var errClosed = errors.New("the driver has failed, and is opened again")

// Cards returns which of the shared cards can have a daemon, and those of which this can't be read. Cards in MIG mode are not among them. If the
// driver fails, or none of the shared cards answers, it is opened again: a card that came back answers only in a new session.
func (d *sharedDriver) Cards(shared []string) (able, unread []string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.driver != nil {
		able, unread, answers, err := cardsOf(d.driver, shared)
		if err == nil && (answers || len(shared) == 0) {
			return able, unread, nil
		}
		_ = d.driver.Close() // It has failed, and what it returns doesn't matter.
		d.driver = nil
	}
	driver, err := d.open()
	if err != nil {
		return nil, nil, err
	}
	d.driver = driver
	able, unread, _, err = cardsOf(driver, shared)
	return able, unread, err
}

// cardsOf is Cards for an open driver. answers reports whether one of the shared cards has answered.
func cardsOf(driver Driver, shared []string) (able, unread []string, answers bool, err error) {
	if err := driver.Refresh(); err != nil {
		return nil, nil, false, err
	}
	for _, uuid := range driver.Cards() {
		if !slices.Contains(shared, uuid) {
			continue
		}
		compute, err := driver.Compute(uuid)
		answers = answers || err == nil
		switch {
		case err != nil:
			unread = append(unread, uuid)
		case isolation.MPSCapable(compute.Major, compute.Minor) == nil:
			able = append(able, uuid)
		}
	}
	return able, unread, answers, nil
}

// Mode returns a card's compute mode.
func (d *sharedDriver) Mode(uuid string) (mode inventory.ComputeMode, err error) {
	err = d.use(func(driver Driver) error {
		compute, err := driver.Compute(uuid)
		mode = compute.Mode
		return err
	})
	return mode, err
}

// Processes returns the processes that use a card.
func (d *sharedDriver) Processes(uuid string) (processes []inventory.Process, err error) {
	err = d.use(func(driver Driver) (err error) {
		processes, err = driver.Processes(uuid)
		return err
	})
	return processes, err
}

// SetMode sets a card's compute mode, unless it has it.
func (d *sharedDriver) SetMode(uuid string, mode inventory.ComputeMode) error {
	return d.use(func(driver Driver) error {
		if compute, err := driver.Compute(uuid); err == nil && compute.Mode == mode {
			return nil
		}
		return driver.SetComputeMode(uuid, mode)
	})
}

// Close closes the driver.
func (d *sharedDriver) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.driver == nil {
		return nil
	}
	defer func() { d.driver = nil }()
	return d.driver.Close()
}

func (d *sharedDriver) use(do func(Driver) error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.driver == nil {
		return errClosed
	}
	return do(d.driver)
}
