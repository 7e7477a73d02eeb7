package webui

import (
	"context"
	"net"
	"net/http"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

// Idle connections are limited, so that they neither exhaust memory nor keep a viewer out.
func TestMaxConnections(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, listener, http.NotFoundHandler(), nil) }()
	var first net.Conn
	for i := range maxConnections + 1 {
		conn, err := net.Dial("tcp", listener.Addr().String())
		check.Must(t, err)
		defer conn.Close()
		if i == 0 {
			first = conn
		}
	}
	if _, err := first.Read(make([]byte, 1)); err == nil {
		t.Error("the first connection is open, want it closed")
	}
	response, err := http.Get("http://" + listener.Addr().String())
	check.Must(t, err)
	response.Body.Close()
	cancel()
	check.NoError(t, <-ended)
}

// On loopback, the page is not for a site whose name leads here.
func TestForeignHost(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check.Must(t, err)
	go func() {
		_ = Serve(t.Context(), listener, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), nil)
	}()
	for host, want := range map[string]int{"localhost:8001": http.StatusOK, "rebound.example.com": http.StatusForbidden} {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+listener.Addr().String(), nil)
		check.Must(t, err)
		request.Host = host
		response, err := http.DefaultClient.Do(request)
		check.Must(t, err)
		response.Body.Close()
		if response.StatusCode != want {
			t.Errorf("%s: status %d, want %d", host, response.StatusCode, want)
		}
	}
}
