package extender

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/cluster"
)

// serving is a Server that answers on a loopback port.
type serving struct {
	address string
	stop    context.CancelFunc
	ended   chan error
}

func serve(t *testing.T, s *Server) serving {
	t.Helper()
	return serveWith(context.Background(), t, s)
}

func serveWith(ctx context.Context, t *testing.T, s *Server) serving {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	out := serving{address: listener.Addr().String(), stop: cancel, ended: make(chan error, 1)}
	go func() { out.ended <- s.Serve(ctx, listener) }()
	t.Cleanup(cancel)
	return out
}

func (s serving) wantEnd(t *testing.T) {
	t.Helper()
	select {
	case err := <-s.ended:
		if err != nil {
			t.Errorf("Serve: %v", err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("Serve doesn't end")
	}
}

// dial opens a connection and writes say to it.
func (s serving) dial(t *testing.T, say string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", s.address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if _, err := io.WriteString(conn, say); err != nil {
		t.Fatal(err)
	}
	return conn
}

// Connections without a request, or with an incomplete one, don't delay stopping, however long the limit for binds is.
func TestStoppingWaitsForNobodyWhoDoesNotAsk(t *testing.T) {
	f := start(t, newNode(t, "n1", 100))
	options := f.options(f.cluster)
	options.StopTimeout = time.Hour
	s := serve(t, NewServer(options))
	if got := get(t, http.DefaultClient, "http://"+s.address+"/livez"); got != "ok\n" {
		t.Fatalf("livez: %q", got)
	}
	silent := s.dial(t, "")
	half := s.dial(t, "POST "+Prefix+"/bind HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
	s.stop()
	s.wantEnd(t)
	for name, conn := range map[string]net.Conn{"silent": silent, "half": half} {
		if err := conn.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(conn); isTimeout(err) {
			t.Errorf("the %s connection is still open", name)
		}
	}
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// slowBind is a Cluster whose binds block until letGo is closed.
type slowBind struct {
	Cluster
	begun, letGo chan struct{}
}

func (s slowBind) Bind(context.Context, cluster.BindRequest) error {
	close(s.begun)
	<-s.letGo
	return nil
}

func TestStoppingWaitsForABindInFlight(t *testing.T) {
	f := start(t, newNode(t, "n1", 100))
	slow := slowBind{f.cluster, make(chan struct{}), make(chan struct{})}
	options := f.options(slow)
	options.StopTimeout = time.Hour
	server := NewServer(options)
	server.grace = time.Nanosecond // The grace must end before the bind does.
	s := serve(t, server)

	type outcome struct {
		result extenderv1.ExtenderBindingResult
		err    error
	}
	answered := make(chan outcome, 1)
	go func() {
		var out outcome
		response, err := http.Post("http://"+s.address+Prefix+"/bind", "application/json", strings.NewReader(text(t, bindArgs(newPod("p", 1), "n1"))))
		if out.err = err; err == nil {
			defer response.Body.Close()
			out.err = json.NewDecoder(response.Body).Decode(&out.result)
		}
		answered <- out
	}()
	<-slow.begun
	s.stop()
	await(t, "the listener to close", func() bool {
		conn, err := net.Dial("tcp", s.address)
		if err == nil {
			conn.Close()
		}
		return err != nil
	})
	select {
	case err := <-s.ended:
		t.Fatalf("Serve ended (%v) beside a bind in flight", err)
	default:
	}
	close(slow.letGo)
	if got := <-answered; got.err != nil || got.result.Error != "" {
		t.Errorf("the bind's answer: %+v", got)
	}
	s.wantEnd(t)
}

func TestServeTellsOfAListenerThatBreaks(t *testing.T) {
	f := start(t, newNode(t, "n1", 100))
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	listener.Close()
	if err := NewServer(f.options(f.cluster)).Serve(t.Context(), listener); err == nil || !strings.Contains(err.Error(), "serving on 127.0.0.1:") {
		t.Errorf("Serve: %v", err)
	}
}

// get returns the body, or the error's text.
func get(t *testing.T, client *http.Client, url string) string {
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

// The health address only reports the extender's state. Its clients must not be able to change anything.
func TestTheHealthAddressServesNoVerb(t *testing.T) {
	f := start(t, newNode(t, "n1", 100))
	handler := NewServer(f.options(f.cluster)).HealthHandler()
	for path, want := range map[string]int{
		"/livez": 200, "/readyz": 200, "/metrics": 200, "/version": 200, Prefix + "/inspect": 404, Prefix + "/inspect/n1": 404,
	} {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		if w.Code != want {
			t.Errorf("GET %s: %d, want %d", path, w.Code, want)
		}
	}
	for _, verb := range []string{"filter", "prioritize", "bind", "preempt"} {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodPost, Prefix+"/"+verb, strings.NewReader("{}")))
		if w.Code != http.StatusNotFound {
			t.Errorf("POST %s: %d, want 404", verb, w.Code)
		}
	}
}

// heldBind is a Cluster whose binds block until the client has disconnected.
type heldBind struct {
	Cluster
	begun, gone chan struct{}
}

func (h heldBind) Bind(ctx context.Context, _ cluster.BindRequest) error {
	close(h.begun)
	<-ctx.Done()
	close(h.gone)
	return ctx.Err()
}

// A member's bind can be held for a long time. If kube-scheduler gives up the call, the context of the held bind must end.
func TestACallThatIsGivenUpReachesWhoHoldsIt(t *testing.T) {
	f := start(t, newNode(t, "n1", 100))
	held := heldBind{f.cluster, make(chan struct{}), make(chan struct{})}
	s := serve(t, NewServer(f.options(held)))
	body := `{"PodName":"a","PodNamespace":"default","PodUID":"uid-a","Node":"n1"}`
	conn := s.dial(t, fmt.Sprintf("POST %s/bind HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", Prefix, len(body), body))
	<-held.begun
	conn.Close()
	select {
	case <-held.gone:
	case <-time.After(30 * time.Second):
		t.Error("it isn't told that its caller has gone")
	}
}

// Headers don't count towards the limit for all request bodies, so each header has its own limit.
func TestLongHeadersAreRefused(t *testing.T) {
	f := start(t, newNode(t, "n1", 100))
	server := NewServer(f.options(f.cluster))
	health, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = server.ServeHealth(t.Context(), health) }()
	for name, address := range map[string]string{"the verbs' address": serve(t, server).address, "the probes' address": health.Addr().String()} {
		for length, want := range map[int]int{maxHeader / 2: 200, 2 * maxHeader: http.StatusRequestHeaderFieldsTooLarge} {
			r, err := http.NewRequest(http.MethodGet, "http://"+address+"/livez", nil)
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("Authorization", "Bearer "+strings.Repeat("x", length))
			response, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(r)
			if err != nil {
				t.Fatal(err)
			}
			response.Body.Close()
			if response.StatusCode != want {
				t.Errorf("%s, a header of %d bytes: %d, want %d", name, length, response.StatusCode, want)
			}
		}
	}
}
