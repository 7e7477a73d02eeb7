package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/connlimit"
	"github.com/gpushare/gpushare/pkg/extender"
	"github.com/gpushare/gpushare/pkg/scheduling"
	"github.com/gpushare/gpushare/pkg/version"
	"github.com/gpushare/gpushare/pkg/webui"
)

// page is the web page. It has its own address, so that its clients can't call the verbs. The zero value serves nothing.
type page struct {
	board    *webui.Board
	listener net.Listener
	tls      *tls.Config
}

func newPage(ctx context.Context, o options, scheduler *scheduling.Scheduler, standby func() error, expires func(time.Time)) (*page, error) {
	p := &page{}
	if !o.ui || o.uiAddress == "" {
		return p, nil
	}
	var err error
	if p.listener, err = net.Listen("tcp", o.uiAddress); err != nil {
		err = fmt.Errorf("--ui-listen-address: %w", err)
		if o.uiAddressGiven {
			return nil, err
		}
		// Another program in the host network may use that port. Pods are scheduled without the page.
		klog.FromContext(ctx).Error(err, "Web page not served: set another address, or an empty one to turn it off")
		return p, nil
	}
	p.board = webui.NewBoard(webui.Options{
		Source: scheduler, Standby: standby, Version: version.Get().Version, Clock: clock.RealClock{},
	})
	if o.tlsCertFile != "" {
		if p.tls, err = extender.ServerTLS(o.tlsCertFile, o.tlsKeyFile, "", expires); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// run updates the page and serves it until ctx ends.
func (p *page) run(ctx context.Context) error {
	if p.board == nil {
		return nil
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return p.board.Run(ctx) })
	klog.FromContext(ctx).Info("Serving the web page", "address", p.listener.Addr().String(), "tls", p.tls != nil)
	g.Go(func() error {
		if err := connlimit.Serve(ctx, p.listener, webui.MaxConnections, p.tls, p.board.Handler()); err != nil {
			return fmt.Errorf("serving the web page: %w", err)
		}
		return nil
	})
	return g.Wait()
}
