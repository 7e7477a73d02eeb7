// Package connlimit limits the number of open connections of a listener, so that idle connections neither exhaust the
// process's memory nor keep other clients from connecting.
package connlimit

import (
	"container/list"
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/loopback"
)

// Limits are the maximum numbers of open connections.
type Limits struct {
	// Total is the limit for all clients together, PerSource the limit for one IP address.
	Total, PerSource int
}

// Listener accepts every connection immediately. If a connection exceeds PerSource, Listener closes the oldest connection
// from the same source; if it exceeds Total, the oldest of all. So a short request, such as a probe of the kubelet, is
// answered no matter how many other connections are open.
type Listener struct {
	net.Listener
	limits Limits

	mu      sync.Mutex // Guards the fields below.
	open    list.List  // Of *conn, oldest first.
	sources map[netip.Addr]*list.List
}

// New returns a Listener that accepts from inner.
func New(inner net.Listener, limits Limits) *Listener {
	return &Listener{Listener: inner, limits: limits, sources: map[netip.Addr]*list.List{}}
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	accepted, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: accepted, listener: l, source: sourceOf(accepted.RemoteAddr())}
	if surplus := l.count(c); surplus != nil {
		_ = surplus.Close() // Its reader gets the error.
	}
	return c, nil
}

// Exempt stops counting a connection that Accept returned, because its client has authenticated itself.
func (l *Listener) Exempt(accepted net.Conn) {
	if c, ok := accepted.(*conn); ok {
		l.forget(c)
	}
}

// count adds a connection, and returns the connection to close instead, or nil.
func (l *Listener) count(c *conn) (surplus *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ofSource := l.sources[c.source]
	if ofSource == nil {
		ofSource = list.New()
		l.sources[c.source] = ofSource
	}
	c.inAll, c.inSource = l.open.PushBack(c), ofSource.PushBack(c)
	switch {
	case ofSource.Len() > l.limits.PerSource:
		surplus = ofSource.Front().Value.(*conn)
	case l.open.Len() > l.limits.Total:
		surplus = l.open.Front().Value.(*conn)
	default:
		return nil
	}
	l.remove(surplus)
	return surplus
}

func (l *Listener) forget(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.remove(c)
}

// remove removes a connection from both lists, if it is still counted. The caller holds the lock.
func (l *Listener) remove(c *conn) {
	if c.inAll == nil {
		return
	}
	ofSource := l.sources[c.source]
	l.open.Remove(c.inAll)
	ofSource.Remove(c.inSource)
	if ofSource.Len() == 0 {
		delete(l.sources, c.source)
	}
	c.inAll, c.inSource = nil, nil
}

// conn is a connection that its listener counts while it is open. The listener's lock guards inAll and inSource.
type conn struct {
	net.Conn
	listener        *Listener
	source          netip.Addr
	inAll, inSource *list.Element
}

func (c *conn) Close() error {
	c.listener.forget(c)
	return c.Conn.Close()
}

// sourceOf returns the IP address that a connection counts for. All connections without one share the zero address.
func sourceOf(address net.Addr) netip.Addr {
	if tcp, ok := address.(*net.TCPAddr); ok {
		return tcp.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

// Serve answers HTTP requests until ctx ends, within time limits that slow and idle clients can't exceed. It is plain HTTP if tlsConfig is nil, and then
// on a loopback address not for other hosts' names. It closes the listener.
func Serve(ctx context.Context, listener net.Listener, limits Limits, tlsConfig *tls.Config, handler http.Handler) error {
	limited := net.Listener(New(listener, limits))
	if tlsConfig != nil {
		limited = tls.NewListener(limited, tlsConfig)
	} else {
		handler = loopback.Handler(listener.Addr(), handler)
	}
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second,
		IdleTimeout: 5 * time.Second, MaxHeaderBytes: 16 << 10,
	}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(limited); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
