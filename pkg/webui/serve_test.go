package webui

import (
	"compress/gzip"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// crowd is a listener with as many clients as are asked for.
type crowd struct {
	net.Listener
	accepted atomic.Int64
	clients  chan net.Conn
}

func (c *crowd) Accept() (net.Conn, error) {
	theirs, ours := net.Pipe()
	c.accepted.Add(1)
	select {
	case c.clients <- theirs:
		return ours, nil
	default: // More than there may be.
		return c.Listener.Accept()
	}
}

// An address of its own takes no more connections than there can be viewers, and a little: who opens thousands doesn't take
// the memory that binds need.
func TestConnectionsAreBounded(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &crowd{Listener: listener, clients: make(chan net.Conn, maxConnections+1)}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, c, http.NotFoundHandler(), nil) }()
	for c.accepted.Load() < maxConnections {
		time.Sleep(time.Millisecond)
	}
	left := <-c.clients
	if n := c.accepted.Load(); n != maxConnections {
		t.Errorf("%d connections are open, want %d at most", n, maxConnections)
	}
	left.Close()
	for c.accepted.Load() == maxConnections { // There is room again.
		time.Sleep(time.Millisecond)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestTheWholeBoardIsPackedOnce(t *testing.T) {
	s := start(t, nil)
	s.book.SetNode("n1", spec(16))
	answer := s.ask(http.MethodGet, "/ui/data.json", "Accept-Encoding", "gzip")
	reader, err := gzip.NewReader(strings.NewReader(answer.body))
	if err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(reader); err != nil || !strings.HasPrefix(string(text), `{"seq":`) {
		t.Errorf("%.100s (%v)", text, err)
	}
	s.board.mu.Lock()
	s.board.refreshed = s.board.Clock.Now().Add(time.Hour) // Nothing changes from here on.
	s.board.mu.Unlock()
	first, err := s.board.Packed()
	if err != nil {
		t.Fatal(err)
	}
	if again, err := s.board.Packed(); err != nil || &again[0] != &first[0] {
		t.Errorf("packed again: %v", err)
	}
}
