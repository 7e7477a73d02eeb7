package deviceplugin

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

func TestHTTP(t *testing.T) {
	b := newFixture(t)
	k := startKubelet(t, b.dir)
	p, _ := b.start(nil)
	server := httptest.NewServer(p.handler())
	defer server.Close()
	get := func(path string) int {
		t.Helper()
		response, err := http.Get(server.URL + path)
		check.Must(t, err)
		defer response.Body.Close()
		return response.StatusCode
	}
	for path, want := range map[string]int{"/livez": 200, "/readyz": 503, "/metrics": 200, "/version": 200, "/": 404} {
		if got := get(path); got != want {
			t.Errorf("%s gave %d, want %d", path, got, want)
		}
	}
	authorizing := &Plugin{metrics: p.metrics, options: Options{AuthorizeMetrics: func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) })
	}}}
	guarded := httptest.NewRecorder()
	authorizing.handler().ServeHTTP(guarded, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if guarded.Code != http.StatusUnauthorized {
		t.Errorf("metrics without authorization gave %d", guarded.Code)
	}
	p.SetCards(gpu.GiB, newCards(16), nil, nil, "")
	k.awaitDevices(16, 16)
	await.True(t, "ready", func() bool { return get("/readyz") == 200 })
}

func TestBadAddress(t *testing.T) {
	b := newFixture(t)
	p, err := New(Options{Client: fakeClient(b.client), Events: b.events, NodeName: testNode, Directory: b.dir, ListenAddress: "127.0.0.1:nowhere"})
	check.Must(t, err)
	if err := p.Run(context.Background()); err == nil {
		t.Error("no error for an invalid address")
	}
	if _, err := New(Options{}); err == nil {
		t.Error("no error for empty options")
	}
}

func TestMetrics(t *testing.T) {
	m := newMetrics(func() bool { return true })
	m.setCards(newCards(16))
	problems, err := testutil.GatherAndLint(m.registry)
	check.Must(t, err)
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}
