package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
	events "k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/nodeconfig"
	"github.com/gpushare/gpushare/pkg/usage"
)

// Options configures a Plugin.
type Options struct {
	// Client may list, watch and patch pods and the node, patch the node's status, and list and watch ResourceSlices.
	Client Client
	// Events writes Events on pods and the node.
	Events   events.EventRecorder
	NodeName string
	// Config is where the node's configuration comes from.
	Config nodeconfig.Source
	// BootID is the kernel's identity of the machine's boot. The inventory carries it. It is empty if it is not known.
	BootID string
	// Simulated is true if the cards don't exist: the driver library simulates them for a trial. The inventory says so.
	Simulated bool
	// VisibleDevices is the kind of name by which a container's environment names its card. The default is the UUID.
	VisibleDevices VisibleDevices
	// DeviceList is the way in which a card gets into a container. The default is the environment.
	DeviceList DeviceListStrategy
	// ErrorEnv makes a container whose Allocate call is rejected start without a card, as the existing plugin does.
	ErrorEnv bool
	// Directory is the kubelet's device plugin directory, which contains its socket and its checkpoint.
	Directory string
	// PodResourcesSocket is the socket of the kubelet's PodResources service, which shows which pod is being admitted.
	// Empty disables its use.
	PodResourcesSocket string
	// ListenAddress is the address for health and metrics. Empty disables both.
	ListenAddress string
	// Isolation is what modes that limit memory need. New sets its CardsByCDI.
	Isolation isolation.Options
	// UsageInterval is the time between two calls of Measure, for the report. UsageAddress is the loopback address of /usage; empty
	// disables it. UsageMetrics adds measured use by container to the metrics.
	UsageInterval time.Duration
	UsageAddress  string
	UsageMetrics  bool
	// Overuse says which use above a request is reported.
	Overuse usage.OveruseOptions
	// AuthorizeMetrics wraps a handler so that it serves only requests that may read metrics. If it is nil, all may.
	AuthorizeMetrics func(http.Handler) http.Handler
}

// Plugin is the device plugin of one node.
type Plugin struct {
	options    Options
	metrics    *metrics
	cards      *cardState
	pods       *podSource
	node       *nodeKeeper
	annotator  *annotator
	checkpoint *checkpoint
	allocator  *allocator
	service    *service
	registrar  *registrar
	reporter   *reporter
	resources  *podResources
	meter      *usage.Meter
	isolator   *isolator
	limits     *limitWatch
	overuse    *overuseWatch
	// configurator brings the node's configuration into force.
	configurator *configurator
}

// New returns a plugin. It has no effect until Run.
func New(o Options) (*Plugin, error) {
	if o.Client.Pods == nil || o.Client.Nodes == nil || o.Client.Slices == nil || o.Events == nil || o.NodeName == "" || o.Directory == "" {
		return nil, errors.New("a device plugin needs a client, an event recorder, a node name and a directory")
	}
	p := &Plugin{options: o, cards: newCardState(), service: &service{
		logger: klog.Background(), interval: time.Second, callGap: time.Second, stop: make(chan struct{}),
	}}
	p.cards.bootID, p.cards.simulated = o.BootID, o.Simulated
	p.metrics = newMetrics(p.service.Listening)
	var err error
	if p.pods, err = newPodSource(o.Client, o.NodeName); err != nil {
		return nil, err
	}
	p.addIsolator()
	if p.node, err = newNodeKeeper(o.Client, o.NodeName, p.cards, o.Events, p.isolator); err != nil {
		return nil, err
	}
	if p.resources, err = newPodResources(o.PodResourcesSocket); err != nil {
		return nil, err
	}
	record, queue := allocation.NewRecord(nil), newAnnotationQueue()
	if err := p.addAnnotator(record, queue); err != nil {
		return nil, err
	}
	p.addAllocator(record, queue)
	if err := p.addConfigurator(); err != nil {
		return nil, err
	}
	p.addMeter(record)
	p.reporter = &reporter{cards: p.cards, events: o.Events, node: nodeReference(o.NodeName)}
	p.addRegistrar()
	return p, nil
}

// addAnnotator adds the annotator, and the watches of limits and overuse whose results it writes to pods.
func (p *Plugin) addAnnotator(record *allocation.Record, queue annotationQueue) error {
	o := &p.options
	p.limits = &limitWatch{
		pods: p.pods, backends: p.isolator.backends, checkInForce: p.isolator.CheckInForce, record: record, events: o.Events, metrics: p.metrics, annotate: queue.Add,
	}
	p.overuse = &overuseWatch{
		pods: p.pods, cards: p.cards, record: record, events: o.Events, metrics: p.metrics, annotate: queue.Add, tracker: usage.NewOveruse(o.Overuse),
	}
	p.annotator = &annotator{
		client: o.Client, pods: p.pods, record: record, events: o.Events, metrics: p.metrics, cards: p.cards, limits: p.limits, overuse: p.overuse, queue: queue,
	}
	return p.annotator.Watch()
}

// addAllocator adds the allocator, and the checkpoint from which its record is rebuilt.
func (p *Plugin) addAllocator(record *allocation.Record, queue annotationQueue) {
	o := &p.options
	p.checkpoint = &checkpoint{
		dir: o.Directory, record: record, pods: p.pods, annotate: queue.Add, backends: p.isolator.backends,
	}
	p.allocator = &allocator{
		snapshots: &snapshots{
			cards: p.cards, pods: p.pods, record: record, rejected: map[gpu.PodUID]bool{},
		},
		checkpoint: p.checkpoint, kubelet: p.resources, isolator: p.isolator, metrics: p.metrics, annotate: queue.Add,
		responses: &responses{
			cards: p.cards, visibleBy: cmp.Or(o.VisibleDevices, VisibleByUUID), strategy: o.DeviceList,
			disableIsolation: p.node.DisableIsolation, errorEnv: o.ErrorEnv, events: o.Events, node: nodeReference(o.NodeName),
		},
		askTimeout: askTimeout,
	}
}

// addConfigurator adds the configurator, and watches the configuration.
func (p *Plugin) addConfigurator() error {
	o := &p.options
	p.configurator = &configurator{
		source: o.Config, node: p.node, pods: p.pods, cards: p.cards, isolator: p.isolator, held: p.allocator.InUse, metrics: p.metrics,
		events: o.Events, object: nodeReference(o.NodeName),
		wake: background.NewSignal(), decided: make(chan struct{}),
	}
	return p.configurator.Watch()
}

// addMeter adds the meter of the memory that pods use, and registers its metrics.
func (p *Plugin) addMeter(record *allocation.Record) {
	o := &p.options
	p.meter = usage.NewMeter(usage.Options{
		Node: o.NodeName, Interval: o.UsageInterval, Cards: func() []gpu.Card { return p.cards.Get().Cards }, Cgroups: o.Isolation.CgroupRoot,
		Containers: containerSource{p.pods, record, p.cards}.Containers,
		Servers:    p.isolator.backends.ServerPIDs,
	})
	p.metrics.registry.MustRegister(usage.NewCollector(p.meter.Report, o.UsageMetrics))
}

// addRegistrar adds the registrar, and connects the service that it registers to the other parts.
func (p *Plugin) addRegistrar() {
	p.service.allocator, p.service.cards, p.service.metrics = p.allocator, p.cards, p.metrics
	p.service.readmission = &readmission{devices: p.checkpoint.Devices, pods: p.pods, time: readmissionTime}
	p.service.onSent = func(cards []gpu.Card) {
		p.cards.SetSent(cards)
		p.node.wake.Raise()
	}
	p.registrar = &registrar{
		dir: p.options.Directory, service: p.service, cards: p.cards, beforeRegister: p.allocator.KubeletStarted,
		events: p.options.Events, node: nodeReference(p.options.NodeName), podResources: p.options.PodResourcesSocket, cleanup: cleanup, absence: absence,
	}
}

// addIsolator adds the isolator, which enforces shares.
func (p *Plugin) addIsolator() {
	o := p.options
	o.Isolation.CardsByCDI = o.DeviceList == ListByCDI
	p.isolator = &isolator{
		cards: p.cards, visible: cmp.Or(o.VisibleDevices, VisibleByUUID), configured: isolation.None, mode: isolation.None,
		cgroups: o.Isolation.CgroupRoot, backends: isolation.NewBackends(o.Isolation),
	}
}

// Settings returns the settings in force. It returns nil until the node's configuration is known.
func (p *Plugin) Settings() *nodeconfig.Settings { return p.configurator.inForce.Load() }

// KnownCards returns the cards that the node's inventory lists, counted in the unit in force, and the boot in which the
// inventory was written (protocol.Inventory). It returns none if the node has no inventory, or if that is of simulated cards and this plugin's
// cards are real, or the other way round: no card can be the same. It waits until the node has a valid
// configuration, or until ctx ends. Each card must keep its index, because running pods hold memory of it.
func (p *Plugin) KnownCards(ctx context.Context) (cards []gpu.Card, bootID string) {
	select {
	case <-ctx.Done():
		return nil, ""
	case <-p.configurator.decided:
	}
	inventory, unit := p.node.Inventory(), p.Settings().Unit
	if inventory.Simulated != p.options.Simulated {
		return nil, ""
	}
	for i := range inventory.Cards {
		card := &inventory.Cards[i]
		card.Memory = unit.Count(inventory.Unit.Bytes(card.Memory))
	}
	return inventory.Cards, inventory.BootID
}

// SetCards sets the cards of the node, at any time, the unit in which their memory is counted, and the node's RDMA adapters, which must not be
// changed later. driverIndex maps the index of a card to the driver's index where the two differ. problem is the reason why none of the cards can be
// used, and empty otherwise.
func (p *Plugin) SetCards(unit gpu.Unit, cards []gpu.Card, adapters []gpu.Adapter, driverIndex map[int]int, problem string) {
	p.cards.Set(unit, cards, adapters, driverIndex, problem)
	p.isolator.Refresh()
	for uid := range p.annotator.record.Snapshot() { // The pod's cards can be lost or found again, see lostCards.
		p.annotator.queue.Add(uid)
	}
	p.configurator.wake.Raise()
}

// Run serves the kubelet until ctx ends. It returns an error only for a failure that waiting can't resolve.
func (p *Plugin) Run(ctx context.Context) error {
	p.service.logger = klog.FromContext(ctx)
	defer p.resources.Close()
	listener, err := listen(ctx, p.options.ListenAddress)
	if err != nil {
		return err
	}
	measured, err := listenLoopback(ctx, p.options.UsageAddress)
	if err != nil {
		return err
	}
	// The informers end after the kubelet's last calls are served (see finish), during which pods still come and go.
	watching, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	group, ctx := errgroup.WithContext(ctx)
	// Run doesn't wait for the informers to end: a reflector that can't reach the API server sleeps through its backoff,
	// up to half a minute, even if its context has ended (k8s.io/client-go tools/cache/reflector.go, watchList).
	go p.pods.informer.RunWithContext(watching)
	go p.node.informer.RunWithContext(watching)
	go p.node.slices.RunWithContext(watching)
	group.Go(func() error { return serve(ctx, listener, p.handler(), "health and metrics") })
	group.Go(func() error { return serve(ctx, measured, p.usageHandler(), "measured use") })
	group.Go(func() error { return p.reporter.Run(ctx) })
	group.Go(func() error { return p.work(ctx) })
	if err := group.Wait(); err != nil {
		return fmt.Errorf("device plugin of node %s: %w", p.options.NodeName, err)
	}
	return nil
}

// work runs what needs the API server's first answer. Before that answer the card of no pod is known.
func (p *Plugin) work(ctx context.Context) error {
	if !cache.WaitForCacheSync(ctx.Done(), p.pods.informer.HasSynced, p.node.informer.HasSynced) {
		return nil
	}
	p.checkpoint.Sync(ctx)
	p.configurator.Apply(ctx)
	// The checkpoint's reader and the annotator process the results of the kubelet's calls, so they end after the last call.
	serving, end := context.WithCancel(context.WithoutCancel(ctx))
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return p.checkpoint.Run(serving) })
	group.Go(func() error { return p.annotator.Run(serving) })
	group.Go(func() error { return p.node.Run(ctx) })
	group.Go(func() error { return p.configurator.Run(ctx) })
	group.Go(func() error { return p.keepLimits(ctx) })
	group.Go(func() error { return p.shareCards(ctx) })
	group.Go(func() error { return p.checkMounts(ctx) })
	group.Go(func() error {
		defer end()
		// The inventory must be on the Node before the kubelet reports memory: the extender schedules by the inventory.
		select {
		case <-ctx.Done():
			return nil
		case <-p.node.written:
			return p.registrar.Run(ctx)
		}
	})
	return group.Wait()
}

// keepLimits makes sure that the containers that were given a limit can be started again with it, in whatever mode the node is now, until
// ctx ends. Other programs can remove the specification of limits.
func (p *Plugin) keepLimits(ctx context.Context) error {
	failing := false
	wait.UntilWithContext(ctx, func(ctx context.Context) { failing = p.limits.Keep(ctx, failing) }, recheckInterval)
	return nil
}

// shareCards tells the isolation mode in force which cards the node shares, until ctx ends.
func (p *Plugin) shareCards(ctx context.Context) error {
	for {
		changed := p.cards.Get().Changed
		if shared, ok := p.cards.Shared(); ok {
			if err := p.isolator.SetShared(shared); err != nil {
				klog.FromContext(ctx).Error(err, "Could not write which cards the node shares, trying again", "delay", nodeRecheck)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-time.After(nodeRecheck):
		}
	}
}
