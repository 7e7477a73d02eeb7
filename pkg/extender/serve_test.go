package extender

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/scheduling"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// serving is a Server that answers on a loopback port.
type serving struct {
	address string
	stop    context.CancelFunc
	ended   chan error
}

func serve(t *testing.T, s *Server) serving {
	t.Helper()
	return serveWith(context.Background(), t, s.Serve)
}

// serveWith calls serve, one of the Server's methods, with a listener.
func serveWith(ctx context.Context, t *testing.T, serve func(context.Context, net.Listener) error) serving {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check.Must(t, err)
	ctx, cancel := context.WithCancel(ctx)
	out := serving{address: listener.Addr().String(), stop: cancel, ended: make(chan error, 1)}
	go func() { out.ended <- serve(ctx, listener) }()
	t.Cleanup(cancel)
	return out
}

func (s serving) wantEnd(t *testing.T) {
	t.Helper()
	if err := await.Receive(t, "the end of Serve", s.ended); err != nil {
		t.Errorf("Serve: %v", err)
	}
}

// dial opens a connection and sends the text.
func (s serving) dial(t *testing.T, text string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", s.address)
	check.Must(t, err)
	t.Cleanup(func() { conn.Close() })
	if _, err := io.WriteString(conn, text); err != nil {
		t.Fatal(err)
	}
	return conn
}

// rawPost returns a verb's request as text. length is the Content-Length.
func rawPost(verb string, length int, body string) string {
	return fmt.Sprintf("POST %s/%s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", Prefix, verb, length, body)
}

const rawLivez = "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"

// fetch returns the body of an answer, or the error's text.
func fetch(t *testing.T, client *http.Client, url string) string {
	t.Helper()
	response, err := client.Get(url)
	if err != nil {
		return err.Error()
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err.Error()
	}
	return string(body)
}

// statusFor returns the status of the answer to a request for a path with this Host.
func statusFor(t *testing.T, client *http.Client, url, host string) int {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	check.Must(t, err)
	request.Host = host
	response, err := client.Do(request)
	check.Must(t, err)
	response.Body.Close()
	return response.StatusCode
}

// On loopback, plain HTTP is answered only for local names: a web page whose name leads here gets nothing.
func TestForeignHost(t *testing.T) {
	server := newServer(&fakeScheduler{})
	for path, serving := range map[string]serving{
		Prefix + "/inspect": serve(t, server), "/metrics": serveWith(context.Background(), t, server.ServeHealth),
	} {
		for host, want := range map[string]int{"localhost:8001": http.StatusOK, "rebound.example.com": http.StatusForbidden} {
			if got := statusFor(t, http.DefaultClient, "http://"+serving.address+path, host); got != want {
				t.Errorf("%s for %s: status %d, want %d", path, host, got, want)
			}
		}
	}
	// A certificate proves who answers, so a browser that doesn't trust it for the name stops there.
	ca := newAuthority(t)
	secure := serveTLS(t, ca.serverTLS("", ignoreExpiry))
	if got := statusFor(t, ca.client("", ""), "https://"+secure.address+Prefix+"/inspect", "gpus.example.com"); got != http.StatusOK {
		t.Errorf("with TLS: status %d, want 200", got)
	}
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// Connections without a request, or with an incomplete one, don't delay stopping, however long the limit for binds is.
func TestStopIncompleteRequests(t *testing.T) {
	s := serve(t, newServer(&fakeScheduler{}, func(o *Options) { o.StopTimeout = time.Hour }))
	if got := fetch(t, http.DefaultClient, "http://"+s.address+"/livez"); got != "ok\n" {
		t.Fatalf("livez: %q", got)
	}
	silent, half := s.dial(t, ""), s.dial(t, rawPost("bind", 100, "{"))
	s.stop()
	s.wantEnd(t)
	for name, conn := range map[string]net.Conn{"silent": silent, "half": half} {
		check.Must(t, conn.SetReadDeadline(time.Now().Add(30*time.Second)))
		if _, err := io.ReadAll(conn); isTimeout(err) {
			t.Errorf("the %s connection is still open", name)
		}
	}
}

func TestStopWaitsForBinds(t *testing.T) {
	begun, release := make(chan struct{}), make(chan struct{})
	server := newServer(&fakeScheduler{bind: func(context.Context, scheduling.BindRequest) error {
		close(begun)
		<-release
		return nil
	}}, func(o *Options) { o.StopTimeout = time.Hour })
	server.stopGrace = time.Nanosecond // It must end before the bind does.
	s := serve(t, server)
	body := validBodies(t)["bind"]
	conn := s.dial(t, strings.Replace(rawPost("bind", len(body), body), "Host: localhost", "Host: localhost\r\nConnection: close", 1))
	<-begun
	if n := server.InFlight(); n != 1 {
		t.Errorf("%d calls in flight, want 1", n)
	}
	s.stop()
	await.True(t, "the listener is closed", func() bool {
		conn, err := net.Dial("tcp", s.address)
		if err == nil {
			conn.Close()
		}
		return err != nil
	})
	select {
	case err := <-s.ended:
		t.Fatalf("Serve ended (%v) before a bind in flight", err)
	default:
	}
	close(release)
	if got, err := io.ReadAll(conn); err != nil || !strings.HasSuffix(string(got), `{"Error":""}`+"\n") {
		t.Errorf("the bind's answer: %s (%v)", got, err)
	}
	s.wantEnd(t)
}

func TestServeBrokenListener(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check.Must(t, err)
	listener.Close()
	if err := newServer(&fakeScheduler{}).Serve(t.Context(), listener); err == nil || !strings.Contains(err.Error(), "serving on 127.0.0.1:") {
		t.Errorf("Serve: %v", err)
	}
}

// The health address only reports the extender's state. Its clients must not be able to change anything.
func TestHealthAddress(t *testing.T) {
	h := newServer(&fakeScheduler{}).HealthHandler()
	for path, want := range map[string]int{
		"/livez": 200, "/readyz": 200, "/metrics": 200, "/version": 200, Prefix + "/inspect": 404, Prefix + "/inspect/n1": 404,
	} {
		if w := get(h, path); w.Code != want {
			t.Errorf("GET %s: %d, want %d", path, w.Code, want)
		}
	}
	for verb, body := range validBodies(t) {
		if w := post(h, verb, body); w.Code != http.StatusNotFound {
			t.Errorf("POST %s: %d, want 404", verb, w.Code)
		}
	}
}

// A member's bind can be held for a long time. If kube-scheduler gives up the call, the context of the held bind ends.
func TestCancelledCall(t *testing.T) {
	begun, ended := make(chan struct{}), make(chan struct{})
	s := serve(t, newServer(&fakeScheduler{bind: func(ctx context.Context, _ scheduling.BindRequest) error {
		close(begun)
		<-ctx.Done()
		close(ended)
		return ctx.Err()
	}}))
	body := validBodies(t)["bind"]
	conn := s.dial(t, rawPost("bind", len(body), body))
	<-begun
	conn.Close()
	await.Receive(t, "the end of the bind's context", ended)
}

// Headers don't count towards the limit for all request bodies, so each header has its own limit.
func TestLongHeaders(t *testing.T) {
	server := newServer(&fakeScheduler{})
	for name, s := range map[string]serving{"main": serve(t, server), "health": serveWith(t.Context(), t, server.ServeHealth)} {
		for length, want := range map[int]int{maxHeader / 2: 200, 2 * maxHeader: http.StatusRequestHeaderFieldsTooLarge} {
			r, err := http.NewRequest(http.MethodGet, "http://"+s.address+"/livez", nil)
			check.Must(t, err)
			r.Header.Set("Authorization", "Bearer "+strings.Repeat("x", length))
			response, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(r)
			check.Must(t, err)
			response.Body.Close()
			if response.StatusCode != want {
				t.Errorf("%s address, a header of %d bytes: %d, want %d", name, length, response.StatusCode, want)
			}
		}
	}
}
