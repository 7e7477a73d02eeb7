package webui

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"k8s.io/klog/v2"
)

const (
	// beatEvery is the interval of heartbeats, by which a viewer detects a dead connection.
	beatEvery = 15 * time.Second
	// writeTimeout ends the streams of viewers that don't read.
	writeTimeout = 10 * time.Second
)

// events streams the complete state and then deltas, until the viewer disconnects.
func (b *Board) events(w http.ResponseWriter, r *http.Request) {
	if !b.enter() {
		w.Header().Set("Retry-After", "30")
		http.Error(w, "too many viewers", http.StatusServiceUnavailable)
		return
	}
	defer b.leave()
	connection := http.NewResponseController(w)
	// The server's deadlines are for short answers. From here on reads have none, and each write has its own.
	if err := connection.SetReadDeadline(time.Time{}); err != nil {
		http.Error(w, "this connection doesn't support streaming", http.StatusNotImplemented)
		return
	}
	header := w.Header()
	header.Set("Content-Type", "text/event-stream")
	header.Set("Cache-Control", "no-store")
	header.Set("X-Accel-Buffering", "no") // Otherwise nginx buffers the stream.
	header.Add("Vary", "Accept-Encoding")
	out, flush := io.Writer(w), connection.Flush
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		header.Set("Content-Encoding", "gzip")
		packed, _ := gzip.NewWriterLevel(w, gzip.BestSpeed) // The level is valid.
		out, flush = packed, func() error { return errors.Join(packed.Flush(), connection.Flush()) }
	}
	if err := b.follow(r.Context(), connection, out, flush); err != nil {
		klog.FromContext(r.Context()).V(2).Info("Stream to a viewer of the page ended", "err", err)
	}
}

// follow writes events to one viewer until it disconnects.
func (b *Board) follow(ctx context.Context, connection *http.ResponseController, out io.Writer, flush func() error) error {
	send := func(events ...[]byte) error {
		if err := connection.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
			return err
		}
		for _, event := range events {
			if _, err := out.Write(event); err != nil {
				return err
			}
		}
		return flush()
	}
	beat := b.Clock.NewTicker(beatEvery)
	defer beat.Stop()
	seq := uint64(0)
	for {
		events, now, changed, err := b.after(seq)
		if err == nil {
			err = send(events...)
		}
		if err != nil {
			return err
		}
		seq = now
		select {
		case <-changed:
		case <-beat.C():
			if err := send(newEvent("beat", 0, []byte("0"))); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// newEvent returns a server-sent event.
func newEvent(name string, seq uint64, data []byte) []byte {
	return fmt.Appendf(nil, "event: %s\nid: %d\ndata: %s\n\n", name, seq, data)
}
