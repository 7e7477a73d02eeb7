package webui

import (
	"context"
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
	// lastWords is how long a stream may take to end once the board has stopped.
	lastWords = 100 * time.Millisecond
)

// events streams the complete state and then deltas, until the viewer disconnects or the board stops.
func (b *Board) events(w http.ResponseWriter, r *http.Request) {
	if b.stopping.Err() != nil || !b.enter() {
		w.Header().Set("Retry-After", "30")
		http.Error(w, "too many viewers, or the extender is stopping", http.StatusServiceUnavailable)
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
	write := func(f *frame) error {
		_, err := w.Write(f.plain)
		return err
	}
	if acceptsGzip(r) {
		header.Set("Content-Encoding", "gzip")
		if _, err := w.Write(gzipHeader); err != nil {
			return // The client has disconnected.
		}
		write = func(f *frame) error {
			_, err := w.Write(f.packed())
			return err
		}
	}
	if err := b.stream(r.Context(), connection, write); err != nil {
		klog.FromContext(r.Context()).V(2).Info("Stream to a viewer of the page ended", "err", err)
	}
}

// stream writes frames to one viewer until it disconnects or the board stops.
func (b *Board) stream(ctx context.Context, connection *http.ResponseController, write func(*frame) error) error {
	// Ends a blocked write when the board stops.
	defer context.AfterFunc(b.stopping, func() { _ = connection.SetWriteDeadline(time.Now().Add(lastWords)) })()
	send := func(frames ...*frame) error {
		if err := connection.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
			return err
		}
		for _, f := range frames {
			if b.stopping.Err() != nil {
				return nil
			}
			if err := write(f); err != nil {
				return err
			}
		}
		return connection.Flush()
	}
	beat := b.Clock.NewTicker(beatEvery)
	defer beat.Stop()
	beatFrame := newFrame("beat", 0, []byte("0"), &b.compressors)
	seq := uint64(0)
	for {
		frames, now, changed, err := b.after(seq)
		if err == nil {
			err = send(frames...)
		}
		if err != nil {
			return err
		}
		seq = now
		select {
		case <-changed:
		case <-beat.C():
			if err := send(beatFrame); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		case <-b.stopping.Done():
			return nil
		}
	}
}

func acceptsGzip(r *http.Request) bool {
	for _, list := range r.Header.Values("Accept-Encoding") {
		for part := range strings.SplitSeq(list, ",") {
			name, weight, _ := strings.Cut(strings.TrimSpace(part), ";")
			if name == "gzip" && strings.ReplaceAll(weight, " ", "") != "q=0" {
				return true
			}
		}
	}
	return false
}
