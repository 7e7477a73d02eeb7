package extender

import (
	"bytes"
	"cmp"
	"errors"
	"io"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/gpushare/gpushare/pkg/connlimit"
)

const (
	// maxBodies limits the memory, in bytes, of the request bodies of all connections together, including their decoded
	// values. kube-scheduler sends its calls that name nodes one after another, with one or two megabytes each. It sends
	// binds concurrently, with half a kilobyte each.
	maxBodies = 64 << 20
	// maxPod limits, within maxBodies, the pod of one request. What else a request carries grows with the cluster, but the pod is
	// what a single user made: one pod must not make the requests for others fail.
	maxPod = maxBodies / 4
	// valueCost and elementCost are the bytes that are counted for a value of a body, and for an element of a list that can
	// become a struct, beside its length: "null," in a list of containers has five bytes, and becomes some hundreds.
	valueCost   = 32
	elementCost = 512
	// maxReaders limits the number of answers about the whole cluster that are built or sent at the same time.
	maxReaders = 8
)

// errFlooded is the answer to a request whose body finds no room at present. A request doesn't wait for room, because a
// client that sends slowly would delay the others.
var errFlooded = errors.New("too many large requests at once")

// errTooMany is the answer to a request whose body exceeds the limit on its own.
var errTooMany = errors.New("the request's body has too many values: where it carries whole nodes, set nodeCacheCapable: true " +
	"for this extender in kube-scheduler's configuration")

// errLargePod is the answer to a request whose pod exceeds maxPod.
var errLargePod = errors.New("the pod is too large for the extender: its lists have too many elements (empty ones count too), " +
	"such as imagePullSecrets, tolerations or ports. Create it again with fewer")

// The limits of open connections.
var (
	// callerLimits apply if no client certificate is required, so that kube-scheduler can't be distinguished from other
	// clients. Any source can then be kube-scheduler, which opens a connection for each bind in flight.
	callerLimits = connlimit.Limits{Total: 8192, PerSource: 4096}
	// strangerLimits apply to clients that haven't shown their certificate yet. A burst of kube-scheduler's own connections
	// stays well below these limits, because each counts only for the milliseconds of its handshake.
	strangerLimits = connlimit.Limits{Total: 2048, PerSource: 1024}
	// healthLimits are far above what probes and scrapers need.
	healthLimits = connlimit.Limits{Total: 256, PerSource: 32}
)

// few returns a handler that runs next for no more than the given number of calls at the same time. A client that requests
// the whole cluster and doesn't read the answer keeps it in memory. Further calls get status 503.
func few(most int, next http.HandlerFunc) http.HandlerFunc {
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

const (
	// firstRead limits the buffer, in bytes, before any byte of the body has arrived: clients can claim any length.
	firstRead = 64 << 10
	// maxKept limits the size of a buffer that is kept, in bytes. A call needs less with thousands of nodes.
	maxKept = 1 << 20
)

// bodies counts the memory of request bodies, and keeps buffers, in which bodies and answers are built, for later requests.
type bodies struct {
	limit   int64
	read    atomic.Int64
	buffers sync.Pool
}

// buffer returns an empty buffer. The caller may give it back with keep once nothing refers to its content.
func (b *bodies) buffer(length int64) *bytes.Buffer {
	buffer, _ := b.buffers.Get().(*bytes.Buffer)
	if buffer == nil {
		buffer = new(bytes.Buffer)
	}
	buffer.Grow(int(min(max(length, 0), firstRead)) + bytes.MinRead)
	return buffer
}

func (b *bodies) keep(buffer *bytes.Buffer) {
	if buffer.Cap() <= maxKept {
		buffer.Reset()
		b.buffers.Put(buffer)
	}
}

// body is a request's body of at most maxBody bytes. Its memory is counted until forget is called. Reading it fails while all bodies together
// exceed the limit.
type body struct {
	io.Reader
	all    *bodies
	length int64
	read   int64
}

func (b *bodies) of(w http.ResponseWriter, r *http.Request) *body {
	return &body{Reader: http.MaxBytesReader(w, r.Body, maxBody), all: b, length: r.ContentLength}
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	return n, cmp.Or(b.count(int64(n)), err)
}

func (b *body) count(n int64) error {
	b.read += n
	if b.all.read.Add(n) > b.all.limit {
		return errFlooded
	}
	return nil
}

func (b *body) forget() { b.all.read.Add(-b.read) }

// countValues counts the memory of the values into which the text of the body is about to be decoded.
func (b *body) countValues(text []byte) error {
	cost, pod := weigh(text, b.all.limit)
	switch {
	case pod > maxPod:
		return errLargePod
	case cost > b.all.limit:
		return errTooMany
	}
	return b.count(cost)
}

// weigh returns the cost in bytes of decoding a body, in addition to the body's length. If the cost exceeds limit, it
// returns some value above limit. A body that is not JSON has a cost too; the decoder refuses it later. pod is the cost and the
// length of the pod, which kube-scheduler writes first: of all up to the end of the first object or list in the body's object.
func weigh(body []byte, limit int64) (cost, pod int64) {
	var lists []bool // For each open value, whether it is a list.
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
			if len(lists) == 1 && pod == 0 {
				pod = cost + int64(i)
			}
		case 'n': // null
			if within() {
				cost += elementCost
			}
		}
	}
	if pod == 0 { // There is no such object, or its end wasn't reached.
		pod = cost
	}
	return cost, pod
}

// stringEnd returns the number of bytes up to and including the quote that ends a JSON string.
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
