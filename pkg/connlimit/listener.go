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
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/loopback"
)

// Listener accepts every connection immediately. If there are more than the limit, Listener closes the oldest one. So a short request, such as a probe
// of the kubelet, is answered no matter how many other connections are open.
type Listener struct {
	net.Listener
	limit int

	mu   sync.Mutex
	open list.List // Of *conn, oldest first. Guarded by mu.
}

// New returns a Listener that accepts from inner.
func New(inner net.Listener, limit int) *Listener { return &Listener{Listener: inner, limit: limit} }

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	accepted, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: accepted, listener: l}
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
	c.element = l.open.PushBack(c)
	if l.open.Len() <= l.limit {
		return nil
	}
	return l.open.Remove(l.open.Front()).(*conn)
}

// forget removes a connection from the list, if it is still in it.
func (l *Listener) forget(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open.Remove(c.element)
}

// conn is a connection that its listener counts while it is open.
type conn struct {
	net.Conn
	listener *Listener
	element  *list.Element
}

func (c *conn) Close() error {
	c.listener.forget(c)
	return c.Conn.Close()
}

// Serve answers HTTP requests until ctx ends, within time limits that slow and idle clients can't exceed. It is plain HTTP if tlsConfig is nil, and then
// on a loopback address not for other hosts' names. It closes the listener.
func Serve(ctx context.Context, listener net.Listener, limit int, tlsConfig *tls.Config, handler http.Handler) error {
	limited := net.Listener(New(listener, limit))
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
