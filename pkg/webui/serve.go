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
)

const (
	requestTimeout = 5 * time.Second
	stopTimeout    = 500 * time.Millisecond
	// maxConnections is enough for all viewers' streams and their other requests. With port forwarding, all viewers have
	// the same address.
	maxConnections = 2 * maxViewers
)

// Serve answers the page alone on the listener until ctx ends. With tlsConfig nil it is plain HTTP.
func Serve(ctx context.Context, listener net.Listener, page http.Handler, tlsConfig *tls.Config) error {
	server := &http.Server{
		Handler: page, ReadHeaderTimeout: requestTimeout, ReadTimeout: requestTimeout,
		WriteTimeout: time.Minute, IdleTimeout: 2 * time.Minute,
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
