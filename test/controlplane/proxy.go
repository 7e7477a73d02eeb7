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

// Proxy forwards the requests of one client to the API server and injects network faults. Without a fault it forwards
// every request and every byte immediately. It uses HTTP/1.1, so that one request can be cut off without affecting
// others, and forwards the client's bearer token.
//
// It is safe for concurrent use. mu guards the fields below it and is never held during a call.
type Proxy struct {
	// URL is the address of the proxy.
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

// StartProxy starts a proxy in front of the API server. Proxy.Close closes it, and so does Stop.
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
			DisableCompression:  true, // Answers are forwarded as the API server encoded them.
		},
		FlushInterval:  -1,
		ModifyResponse: p.delayWatch,
		// If the API server can't be reached, the client sees a broken connection, not an error status from the proxy.
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
		ErrorLog:     quiet(),
	}
	p.server = &http.Server{
		Handler:           p,
		TLSConfig:         &tls.Config{Certificates: []tls.Certificate{certificate}},
		TLSNextProto:      map[string]func(*http.Server, *tls.Conn, http.Handler){}, // Only HTTP/1.1.
		ReadHeaderTimeout: time.Minute,
		ConnState:         p.track,
		ErrorLog:          quiet(),
	}
	go func() { _ = p.server.ServeTLS(listener, "", "") }() // Ends with Close.
	return p, nil
}

func quiet() *log.Logger { return log.New(io.Discard, "", 0) }

// Kubeconfig writes a copy of a kubeconfig that uses the proxy and returns its path. The original must have a bearer
// token: a client certificate can't be forwarded.
func (p *Proxy) Kubeconfig(path string) (string, error) {
	config, err := clientcmd.LoadFromFile(path)
	if err != nil {
		return "", fmt.Errorf("reading the kubeconfig for the proxy: %w", err)
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
		return "", fmt.Errorf("writing the kubeconfig for the proxy: %w", err)
	}
	return out, nil
}

// ServeHTTP forwards a request through all matching faults. The fault injected last is the outermost.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var next http.Handler = p.forward
	for _, injection := range p.matching(r) {
		inner := next
		next = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			injection.fault(w, r, inner, injection.lifted)
		})
	}
	next.ServeHTTP(w, r)
}

func (p *Proxy) matching(r *http.Request) []*Injection {
	p.mu.Lock()
	defer p.mu.Unlock()
	var matching []*Injection
	for _, injection := range p.faults {
		if injection.match(r) && (injection.times == 0 || injection.hits < injection.times) {
			injection.hits++
			matching = append(matching, injection)
		}
	}
	return matching
}

// Inject applies the fault to the next times matching requests. With times 0 it applies to all of them until it is
// lifted.
func (p *Proxy) Inject(match Match, times int, fault Fault) *Injection {
	injection := &Injection{proxy: p, match: match, times: times, fault: fault, lifted: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = append(p.faults, injection)
	return injection
}

// Injection is an injected fault.
type Injection struct {
	proxy  *Proxy
	match  Match
	times  int
	fault  Fault
	hits   int // guarded by the proxy's lock
	lifted chan struct{}
	once   sync.Once
}

// Hits returns the number of requests that the fault was applied to.
func (i *Injection) Hits() int {
	i.proxy.mu.Lock()
	defer i.proxy.mu.Unlock()
	return i.hits
}

// Lift removes the fault and releases the requests that it holds. Lifting twice is no error.
func (i *Injection) Lift() {
	i.once.Do(func() {
		i.proxy.mu.Lock()
		i.proxy.faults = slices.DeleteFunc(i.proxy.faults, func(other *Injection) bool { return other == i })
		i.proxy.mu.Unlock()
		close(i.lifted)
	})
}

// Blackhole forwards nothing: requests and watches wait, and connections stay open. heal ends that, also removes a
// watch delay set before, and releases what was waiting, like a network that has recovered.
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

// SetWatchDelay delays every event of all present and future watches by d. It also applies to events that are being
// delayed.
func (p *Proxy) SetWatchDelay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.watchDelay = d
	close(p.delayChanged)
	p.delayChanged = make(chan struct{})
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

// Close stops the proxy and cuts its connections. Closing twice is no error.
func (p *Proxy) Close() error {
	err := p.server.Close()
	p.forward.Transport.(*http.Transport).CloseIdleConnections()
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("closing the proxy: %w", err)
	}
	return nil
}

// delayWatch adds the delay to the body of a watch.
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

// chunk is the result of one read: data, and the error that ended the reading.
type chunk struct {
	data    []byte
	err     error
	arrived time.Time
}

// delayed returns a body with the content of another one, delayed by watchDelay. It buffers some thousand chunks;
// beyond that, the API server sees a slow reader.
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
				break // The client has disconnected.
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
