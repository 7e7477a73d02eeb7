package inspect

import (
	"net/http"
	"slices"
	"sync"
)

// Reachability looks at every answer of the API server and knows whether the last one was one. Its methods may be
// called from several goroutines.
type Reachability struct {
	mu      sync.Mutex
	problem string        // guarded by mu; empty while the server answers
	changed chan struct{} // told, without blocking, when problem changes
}

// NewReachability returns one that has seen no problem yet.
func NewReachability() *Reachability {
	return &Reachability{changed: make(chan struct{}, 1)}
}

// Changed tells when Problem may have another value.
func (r *Reachability) Changed() <-chan struct{} { return r.changed }

// Problem says in words why the API server can't be read, or is empty.
func (r *Reachability) Problem() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.problem
}

// Wrap is a transport.WrapperFunc.
func (r *Reachability) Wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(request *http.Request) (*http.Response, error) {
		response, err := next.RoundTrip(request)
		switch {
		case err != nil && request.Context().Err() != nil: // We gave up ourselves.
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

// refusals are answers with which nothing can be read. Other 4xx belong to the informers' protocol.
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
