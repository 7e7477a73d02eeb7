package extender

import (
	"errors"
	"fmt"
	"io"
	"net/http"
)

const (
	// maxBody limits a request's body, in bytes: far above 5,000 node names with a large pod, far below the available memory.
	maxBody = 16 << 20
	// maxPod limits the pod of a request with node names, in bytes. What else a request carries grows with the cluster, but the pod is what a single
	// user made. The API server accepts pods whose lists have hundreds of thousands of empty elements, and the decoded pod takes up to 40 times as much
	// memory as its text: "{}," becomes a node selector's term of 48 bytes, in a list that grows by copying.
	maxPod = 2 << 20
	// maxReaders limits the number of answers about the whole cluster that are built or sent at the same time.
	maxReaders = 8
)

// errLargePod is the answer to a request whose pod exceeds maxPod.
var errLargePod = errors.New("the pod is too large for the extender: its lists have too many elements (empty ones count too), " +
	"such as imagePullSecrets, tolerations or ports. Create it again with fewer")

// The limits of open connections.
const (
	// callerLimit applies if no client certificate is required, so that kube-scheduler can't be distinguished from other
	// clients: kube-scheduler opens a connection for each bind in flight.
	callerLimit = 8192
	// strangerLimit applies to clients that haven't shown their certificate yet. A burst of kube-scheduler's own connections
	// stays well below it, because each counts only for the milliseconds of its handshake.
	strangerLimit = 2048
	// healthLimit is far above what probes and scrapers need.
	healthLimit = 256
)

// limitConcurrent returns a handler that runs next for no more than the given number of calls at the same time. A client that requests
// the whole cluster and doesn't read the answer keeps it in memory. Further calls get status 503.
func limitConcurrent(most int, next http.HandlerFunc) http.HandlerFunc {
	places := make(chan struct{}, most)
	return func(w http.ResponseWriter, r *http.Request) {
		select {
		case places <- struct{}{}:
			defer func() { <-places }()
			next(w, r)
		default:
			http.Error(w, "too many requests for this path at once", http.StatusServiceUnavailable)
		}
	}
}

// readBody returns the request's body.
func readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if tooLarge, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return nil, fmt.Errorf("the request's body is over %d bytes: where it carries whole nodes, set nodeCacheCapable: true "+
			"for this extender in kube-scheduler's configuration", tooLarge.Limit)
	}
	if err != nil {
		return nil, fmt.Errorf("the request's body can't be read: %w", err)
	}
	return text, nil
}
