package extender

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"iter"
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

	"github.com/gpushare/gpushare/pkg/cluster"
	"github.com/gpushare/gpushare/pkg/connlimit"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/preemption"
)

// Prefix is the path that every verb lies under.
const Prefix = "/gpushare-scheduler"

const (
	// maxBody bounds what a request may carry: far above 5,000 node names with a large pod, far below the memory at hand.
	maxBody = 16 << 20
	// maxHeader bounds a request's header, which takes several times as much memory once it is parsed. A bearer token has one or
	// two kilobytes.
	maxHeader = 8 << 10
	// headerTimeout and readTimeout end clients that send slowly.
	headerTimeout = 5 * time.Second
	readTimeout   = 15 * time.Second
	// idleTimeout is above the 90 seconds after which kube-scheduler closes an idle connection: a request on a connection
	// that the server is closing would be lost. Idle connections of others are closed once there are too many.
	idleTimeout = 2 * time.Minute
	// writeTimeout ends clients that don't fetch their answer. It covers reading the request and a bind as well.
	writeTimeout = 2*time.Minute + readTimeout
	// healthIdleTimeout and healthWriteTimeout are for probes and scrapers, which ask once in a while.
	healthIdleTimeout  = 5 * time.Second
	healthWriteTimeout = 30 * time.Second
	// stopGrace is how long a stopping server waits for requests other than binds.
	stopGrace = time.Second
)

// Cluster is what the verbs need of package cluster.
type Cluster interface {
	// Ready returns why nothing can be answered yet, or nil.
	Ready() error
	Bind(ctx context.Context, request cluster.BindRequest) error
	// Preempt corrects the victims that are proposed for each node, and leaves out the nodes that can't be helped.
	Preempt(ctx context.Context, pod *corev1.Pod, proposed map[string]preemption.Victims) (map[string]preemption.Victims, error)
	// FilterGang answers for a member of a group, unless it may go wherever any pod may: then decided is false.
	FilterGang(pod *corev1.Pod, offered []string) (answer gang.FilterResult, decided bool)
	Refused(pod gpu.Pod, at time.Time)
	Passed(uid gpu.PodUID)
	// Sampled notes that filter found no node for the pod among so many that it was asked about.
	Sampled(uid gpu.PodUID, asked int)
	// NamedFew notes that filter passed the pod, but named only some of the nodes that fit.
	NamedFew(uid gpu.PodUID)
	// NameAll reports whether filter must name every node that fits the pod.
	NameAll(uid gpu.PodUID) bool
	// Blocked tells of the nodes on which the pod that was refused finds no card with room now.
	Blocked(pod *corev1.Pod, full iter.Seq[string], at time.Time)
	Ledger() *ledger.Ledger
}

// Observer is told what happens, for metrics. Its methods must return at once.
type Observer interface {
	// Answered tells how long a verb took, and whether it answered, refused with an error, or panicked.
	Answered(verb, outcome string, took time.Duration)
	// Filtered counts nodes by what filter said of them.
	Filtered(reason placement.Reason, nodes int)
	// CertificateExpires notes when a certificate that is in use expires.
	CertificateExpires(certificate string, at time.Time)
}

// The certificates of which an Observer hears.
const (
	// CertificateServer is what the extender shows, CertificateClient what kube-scheduler has shown last.
	CertificateServer = "server"
	CertificateClient = "client"
)

// The outcomes of a verb.
const (
	OutcomeOK    = "ok"
	OutcomeError = "error"
	OutcomePanic = "panic"
)

// Options are what a Server works with.
type Options struct {
	Cluster  Cluster
	Observer Observer
	// Metrics answers /metrics.
	Metrics http.Handler
	// AuthorizeMetrics returns a handler that passes on only requests of clients that may read metrics; nil where every client may.
	AuthorizeMetrics func(http.Handler) http.Handler
	// CardPolicy and NodePolicy are what filter and prioritize judge nodes by.
	CardPolicy, NodePolicy placement.Policy
	// FilterBest is how many of the nodes that share the best score filter passes at most where more than FilterBestAbove
	// are on offer. With fewer, and with 0 always, it passes every node that fits, and says of the others why they don't.
	FilterBest, FilterBestAbove int
	// TLS is what ServerTLS returned; nil for plain HTTP.
	TLS *tls.Config
	// ClientNames are the names of which a client's certificate must have one; none where no certificate is asked for.
	ClientNames []string
	// Answer says whether this replica is to answer kube-scheduler; nil for the only one. Calls are counted before it is
	// asked, see InFlight.
	Answer func() error
	// StopTimeout is how long a stopping server waits for binds in flight, after a second for everything. What is cut
	// then is found out by whoever comes next, as after a kill.
	StopTimeout time.Duration
}

// Server answers HTTP.
type Server struct {
	Options
	// grace is stopGrace and slowest is readTimeout outside tests.
	grace, slowest time.Duration
	// inFlight counts the calls of kube-scheduler in flight.
	inFlight atomic.Int64
	bodies   bodies
	// refusals limits what is logged of refused requests.
	refusals rate.Sometimes
	// metrics answers /metrics, on whichever address.
	metrics http.Handler
}

// NewServer wires a Server.
func NewServer(o Options) *Server {
	s := &Server{
		Options: o, grace: stopGrace, slowest: readTimeout, bodies: newBodies(),
		refusals: rate.Sometimes{First: 1, Interval: time.Minute},
	}
	s.metrics = few(maxReaders, s.getMetrics)
	if o.AuthorizeMetrics != nil {
		s.metrics = o.AuthorizeMetrics(s.metrics)
	}
	return s
}

// Handler returns the router with every path.
func (s *Server) Handler() http.Handler {
	return s.bodies.bound(s.router())
}

func (s *Server) router() *httprouter.Router {
	r := httprouter.New()
	r.HandlerFunc(http.MethodPost, Prefix+"/filter", verb(s, "filter", s.filter, filterError))
	r.HandlerFunc(http.MethodPost, Prefix+"/prioritize", verb(s, "prioritize", s.prioritize, nil))
	r.HandlerFunc(http.MethodPost, Prefix+"/bind", verb(s, "bind", s.bind, bindError))
	r.HandlerFunc(http.MethodPost, Prefix+"/preempt", verb(s, "preempt", s.preempt, nil))
	r.HandlerFunc(http.MethodGet, Prefix+"/inspect", s.clientsOnly(few(maxReaders, s.inspectAll)))
	r.HandlerFunc(http.MethodGet, Prefix+"/inspect/:node", s.clientsOnly(s.inspectNode))
	return s.withHealth(r)
}

// HealthHandler returns a router with the paths that tell how the extender is, and none that does anything.
func (s *Server) HealthHandler() http.Handler { return s.withHealth(httprouter.New()) }

func (s *Server) withHealth(r *httprouter.Router) *httprouter.Router {
	r.GET("/version", getVersion)
	r.GET("/livez", livez)
	r.GET("/readyz", s.readyz)
	r.Handler(http.MethodGet, "/metrics", s.metrics)
	r.NotFound = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		http.Error(w, fmt.Sprintf("no such path: %.200q", req.URL.Path), http.StatusNotFound)
	})
	return r
}

// getMetrics reads the certificate again first: no client may have connected since it changed, least of all to a
// standby replica.
func (s *Server) getMetrics(w http.ResponseWriter, r *http.Request) {
	if s.TLS != nil {
		_, _ = s.TLS.GetConfigForClient(nil) // Files that can't be used are logged there.
	}
	s.Metrics.ServeHTTP(w, r)
}

// InFlight says how many calls of kube-scheduler are being answered.
func (s *Server) InFlight() int { return int(s.inFlight.Load()) }

// Serve answers on the listener until ctx ends, then waits for the requests in flight.
func (s *Server) Serve(ctx context.Context, listener net.Listener) error {
	limits := callerLimits
	if len(s.ClientNames) > 0 {
		limits = strangerLimits
	}
	limited := connlimit.New(listener, limits)
	listener = limited
	if s.TLS != nil {
		listener = tls.NewListener(limited, s.TLS)
	}
	return s.serve(ctx, listener, &http.Server{
		Handler:      s.Handler(),
		ReadTimeout:  s.slowest,
		WriteTimeout: writeTimeout,
		IdleTimeout:  idleTimeout,
		ConnState:    func(c net.Conn, state http.ConnState) { s.exemptClient(limited, c, state) },
	})
}

// exemptClient takes a connection out of the limits once its client has proved that it is kube-scheduler.
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

// ServeHealth answers probes and scrapers on a listener of their own, in plain HTTP: for where they can't reach the
// other one, or have no certificate to show it.
func (s *Server) ServeHealth(ctx context.Context, listener net.Listener) error {
	return s.serve(ctx, connlimit.New(listener, healthLimits), &http.Server{
		Handler:      s.HealthHandler(),
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

// stop waits a moment for everything, and somewhat longer for calls in flight. Without that limit
// http.Server.Shutdown would wait seconds for connections that were opened in advance and never used.
func (s *Server) stop(logger klog.Logger, server *http.Server) error {
	err := shutdown(server, s.grace)
	if err != nil && s.inFlight.Load() > 0 {
		err = shutdown(server, s.StopTimeout)
	}
	if err == nil {
		return nil
	}
	// What is left never sent all of a request, or doesn't fetch its answer.
	logger.V(2).Info("Connections that didn't come to an end are cut", "err", err)
	return server.Close()
}

// serverLog takes what net/http has to say. Whoever can connect can have it say that no TLS connection came about, any
// number of times: that is for those only who look for it.
type serverLog struct{ klog.Logger }

// Write implements io.Writer.
func (l serverLog) Write(text []byte) (int, error) {
	line := string(bytes.TrimSpace(text))
	if strings.HasPrefix(line, "http: TLS handshake error") {
		l.V(2).Info("A client's TLS connection did not come about", "err", line)
	} else {
		l.Info("The HTTP server reports", "err", line)
	}
	return len(text), nil
}

func shutdown(server *http.Server, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return server.Shutdown(ctx)
}
