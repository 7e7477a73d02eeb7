package extender

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/scheduling"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/fake"
)

// Incomplete bodies count too: a client that sends much and never completes its request can't exhaust the memory. The memory
// is free again once the client has disconnected.
func TestManyLargeBodies(t *testing.T) {
	server := newServer(&fakeScheduler{})
	const half = 600 << 10
	body := validBodies(t)["filter"]
	// Room for half of two large bodies, and half of a small one.
	server.bodies.limit = int64(2*half + len(body)/2)
	server.readTimeout = time.Hour // The flood must not time out.
	s := serve(t, server)
	ask := func() string {
		response, err := http.Post("http://"+s.address+Prefix+"/filter", "application/json", strings.NewReader(body))
		if err != nil {
			return err.Error()
		}
		defer response.Body.Close()
		answer, err := io.ReadAll(response.Body)
		if err != nil {
			return err.Error()
		}
		return string(answer)
	}
	if got := ask(); !strings.Contains(got, `"NodeNames":["n1"]`) {
		t.Fatalf("before: %s", got)
	}

	flood := rawPost("filter", 2*half, `"`+strings.Repeat("x", half-1))
	first, second := s.dial(t, flood), s.dial(t, flood)
	// Before that, the flood could be rejected instead.
	await.True(t, "the flood is counted", func() bool { return server.bodies.read.Load() == 2*half })
	if got := ask(); !strings.Contains(got, "too many large requests at once") {
		t.Errorf("under the flood: %s", got)
	}
	if got := fetch(t, http.DefaultClient, "http://"+s.address+"/livez"); got != "ok\n" {
		t.Errorf("livez under the flood: %s", got)
	}
	first.Close()
	second.Close()
	await.True(t, "an answer after the flood", func() bool { return strings.Contains(ask(), `"NodeNames":["n1"]`) })
	await.True(t, "no body is counted any more", func() bool { return server.bodies.read.Load() == 0 })
}

// Few bytes can decode to many: "null," in a list of containers has five bytes, and becomes four hundred. Whole nodes of a
// normal cluster find room.
func TestBodyWithManyValues(t *testing.T) {
	h := newServer(&fakeScheduler{}).Handler()
	pod := `{"metadata":{"name":"p","namespace":"d","uid":"u"},"spec":{"containers":[{"resources":{"limits":{"aliyun.com/gpu-mem":"1"}}}]}}`
	list := func(element string) string { return "[" + strings.Repeat(element+",", 1<<20) + element + "]" }
	for name, body := range map[string]string{
		"nulls for whole nodes":   `{"Pod":` + pod + `,"Nodes":{"items":` + list("null") + `}}`,
		"empty objects for nodes": `{"Pod":` + pod + `,"Nodes":{"items":` + list("{}") + `}}`,
		"lists in a list":         `{"Pod":` + pod + `,"Nodes":{"items":` + list("[]") + `}}`,
		"many names":              `{"Pod":` + pod + `,"NodeNames":` + strings.ReplaceAll(list("{}"), "{}", `""`) + `,"x":` + list("1") + `}`,
	} {
		got := answer[filterResult](t, post(h, "filter", body), 200).Error
		if want := errTooMany.Error(); got != want {
			t.Errorf("%s: %.300q, want %q", name, got, want)
		}
	}

	args := extenderv1.ExtenderArgs{Pod: fake.Pod("p", 1), Nodes: &corev1.NodeList{}}
	for i := range 800 {
		node := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node-%d", i), Annotations: map[string]string{"inventory": strings.Repeat("x", 1000)}}}
		for j := range 50 {
			digest := fmt.Sprintf("registry.example/team/image-%d@sha256:%064d", j, j)
			node.Status.Images = append(node.Status.Images, corev1.ContainerImage{Names: []string{digest, digest[:40] + ":v1"}, SizeBytes: 1})
		}
		for range 6 {
			node.Status.Conditions = append(node.Status.Conditions, corev1.NodeCondition{Type: "Ready", Reason: "some", Message: "words"})
			node.ManagedFields = append(node.ManagedFields, metav1.ManagedFieldsEntry{Manager: "kubelet"})
		}
		args.Nodes.Items = append(args.Nodes.Items, node)
	}
	if got := answer[filterResult](t, post(h, "filter", text(t, args)), 200); got.Error != "" {
		t.Errorf("whole nodes, %d MiB of them: %s", len(text(t, args))>>20, got.Error)
	}
}

func TestWeigh(t *testing.T) {
	for body, want := range map[string]int64{
		``:                            0,
		`{}`:                          valueCost,
		`{"a":"b"}`:                   valueCost,
		`{"a":1,"b":null}`:            2 * valueCost,
		`[1,2,3]`:                     3 * valueCost,
		`[null]`:                      valueCost + elementCost,
		`[{},{}]`:                     4*valueCost + 2*elementCost,
		`[[],[{}]]`:                   5*valueCost + 3*elementCost,
		`{"a":[{"b":{}}],"c":{}}`:     6*valueCost + elementCost,
		`{"a,b\"[{,n":"\\","c":",,"}`: 2 * valueCost,
		`["\\\"null,",null]`:          2*valueCost + elementCost,
		`["no end, null`:              valueCost,
		`]]][null]`:                   valueCost + elementCost,
	} {
		if got, _ := weigh([]byte(body), maxBodies); got != want {
			t.Errorf("%s: %d, want %d", body, got, want)
		}
	}
	if got, _ := weigh([]byte(strings.Repeat("[", 1<<20)), 1000); got <= 1000 || got > 2000 {
		t.Errorf("above the limit: %d", got)
	}
}

func TestWeighPod(t *testing.T) {
	for body, want := range map[string]int64{
		`{"Pod":{"a":[{}]},"Nodes":{"items":[{},{}]}}`: 4*valueCost + elementCost + int64(len(`{"Pod":{"a":[{}]`)),
		`{"Pod":{"a":[{},{}`:                           6*valueCost + 2*elementCost,
	} {
		if _, got := weigh([]byte(body), maxBodies); got != want {
			t.Errorf("%s: %d, want %d", body, got, want)
		}
	}
}

// The API server accepts pods with more than 100,000 empty elements, each of which costs a multiple of its length. Meanwhile the
// requests for other pods must find room.
func TestPodWithManyValues(t *testing.T) {
	within, leave := make(chan struct{}), make(chan struct{})
	h := newServer(&fakeScheduler{filter: func(nodes []string) scheduling.FilterResult {
		within <- struct{}{}
		<-leave
		return scheduling.FilterResult{Nodes: nodes, Passed: candidates(len(nodes))}
	}}).Handler()
	filter := func(secrets int) string {
		pod := fake.Pod("odd", 1)
		pod.Spec.ImagePullSecrets = make([]corev1.LocalObjectReference, secrets)
		return text(t, nodesRequest(pod, "n1"))
	}
	const most = maxPod / (len("{},") + elementCost + 2*valueCost)
	for _, secrets := range []int{most + 1, 115_902} {
		if got := answer[filterResult](t, post(h, "filter", filter(secrets)), 200).Error; got != errLargePod.Error() {
			t.Errorf("%d secrets: %.300q, want %q", secrets, got, errLargePod)
		}
	}
	var calls sync.WaitGroup
	for range 3 {
		calls.Go(func() { post(h, "filter", filter(most-10)) })
		<-within
	}
	if got := answer[extenderv1.ExtenderBindingResult](t, post(h, "bind", text(t, bindArgs(fake.Pod("plain", 1), "n1"))), 200).Error; got != "" {
		t.Errorf("a bind while three pods with as many values as possible are filtered: %s", got)
	}
	close(leave)
	calls.Wait()
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
