package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedv1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/cluster"
	"github.com/gpushare/gpushare/pkg/extender"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/leader"
	"github.com/gpushare/gpushare/pkg/metrics"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/tokenauth"
	"github.com/gpushare/gpushare/pkg/version"
	"github.com/gpushare/gpushare/pkg/waiting"
)

const component = "gpushare-extender"

// stopTimeout keeps the end within two seconds of SIGTERM, also while the API server hangs.
const stopTimeout = 800 * time.Millisecond

// serve wires the parts, runs them until ctx ends, and stops them in reverse.
func serve(ctx context.Context, o options) error {
	logger := klog.FromContext(ctx).WithName(component)
	ctx = klog.NewContext(ctx, logger)
	logger.Info("Starting", "version", version.Get().String())

	listener, err := net.Listen("tcp", o.listenAddress)
	if err != nil {
		return fmt.Errorf("--listen-address: %w", err)
	}
	defer listener.Close()
	var health net.Listener
	if o.healthAddress != "" {
		if health, err = net.Listen("tcp", o.healthAddress); err != nil {
			return fmt.Errorf("--health-address: %w", err)
		}
		defer health.Close()
	}

	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	observer := metrics.NewExtender(registry)
	var tlsConfig *tls.Config
	var clientNames []string
	expires := func(at time.Time) { observer.CertificateExpires(extender.CertificateServer, at) }
	if o.tlsCertFile != "" {
		if tlsConfig, err = extender.ServerTLS(o.tlsCertFile, o.tlsKeyFile, o.clientCAFile, expires); err != nil {
			return err
		}
	}
	if o.clientCAFile != "" {
		clientNames = o.clientNames
	}
	config, err := restConfig(o.kubeconfig)
	if err != nil {
		return err
	}
	config.UserAgent = component + "/" + version.Get().Version
	config.QPS, config.Burst = o.qps, o.burst
	// Pods and nodes as protobuf cost a fraction of what they cost as JSON, here and in the API server.
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("reaching the API server: %w", err)
	}
	recorder, stopEvents, err := newRecorder(ctx, config)
	if err != nil {
		return err
	}
	defer stopEvents()

	// The flags were validated: these can't fail.
	cardPolicy, _ := placement.ParsePolicy(o.cardPolicy)
	nodePolicy, _ := placement.ParsePolicy(o.nodePolicy)

	groups := metrics.NewGangs(registry)
	// The elector and what it elects need each other: the cluster asks it before each write.
	var elector *leader.Elector
	var leading, answer func() error
	if o.election.elect {
		leading = func() error { return elector.Leading() }
		answer = func() error { return elector.Answer() }
	}
	state, err := cluster.New(cluster.Options{
		Client: client, API: cluster.NewAPI(client), Recorder: recorder, Observer: observer,
		CardPolicy: cardPolicy, NodePolicy: nodePolicy, BindTimeout: o.bindTimeout, BindWindow: o.bindWindow, EvictFragmented: o.evictFragmented,
		Leading: leading, Clock: clock.RealClock{},
		Gangs: cluster.GangOptions{
			Hold: o.gangs.hold, Patience: o.gangs.patience, ClaimAfter: o.gangs.claimAfter, OnFailure: gang.FailurePolicy(o.gangs.failurePolicy),
			Observer: groups, Answering: answer,
		},
	})
	if err != nil {
		return err
	}
	metrics.NewLedger(registry, state.Ledger(), state.Ready, o.cardMetrics)
	metrics.NewCluster(registry, state)
	metrics.NewPending(registry, state.Ready, func() []waiting.Why {
		pods, _ := state.Pending(0)
		return state.Explain(pods)
	})
	groups.Count(state.GangStates)
	web, err := newPage(ctx, o, state, answer, expires)
	if err != nil {
		return err
	}
	defer web.close()
	var authorizeMetrics func(http.Handler) http.Handler
	if o.authorizeMetrics {
		reviewer, err := tokenauth.New(config)
		if err != nil {
			return err
		}
		authorizeMetrics = reviewer.Handler
	}
	server := extender.NewServer(extender.Options{
		Cluster: state, Observer: observer, Metrics: promhttp.HandlerFor(registry, promhttp.HandlerOpts{Registry: registry}),
		AuthorizeMetrics: authorizeMetrics,
		CardPolicy:       cardPolicy, NodePolicy: nodePolicy, FilterBest: o.filterBest, FilterBestAbove: o.bestAbove,
		TLS: tlsConfig, ClientNames: clientNames, Answer: answer, StopTimeout: min(o.bindTimeout, stopTimeout),
	})
	if o.election.elect {
		if elector, err = newElector(o.election, config, listener.Addr(), state, server, metrics.NewLeader(registry)); err != nil {
			return err
		}
	}

	if tlsConfig == nil && !loopback(listener.Addr()) {
		logger.Info("Plain HTTP on an address that others can reach: whoever does can bind pods. Give --tls-cert-file, --tls-key-file and "+
			"--client-ca-file, or listen on 127.0.0.1", "address", listener.Addr().String())
	}
	logger.Info("Answering", "address", listener.Addr().String(), "tls", tlsConfig != nil)
	if health != nil {
		logger.Info("Answering probes", "address", health.Addr().String())
	}
	err = runParts(ctx, elector, state, server, listener, health, web)
	logger.Info("Stopped")
	return err
}

// runParts runs the parts until ctx ends. A leader first hands over, while everything else still runs: its last writes are
// looked up, and whoever calls is told to go elsewhere.
func runParts(ctx context.Context, elector *leader.Elector, state *cluster.Cluster, server *extender.Server, listener, health net.Listener, web *page) error {
	g, working := errgroup.WithContext(context.WithoutCancel(ctx))
	working, stop := context.WithCancel(working)
	defer stop()
	// Ends with ctx, and when one of the parts fails.
	leading, resign := context.WithCancel(ctx)
	defer context.AfterFunc(working, resign)()

	g.Go(func() error { return state.Run(working) })
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
		return elector.Run(leading)
	})
	return g.Wait()
}

// restConfig reads the kubeconfig or, where none is named, the pod's own service account.
func restConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		config, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("no --kubeconfig is given, and the pod's own service account can't be used: %w", err)
		}
		return config, nil
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	return config, nil
}

// newRecorder writes Events through a client of its own, so that a burst of them never holds up a bind. stop must be
// called at the end.
func newRecorder(ctx context.Context, config *rest.Config) (recorder record.EventRecorder, stop func(), err error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = 100, 1000
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, nil, fmt.Errorf("reaching the API server: %w", err)
	}
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedv1.EventSinkImpl{Interface: client.CoreV1().Events("")})
	return broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component}), broadcaster.Shutdown, nil
}

func loopback(address net.Addr) bool {
	tcp, ok := address.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}
