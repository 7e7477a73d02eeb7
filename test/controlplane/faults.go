package controlplane

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Match selects requests.
type Match func(*http.Request) bool

// Everything matches every request.
func Everything(*http.Request) bool { return true }

// Bindings matches the requests that bind a pod to a node.
func Bindings(r *http.Request) bool {
	return r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/binding")
}

// Fault handles a request in place of the proxy. It can call next to forward the request, and it can wait until lifted
// is closed.
type Fault func(w http.ResponseWriter, r *http.Request, next http.Handler, lifted <-chan struct{})

// Answer answers with an error status in the API server's format and doesn't forward the request. A retryAfter above 0
// is sent as Retry-After, in seconds; client-go then retries by itself.
func Answer(status, retryAfter int) Fault {
	return func(w http.ResponseWriter, _ *http.Request, _ http.Handler, _ <-chan struct{}) {
		body, err := json.Marshal(metav1.Status{
			TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
			Status:   metav1.StatusFailure,
			Code:     int32(status),
			Reason:   reason(status),
			Message:  fmt.Sprintf("injected by the test: %s", http.StatusText(status)),
		})
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		w.Header().Set("Content-Type", "application/json")
		if retryAfter > 0 {
			w.Header().Set("Retry-After", strconv.Itoa(retryAfter))
		}
		w.WriteHeader(status)
		_, _ = w.Write(body)
	}
}

func reason(status int) metav1.StatusReason {
	switch status {
	case http.StatusTooManyRequests:
		return metav1.StatusReasonTooManyRequests
	case http.StatusServiceUnavailable:
		return metav1.StatusReasonServiceUnavailable
	case http.StatusGatewayTimeout:
		return metav1.StatusReasonTimeout
	case http.StatusInternalServerError:
		return metav1.StatusReasonInternalError
	default:
		return metav1.StatusReasonUnknown
	}
}

// CutConnection cuts the connection without forwarding the request.
func CutConnection(http.ResponseWriter, *http.Request, http.Handler, <-chan struct{}) {
	panic(http.ErrAbortHandler)
}

// CutAnswer forwards the request and cuts the connection once the server has answered: the request takes effect, but
// its answer is lost.
func CutAnswer(w http.ResponseWriter, r *http.Request, next http.Handler, _ <-chan struct{}) {
	next.ServeHTTP(beforeAnswer(w, func() { panic(http.ErrAbortHandler) }), r)
}

// HoldAnswer forwards the request and holds the answer until the fault is lifted or the client gives up: the request
// takes effect, but the client times out.
func HoldAnswer(w http.ResponseWriter, r *http.Request, next http.Handler, lifted <-chan struct{}) {
	next.ServeHTTP(beforeAnswer(w, func() { hold(r, lifted, nil) }), r)
}

// Hold forwards the request only when the fault is lifted. It drops the request if the client has given up by then.
func Hold(w http.ResponseWriter, r *http.Request, next http.Handler, lifted <-chan struct{}) {
	readBody(r)
	hold(r, lifted, nil)
	next.ServeHTTP(w, r)
}

// Late forwards the request when the fault is lifted, even if the client has given up by then: like a packet that was
// in the network when its sender froze.
func Late(w http.ResponseWriter, r *http.Request, next http.Handler, lifted <-chan struct{}) {
	readBody(r)
	<-lifted
	// Given a context that can't end, the reverse proxy would watch the client's connection itself.
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
	defer cancel()
	next.ServeHTTP(w, r.WithContext(ctx))
}

// Slow forwards the request after a delay.
func Slow(delay time.Duration) Fault {
	return func(w http.ResponseWriter, r *http.Request, next http.Handler, lifted <-chan struct{}) {
		timer := time.NewTimer(delay)
		defer timer.Stop()
		readBody(r)
		hold(r, lifted, timer.C)
		next.ServeHTTP(w, r)
	}
}

// readBody reads the request's body into memory. Only then does the server notice that the client disconnects.
func readBody(r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
}

// hold waits until the fault is lifted or over fires, and drops the request if the client gives up before. A nil over
// never fires.
func hold(r *http.Request, lifted <-chan struct{}, over <-chan time.Time) {
	select {
	case <-lifted:
	case <-over:
	case <-r.Context().Done():
	}
	if r.Context().Err() != nil {
		panic(http.ErrAbortHandler)
	}
}

// answerWriter calls before once, before the first byte of the answer.
type answerWriter struct {
	http.ResponseWriter
	before func()
}

func beforeAnswer(w http.ResponseWriter, before func()) http.ResponseWriter {
	return &answerWriter{ResponseWriter: w, before: sync.OnceFunc(before)}
}

func (w *answerWriter) WriteHeader(status int) {
	w.before()
	w.ResponseWriter.WriteHeader(status)
}

func (w *answerWriter) Write(data []byte) (int, error) {
	w.before()
	return w.ResponseWriter.Write(data)
}

// Unwrap lets the reverse proxy flush.
func (w *answerWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
