package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"runtime/debug"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedv1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/cmd/internal/program"
	"github.com/gpushare/gpushare/pkg/apiserver"
	"github.com/gpushare/gpushare/pkg/binding"
	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/extender"
	"github.com/gpushare/gpushare/pkg/leader"
	"github.com/gpushare/gpushare/pkg/loopback"
	"github.com/gpushare/gpushare/pkg/metrics"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/scheduling"
	"github.com/gpushare/gpushare/pkg/tokenauth"
	"github.com/gpushare/gpushare/pkg/version"
)

const component = "gpushare-extender"

// evictionRecord is the name of the ConfigMap in which evictions for other pods are recorded.
const evictionRecord = "gpushare-evictions"

// gcPercent is how much the heap grows until it is collected, in percent of what was in use after the last collection, unless GOGC is set. With Go's
// own 100, collections take a tenth of the processor time.
const gcPercent = 200

// apiQPS is the maximum number of requests per second to the API server, without Events, leader election and token reviews.
const apiQPS = 1000

// stopTimeout limits the time for calls in flight at SIGTERM. The process exits within two seconds in any case.
const stopTimeout = 800 * time.Millisecond

// serve creates the components, runs them until ctx ends, and stops them in reverse order.
func serve(ctx context.Context, o options) error {
	logger := klog.FromContext(ctx).WithName(component)
	ctx = klog.NewContext(ctx, logger)
	logger.Info("Starting", "version", version.Get().String())
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	listener, health, err := listen(o)
	if err != nil {
		return err
	}
	defer listener.Close()
	if health != nil {
		defer health.Close()
	}

	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	observer := metrics.NewExtender(registry)
	expires := func(at time.Time) { observer.CertificateExpires(extender.CertificateServer, at) }
	var tlsConfig *tls.Config
	if o.tlsCertFile != "" {
		if tlsConfig, err = extender.ServerTLS(o.tlsCertFile, o.tlsKeyFile, o.clientCAFile, expires); err != nil {
			return err
		}
	}
	config, err := apiConfig(o)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("creating a client of the API server: %w", err)
	}
	recorder, stopEvents, err := newRecorder(ctx, config)
	if err != nil {
		return err
	}
	defer stopEvents()
	var elector *leader.Elector
	var leading, answer func() error
	if o.election.elect {
		elector, err = newElector(o.election, config, listener.Addr(), binding.Deadline(o.scheduling.BindTimeout), metrics.NewLeader(registry))
		if err != nil {
			return err
		}
		leading, answer = elector.Leading, elector.CheckAnswering
	}

	settings := schedulingOptions(o)
	settings.Client, settings.API, settings.Recorder, settings.Observer, settings.Leading = client, apiserver.New(client), recorder, observer, leading
	scheduler, err := newScheduler(o, registry, settings, answer)
	if err != nil {
		return err
	}
	cards := metrics.NewLedger(registry, scheduler, scheduler.Ready, func() bool {
		return o.cardMetrics && (leading == nil || leading() == nil)
	})

	web, err := newPage(ctx, o, scheduler, answer, expires)
	if err != nil {
		return err
	}
	serving := extender.Options{
		Scheduler: scheduler, Observer: observer, Metrics: promhttp.HandlerFor(cards.Beside(registry), promhttp.HandlerOpts{Registry: registry}),
		TLS: tlsConfig, Answer: answer, StopTimeout: min(o.scheduling.BindTimeout, stopTimeout),
	}
	if o.clientCAFile != "" {
		serving.ClientNames = o.clientNames
	}
	if o.authorizeMetrics {
		reviewer, err := tokenauth.New(config)
		if err != nil {
			return err
		}
		serving.AuthorizeMetrics = reviewer.Handler
	}
	logAddresses(logger, listener, health, tlsConfig != nil)
	err = runParts(ctx, elector, scheduler, extender.NewServer(serving), listener, health, web)
	logger.Info("Stopped")
	return err
}

// listen opens the addresses. health is nil if health checks have none of their own.
func listen(o options) (listener, health net.Listener, err error) {
	listener, err = net.Listen("tcp", o.listenAddress)
	if err != nil {
		return nil, nil, fmt.Errorf("--listen-address: %w", err)
	}
	if o.healthAddress == "" {
		return listener, nil, nil
	}
	health, err = net.Listen("tcp", o.healthAddress)
	if err != nil {
		_ = listener.Close()
		return nil, nil, fmt.Errorf("--health-address: %w", err)
	}
	return listener, health, nil
}

// apiConfig returns the configuration of the API server's clients.
func apiConfig(o options) (*rest.Config, error) {
	config, err := program.APIConfig(o.kubeconfig, component)
	if err != nil {
		return nil, err
	}
	config.QPS, config.Burst = apiQPS, 2*apiQPS
	// Decoding and encoding protobuf costs a fraction of JSON, here and in the API server.
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	// The API server would compress each event of a watch by itself (from Kubernetes 1.37 on), for each replica: 3% of its processor time.
	config.DisableCompression = true
	return config, nil
}

// schedulingOptions returns what the flags say about scheduling. The caller adds clients and observers.
func schedulingOptions(o options) scheduling.Options {
	out := o.scheduling
	// validate has checked these.
	out.CardPolicy, _ = placement.ParsePolicy(o.cardPolicy, placement.Policies())
	out.NodePolicy, _ = placement.ParsePolicy(o.nodePolicy, placement.NodePolicies())
	out.FilterBestAbove, out.SampleSize, out.Clock = filterBestAbove, o.sampleSize(), clock.RealClock{}
	out.EvictionRecord = types.NamespacedName{Namespace: o.election.options.Namespace, Name: evictionRecord}
	out.EvictOverusers = o.overusePolicy == overuseEvict
	out.Reservations.MaxIdle = o.maxIdle / 100
	out.FairShare.Label, _ = dispatch.TenantLabel(o.fairShare.by)
	out.FairShare.On = o.fairShare.mode != fairShareOff
	if o.fairShare.mode == fairShareReclaim {
		out.FairShare.ReclaimAfter = o.fairShare.reclaimAfter
	}
	return out
}

// newScheduler returns a scheduler with these settings, and registers its metrics. answer is nil without replicas.
func newScheduler(o options, registry *prometheus.Registry, settings scheduling.Options, answer func() error) (*scheduling.Scheduler, error) {
	groups := metrics.NewGangs(registry)
	settings.Gangs.Observer, settings.Gangs.Answering = groups, answer
	var fair *metrics.FairShare
	if settings.FairShare.On {
		fair = metrics.NewFairShare(registry)
		settings.FairShare.Observer = fair
	}
	scheduler, err := scheduling.New(settings)
	if err != nil {
		return nil, err
	}
	groups.Count(scheduler.GangStates)
	if fair != nil {
		fair.Tenants(scheduler.Ready, scheduler.Tenants, scheduler.InvalidNamespaces)
	}
	metrics.NewCluster(registry, scheduler)
	metrics.NewPending(registry, scheduler.Ready, o.waitBound(), func() metrics.PendingPods {
		now := scheduler.Explain()
		return metrics.PendingPods{At: now.At, Diagnoses: now.Diagnoses, RequestProblems: len(now.RequestProblems)}
	})
	return scheduler, nil
}

// logAddresses logs where this process serves, and a warning if any client can bind pods there.
func logAddresses(logger klog.Logger, listener, health net.Listener, withTLS bool) {
	if !withTLS && !loopback.Is(listener.Addr()) {
		logger.Info("Serving plain HTTP on an address that is not loopback: any client that can reach it can bind pods. Set --tls-cert-file, "+
			"--tls-key-file and --client-ca-file, or listen on 127.0.0.1", "address", listener.Addr().String())
	}
	logger.Info("Serving kube-scheduler's calls", "address", listener.Addr().String(), "tls", withTLS)
	if health != nil {
		logger.Info("Serving health checks", "address", health.Addr().String())
	}
}

// runParts runs the components until ctx ends. A leader first releases its Lease, while the other components still run: they
// resolve its last writes, and answer new calls with the error that this replica is stopping.
func runParts(ctx context.Context, elector *leader.Elector, scheduler *scheduling.Scheduler, server *extender.Server, listener, health net.Listener, web *page) error {
	g, working := errgroup.WithContext(context.WithoutCancel(ctx))
	working, stop := context.WithCancel(working)
	defer stop()
	// leading ends with ctx, and when a component fails.
	leading, resign := context.WithCancel(ctx)
	defer context.AfterFunc(working, resign)()

	g.Go(func() error { return scheduler.Run(working) })
	g.Go(func() error { return server.Serve(working, listener) })
	if health != nil {
		g.Go(func() error { return server.ServeHealth(working, health) })
	}
	g.Go(func() error { return web.run(working) })
	g.Go(func() error {
		defer stop()
		if elector == nil {
			<-leading.Done()
			return nil
		}
		return elector.Run(leading, replica{scheduler, server})
	})
	return g.Wait()
}

// recentEvents is how many Events are remembered, so that equal ones are counted in one object. Each needs 1.3 KiB.
const recentEvents = 1024

// newRecorder returns a recorder of Events with its own client: a burst of them delays no bind. The caller calls stop.
func newRecorder(ctx context.Context, config *rest.Config) (recorder record.EventRecorder, stop func(), err error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = 100, 1000
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, nil, fmt.Errorf("creating a client of the API server: %w", err)
	}
	broadcaster := record.NewBroadcaster(record.WithContext(ctx), record.WithCorrelatorOptions(record.CorrelatorOptions{LRUCacheSize: recentEvents}))
	broadcaster.StartRecordingToSink(program.ShortEvents(&typedv1.EventSinkImpl{Interface: client.CoreV1().Events("")}))
	return broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component}), broadcaster.Shutdown, nil
}
