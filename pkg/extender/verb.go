package extender

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"strconv"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/clustercache"
)

// verb returns the handler of a verb. answer turns the verb's arguments into its answer. fail turns an error into an answer,
// for verbs whose answer has a field for it. If fail is nil, an error becomes an HTTP status.
func verb[A any](s *Server, name string, answer func(context.Context, *A) (any, error), fail func(error) any) http.HandlerFunc {
	return s.schedulerOnly(name, func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		args, reply, outcome := new(A), any(nil), OutcomeError
		body, err := readBody(w, r)
		if err == nil {
			err = decode(body, args)
		}
		// The call is counted before Answer is called: a leader that hands over stops answering and awaits the counted calls.
		s.inFlight.Add(1)
		defer s.inFlight.Add(-1)
		defer s.pacer.end(r.Context())
		standby := s.standby()
		switch {
		case standby != nil:
			// The client's next connection may reach the leader.
			w.Header().Set("Connection", "close")
			err = standby
		case err == nil:
			reply, outcome, err = guarded(r.Context(), name, args, answer)
		}
		switch {
		case err == nil:
			writeReply(w, r, reply)
		case fail != nil:
			write(w, r, http.StatusOK, fail(err))
		case outcome == OutcomePanic:
			http.Error(w, err.Error(), http.StatusInternalServerError)
		case standby != nil, errors.Is(err, clustercache.ErrNotSynced):
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		default:
			http.Error(w, err.Error(), http.StatusBadRequest)
		}
		s.Observer.Answered(name, outcome, time.Since(start))
	})
}

// standby returns the reason why another replica must answer, or nil.
func (s *Server) standby() error {
	if s.Answer == nil {
		return nil
	}
	return s.Answer()
}

// guarded runs a verb. A panic fails only this request, with an error like any other.
func guarded[A any](ctx context.Context, name string, args *A, answer func(context.Context, *A) (any, error)) (reply any, outcome string, err error) {
	defer func() {
		if cause := recover(); cause != nil {
			klog.FromContext(ctx).Error(fmt.Errorf("panic: %v", cause), "A request panicked", "verb", name, "stack", string(debug.Stack()))
			reply, outcome, err = nil, OutcomePanic, errInternal
		}
	}()
	reply, err = answer(ctx, args)
	if err != nil {
		return nil, OutcomeError, err
	}
	return reply, OutcomeOK, nil
}

var errInternal = errors.New("internal error, see the extender's log")

// writeReply answers with a verb's reply.
func writeReply(w http.ResponseWriter, r *http.Request, reply any) {
	filtered, ok := reply.(filterAnswer)
	if !ok {
		write(w, r, http.StatusOK, reply)
		return
	}
	const typical = 128 // Bytes of a node's name and reason.
	text := append(filtered.appendJSON(make([]byte, 0, typical*(1+len(filtered.Reasons)))), '\n')
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(text)))
	_, err := w.Write(text)
	logUnsent(r, err)
}

func write(w http.ResponseWriter, r *http.Request, status int, answer any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	logUnsent(r, json.NewEncoder(w).Encode(answer))
}

// logUnsent logs the error of an answer whose client has closed the connection. The status line has already been sent.
func logUnsent(r *http.Request, err error) {
	if err != nil {
		klog.FromContext(r.Context()).V(2).Info("Could not send an answer", "err", err)
	}
}
