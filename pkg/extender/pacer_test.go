package extender

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/scheduling"
)

// batches makes bind calls return together, as soon as size of them have begun. It calls done when none is left.
type batches struct {
	size, left int
	done       func()

	mu    sync.Mutex
	begun int
	next  chan struct{}
}

func (b *batches) bind(context.Context, scheduling.BindRequest) error {
	b.mu.Lock()
	if b.next == nil {
		b.next = make(chan struct{})
	}
	next := b.next
	if b.begun++; b.begun == b.size {
		close(next)
		b.begun, b.next = 0, nil
	}
	if b.left--; b.left == 0 {
		b.done()
	}
	b.mu.Unlock()
	<-next
	return nil
}

// TestBindsReuseConnections sends filter and bind calls as kube-scheduler does, while pods are bound in batches.
func TestBindsReuseConnections(t *testing.T) {
	const pods, rounds = 10, 20
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	server := newServer(&fakeScheduler{bind: (&batches{size: pods, left: pods * rounds, done: cancel}).bind})
	server.pacer.longest = 5 * time.Second
	s := serve(t, server)
	var opened atomic.Int32
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		opened.Add(1)
		return new(net.Dialer).DialContext(ctx, network, address)
	}}}
	defer client.CloseIdleConnections()
	var filtering sync.Mutex // kube-scheduler filters one pod at a time.
	var all sync.WaitGroup
	for range pods {
		all.Go(func() {
			for range rounds {
				filtering.Lock()
				s.call(ctx, t, client, "filter", `{"Pod": {"metadata": {"name": "p"}}, "NodeNames": ["n1"]}`)
				filtering.Unlock()
				s.call(ctx, t, client, "bind", `{"PodName": "p", "PodNamespace": "default", "PodUID": "u", "Node": "n1"}`)
			}
		})
	}
	all.Wait()
	if n := opened.Load(); n > 2*pods {
		t.Errorf("%d connections for %d binds, want %d at most", n, pods*rounds, 2*pods)
	}
}

// call makes a call of kube-scheduler. It returns at once when ctx ends.
func (s serving) call(ctx context.Context, t *testing.T, client *http.Client, verb, body string) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+s.address+Prefix+"/"+verb, strings.NewReader(body))
	if err != nil {
		t.Error(err)
		return
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := client.Do(request)
	if err == nil {
		defer response.Body.Close()
		_, err = io.Copy(io.Discard, response.Body)
	}
	if ctx.Err() == nil && (err != nil || response.StatusCode != http.StatusOK) {
		t.Errorf("%s: %v", verb, err)
	}
}
