// Package connlimit bounds the number of open connections of a listener, so that clients that open connections and keep
// them neither exhaust the process's memory nor keep others from connecting.
package connlimit

import (
	"container/list"
	"net"
	"net/netip"
	"sync"
)

// Limits are how many connections may be open at once.
type Limits struct {
	// Total counts the connections of all clients, PerSource those from one IP address.
	Total, PerSource int
}

// Listener accepts every connection at once. Where a connection exceeds a limit, Listener closes the oldest one in its
// place: of the same source where that one has too many, else of all. So a client that asks a short question, such as
// the kubelet with a probe, gets its answer however many others are connected.
type Listener struct {
	net.Listener
	limits Limits

	mu      sync.Mutex // Guards what follows.
	open    list.List  // Of *conn, the oldest first.
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
		_ = surplus.Close() // Its own user notices.
	}
	return c, nil
}

// Exempt stops counting a connection that Accept returned: its client has proved who it is.
func (l *Listener) Exempt(accepted net.Conn) {
	if c, ok := accepted.(*conn); ok {
		l.forget(c)
	}
}

// count adds a connection, and returns the one that is to be closed for it, or nil.
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

// remove takes a connection out of both lists, if it is there. The caller holds the lock.
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

// conn is a connection that its listener counts while it is open. The listener's lock guards the elements.
type conn struct {
	net.Conn
	listener        *Listener
	source          netip.Addr
	inAll, inSource *list.Element
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.listener.forget(c)
	return c.Conn.Close()
}

// sourceOf returns the address that a connection counts for; that of all others where it isn't an IP address.
func sourceOf(address net.Addr) netip.Addr {
	if tcp, ok := address.(*net.TCPAddr); ok {
		return tcp.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}
