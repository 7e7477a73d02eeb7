package extender

import (
	"bufio"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/gpushare/gpushare/test/check"
)

// A web page can make the browser send a request to any address that the browser reaches: with an Origin header, or with a
// content type for which the browser needs no permission of the server.
func TestWebPagesRejected(t *testing.T) {
	scheduler := &fakeScheduler{}
	h := newServer(scheduler).Handler()
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
		for verb, body := range validBodies(t) {
			r := newRequest(http.MethodPost, Prefix+"/"+verb, body)
			r.Header = test.header
			if w := serveOne(h, r); w.Code != test.status || !strings.Contains(w.Body.String(), test.want) {
				t.Errorf("%s, %s: %d %s", verb, name, w.Code, w.Body)
			}
		}
	}
	if scheduler.calls != 0 {
		t.Errorf("%d calls reached the Scheduler", scheduler.calls)
	}
	r := newRequest(http.MethodPost, Prefix+"/bind", validBodies(t)["bind"])
	r.Header.Set("Content-Type", "application/json; charset=utf-8")
	if got := answer[bindResult](t, serveOne(h, r), 200).Error; got != "" {
		t.Errorf("with a character set: %s", got)
	}
}

// One CA can sign certificates for many clients. The name decides which client may call.
func TestClientNames(t *testing.T) {
	ca, observer := newAuthority(t), newObserver()
	s := serve(t, newServer(&fakeScheduler{}, func(o *Options) {
		o.ClientNames, o.Observer = []string{"other-scheduler", "kube-scheduler"}, observer
		o.TLS = ca.serverTLS(ca.caFile(), func(at time.Time) { observer.CertificateExpires(CertificateServer, at) })
	}))
	send := func(client *http.Client, method, path, body string) (int, string) {
		t.Helper()
		r, err := http.NewRequest(method, "https://"+s.address+path, strings.NewReader(body))
		check.Must(t, err)
		r.Header.Set("Content-Type", "application/json")
		response, err := client.Do(r)
		check.Must(t, err)
		defer response.Body.Close()
		answer, err := io.ReadAll(response.Body)
		check.Must(t, err)
		return response.StatusCode, string(answer)
	}

	tenant := ca.client(ca.issue("tenant.example", 3))
	want := `the client's certificate has the common name "tenant.example", --client-names allows other-scheduler, kube-scheduler`
	for verb, body := range validBodies(t) {
		if code, got := send(tenant, http.MethodPost, Prefix+"/"+verb, body); code != 403 || !strings.Contains(got, want) {
			t.Errorf("a tenant's %s: %d %s", verb, code, got)
		}
	}
	for path, want := range map[string]int{
		Prefix + "/inspect": 403, Prefix + "/inspect/n1": 403, "/livez": 200, "/readyz": 200, "/metrics": 200, "/version": 200,
	} {
		if code, got := send(tenant, http.MethodGet, path, ""); code != want {
			t.Errorf("a tenant's %s: %d %s", path, code, got)
		}
	}

	scheduler := ca.client(ca.issue("kube-scheduler", 4))
	scheduler.Transport.(*http.Transport).TLSClientConfig.ClientSessionCache = tls.NewLRUClientSessionCache(1)
	for range 2 { // The second connection resumes the session.
		if code, got := send(scheduler, http.MethodPost, Prefix+"/bind", validBodies(t)["bind"]); code != 200 || !strings.Contains(got, `"Error":""`) {
			t.Errorf("kube-scheduler's bind: %d %s", code, got)
		}
	}
	if code, got := send(scheduler, http.MethodGet, Prefix+"/inspect", ""); code != 200 {
		t.Errorf("kube-scheduler's inspect: %d %s", code, got)
	}
	s.stop()
	s.wantEnd(t)
	for _, certificate := range []string{CertificateServer, CertificateClient} {
		// Both certificates are valid for an hour, and the CA for longer.
		if left := time.Until(observer.expires[certificate]); left <= 0 || left > time.Hour {
			t.Errorf("the certificate %s expires in %v", certificate, left)
		}
	}
}

func TestAuthorizeMetrics(t *testing.T) {
	server := newServer(&fakeScheduler{}, func(o *Options) {
		o.AuthorizeMetrics = func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Authorization") == "" {
					http.Error(w, "no token", http.StatusUnauthorized)
					return
				}
				next.ServeHTTP(w, r)
			})
		}
	})
	for address, handler := range map[string]http.Handler{"main": server.Handler(), "health": server.HealthHandler()} {
		for _, test := range []struct {
			path, token string
			want        int
		}{{"/metrics", "", 401}, {"/metrics", "Bearer x", 200}, {"/livez", "", 200}, {"/readyz", "", 200}} {
			r := newRequest(http.MethodGet, test.path, "")
			r.Header.Set("Authorization", test.token)
			if w := serveOne(handler, r); w.Code != test.want {
				t.Errorf("%s of the %s address with %q: %d, want %d", test.path, address, test.token, w.Code, test.want)
			}
		}
	}
}

// Idle connections don't keep the server from answering probes.
func TestIdleConnections(t *testing.T) {
	s := serveWith(t.Context(), t, newServer(&fakeScheduler{}).ServeHealth)
	for range 3 * healthLimit {
		conn, err := net.Dial("tcp", s.address)
		check.Must(t, err)
		defer conn.Close()
		_, _ = io.WriteString(conn, rawLivez) // It fails if a later connection has already displaced this one.
	}
	for range 3 { // The kubelet gives up after three failed probes.
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
		if got := fetch(t, client, "http://"+s.address+"/livez"); got != "ok\n" {
			t.Errorf("livez: %s", got)
		}
	}
}

// A client whose certificate was accepted keeps its connections, however many connections other clients open.
func TestAcceptedClientKeepsConnection(t *testing.T) {
	ca := newAuthority(t)
	server := newServer(&fakeScheduler{}, func(o *Options) {
		o.ClientNames, o.TLS = []string{"kube-scheduler"}, ca.serverTLS(ca.caFile(), ignoreExpiry)
	})
	server.strangers = 32 // So many connections that send nothing are opened before the first of them is closed for that.
	s := serve(t, server)
	connect := func(name string) *tls.Conn {
		conn, err := tls.Dial("tcp", s.address, ca.client(ca.issue(name, 3)).Transport.(*http.Transport).TLSClientConfig)
		check.Must(t, err)
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	// livez sends a request on the connection and awaits the answer.
	livez := func(conn *tls.Conn) error {
		if _, err := io.WriteString(conn, rawLivez); err != nil {
			return err
		}
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			return err
		}
		return response.Body.Close()
	}
	scheduler, tenant := connect("kube-scheduler"), connect("tenant.example")
	for _, conn := range []*tls.Conn{scheduler, tenant} {
		check.Must(t, livez(conn))
	}
	for range server.strangers {
		s.dial(t, "")
	}
	_ = tenant.SetReadDeadline(time.Now().Add(30 * time.Second))
	if _, err := tenant.Read(make([]byte, 1)); err == nil || isTimeout(err) {
		t.Errorf("the tenant's connection is open (%v), want the oldest closed", err)
	}
	if err := livez(scheduler); err != nil {
		t.Errorf("kube-scheduler's connection: %v", err)
	}
}
