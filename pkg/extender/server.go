package extender

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/julienschmidt/httprouter"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/connlimit"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/loopback"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/scheduling"
	"github.com/gpushare/gpushare/pkg/version"
)

// Prefix is the common path prefix of all verbs.
const Prefix = "/gpushare-scheduler"

const (
	// maxHeader limits a request's header, in bytes. A header takes several times as much memory once it is parsed. A bearer
	// token has one or two kilobytes.
	maxHeader = 8 << 10
	// headerTimeout and readTimeout end the connections of clients that send slowly.
	headerTimeout = 5 * time.Second
	readTimeout   = 15 * time.Second
	// idleTimeout is above the 90 seconds after which kube-scheduler closes an idle connection: a request on a connection
	// that the server is closing would be lost. Idle connections of other clients are closed once there are too many.
	idleTimeout = 2 * time.Minute
	// writeTimeout ends the connections of clients that don't read their answer. It includes reading the request, and a bind.
	writeTimeout = 2*time.Minute + readTimeout
	// healthIdleTimeout and healthWriteTimeout apply to probes and scrapers, which send a request only now and then.
	healthIdleTimeout  = 5 * time.Second
	healthWriteTimeout = 30 * time.Second
	// stopGrace is how long a stopping server waits for requests other than binds.
	stopGrace = time.Second
)

// Scheduler decides about kube-scheduler's calls; *scheduling.Scheduler implements it.
type Scheduler interface {
	// Ready returns the reason why no call can be answered yet, or nil.
	Ready() error
	Filter(pod *corev1.Pod, nodes []string) (scheduling.FilterResult, error)
	Prioritize(pod *corev1.Pod, nodes []string) (scores []int64, err error)
	Bind(ctx context.Context, request scheduling.BindRequest) error
	Preempt(ctx context.Context, pod *corev1.Pod, proposed map[string]preemption.Victims) (map[string]preemption.Victims, error)
	// Nodes and Node return the nodes of the ledger, for inspect.
	Nodes() []ledger.Node
	Node(name string) (ledger.Node, bool)
}

// Observer receives events for metrics. Its methods must return at once.
type Observer interface {
	// Answered records the duration of a verb's call, and its outcome: OutcomeOK, OutcomeError or OutcomePanic.
	Answered(verb, outcome string, took time.Duration)
	// CertificateExpires records when a certificate in use expires. certificate is CertificateServer or CertificateClient.
	CertificateExpires(certificate string, at time.Time)
}

// The certificates that an Observer distinguishes.
const (
	// CertificateServer is the extender's own certificate. CertificateClient is the one that kube-scheduler presented last.
	CertificateServer = "server"
	CertificateClient = "client"
)

// The outcomes of a verb's call.
const (
	OutcomeOK    = "ok"
	OutcomeError = "error"
	OutcomePanic = "panic"
)

// Options configure a Server.
type Options struct {
	Scheduler Scheduler
	Observer  Observer
	Metrics   http.Handler
	// AuthorizeMetrics returns a handler that passes on only requests of clients that may read metrics. It is nil if every
	// client may.
	AuthorizeMetrics func(http.Handler) http.Handler
	// TLS is the result of ServerTLS; nil for plain HTTP.
	TLS *tls.Config
	// ClientNames are the names that a client's certificate may have; empty if no certificate is required.
	ClientNames []string
	// Answer returns an error if this replica must not answer kube-scheduler. It is nil if there is only one replica. A call
	// is counted before Answer is called, see InFlight.
	Answer func() error
	// StopTimeout is how long a stopping server waits for binds in flight, after it has waited stopGrace for all requests.
	// If a bind is cut then, the process that leads next finds out its result, as after a kill.
	StopTimeout time.Duration
}

// Server answers HTTP.
type Server struct {
	Options
	// stopGrace and readTimeout are the constants, except in tests, and strangers is strangerLimit.
	stopGrace, readTimeout time.Duration
	strangers              int
	// inFlight is the number of kube-scheduler's calls in flight, without the binds whose answers are held.
	inFlight atomic.Int64
	pacer    pacer
	// rejections limits the log lines about rejected requests.
	rejections rate.Sometimes
	// metrics answers /metrics on both addresses.
	metrics http.Handler
}

// NewServer returns a Server with these options.
func NewServer(o Options) *Server {
	s := &Server{
		Options: o, stopGrace: stopGrace, readTimeout: readTimeout, strangers: strangerLimit,
		rejections: rate.Sometimes{First: 1, Interval: time.Minute}, pacer: pacer{longest: maxHold, spare: map[net.Conn]struct{}{}},
	}
	s.metrics = limitConcurrent(maxReaders, s.getMetrics)
	if o.AuthorizeMetrics != nil {
		s.metrics = o.AuthorizeMetrics(s.metrics)
	}
	return s
}

// Handler returns a handler for all paths.
func (s *Server) Handler() http.Handler {
	r := httprouter.New()
	r.HandlerFunc(http.MethodPost, Prefix+"/filter", verb(s, "filter", s.filter, filterError))
	r.HandlerFunc(http.MethodPost, Prefix+"/prioritize", verb(s, "prioritize", s.prioritize, nil))
	r.HandlerFunc(http.MethodPost, Prefix+"/bind", verb(s, "bind", s.bind, bindError))
	r.HandlerFunc(http.MethodPost, Prefix+"/preempt", verb(s, "preempt", s.preempt, nil))
	r.HandlerFunc(http.MethodGet, Prefix+"/inspect", s.clientsOnly(limitConcurrent(maxReaders, s.inspectAll)))
	r.HandlerFunc(http.MethodGet, Prefix+"/inspect/:node", s.clientsOnly(s.inspectNode))
	return s.withHealth(r)
}

// HealthHandler returns a handler for the paths that report the extender's state. None of them has a side effect.
func (s *Server) HealthHandler() http.Handler { return s.withHealth(httprouter.New()) }

func (s *Server) withHealth(r *httprouter.Router) *httprouter.Router {
	get := func(path string, handle http.HandlerFunc) { r.HandlerFunc(http.MethodGet, path, handle) }
	get("/version", func(w http.ResponseWriter, req *http.Request) { write(w, req, http.StatusOK, version.Get()) })
	// If the API server is unreachable, killing the extender doesn't help.
	get("/livez", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	get("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		s.readTLS()
		if err := s.Scheduler.Ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	get("/metrics", s.metrics.ServeHTTP)
	r.NotFound = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		http.Error(w, fmt.Sprintf("no such path: %.200q", req.URL.Path), http.StatusNotFound)
	})
	return r
}

func (s *Server) getMetrics(w http.ResponseWriter, r *http.Request) {
	s.readTLS()
	s.Metrics.ServeHTTP(w, r)
}

// readTLS reads the certificate again, so that the metric of its expiry is current and files that can't be used are logged: possibly no client has
// connected since they changed, least of all to a standby. The kubelet's probe calls it every two seconds.
func (s *Server) readTLS() {
	if s.TLS != nil {
		_, _ = s.TLS.GetConfigForClient(nil) // It logs files that can't be used.
	}
}

// InFlight returns the number of kube-scheduler's calls in flight, without the binds whose answers are held.
func (s *Server) InFlight() int { return int(s.inFlight.Load()) }

// Serve answers on the listener until ctx ends, then waits for the requests in flight.
func (s *Server) Serve(ctx context.Context, listener net.Listener) error {
	limit := callerLimit
	if len(s.ClientNames) > 0 {
		limit = s.strangers
	}
	limited := connlimit.New(listener, limit)
	listener = limited
	handler := s.Handler()
	if s.TLS != nil {
		listener = tls.NewListener(limited, s.TLS)
	} else {
		handler = loopback.Handler(listener.Addr(), handler)
	}
	return s.serve(ctx, listener, &http.Server{
		Handler:      handler,
		ReadTimeout:  s.readTimeout,
		WriteTimeout: writeTimeout,
		IdleTimeout:  idleTimeout,
		ConnContext:  withConn,
		ConnState: func(c net.Conn, state http.ConnState) {
			s.exemptClient(limited, c, state)
			s.pacer.connState(c, state)
		},
	})
}

// exemptClient exempts a connection from the limits once its client has proved that it is kube-scheduler.
func (s *Server) exemptClient(limited *connlimit.Listener, c net.Conn, state http.ConnState) {
	if state != http.StateActive || len(s.ClientNames) == 0 {
		return
	}
	if secure, ok := c.(*tls.Conn); ok {
		if shown := secure.ConnectionState(); s.checkClient(&shown) == nil {
			limited.Exempt(secure.NetConn())
		}
	}
}

// ServeHealth answers probes and scrapers on a separate listener in plain HTTP. It is for probes and scrapers that can't
// reach the main listener, or that have no certificate for it.
func (s *Server) ServeHealth(ctx context.Context, listener net.Listener) error {
	return s.serve(ctx, connlimit.New(listener, healthLimit), &http.Server{
		Handler:      loopback.Handler(listener.Addr(), s.HealthHandler()),
		ReadTimeout:  headerTimeout,
		WriteTimeout: healthWriteTimeout,
		IdleTimeout:  healthIdleTimeout,
	})
}

func (s *Server) serve(ctx context.Context, listener net.Listener, server *http.Server) error {
	server.ReadHeaderTimeout, server.MaxHeaderBytes = headerTimeout, maxHeader
	server.ErrorLog = log.New(serverLog{klog.FromContext(ctx)}, "", 0)
	server.BaseContext = func(net.Listener) context.Context { return context.WithoutCancel(ctx) }
	stopped := make(chan error, 1)
	go func() {
		<-ctx.Done()
		stopped <- s.stop(klog.FromContext(ctx), server)
	}()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving on %s: %w", listener.Addr(), err)
	}
	return <-stopped
}

// stop waits stopGrace for all requests, and then up to StopTimeout if calls are in flight. Without the first limit,
// http.Server.Shutdown would wait seconds for connections that were opened in advance and never used.
func (s *Server) stop(logger klog.Logger, server *http.Server) error {
	err := shutdown(server, s.stopGrace)
	if err != nil && s.inFlight.Load() > 0 {
		err = shutdown(server, s.StopTimeout)
	}
	if err == nil {
		return nil
	}
	logger.V(2).Info("Closing connections with incomplete requests or unread answers", "err", err)
	return server.Close()
}

// serverLog logs the messages of net/http. Failed TLS handshakes, of which clients can cause any number, need -v=2.
type serverLog struct{ klog.Logger }

func (l serverLog) Write(text []byte) (int, error) {
	line := string(bytes.TrimSpace(text))
	if strings.HasPrefix(line, "http: TLS handshake error") {
		l.V(2).Info("TLS handshake failed", "err", line)
	} else {
		l.Error(errors.New(line), "HTTP server failed")
	}
	return len(text), nil
}

func shutdown(server *http.Server, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return server.Shutdown(ctx)
}
