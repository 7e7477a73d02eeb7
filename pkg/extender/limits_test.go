package extender

import (
	"context"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/fake"
)

// The API server accepts pods with hundreds of thousands of empty elements, which take a multiple of their length in memory. Such a pod doesn't make the
// extender use gigabytes.
func TestPodWithManyElements(t *testing.T) {
	h := newServer(&fakeScheduler{}).Handler()
	filter := func(terms int) string {
		pod := fake.Pod("odd", 1)
		pod.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: make([]corev1.NodeSelectorTerm, terms)},
		}}
		var before, after runtime.MemStats
		body := text(t, nodesRequest(pod, "n1"))
		runtime.ReadMemStats(&before)
		message := answer[filterResult](t, post(h, "filter", body), 200).Error
		runtime.ReadMemStats(&after)
		if allocated := after.TotalAlloc - before.TotalAlloc; allocated > 256<<20 {
			t.Errorf("%d MiB allocated for a pod of %d KiB", allocated>>20, len(body)>>10)
		}
		return message
	}
	const most = maxPod / len("{},")
	if got := filter(most - 1000); got != "" {
		t.Errorf("a pod within the limit: %s", got)
	}
	if got := filter(most); got != errLargePod.Error() {
		t.Errorf("a pod above the limit: %.300q, want %q", got, errLargePod)
	}
}

// logText collects the log.
type logText struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logText) has(what string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.text.String(), what)
}

// Any client that can connect can cause failed handshakes, so by default these are not logged. Other errors of the server
// are.
func TestHandshakeLog(t *testing.T) {
	config := newAuthority(t).serverTLS("", ignoreExpiry)
	for verbosity, want := range map[int]bool{0: false, 2: true} {
		var text logText
		logger := textlogger.NewLogger(textlogger.NewConfig(textlogger.Verbosity(verbosity), textlogger.Output(&text)))
		server := newServer(&fakeScheduler{}, func(o *Options) { o.TLS = config })
		s := serveWith(klog.NewContext(context.Background(), logger), t, server.Serve)
		if _, err := io.ReadAll(s.dial(t, rawLivez)); isTimeout(err) {
			t.Error(err)
		}
		if want {
			await.True(t, "the failed handshake is logged", func() bool { return text.has("TLS handshake error") })
		}
		s.stop()
		s.wantEnd(t)
		if text.has("TLS handshake error") != want {
			t.Errorf("verbosity %d: logged %t, want %t", verbosity, !want, want)
		}
		if _, err := (serverLog{logger}).Write([]byte("http: panic serving 192.0.2.1:1\n")); err != nil || !text.has("panic serving") {
			t.Errorf("a panic isn't logged (%v)", err)
		}
	}
}

// Clients that request the whole cluster and don't read the answer can't keep any number of answers in memory.
func TestManyReaders(t *testing.T) {
	begun, release := make(chan struct{}), make(chan struct{})
	server := newServer(&fakeScheduler{}, func(o *Options) {
		o.Metrics = http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			begun <- struct{}{}
			<-release
		})
	})
	// Both addresses have one limit.
	handlers := []http.Handler{server.Handler(), server.HealthHandler()}
	ask := func(i int, path string) int { return get(handlers[i%2], path).Code }
	ended := make(chan int)
	for i := range maxReaders {
		go func() { ended <- ask(i, "/metrics") }()
		<-begun
	}
	for i := range 2 {
		if got := ask(i, "/metrics"); got != http.StatusServiceUnavailable {
			t.Errorf("one more: %d", got)
		}
		if got := ask(i, "/livez"); got != http.StatusOK {
			t.Errorf("livez meanwhile: %d", got)
		}
	}
	close(release)
	for range maxReaders {
		if got := <-ended; got != http.StatusOK {
			t.Errorf("one of the first: %d", got)
		}
	}
	go func() { <-begun }()
	if got := ask(0, "/metrics"); got != http.StatusOK {
		t.Errorf("afterwards: %d", got)
	}
}
