package mps

import (
	"fmt"
	"net/http"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Metrics are those of the daemons.
type Metrics struct {
	states   *prometheus.GaugeVec
	restarts *prometheus.CounterVec
}

// NewMetrics returns the metrics of no daemon, and registers them.
func NewMetrics(registerer prometheus.Registerer) *Metrics {
	m := &Metrics{
		states: prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: "gpushare", Subsystem: "mps", Name: "daemon_state",
			Help: "1 for the state of the card's MPS daemon."}, []string{"uuid", "state"}),
		restarts: prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "gpushare", Subsystem: "mps", Name: "daemon_restarts_total",
			Help: "Ends of the card's MPS daemon that were not wanted. Each one ends the programs that use the card."}, []string{"uuid"}),
	}
	registerer.MustRegister(m.states, m.restarts)
	return m
}

func (m *Metrics) set(uuid string, state State) {
	m.restarts.WithLabelValues(uuid)
	for _, s := range States() {
		value := 0.0
		if s == state {
			value = 1
		}
		m.states.WithLabelValues(uuid, string(s)).Set(value)
	}
}

// forget removes the metrics of a card.
func (m *Metrics) forget(uuid string) {
	m.states.DeletePartialMatch(prometheus.Labels{"uuid": uuid})
	m.restarts.DeleteLabelValues(uuid)
}

// Handler returns the handler for health and metrics. A daemon that isn't ready makes the pod not ready; restarting the pod
// wouldn't help, and would end the clients of the other cards.
func (s *Supervisor) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if reasons := s.NotReady(); len(reasons) > 0 {
			http.Error(w, strings.Join(reasons, "\n"), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{MaxRequestsInFlight: 8}))
	return mux
}
