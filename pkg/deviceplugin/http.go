package deviceplugin

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/connlimit"
	"github.com/gpushare/gpushare/pkg/version"
)

// maxConnections limits the open connections. It is far above what probes and scrapers need.
const maxConnections = 256

// maxScrapes bounds the number of concurrent scrapes.
const maxScrapes = 8

// handler returns the handler for health, metrics and version.
func (p *Plugin) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if missing := p.missing(); len(missing) > 0 {
			http.Error(w, strings.Join(missing, "\n"), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(version.Get()) // The client may have disconnected.
	})
	scrape := promhttp.HandlerFor(p.metrics.registry, promhttp.HandlerOpts{MaxRequestsInFlight: maxScrapes})
	var metrics http.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.metrics.setCards(p.cards.Get().Cards)
		p.metrics.setIsolation(p.cards.Get().Mode)
		scrape.ServeHTTP(w, r)
	})
	if p.options.AuthorizeMetrics != nil {
		metrics = p.options.AuthorizeMetrics(metrics)
	}
	mux.Handle("GET /metrics", metrics)
	return mux
}

// missing returns the reasons why the plugin is not ready; none if it is.
func (p *Plugin) missing() []string {
	var out []string
	if problem := p.cards.Get().Missing(); problem != "" {
		out = append(out, problem)
	}
	if !p.pods.informer.HasSynced() || !p.node.informer.HasSynced() {
		out = append(out, "the node and its pods have not been read from the API server yet")
	} else if _, err := p.node.node(); err != nil {
		out = append(out, err.Error())
	} else if !p.node.Written() {
		out = append(out, "the inventory isn't on the node yet")
	}
	if problem := p.configurator.Missing(); problem != "" {
		out = append(out, problem)
	}
	if !p.service.Listening() {
		out = append(out, "the kubelet isn't connected")
	}
	return out
}

// listen opens the address, before anything starts: an unusable one is an error at once. It returns nil if it is empty.
func listen(ctx context.Context, address string) (net.Listener, error) {
	if address == "" {
		return nil, nil
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", address, err)
	}
	return listener, nil
}

// serve answers requests until the context ends. It returns at once without a listener.
func serve(ctx context.Context, listener net.Listener, handler http.Handler, what string) error {
	if listener == nil {
		return nil
	}
	klog.FromContext(ctx).Info("Serving", "what", what, "address", listener.Addr().String())
	if err := connlimit.Serve(ctx, listener, maxConnections, nil, handler); err != nil {
		return fmt.Errorf("serving %s: %w", what, err)
	}
	return nil
}
