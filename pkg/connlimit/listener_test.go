package connlimit

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"
)

// stage is a Listener on loopback whose connections stay open until they are closed.
type stage struct {
	t        *testing.T
	listener *Listener
}

func newStage(t *testing.T, limits Limits) stage {
	t.Helper()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { inner.Close() })
	return stage{t, New(inner, limits)}
}

// connect opens a connection from a loopback address and returns both its ends.
func (s stage) connect(from string) (client, server net.Conn) {
	s.t.Helper()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	client, err := dialer.Dial("tcp", s.listener.Addr().String())
	if err != nil {
		s.t.Fatal(err)
	}
	if server, err = s.listener.Accept(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { client.Close(); server.Close() })
	return client, server
}

func (s stage) wantOpen(want int) {
	s.t.Helper()
	s.listener.mu.Lock()
	defer s.listener.mu.Unlock()
	if got := s.listener.open.Len(); got != want {
		s.t.Errorf("%d connections counted, want %d", got, want)
	}
	sum := 0
	for _, ofSource := range s.listener.sources {
		sum += ofSource.Len()
	}
	if sum != want {
		s.t.Errorf("%d connections are counted by source, want %d", sum, want)
	}
}

// wantClosed checks that the server has closed a connection, or that the connection still carries data.
func wantClosed(t *testing.T, client, server net.Conn, want bool) {
	t.Helper()
	if want {
		_ = client.SetReadDeadline(time.Now().Add(30 * time.Second))
		if _, err := client.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) || err == nil {
			t.Errorf("the connection is open (%v), want it closed", err)
		}
		return
	}
	if _, err := server.Write([]byte("x")); err != nil {
		t.Errorf("the connection is closed: %v", err)
	} else if _, err := io.ReadFull(client, make([]byte, 1)); err != nil {
		t.Errorf("the connection is closed: %v", err)
	}
}

// TestPerSourceLimit checks that a source above its limit loses its oldest connection, and no other source loses one.
func TestPerSourceLimit(t *testing.T) {
	s := newStage(t, Limits{Total: 10, PerSource: 2})
	other, otherServer := s.connect("127.0.0.2")
	first, firstServer := s.connect("127.0.0.3")
	second, secondServer := s.connect("127.0.0.3")
	third, thirdServer := s.connect("127.0.0.3")
	wantClosed(t, first, firstServer, true)
	wantClosed(t, second, secondServer, false)
	wantClosed(t, third, thirdServer, false)
	wantClosed(t, other, otherServer, false)
	s.wantOpen(3)
}

// TestTotalLimit checks that above the total limit the oldest connection is closed.
func TestTotalLimit(t *testing.T) {
	s := newStage(t, Limits{Total: 2, PerSource: 2})
	first, firstServer := s.connect("127.0.0.2")
	second, secondServer := s.connect("127.0.0.3")
	third, thirdServer := s.connect("127.0.0.4")
	wantClosed(t, first, firstServer, true)
	wantClosed(t, second, secondServer, false)
	wantClosed(t, third, thirdServer, false)
	s.wantOpen(2)
}

func TestExempt(t *testing.T) {
	s := newStage(t, Limits{Total: 1, PerSource: 1})
	known, knownServer := s.connect("127.0.0.2")
	s.listener.Exempt(knownServer)
	s.wantOpen(0)
	_, _ = s.connect("127.0.0.2")
	_, _ = s.connect("127.0.0.2")
	wantClosed(t, known, knownServer, false)
	s.wantOpen(1)
}

func TestClose(t *testing.T) {
	s := newStage(t, Limits{Total: 1, PerSource: 1})
	for range 3 {
		_, server := s.connect("127.0.0.2")
		server.Close()
		server.Close()
		s.wantOpen(0)
	}
	if len(s.listener.sources) != 0 {
		t.Error("a source without connections is remembered")
	}
}
