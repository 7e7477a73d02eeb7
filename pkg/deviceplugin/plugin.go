package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/tools/cache"
	events "k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Options are what a plugin needs.
type Options struct {
	// Client may list, watch and patch pods and the node, and patch its status.
	Client Client
	// Events writes events on pods and the node.
	Events events.EventRecorder
	// NodeName is the name of the node's object.
	NodeName string
	// Unit is what the cards' memory is counted in.
	Unit gpu.Unit
	// BootID is the kernel's identity of the machine's boot, which the inventory carries; empty where it isn't known.
	BootID string
	// VisibleDevices is by which name containers are told their card; its UUID by default.
	VisibleDevices VisibleDevices
	// DeviceList is by which way a card gets into a container; the environment by default.
	DeviceList DeviceListStrategy
	// ErrorEnv makes a container that is refused a card start without one, as the existing plugin does.
	ErrorEnv bool
	// Directory is the kubelet's, with its socket and its checkpoint.
	Directory string
	// PodResourcesSocket is the kubelet's service that tells which pod is being admitted; empty for none.
	PodResourcesSocket string
	// ListenAddress is for health and metrics; empty for none.
	ListenAddress string
	// AuthorizeMetrics lets only those through to a handler who may read metrics; nil for everyone.
	AuthorizeMetrics func(http.Handler) http.Handler
}

// Plugin is the device plugin of one node.
type Plugin struct {
	options   Options
	metrics   *metrics
	cards     *cardState
	pods      *podSource
	node      *nodeKeeper
	annotator *annotator
	allocator *allocator
	service   *service
	registrar *registrar
	reporter  *reporter
	resources *podResources
}

// New puts a plugin together. It does nothing until Run.
func New(o Options) (*Plugin, error) {
	if o.Client.Pods == nil || o.Client.Nodes == nil || o.Events == nil || o.NodeName == "" || o.Unit <= 0 || o.Directory == "" {
		return nil, errors.New("a device plugin needs a client, an event recorder, a node name, a unit and a directory")
	}
	p := &Plugin{options: o, cards: newCardState(o.Unit), service: newService()}
	p.cards.bootID = o.BootID
	p.metrics = newMetrics(p.service.Listening)
	var err error
	if p.pods, err = newPodSource(o.Client, o.NodeName); err != nil {
		return nil, err
	}
	if p.node, err = newNodeKeeper(o.Client, o.NodeName, p.cards, o.Events); err != nil {
		return nil, err
	}
	if p.resources, err = newPodResources(o.PodResourcesSocket); err != nil {
		return nil, err
	}
	record := newRecord()
	p.annotator = newAnnotator(o.Client, p.pods, record, o.Events, p.metrics)
	if err := p.annotator.Watch(); err != nil {
		return nil, err
	}
	p.allocator = &allocator{
		cards: p.cards, pods: p.pods, record: record, books: &checkpoint{dir: o.Directory},
		resources: p.resources, metrics: p.metrics, events: o.Events, node: nodeReference(o.NodeName),
		reply: &reply{
			unit: o.Unit, visibleBy: cmp.Or(o.VisibleDevices, VisibleByUUID), strategy: o.DeviceList,
			position:         p.cards.Position,
			disableIsolation: p.node.DisableIsolation,
		},
		errorEnv: o.ErrorEnv, notify: p.annotator.Notify, now: time.Now,
		turn: make(chan struct{}, 1), stale: make(chan struct{}, 1),
		hints: map[deviceSet]hint{}, refused: map[gpu.PodUID]bool{}, met: map[gpu.PodUID]bool{},
	}
	p.reporter = newReporter(p.cards, o.Events, nodeReference(o.NodeName))
	p.service.allocator, p.service.cards, p.service.metrics = p.allocator, p.cards, p.metrics
	p.registrar = &registrar{
		dir: o.Directory, service: p.service, cards: p.cards, before: p.allocator.Settle,
		refused: p.reporter.Refused, wake: make(chan struct{}, 1), settle: settle,
	}
	return p, nil
}

// KnownCards returns the cards that the node's inventory lists, none where it has none, and the boot in which it was
// written (protocol.Inventory). It waits for the API server, or until ctx ends. A card is to keep its index: running pods
// hold memory of it.
func (p *Plugin) KnownCards(ctx context.Context) (cards []gpu.Card, bootID string) {
	if !cache.WaitForCacheSync(ctx.Done(), p.node.informer.HasSynced) {
		return nil, ""
	}
	return p.node.Told()
}

// SetCards takes what cards the node has, at any time, also while it runs. moved has the driver's own index of cards that
// it lists at another than theirs. problem says why none of the cards can be used, and is empty otherwise.
func (p *Plugin) SetCards(cards []gpu.Card, moved map[int]int, problem string) {
	p.cards.Set(cards, moved, problem)
	known, _, _ := p.cards.Get()
	p.metrics.setCards(known)
}

// Run serves the kubelet until the context ends, and returns an error only for what waiting can't mend.
func (p *Plugin) Run(ctx context.Context) error {
	p.service.logger = klog.FromContext(ctx)
	defer p.resources.Close()
	listener, err := listen(ctx, p.options.ListenAddress)
	if err != nil {
		return err
	}
	// Pods come and go while the kubelet's last calls are served, see finish: so this ends after them.
	watching, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	group, ctx := errgroup.WithContext(ctx)
	// Not waited for at the end: a reflector that can't reach the API server sleeps through its back-off, up to half a
	// minute, whatever its context says (k8s.io/client-go tools/cache/reflector.go, watchList).
	go p.pods.informer.RunWithContext(watching)
	go p.node.informer.RunWithContext(watching)
	group.Go(func() error { return p.serve(ctx, listener) })
	group.Go(func() error { return p.reporter.Run(ctx) })
	group.Go(func() error { return p.work(ctx) })
	if err := group.Wait(); err != nil {
		return fmt.Errorf("device plugin of node %s: %w", p.options.NodeName, err)
	}
	return nil
}

// work does what has to wait for the API server's first answer: without it nobody's card is known.
func (p *Plugin) work(ctx context.Context) error {
	if !p.waitForAPI(ctx) {
		return nil
	}
	p.allocator.Sync(ctx)
	// What is told of the kubelet's calls ends after the last of them.
	serving, end := context.WithCancel(context.WithoutCancel(ctx))
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return p.allocator.Follow(serving) })
	group.Go(func() error { return p.annotator.Run(serving) })
	group.Go(func() error { return p.node.Run(ctx) })
	group.Go(func() error { return p.follow(ctx) })
	group.Go(func() error {
		defer end()
		// Who schedules by the inventory has to find it once there is memory to schedule.
		select {
		case <-ctx.Done():
			return nil
		case <-p.node.written:
			return p.registrar.Run(ctx)
		}
	})
	return group.Wait()
}

// follow watches the kubelet's directory, and gives up where it can never see the kubelet again.
func (p *Plugin) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	directories := []string{filepath.Clean(p.options.Directory)}
	if p.options.PodResourcesSocket != "" {
		directories = append(directories, filepath.Dir(p.options.PodResourcesSocket))
	}
	watchDirectory(ctx, directories[0], func(name string) {
		if name == checkpointFile || name == "" {
			poke(p.allocator.stale)
		}
		if name != checkpointFile {
			poke(p.registrar.wake)
		}
		for _, dir := range directories {
			if name == "" && deleted(dir) {
				cancel(fmt.Errorf("%w: %s", errMountDeleted, dir))
			}
		}
	})
	if cause := context.Cause(ctx); errors.Is(cause, errMountDeleted) {
		return cause
	}
	return nil
}

// waitForAPI waits until the pods and the node are known, and says so when that takes long.
func (p *Plugin) waitForAPI(ctx context.Context) bool {
	synced := make(chan bool, 1)
	go func() {
		synced <- cache.WaitForCacheSync(ctx.Done(), p.pods.informer.HasSynced, p.node.informer.HasSynced)
	}()
	ticker := time.NewTicker(10 * time.Second)
	defer ticker.Stop()
	for {
		select {
		case ok := <-synced:
			return ok
		case <-ticker.C:
			// The informers keep the reason to themselves.
			reason := "the informers aren't through yet"
			if _, err := p.pods.Live(ctx); err != nil {
				reason = err.Error()
			}
			klog.FromContext(ctx).Info("Waiting for the API server to tell this node and its pods", "node", p.options.NodeName, "reason", reason)
		}
	}
}
