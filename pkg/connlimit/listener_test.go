package connlimit

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/gpushare/gpushare/test/check"
)

// stage is a Listener on loopback whose connections stay open until they are closed.
type stage struct {
	t        *testing.T
	listener *Listener
}

func newStage(t *testing.T, limit int) stage {
	t.Helper()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	check.Must(t, err)
	t.Cleanup(func() { inner.Close() })
	return stage{t, New(inner, limit)}
}

// connection is both ends of a connection.
type connection struct{ client, server net.Conn }

// connect opens a connection.
func (s stage) connect() connection {
	s.t.Helper()
	client, err := net.Dial("tcp", s.listener.Addr().String())
	check.Must(s.t, err)
	server, err := s.listener.Accept()
	check.Must(s.t, err)
	s.t.Cleanup(func() { client.Close(); server.Close() })
	return connection{client, server}
}

func (s stage) wantOpen(want int) {
	s.t.Helper()
	s.listener.mu.Lock()
	defer s.listener.mu.Unlock()
	if got := s.listener.open.Len(); got != want {
		s.t.Errorf("%d connections counted, want %d", got, want)
	}
}

// wantClosed checks that the server has closed the connection.
func (s stage) wantClosed(c connection) {
	s.t.Helper()
	_ = c.client.SetReadDeadline(time.Now().Add(30 * time.Second))
	if _, err := c.client.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) || err == nil {
		s.t.Errorf("the connection is open (%v), want it closed", err)
	}
}

// wantData checks that the connections carry data.
func (s stage) wantData(connections ...connection) {
	s.t.Helper()
	for i, c := range connections {
		if _, err := c.server.Write([]byte("x")); err != nil {
			s.t.Errorf("connection %d is closed: %v", i, err)
		} else if _, err := io.ReadFull(c.client, make([]byte, 1)); err != nil {
			s.t.Errorf("connection %d is closed: %v", i, err)
		}
	}
}

// TestLimit checks that above the limit the oldest connection is closed.
func TestLimit(t *testing.T) {
	s := newStage(t, 2)
	first, second, third := s.connect(), s.connect(), s.connect()
	s.wantClosed(first)
	s.wantData(second, third)
	s.wantOpen(2)
}

func TestExempt(t *testing.T) {
	s := newStage(t, 1)
	known := s.connect()
	s.listener.Exempt(known.server)
	s.wantOpen(0)
	s.connect()
	s.connect()
	s.wantData(known)
	s.wantOpen(1)
}

func TestClose(t *testing.T) {
	s := newStage(t, 1)
	for range 3 {
		c := s.connect()
		c.server.Close()
		c.server.Close()
		s.wantOpen(0)
	}
}
