package webui

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/gpushare/gpushare/pkg/connlimit"
	"github.com/gpushare/gpushare/pkg/loopback"
)

const (
	requestTimeout = 5 * time.Second
	stopTimeout    = 500 * time.Millisecond
	// maxHeader has room for what browsers send, cookies of other programs on the same host included.
	maxHeader = 16 << 10
	// maxConnections has room for all viewers' streams and for what they load besides. Viewers who forward a port all come
	// from one address.
	maxConnections = 2 * maxViewers
)

// Serve answers the page alone on the listener until ctx ends. With tlsConfig nil it is plain HTTP.
func Serve(ctx context.Context, listener net.Listener, page http.Handler, tlsConfig *tls.Config) error {
	if tlsConfig == nil {
		page = loopback.Handler(listener.Addr(), page)
	}
	server := &http.Server{
		Handler: page, ReadHeaderTimeout: requestTimeout, ReadTimeout: requestTimeout,
		WriteTimeout: time.Minute, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: maxHeader,
		BaseContext: func(net.Listener) context.Context { return context.WithoutCancel(ctx) },
	}
	listener = connlimit.New(listener, connlimit.Limits{Total: maxConnections, PerSource: maxConnections})
	if tlsConfig != nil {
		listener = tls.NewListener(listener, tlsConfig)
	}
	stopped := make(chan error, 1)
	go func() {
		<-ctx.Done()
		patience, cancel := context.WithTimeout(context.Background(), stopTimeout)
		defer cancel()
		if server.Shutdown(patience) != nil {
			stopped <- server.Close()
			return
		}
		stopped <- nil
	}()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving the page on %s: %w", listener.Addr(), err)
	}
	return <-stopped
}
