package extender

import (
	"bufio"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	extenderv1 "k8s.io/kube-scheduler/extender/v1"
)

var verbs = []string{"filter", "prioritize", "bind", "preempt"}

// A web page can make the browser send a request to any address that the browser reaches: with an Origin header, or with a
// content type for which the browser asks no permission of the server.
func TestVerbsRefuseRequestsOfWebPages(t *testing.T) {
	pod := newPod("p", 10)
	f := start(t, newNode(t, "n1", 100), pod)
	bind := text(t, bindArgs(pod, "n1"))
	for name, test := range map[string]struct {
		header http.Header
		status int
		want   string
	}{
		"another type":     {http.Header{"Content-Type": {"text/plain"}}, 415, errContentType.Error()},
		"a form":           {http.Header{"Content-Type": {"application/x-www-form-urlencoded"}}, 415, errContentType.Error()},
		"no type":          {nil, 415, errContentType.Error()},
		"an origin":        {http.Header{"Content-Type": {"application/json"}, "Origin": {"https://example.com"}}, 403, errOrigin.Error()},
		"an opaque origin": {http.Header{"Content-Type": {"application/json"}, "Origin": {"null"}}, 403, errOrigin.Error()},
	} {
		for _, verb := range verbs {
			w := httptest.NewRecorder()
			r := httptest.NewRequest(http.MethodPost, Prefix+"/"+verb, strings.NewReader(bind))
			r.Header = test.header
			f.handler.ServeHTTP(w, r)
			if w.Code != test.status || !strings.Contains(w.Body.String(), test.want) {
				t.Errorf("%s, %s: %d %s", verb, name, w.Code, w.Body)
			}
		}
	}
	if nodes := f.cluster.Ledger().Nodes(); len(nodes[0].Allocations) != 0 {
		t.Errorf("the ledger changed: %+v", nodes[0].Allocations)
	}

	r := newRequest(http.MethodPost, Prefix+"/bind", bind)
	r.Header.Set("Content-Type", "application/json; charset=utf-8")
	w := httptest.NewRecorder()
	f.handler.ServeHTTP(w, r)
	if got := answer[extenderv1.ExtenderBindingResult](t, w, 200).Error; got != "" {
		t.Errorf("with a character set: %s", got)
	}
}

// One CA can sign certificates for many clients. The name decides which client may call.
func TestOnlyNamedClientsCall(t *testing.T) {
	ca := newAuthority(t)
	cert, key := ca.issue("server", 2)
	pod := newPod("p", 10)
	f := start(t, newNode(t, "n1", 100), pod)
	options := f.options(f.cluster)
	options.ClientNames = []string{"other-scheduler", "kube-scheduler"}
	var err error
	options.TLS, err = ServerTLS(cert, key, ca.caFile(), func(at time.Time) { f.observer.CertificateExpires(CertificateServer, at) })
	if err != nil {
		t.Fatal(err)
	}
	s := serve(t, NewServer(options))
	t.Cleanup(func() {
		s.stop()
		s.wantEnd(t)
	})
	ask := func(client *http.Client, method, path, body string) (int, string) {
		t.Helper()
		r, err := http.NewRequest(method, "https://"+s.address+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		response, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		answer, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		return response.StatusCode, string(answer)
	}

	bind := text(t, bindArgs(pod, "n1"))
	tenant := ca.client(ca.issue("tenant.example", 3))
	want := `the client's certificate has the common name "tenant.example", --client-names allows other-scheduler, kube-scheduler`
	for _, verb := range verbs {
		if code, got := ask(tenant, http.MethodPost, Prefix+"/"+verb, bind); code != 403 || !strings.Contains(got, want) {
			t.Errorf("a tenant's %s: %d %s", verb, code, got)
		}
	}
	for _, path := range []string{"/inspect", "/inspect/n1"} {
		if code, _ := ask(tenant, http.MethodGet, Prefix+path, ""); code != 403 {
			t.Errorf("a tenant's %s: %d", path, code)
		}
	}
	for _, path := range []string{"/livez", "/readyz", "/metrics", "/version"} {
		if code, got := ask(tenant, http.MethodGet, path, ""); code != 200 {
			t.Errorf("another client's %s: %d %s", path, code, got)
		}
	}

	scheduler := ca.client(ca.issue("kube-scheduler", 4))
	config := scheduler.Transport.(*http.Transport).TLSClientConfig
	config.ClientSessionCache = tls.NewLRUClientSessionCache(1)
	for range 2 { // The second connection resumes the session.
		if code, got := ask(scheduler, http.MethodPost, Prefix+"/bind", bind); code != 200 || !strings.Contains(got, `"Error":""`) {
			t.Errorf("kube-scheduler's bind: %d %s", code, got)
		}
	}
	if code, got := ask(scheduler, http.MethodGet, Prefix+"/inspect/n1", ""); code != 200 {
		t.Errorf("kube-scheduler's inspect: %d %s", code, got)
	}

	// Both certificates are valid for an hour, and the CA for longer.
	for _, certificate := range []string{CertificateServer, CertificateClient} {
		const metric = "gpushare_extender_certificate_expiry_timestamp_seconds"
		families, err := f.registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		at := 0.0
		for _, family := range families {
			for _, m := range family.GetMetric() {
				if family.GetName() == metric && m.GetLabel()[0].GetValue() == certificate {
					at = m.GetGauge().GetValue()
				}
			}
		}
		if left := time.Until(time.Unix(int64(at), 0)); left <= 0 || left > time.Hour {
			t.Errorf("the certificate %s is good for %v", certificate, left)
		}
	}
}

func TestMetricsAskWhoMayReadThem(t *testing.T) {
	f := start(t, newNode(t, "n1", 100))
	options := f.options(f.cluster)
	options.AuthorizeMetrics = func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") == "" {
				http.Error(w, "who are you?", http.StatusUnauthorized)
				return
			}
			next.ServeHTTP(w, r)
		})
	}
	server := NewServer(options)
	for address, handler := range map[string]http.Handler{"the verbs' address": server.Handler(), "the probes' address": server.HealthHandler()} {
		for _, test := range []struct {
			path, token string
			want        int
		}{{"/metrics", "", 401}, {"/metrics", "Bearer x", 200}, {"/livez", "", 200}, {"/readyz", "", 200}} {
			w := httptest.NewRecorder()
			r := httptest.NewRequest(http.MethodGet, test.path, nil)
			r.Header.Set("Authorization", test.token)
			handler.ServeHTTP(w, r)
			if w.Code != test.want {
				t.Errorf("%s of %s with %q: %d, want %d", test.path, address, test.token, w.Code, test.want)
			}
		}
	}
}

// Idle connections, from one source or from many, don't keep the server from answering probes and kube-scheduler.
func TestIdleConnectionsDoNotShutOutProbes(t *testing.T) {
	f := start(t, newNode(t, "n1", 100))
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := NewServer(f.options(f.cluster))
	go func() { _ = server.ServeHealth(t.Context(), listener) }()
	address := listener.Addr().String()
	for i := range 3 * healthLimits.Total {
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(i%100))}}
		conn, err := dialer.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			continue // A later connection has already displaced this one.
		}
	}
	for range 3 { // The kubelet gives up after three failed probes.
		if got := get(t, &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}, "http://"+address+"/livez"); got != "ok\n" {
			t.Errorf("livez: %s", got)
		}
	}
}

// A client whose certificate was accepted keeps its connections, however many connections other clients open.
func TestStrangersDoNotCutOffKubeScheduler(t *testing.T) {
	ca := newAuthority(t)
	cert, key := ca.issue("server", 2)
	f := start(t, newNode(t, "n1", 100))
	options := f.options(f.cluster)
	options.ClientNames = []string{"kube-scheduler"}
	var err error
	if options.TLS, err = ServerTLS(cert, key, ca.caFile(), func(time.Time) {}); err != nil {
		t.Fatal(err)
	}
	s := serve(t, NewServer(options))
	// connect opens a connection with a certificate. It returns a function that sends a request on this connection and
	// awaits the answer.
	connect := func(name string) (*tls.Conn, func() error) {
		client := ca.client(ca.issue(name, 3))
		conn, err := tls.Dial("tcp", s.address, client.Transport.(*http.Transport).TLSClientConfig)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn, func() error {
			if _, err := io.WriteString(conn, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
				return err
			}
			response, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				return err
			}
			return response.Body.Close()
		}
	}
	_, askScheduler := connect("kube-scheduler")
	tenant, askTenant := connect("tenant.example")
	for _, ask := range []func() error{askScheduler, askTenant} {
		if err := ask(); err != nil {
			t.Fatal(err)
		}
	}
	for range strangerLimits.PerSource {
		s.dial(t, "")
	}
	_ = tenant.SetReadDeadline(time.Now().Add(30 * time.Second))
	if _, err := tenant.Read(make([]byte, 1)); err == nil || isTimeout(err) {
		t.Errorf("another client's connection is open (%v), want the oldest closed", err)
	}
	if err := askScheduler(); err != nil {
		t.Errorf("kube-scheduler's connection: %v", err)
	}
}
