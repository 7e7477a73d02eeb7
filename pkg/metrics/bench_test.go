package metrics

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// discard is a ResponseWriter that discards what is written.
type discard struct{ http.ResponseWriter }

func (discard) Write(b []byte) (int, error) { return len(b), nil }

// BenchmarkScrape measures a scrape with the series of each card of 5,000 nodes.
func BenchmarkScrape(b *testing.B) {
	l := ledger.New()
	for i := range 5000 {
		var cards []gpu.Card
		for c := range 8 {
			cards = append(cards, gpu.Card{Index: c, Memory: 16276})
		}
		l.SetNode(fmt.Sprintf("node-%04d", i), ledger.NodeSpec{Cards: cards})
	}
	registry := prometheus.NewRegistry()
	cards := NewLedger(registry, l, func() error { return nil }, always)
	handler := promhttp.HandlerFor(cards.Beside(registry), promhttp.HandlerOpts{})
	request := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	request.Header.Set("Accept-Encoding", "gzip")
	for b.Loop() {
		handler.ServeHTTP(discard{httptest.NewRecorder()}, request)
	}
}
