package inspect

import (
	"net/http"
	"slices"
	"sync"
)

// Reachability records whether the API server's last response was a success. Its methods are safe for concurrent use.
type Reachability struct {
	mu      sync.Mutex
	problem string        // Guarded by mu; empty while the server responds.
	changed chan struct{} // Receives a value, without blocking, when problem changes.
}

// NewReachability returns a Reachability without a problem.
func NewReachability() *Reachability {
	return &Reachability{changed: make(chan struct{}, 1)}
}

// Changed returns a channel that receives a value when Problem may have changed.
func (r *Reachability) Changed() <-chan struct{} { return r.changed }

// Problem returns why the API server can't be read; empty if it can.
func (r *Reachability) Problem() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.problem
}

// Wrap is a transport.WrapperFunc that records the results of all requests.
func (r *Reachability) Wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(request *http.Request) (*http.Response, error) {
		response, err := next.RoundTrip(request)
		switch {
		case err != nil && request.Context().Err() != nil: // The client canceled the request.
		case err != nil:
			r.set(err.Error())
		case response.StatusCode >= 500 || slices.Contains(refusals, response.StatusCode):
			r.set("it answers " + response.Status)
		default:
			r.set("")
		}
		return response, err
	})
}

// refusals are status codes with which nothing can be read. Other 4xx codes are part of the informers' protocol.
var refusals = []int{http.StatusUnauthorized, http.StatusForbidden, http.StatusTooManyRequests}

func (r *Reachability) set(problem string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.problem == problem {
		return
	}
	r.problem = problem
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return f(request) }
