package extender

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/scheduling"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

func TestMain(m *testing.M) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

var verbs = []string{"filter", "prioritize", "bind", "preempt"}

type (
	filterResult = extenderv1.ExtenderFilterResult
	bindResult   = extenderv1.ExtenderBindingResult
)

// fakeScheduler is a Scheduler. Without a function that replaces them, its calls succeed: every node passes.
type fakeScheduler struct {
	filter     func(nodes []string) scheduling.FilterResult
	prioritize func(nodes []string) []int64
	bind       func(ctx context.Context, request scheduling.BindRequest) error
	preempt    func(proposed map[string]preemption.Victims) map[string]preemption.Victims
	nodes      []ledger.Node

	mu sync.Mutex
	// err is the error of each call.
	err error
	// calls is the number of calls except Ready.
	calls int
}

// called counts a call and returns its error.
func (f *fakeScheduler) called() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls++
	return f.err
}

func (f *fakeScheduler) Ready() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

func (f *fakeScheduler) Filter(_ *corev1.Pod, nodes []string) (scheduling.FilterResult, error) {
	err := f.called()
	if f.filter != nil {
		return f.filter(nodes), err
	}
	return scheduling.FilterResult{Nodes: nodes, Passed: candidates(len(nodes))}, err
}

func (f *fakeScheduler) Prioritize(_ *corev1.Pod, nodes []string) ([]int64, error) {
	err := f.called()
	if f.prioritize != nil {
		return f.prioritize(nodes), err
	}
	return make([]int64, len(nodes)), err
}

func (f *fakeScheduler) Bind(ctx context.Context, request scheduling.BindRequest) error {
	err := f.called()
	if f.bind != nil {
		return f.bind(ctx, request)
	}
	return err
}

func (f *fakeScheduler) Preempt(_ context.Context, _ *corev1.Pod, proposed map[string]preemption.Victims) (map[string]preemption.Victims, error) {
	err := f.called()
	if f.preempt != nil {
		return f.preempt(proposed), err
	}
	return proposed, err
}

func (f *fakeScheduler) Nodes() []ledger.Node { return f.nodes }

func (f *fakeScheduler) Node(name string) (ledger.Node, bool) {
	for _, node := range f.nodes {
		if node.Name == name {
			return node, true
		}
	}
	return ledger.Node{}, false
}

// candidates returns the first n positions.
func candidates(n int) []placement.Candidate {
	out := make([]placement.Candidate, n)
	for i := range out {
		out[i].Node = i
	}
	return out
}

// fakeObserver is an Observer.
type fakeObserver struct {
	mu sync.Mutex
	// answered counts the calls by verb and outcome, such as "bind ok".
	answered map[string]int
	// expires is the expiry of each certificate.
	expires map[string]time.Time
}

func (o *fakeObserver) Answered(verb, outcome string, _ time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.answered[verb+" "+outcome]++
}

func (o *fakeObserver) CertificateExpires(certificate string, at time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.expires[certificate] = at
}

// count returns the number of calls by verb and outcome.
func (o *fakeObserver) count(what string) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.answered[what]
}

// newObserver returns a fakeObserver.
func newObserver() *fakeObserver {
	return &fakeObserver{answered: map[string]int{}, expires: map[string]time.Time{}}
}

// newServer returns a Server over the Scheduler. change, if given, changes its Options before.
func newServer(s Scheduler, change ...func(*Options)) *Server {
	o := Options{
		Scheduler: s, Observer: newObserver(), StopTimeout: 10 * time.Second,
		Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("a metric\n")) }),
	}
	for _, c := range change {
		c(&o)
	}
	return NewServer(o)
}

// newRequest returns a request in the form that kube-scheduler sends.
func newRequest(method, path, body string) *http.Request {
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	return r
}

// serveOne returns the handler's answer to the request.
func serveOne(h http.Handler, r *http.Request) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func get(h http.Handler, path string) *httptest.ResponseRecorder {
	return serveOne(h, newRequest(http.MethodGet, path, ""))
}

func post(h http.Handler, verb, body string) *httptest.ResponseRecorder {
	return serveOne(h, newRequest(http.MethodPost, Prefix+"/"+verb, body))
}

// text returns the value as JSON.
func text(t testing.TB, value any) string {
	t.Helper()
	data, err := json.Marshal(value)
	check.Must(t, err)
	return string(data)
}

// answer decodes a JSON answer strictly, and checks its status.
func answer[T any](t testing.TB, w *httptest.ResponseRecorder, status int) T {
	t.Helper()
	var out T
	if w.Code != status {
		t.Fatalf("status %d, want %d: %s", w.Code, status, w.Body)
	}
	if got := w.Header().Get("Content-Type"); got != "application/json" {
		t.Errorf("Content-Type %q", got)
	}
	decoder := json.NewDecoder(bytes.NewReader(w.Body.Bytes()))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&out); err != nil {
		t.Fatalf("decoding the answer: %v: %s", err, w.Body)
	}
	return out
}

// nodesRequest returns the arguments of filter and prioritize for a pod and the names of the candidate nodes.
func nodesRequest(pod *corev1.Pod, names ...string) extenderv1.ExtenderArgs {
	return extenderv1.ExtenderArgs{Pod: pod, NodeNames: &names}
}

// wholeNodes returns the same arguments with Node objects.
func wholeNodes(args extenderv1.ExtenderArgs) extenderv1.ExtenderArgs {
	nodes := &corev1.NodeList{}
	for _, name := range *args.NodeNames {
		nodes.Items = append(nodes.Items, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"of": name}}})
	}
	return extenderv1.ExtenderArgs{Pod: args.Pod, Nodes: nodes}
}

func bindArgs(pod *corev1.Pod, node string) extenderv1.ExtenderBindingArgs {
	return extenderv1.ExtenderBindingArgs{PodNamespace: pod.Namespace, PodName: pod.Name, PodUID: pod.UID, Node: node}
}

// validBodies returns a valid request for each verb.
func validBodies(t testing.TB) map[string]string {
	pod := fake.Pod("p", 10)
	nodes := text(t, nodesRequest(pod, "n1"))
	return map[string]string{
		"filter": nodes, "prioritize": nodes, "bind": text(t, bindArgs(pod, "n1")),
		"preempt": text(t, extenderv1.ExtenderPreemptionArgs{Pod: pod, NodeNameToMetaVictims: meta("n1", 0, "uid-a")}),
	}
}

// errorOf returns the error of a verb's answer, from the field or the body that kube-scheduler reads. status is the status
// that a verb without such a field must answer.
func errorOf(t testing.TB, verb string, w *httptest.ResponseRecorder, status int) string {
	t.Helper()
	switch verb {
	case "filter":
		return answer[filterResult](t, w, http.StatusOK).Error
	case "bind":
		return answer[bindResult](t, w, http.StatusOK).Error
	}
	if w.Code != status {
		t.Errorf("%s: status %d, want %d", verb, w.Code, status)
	}
	return strings.TrimSpace(w.Body.String())
}

// wantErrors expects this error from each verb.
func wantErrors(t *testing.T, h http.Handler, want string, status int) {
	t.Helper()
	for verb, body := range validBodies(t) {
		if got := errorOf(t, verb, post(h, verb, body), status); got != want {
			t.Errorf("%s: %q, want %q", verb, got, want)
		}
	}
}
