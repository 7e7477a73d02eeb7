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

	"github.com/gpushare/gpushare/pkg/cluster"
)

// verb makes a handler of what turns a verb's arguments into its answer. fail makes an error the answer's own, for
// verbs that have a field for it; where it is nil the error becomes an HTTP status.
func verb[A any](s *Server, name string, answer func(context.Context, *A) (any, error), fail func(error) any) http.HandlerFunc {
	return s.schedulerOnly(name, func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		args := new(A)
		reply, outcome, err := any(nil), OutcomeError, s.bodies.decode(w, r, args)
		// Counted before Answer is asked: a leader that hands over answers nobody any more, then waits for these.
		s.inFlight.Add(1)
		defer s.inFlight.Add(-1)
		standby := s.standby()
		switch {
		case standby != nil:
			// The next connection may lead to the leader.
			w.Header().Set("Connection", "close")
			err = standby
		case err == nil:
			reply, outcome, err = guarded(r.Context(), name, args, answer)
		}
		switch {
		case err == nil:
			write(w, r, http.StatusOK, reply)
		case fail != nil:
			write(w, r, http.StatusOK, fail(err))
		case outcome == OutcomePanic:
			http.Error(w, err.Error(), http.StatusInternalServerError)
		case standby != nil, errors.Is(err, cluster.ErrNotReady):
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		default:
			http.Error(w, err.Error(), http.StatusBadRequest)
		}
		s.Observer.Answered(name, outcome, time.Since(start))
	})
}

// standby returns why another replica is to be asked, or nil.
func (s *Server) standby() error {
	if s.Answer == nil {
		return nil
	}
	return s.Answer()
}

// guarded runs a verb. A panic ends this one request, with an error like any other.
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

func write(w http.ResponseWriter, r *http.Request, status int, answer any) {
	w.Header().Set("Content-Type", "application/json")
	var err error
	if own, ok := answer.(interface{ appendJSON(to []byte) []byte }); ok {
		body := append(own.appendJSON(nil), '\n')
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		w.WriteHeader(status)
		_, err = w.Write(body)
	} else {
		w.WriteHeader(status)
		err = json.NewEncoder(w).Encode(answer)
	}
	if err != nil {
		// The client went away; the status line is out already.
		klog.FromContext(r.Context()).V(2).Info("An answer could not be sent", "err", err)
	}
}
