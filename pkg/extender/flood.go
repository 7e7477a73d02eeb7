package extender

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/gpushare/gpushare/pkg/connlimit"
)

const (
	// maxBodies bounds the requests' bodies that are in memory at once, with what they are decoded to, all connections
	// together. kube-scheduler's calls that name nodes come one after another and have a megabyte or two; its binds come
	// together and have half a kilobyte.
	maxBodies = 64 << 20
	// valueCost and elementCost are what is counted for a value of a body, and for an element of a list that can become a
	// struct, beside its bytes: "null," in a list of containers or nodes is five bytes, and becomes some hundreds.
	valueCost   = 32
	elementCost = 512
	// maxReaders bounds the answers that tell of the whole cluster and are made, or fetched, at once.
	maxReaders = 8
)

// errFlooded answers a request whose body finds no room. Nothing waits for room: who sends slowly would hold up others.
var errFlooded = errors.New("too many large requests at once")

// errTooMany answers a request that would never find room.
var errTooMany = errors.New("the request's body has too many values: where it carries whole nodes, set nodeCacheCapable: true " +
	"for this extender in kube-scheduler's configuration")

// How many connections may be open at once.
var (
	// callerLimits are for where kube-scheduler can't be told from others: a single source is kube-scheduler for all that is
	// known, and that opens a connection for each bind in flight.
	callerLimits = connlimit.Limits{Total: 8192, PerSource: 4096}
	// strangerLimits are for clients that haven't shown their certificate yet. A storm of kube-scheduler's own connections is
	// well below them, as these count for the milliseconds of their handshakes alone.
	strangerLimits = connlimit.Limits{Total: 2048, PerSource: 1024}
	// healthLimits are far above what probes and scrapers need.
	healthLimits = connlimit.Limits{Total: 256, PerSource: 32}
)

// few lets no more than so many calls be answered at once: who asks for the whole cluster, and doesn't fetch it, keeps it
// in memory. The others are told to come again.
func few(most int, next http.HandlerFunc) http.HandlerFunc {
	places := make(chan struct{}, most)
	return func(w http.ResponseWriter, r *http.Request) {
		select {
		case places <- struct{}{}:
			defer func() { <-places }()
			next(w, r)
		default:
			http.Error(w, "too many others ask for the same at the moment", http.StatusServiceUnavailable)
		}
	}
}

// bodies counts what is in memory of requests' bodies, and keeps the buffers that they were read into for the next ones.
type bodies struct {
	limit int64
	read  atomic.Int64
	// buffers are few: kube-scheduler's calls that have large bodies come one after another. Whoever sends slowly, and
	// many at once, has no more of them.
	buffers chan *bytes.Buffer
}

func newBodies() bodies {
	return bodies{limit: maxBodies, buffers: make(chan *bytes.Buffer, keptBuffers)}
}

const (
	// firstRead is what is read of a body before it is known to be there: clients can claim any length.
	firstRead = 64 << 10
	// keptBuffers is how many are kept, and maxKept how large each may be: more than a call has at thousands of nodes.
	keptBuffers, maxKept = 4, 1 << 20
)

// buffer returns an empty one, which may be given back by keep once nothing refers to what was read into it.
func (b *bodies) buffer(length int64) *bytes.Buffer {
	var buffer *bytes.Buffer
	select {
	case buffer = <-b.buffers:
	default:
		buffer = new(bytes.Buffer)
	}
	buffer.Grow(int(min(max(length, 0), firstRead)) + bytes.MinRead)
	return buffer
}

func (b *bodies) keep(buffer *bytes.Buffer) {
	if buffer.Cap() > maxKept {
		return
	}
	buffer.Reset()
	select {
	case b.buffers <- buffer:
	default:
	}
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

// decodes counts what the body, which was read, is about to be decoded to.
func (c *countedBody) decodes(body []byte) error {
	cost := weigh(body, c.all.limit)
	if cost > c.all.limit {
		return errTooMany
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.read += cost
	if c.all.read.Add(cost) > c.all.limit {
		return errFlooded
	}
	return nil
}

// weigh returns what a body costs beside its bytes once it is decoded, or more than the limit. What is no JSON has some
// weight too; the decoder refuses it soon enough.
func weigh(body []byte, limit int64) (cost int64) {
	var lists []bool // Whether each value that has begun is a list.
	within := func() bool { return len(lists) > 0 && lists[len(lists)-1] }
	for i := 0; i < len(body) && cost <= limit; i++ {
		switch body[i] {
		case '"':
			i += stringEnd(body[i+1:])
		case ',':
			cost += valueCost
		case '{', '[':
			if within() {
				cost += elementCost
			}
			cost += valueCost
			lists = append(lists, body[i] == '[')
		case '}', ']':
			if len(lists) > 0 {
				lists = lists[:len(lists)-1]
			}
		case 'n': // null
			if within() {
				cost += elementCost
			}
		}
	}
	return cost
}

// stringEnd returns how many bytes there are up to the quote that ends a JSON string, that included.
func stringEnd(rest []byte) int {
	for at := 0; ; {
		quote := bytes.IndexByte(rest[at:], '"')
		if quote < 0 {
			return len(rest)
		}
		at += quote + 1
		escapes := 0
		for i := at - 2; i >= 0 && rest[i] == '\\'; i-- {
			escapes++
		}
		if escapes%2 == 0 {
			return at
		}
	}
}

func (c *countedBody) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgotten = true
	c.all.read.Add(-c.read)
}
