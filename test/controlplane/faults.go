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

// Match chooses requests.
type Match func(*http.Request) bool

// Everything matches every request.
func Everything(*http.Request) bool { return true }

// Bindings matches the requests that bind a pod to a node.
func Bindings(r *http.Request) bool {
	return r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/binding")
}

// Fault is what happens to a request instead of being passed on. It may call next to pass it on all the same, and may
// wait until it is lifted.
type Fault func(w http.ResponseWriter, r *http.Request, next http.Handler, lifted <-chan struct{})

// Answer turns the request away with an error status, as the API server words one. With retryAfter above 0 the client
// is told to try again after so many seconds, which client-go does by itself.
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

// CutConnection cuts the connection without passing the request on.
func CutConnection(http.ResponseWriter, *http.Request, http.Handler, <-chan struct{}) {
	panic(http.ErrAbortHandler)
}

// CutAnswer passes the request on and cuts the connection once the server has answered: what was asked is done, and
// the client can't know.
func CutAnswer(w http.ResponseWriter, r *http.Request, next http.Handler, _ <-chan struct{}) {
	next.ServeHTTP(beforeAnswer(w, func() { panic(http.ErrAbortHandler) }), r)
}

// HoldAnswer passes the request on and holds the answer back until the fault is lifted or the client gives up: what
// was asked is done, and the client runs into its timeout.
func HoldAnswer(w http.ResponseWriter, r *http.Request, next http.Handler, lifted <-chan struct{}) {
	next.ServeHTTP(beforeAnswer(w, func() { hold(r, lifted, nil) }), r)
}

// Hold passes the request on only once the fault is lifted, and not at all where the client has given up by then.
func Hold(w http.ResponseWriter, r *http.Request, next http.Handler, lifted <-chan struct{}) {
	readBody(r)
	hold(r, lifted, nil)
	next.ServeHTTP(w, r)
}

// Late passes the request on once the fault is lifted, whether or not the client still waits: as a packet that was under way
// when its sender froze.
func Late(w http.ResponseWriter, r *http.Request, next http.Handler, lifted <-chan struct{}) {
	readBody(r)
	<-lifted
	// A context that can end, though nobody ends it: the reverse proxy looks after the client by itself otherwise.
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
	defer cancel()
	next.ServeHTTP(w, r.WithContext(ctx))
}

// Slow passes the request on after a delay.
func Slow(delay time.Duration) Fault {
	return func(w http.ResponseWriter, r *http.Request, next http.Handler, lifted <-chan struct{}) {
		timer := time.NewTimer(delay)
		defer timer.Stop()
		readBody(r)
		hold(r, lifted, timer.C)
		next.ServeHTTP(w, r)
	}
}

// readBody reads the request's body into memory: only then does the server notice that the client hangs up.
func readBody(r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
}

// hold waits until the fault is lifted or over, and drops the request where the client gives up before. A nil over
// never comes.
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

// answerWriter calls before once, ahead of the first byte of the answer.
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
