package mps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
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
}

// Options configure a Supervisor. Directory and Driver are required.
type Options struct {
	Directory isolation.MPSDirectory
	Driver    Driver
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

	// mu guards daemons, by card. Those of cards that can't have one any more are removed once they have ended.
	mu      sync.Mutex
	daemons map[string]*daemon
}

// New returns a supervisor. It has no effect until Run.
func New(o Options) (*Supervisor, error) {
	if o.Directory == "" || o.Driver == nil {
		return nil, errors.New("a supervisor of MPS daemons needs a directory and a driver")
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
		options: o, driver: &sharedDriver{driver: o.Driver}, metrics: NewMetrics(registry), registry: registry, daemons: map[string]*daemon{},
	}, nil
}

// followInterval is the time between two listings of the cards.
const followInterval = 10 * time.Second

// Run keeps the daemons running until ctx ends. It then ends all of them and returns.
func (s *Supervisor) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	ticker := time.NewTicker(followInterval)
	defer ticker.Stop()
	for {
		if err := s.follow(ctx, &running); err != nil {
			klog.FromContext(ctx).Error(err, "Could not list the cards, the daemons stay as they are")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// follow starts a daemon for each card that can have one, and ends those of other cards.
func (s *Supervisor) follow(ctx context.Context, running *sync.WaitGroup) error {
	cards, err := s.driver.Cards()
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for uuid, d := range s.daemons {
		if !slices.Contains(cards, uuid) {
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
	return nil
}

// NotReady returns why daemons are not ready, sorted; none if all are.
func (s *Supervisor) NotReady() (reasons []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.daemons) == 0 {
		return []string{"no card can have an MPS daemon"}
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
	mu     sync.Mutex
	driver Driver
}

// Cards returns the cards that can have a daemon. Those in MIG mode are not among them.
func (d *sharedDriver) Cards() (uuids []string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.driver.Refresh(); err != nil {
		return nil, err
	}
	for _, uuid := range d.driver.Cards() {
		compute, err := d.driver.Compute(uuid)
		if err == nil && isolation.MPSCapable(compute.Major, compute.Minor) == nil {
			uuids = append(uuids, uuid)
		}
	}
	return uuids, nil
}

// Mode returns a card's compute mode.
func (d *sharedDriver) Mode(uuid string) (inventory.ComputeMode, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	compute, err := d.driver.Compute(uuid)
	return compute.Mode, err
}

// SetMode sets a card's compute mode, unless it has it.
func (d *sharedDriver) SetMode(uuid string, mode inventory.ComputeMode) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if compute, err := d.driver.Compute(uuid); err == nil && compute.Mode == mode {
		return nil
	}
	return d.driver.SetComputeMode(uuid, mode)
}
