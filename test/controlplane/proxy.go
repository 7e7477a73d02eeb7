package controlplane

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/tools/clientcmd"
)

// Proxy stands between one client and the API server and plays a bad network, as a test tells it to. With nothing
// injected it passes every request and every byte on at once. It speaks HTTP/1.1, so that one request can be cut off
// without the others, and passes on the client's bearer token.
//
// Safe for use by several goroutines. The lock guards the fields below it and is never held across a call.
type Proxy struct {
	// URL is where the proxy serves.
	URL string

	dir     string
	server  *http.Server
	forward *httputil.ReverseProxy

	mu          sync.Mutex
	faults      []*Injection
	connections map[net.Conn]http.ConnState
	watchDelay  time.Duration
	// delayChanged is closed, and replaced, when watchDelay changes.
	delayChanged chan struct{}
}

// StartProxy starts a proxy in front of the API server. Stop closes it, and so does its own Close.
func (c *ControlPlane) StartProxy() (*Proxy, error) {
	proxy, err := newProxy(c.authority, c.apiPort.URL("https"), filepath.Join(c.Dir, "kubeconfig"))
	if err != nil {
		return nil, fmt.Errorf("starting a proxy to the API server: %w", err)
	}
	c.proxies = append(c.proxies, proxy)
	return proxy, nil
}

func newProxy(a *authority, target, dir string) (*Proxy, error) {
	to, err := url.Parse(target)
	if err != nil {
		return nil, err
	}
	serving, err := a.serving("gpushare-test-proxy")
	if err != nil {
		return nil, err
	}
	certificate, err := tls.X509KeyPair(serving.certificate, serving.key)
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AddCert(a.certificate)

	p := &Proxy{
		URL:          "https://" + listener.Addr().String(),
		dir:          dir,
		connections:  map[net.Conn]http.ConnState{},
		delayChanged: make(chan struct{}),
	}
	p.forward = &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) },
		Transport: &http.Transport{
			TLSClientConfig:     &tls.Config{RootCAs: roots},
			MaxIdleConnsPerHost: 256,
			DisableCompression:  true, // What the client asked for goes through as it is.
		},
		FlushInterval:  -1,
		ModifyResponse: p.delayWatch,
		// An API server that can't be reached is a broken connection, not an answer of somebody's.
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
		ErrorLog:     quiet(),
	}
	p.server = &http.Server{
		Handler:           p,
		TLSConfig:         &tls.Config{Certificates: []tls.Certificate{certificate}},
		TLSNextProto:      map[string]func(*http.Server, *tls.Conn, http.Handler){}, // HTTP/1.1 alone.
		ReadHeaderTimeout: time.Minute,
		ConnState:         p.track,
		ErrorLog:          quiet(),
	}
	go func() { _ = p.server.ServeTLS(listener, "", "") }() // Ends with Close.
	return p, nil
}

func quiet() *log.Logger { return log.New(io.Discard, "", 0) }

// Kubeconfig writes a copy of a kubeconfig that goes through the proxy, and returns its path. The original must carry
// a bearer token: a client certificate can't pass through somebody in the middle.
func (p *Proxy) Kubeconfig(path string) (string, error) {
	config, err := clientcmd.LoadFromFile(path)
	if err != nil {
		return "", fmt.Errorf("reading the kubeconfig to send through the proxy: %w", err)
	}
	for name, auth := range config.AuthInfos {
		if auth.Token == "" {
			return "", fmt.Errorf("the kubeconfig %s has no bearer token for %s", path, name)
		}
	}
	for _, cluster := range config.Clusters {
		cluster.Server = p.URL
	}
	base := strings.TrimSuffix(filepath.Base(path), ".yaml")
	out := filepath.Join(p.dir, base+"-through-"+strings.TrimPrefix(p.URL, "https://127.0.0.1:")+".yaml")
	if err := clientcmd.WriteToFile(*config, out); err != nil {
		return "", fmt.Errorf("writing the kubeconfig through the proxy: %w", err)
	}
	return out, nil
}

// ServeHTTP passes a request on, through the faults that it meets, the one injected last first.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var next http.Handler = p.forward
	for _, injection := range p.met(r) {
		inner := next
		next = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			injection.fault(w, r, inner, injection.lifted)
		})
	}
	next.ServeHTTP(w, r)
}

func (p *Proxy) met(r *http.Request) []*Injection {
	p.mu.Lock()
	defer p.mu.Unlock()
	var met []*Injection
	for _, injection := range p.faults {
		if injection.match(r) && (injection.times == 0 || injection.hits < injection.times) {
			injection.hits++
			met = append(met, injection)
		}
	}
	return met
}

// Inject lets the next times requests that match meet the fault, or all of them, with times 0, until it is lifted.
func (p *Proxy) Inject(match Match, times int, fault Fault) *Injection {
	injection := &Injection{proxy: p, match: match, times: times, fault: fault, lifted: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = append(p.faults, injection)
	return injection
}

// Injection is a fault that was injected.
type Injection struct {
	proxy  *Proxy
	match  Match
	times  int
	fault  Fault
	hits   int // guarded by the proxy's lock
	lifted chan struct{}
	once   sync.Once
}

// Hits returns how many requests have met the fault.
func (i *Injection) Hits() int {
	i.proxy.mu.Lock()
	defer i.proxy.mu.Unlock()
	return i.hits
}

// Lift takes the fault away; what it held goes on. Lifting twice does nothing.
func (i *Injection) Lift() {
	i.once.Do(func() {
		i.proxy.mu.Lock()
		i.proxy.faults = slices.DeleteFunc(i.proxy.faults, func(other *Injection) bool { return other == i })
		i.proxy.mu.Unlock()
		close(i.lifted)
	})
}

// Blackhole lets nothing through any more: requests wait, watches stand still, connections stay open. The function
// that it returns ends that, and what waited goes on, as after a network has healed; a watch delay set before is gone.
func (p *Proxy) Blackhole() (heal func()) {
	injection := p.Inject(Everything, 0, Hold)
	p.SetWatchDelay(forever)
	return func() {
		p.SetWatchDelay(0)
		injection.Lift()
	}
}

// forever outlasts every test.
const forever = 24 * time.Hour

// SetWatchDelay has all watches, those that run too, hand every event on that much later than it came. An event on its
// way is due by the new delay.
func (p *Proxy) SetWatchDelay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.watchDelay = d
	close(p.delayChanged)
	p.delayChanged = make(chan struct{})
}

// DropConnections cuts all connections of the client, watches included. New ones are taken.
func (p *Proxy) DropConnections() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for connection := range p.connections {
		// Closing the TLS layer could wait for a client that doesn't read; a cut cable sends no farewell either.
		if secure, ok := connection.(*tls.Conn); ok {
			connection = secure.NetConn()
		}
		_ = connection.Close()
	}
}

func (p *Proxy) track(connection net.Conn, state http.ConnState) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if state == http.StateClosed || state == http.StateHijacked {
		delete(p.connections, connection)
		return
	}
	p.connections[connection] = state
}

// Close ends the proxy and cuts its connections. Closing twice is no error.
func (p *Proxy) Close() error {
	err := p.server.Close()
	p.forward.Transport.(*http.Transport).CloseIdleConnections()
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("closing the proxy: %w", err)
	}
	return nil
}

// delayWatch puts the delay into the body of a watch.
func (p *Proxy) delayWatch(response *http.Response) error {
	if watches(response.Request) && response.StatusCode == http.StatusOK {
		response.Body = p.delayed(response.Request.Context(), response.Body)
	}
	return nil
}

func watches(r *http.Request) bool {
	watch := r.URL.Query().Get("watch")
	return watch == "true" || watch == "1"
}

// chunk is what was read at once, and the error that ended the reading.
type chunk struct {
	data    []byte
	err     error
	arrived time.Time
}

// delayed returns a body that hands on what comes from another, each piece and the end as late as watchDelay says.
// Reading never waits for handing on, up to some thousand pieces; beyond those the API server feels a slow reader.
func (p *Proxy) delayed(ctx context.Context, body io.ReadCloser) io.ReadCloser {
	out, in := io.Pipe()
	chunks := make(chan chunk, 4096)
	go func() {
		defer close(chunks)
		buffer := make([]byte, 32<<10)
		for {
			n, err := body.Read(buffer)
			select {
			case chunks <- chunk{data: bytes.Clone(buffer[:n]), err: err, arrived: time.Now()}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	go func() {
		for c := range chunks {
			if !p.untilDue(ctx, c.arrived) {
				break
			}
			if _, err := in.Write(c.data); err != nil {
				break // The client has gone.
			}
			if c.err != nil {
				_ = in.CloseWithError(c.err)
				return
			}
		}
		_ = in.CloseWithError(io.ErrUnexpectedEOF)
	}()
	return &delayedBody{PipeReader: out, body: body}
}

func (p *Proxy) untilDue(ctx context.Context, arrived time.Time) bool {
	for {
		p.mu.Lock()
		delay, changed := p.watchDelay, p.delayChanged
		p.mu.Unlock()
		left := time.Until(arrived.Add(delay))
		if left <= 0 {
			return true
		}
		timer := time.NewTimer(left)
		select {
		case <-timer.C:
		case <-changed:
		case <-ctx.Done():
			timer.Stop()
			return false
		}
		timer.Stop()
	}
}

type delayedBody struct {
	*io.PipeReader
	body io.Closer
}

func (b *delayedBody) Close() error {
	return errors.Join(b.PipeReader.Close(), b.body.Close())
}
