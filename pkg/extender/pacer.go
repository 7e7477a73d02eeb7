package extender

import (
	"context"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"
)

const (
	// keptIdle is the number of idle connections that kube-scheduler keeps. If an answer leaves it with another one, it closes
	// that, and opens a new one for a later bind (net/http, DefaultMaxIdleConnsPerHost).
	keptIdle = 2
	// maxHold is the longest time for which the answer to a bind is held: longer than binds are collected by default (--bind-window) and
	// then written, also where the API server is busy, so that the next ones need the connections.
	maxHold = time.Second
)

// pacer holds answers to successful binds until later binds need their connections. Binds that are written together would
// otherwise be answered together, and nearly each of the next ones would begin with a TLS handshake, which costs about as much as
// the bind itself. A pod doesn't wait for the answer: it is bound already. The connections of several schedulers count together.
type pacer struct {
	// longest is maxHold, except in tests.
	longest time.Duration

	mu sync.Mutex
	// spare are the connections without a bind in flight. Those with other calls count: they are answered at once.
	spare map[net.Conn]struct{}
	// held are the held answers, the oldest first.
	held []heldAnswer
}

type heldAnswer struct {
	conn    net.Conn
	release chan struct{}
}

// connKey is the key of a request's connection in its context.
type connKey struct{}

func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// begin records that a bind has arrived.
func (p *pacer) begin(ctx context.Context) {
	if conn, ok := ctx.Value(connKey{}).(net.Conn); ok {
		p.update(func() { delete(p.spare, conn) })
	}
}

// end records that a call of kube-scheduler has been answered, or is about to be.
func (p *pacer) end(ctx context.Context) {
	if conn, ok := ctx.Value(connKey{}).(net.Conn); ok {
		p.update(func() { p.spare[conn] = struct{}{} })
	}
}

// connState records connections that are closed.
func (p *pacer) connState(conn net.Conn, state http.ConnState) {
	if state == http.StateClosed {
		p.update(func() { delete(p.spare, conn) })
	}
}

// hold blocks until the client has a use for the connection of a bind, the longest time has passed, or ctx ends.
func (p *pacer) hold(ctx context.Context) {
	conn, ok := ctx.Value(connKey{}).(net.Conn)
	if !ok {
		return
	}
	answer := heldAnswer{conn: conn, release: make(chan struct{})}
	p.update(func() { p.held = append(p.held, answer) })
	timer := time.NewTimer(p.longest)
	defer timer.Stop()
	select {
	case <-answer.release:
	case <-timer.C:
	case <-ctx.Done():
	}
	p.update(func() {
		p.held = slices.DeleteFunc(p.held, func(h heldAnswer) bool { return h.release == answer.release })
	})
}

// update applies a change, and releases the answers whose connections kube-scheduler keeps.
func (p *pacer) update(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
	for len(p.held) > 0 && len(p.spare) < keptIdle {
		p.spare[p.held[0].conn] = struct{}{}
		close(p.held[0].release)
		p.held = p.held[1:]
	}
}
