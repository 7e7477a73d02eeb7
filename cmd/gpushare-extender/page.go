package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/cluster"
	"github.com/gpushare/gpushare/pkg/extender"
	"github.com/gpushare/gpushare/pkg/version"
	"github.com/gpushare/gpushare/pkg/webui"
)

// page is the web page and where it is served. The zero value is no page.
type page struct {
	board   *webui.Board
	handler http.Handler
	// listener is nil where the page lies beside the verbs.
	listener net.Listener
	tls      *tls.Config
}

func newPage(o options, state *cluster.Cluster, standby func() error) (*page, error) {
	p := &page{}
	if !o.ui {
		return p, nil
	}
	p.board = webui.NewBoard(webui.Options{
		Source: state, Standby: standby, Version: version.Get().Version, Clock: clock.RealClock{},
	})
	var err error
	if p.handler, err = p.board.Handler(); err != nil || o.uiAddress == "" {
		return p, err
	}
	if o.tlsCertFile != "" {
		if p.tls, err = extender.ServerTLS(o.tlsCertFile, o.tlsKeyFile, ""); err != nil {
			return nil, err
		}
	}
	if p.listener, err = net.Listen("tcp", o.uiAddress); err != nil {
		return nil, fmt.Errorf("--ui-listen-address: %w", err)
	}
	return p, nil
}

// mounted is what answers on the verbs' address, nil for nothing.
func (p *page) mounted() http.Handler {
	if p.listener != nil {
		return nil
	}
	return p.handler
}

func (p *page) close() {
	if p.listener != nil {
		_ = p.listener.Close() // Closed already where it served.
	}
}

// run keeps the page up to date, and serves it where it has an address of its own, until ctx ends.
func (p *page) run(ctx context.Context) error {
	if p.board == nil {
		return nil
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return p.board.Run(ctx) })
	if p.listener != nil {
		klog.FromContext(ctx).Info("Showing the page", "address", p.listener.Addr().String(), "tls", p.tls != nil)
		g.Go(func() error { return webui.Serve(ctx, p.listener, p.handler, p.tls) })
	}
	return g.Wait()
}
