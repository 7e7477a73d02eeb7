package extender

import (
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"

	"golang.org/x/net/netutil"
)

const (
	// maxConnections is far above what kube-scheduler opens: one for each bind in flight, and a few.
	maxConnections = 8192
	// maxBodies bounds the requests' bodies that are in memory at once, all connections together. kube-scheduler's calls
	// that name nodes come one after another and have a megabyte or two; its binds come together and have half a kilobyte.
	maxBodies = 64 << 20
)

// errFlooded answers a request whose body finds no room. Nothing waits for room: who sends slowly would hold up others.
var errFlooded = errors.New("too many large requests at once")

// bounded lets no more connections be open than maxConnections: others wait to be accepted.
func bounded(l net.Listener) net.Listener { return netutil.LimitListener(l, maxConnections) }

// bodies counts what is in memory of requests' bodies.
type bodies struct {
	limit int64
	read  atomic.Int64
}

// bound makes requests' reads fail once all bodies together pass the limit.
func (b *bodies) bound(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := &countedBody{ReadCloser: r.Body, all: b}
		defer body.forget()
		r.Body = body
		next.ServeHTTP(w, r)
	})
}

// countedBody counts what was read of one body until it is forgotten.
type countedBody struct {
	io.ReadCloser
	all *bodies

	mu        sync.Mutex
	read      int64
	forgotten bool
}

// Read implements io.Reader.
func (c *countedBody) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.forgotten {
		return n, err
	}
	c.read += int64(n)
	if c.all.read.Add(int64(n)) > c.all.limit {
		return 0, errFlooded
	}
	return n, err
}

func (c *countedBody) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgotten = true
	c.all.read.Add(-c.read)
}
