package webui

import (
	"context"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// Idle connections are limited, so that they neither exhaust memory nor keep a viewer out.
func TestMaxConnections(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, listener, http.NotFoundHandler(), nil) }()
	var first net.Conn
	for i := range maxConnections + 1 {
		conn, err := net.Dial("tcp", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if i == 0 {
			first = conn
		}
	}
	if _, err := first.Read(make([]byte, 1)); err == nil {
		t.Error("the first connection is open, want it closed")
	}
	response, err := http.Get("http://" + listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestCompressedOnce(t *testing.T) {
	s := start(t, nil)
	s.ledger.SetNode("n1", spec(16))
	if text := unpack(t, s.ask(http.MethodGet, "/ui/data.json", "Accept-Encoding", "gzip").body); !strings.HasPrefix(text, `{"seq":`) {
		t.Errorf("%.100s", text)
	}
	s.board.mu.Lock()
	s.board.refreshed = s.board.Clock.Now().Add(time.Hour) // No refresh from here on.
	s.board.mu.Unlock()
	first, err := s.board.Packed()
	if err != nil {
		t.Fatal(err)
	}
	if again, err := s.board.Packed(); err != nil || &again[0] != &first[0] {
		t.Errorf("compressed again: %v", err)
	}
}
