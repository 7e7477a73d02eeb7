package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
)

// newClient returns a Client over client-go's real client.
func newClient(t *testing.T, url string) Client {
	t.Helper()
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host: url, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: "application/json"},
	})
	check.Must(t, err)
	return New(client)
}

// newBinding returns a new Binding for each call: the client sets its kind when it sends it.
func newBinding() *corev1.Binding {
	return &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "uid-p", Annotations: map[string]string{"a": "b"}},
		Target:     corev1.ObjectReference{Kind: "Node", Name: "n1"},
	}
}

// cut closes the connection without an answer.
func cut(w http.ResponseWriter) {
	conn, _, err := w.(http.Hijacker).Hijack()
	if err == nil {
		conn.Close()
	}
}

func status(code int, reason metav1.StatusReason) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		result := "Failure"
		if code < 300 {
			result = "Success"
		}
		fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":%q,"message":"a message","reason":%q,"code":%d}`, result, reason, code)
	}
}

// TestOutcomeOf sends Bindings through client-go's real client to servers that fail in different ways.
func TestOutcomeOf(t *testing.T) {
	tests := map[string]struct {
		answer http.HandlerFunc
		want   Outcome
	}{
		"201":                            {status(201, ""), Done},
		"400":                            {status(400, metav1.StatusReasonBadRequest), Rejected},
		"401":                            {status(401, metav1.StatusReasonUnauthorized), Rejected},
		"403":                            {status(403, metav1.StatusReasonForbidden), Rejected},
		"404":                            {status(404, metav1.StatusReasonNotFound), Rejected},
		"408":                            {status(408, metav1.StatusReasonTimeout), Unknown},
		"409":                            {status(409, metav1.StatusReasonConflict), Conflict},
		"422":                            {status(422, metav1.StatusReasonInvalid), Rejected},
		"429":                            {status(429, metav1.StatusReasonTooManyRequests), Rejected},
		"500":                            {status(500, metav1.StatusReasonInternalError), Unknown},
		"503":                            {status(503, metav1.StatusReasonServiceUnavailable), Unknown},
		"504, the server's own deadline": {status(504, metav1.StatusReasonTimeout), Unknown},
		"429 with Retry-After": {func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Retry-After", "0")
			status(429, metav1.StatusReasonTooManyRequests)(w, r)
		}, Rejected},
		"500 with Retry-After": {func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Retry-After", "0")
			status(500, metav1.StatusReasonServerTimeout)(w, r)
		}, Unknown},
		"502 of a proxy, without a Status": {func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "<html>bad gateway</html>", http.StatusBadGateway)
		}, Unknown},
		"the connection is cut after the request was read": {func(w http.ResponseWriter, _ *http.Request) { cut(w) }, Unknown},
		"the connection is cut during the answer": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			w.WriteHeader(http.StatusCreated)
			fmt.Fprint(w, `{"kind":"Status"`)
		}, Unknown},
		"no answer comes before the deadline": {func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, Unknown},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var calls atomic.Int32
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				calls.Add(1)
				if _, err := io.ReadAll(r.Body); err != nil {
					t.Errorf("reading the request: %v", err)
				}
				test.answer(w, r)
			}))
			defer server.Close()
			deadline := 10 * time.Second
			if strings.Contains(name, "deadline") && test.want == Unknown {
				deadline = 200 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), deadline)
			defer cancel()
			err := newClient(t, server.URL).Bind(ctx, newBinding())
			if got := OutcomeOf(err); got != test.want {
				t.Errorf("outcome %d, want %d: %v", got, test.want, err)
			}
			// Package eviction distinguishes calls without an answer in time from others without one.
			if late := errors.Is(err, context.DeadlineExceeded); late != (name == "no answer comes before the deadline") {
				t.Errorf("past its deadline: %t, %v", late, err)
			}
			if n := calls.Load(); n != 1 {
				t.Errorf("sent %d times, want once", n)
			}
		})
	}
}

func TestOutcomeOfUnsent(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	url := server.URL
	server.Close()
	if err := newClient(t, url).Bind(t.Context(), newBinding()); err == nil || OutcomeOf(err) != Rejected {
		t.Errorf("no listener: outcome %d of %v, want Rejected", OutcomeOf(err), err)
	}
	// The deadline has passed already. The error does not show whether anything was sent, so the outcome is unknown.
	ctx, cancel := context.WithTimeout(t.Context(), -1)
	defer cancel()
	if err := newClient(t, url).Bind(ctx, newBinding()); err == nil || OutcomeOf(err) != Unknown {
		t.Errorf("no time left: outcome %d of %v, want Unknown", OutcomeOf(err), err)
	}
}

func TestBindRequest(t *testing.T) {
	var path, timeout string
	var got corev1.Binding
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path, timeout = r.Method+" "+r.URL.Path, r.URL.Query().Get("timeout")
		if err := json.NewDecoder(r.Body).Decode(&got); err != nil {
			t.Errorf("the body: %v", err)
		}
		status(201, "")(w, r)
	}))
	defer server.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	check.Must(t, newClient(t, server.URL).Bind(ctx, newBinding()))
	if path != "POST /api/v1/namespaces/default/pods/p/binding" {
		t.Errorf("path %s", path)
	}
	if got.UID != "uid-p" || got.Annotations["a"] != "b" || got.Target.Name != "n1" {
		t.Errorf("sent %+v", got)
	}
	if d, err := time.ParseDuration(timeout); err != nil || d <= 0 || d > time.Minute {
		t.Errorf("timeout %q (%v), want at most a minute", timeout, err)
	}
}

// The patch names one gate, so that others stay, and the UID, so that no later pod of the name loses its gate.
func TestOpenGate(t *testing.T) {
	var patch []byte
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPatch || r.URL.Path != "/api/v1/namespaces/default/pods/p" || r.Header.Get("Content-Type") != string(types.StrategicMergePatchType) {
			status(404, metav1.StatusReasonNotFound)(w, r)
			return
		}
		patch, _ = io.ReadAll(r.Body)
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"kind":"Pod","apiVersion":"v1"}`)
	}))
	defer server.Close()
	api := newClient(t, server.URL)
	if err := api.OpenGate(t.Context(), gpu.Pod{Namespace: "default", Name: "p", UID: "uid-p"}, protocol.GateFairShare); err != nil {
		t.Errorf("OpenGate: %v", err)
	}
	want := `{"metadata":{"uid":"uid-p"},"spec":{"schedulingGates":[{"$patch":"delete","name":"gpushare.aliyun.com/fair-share"}]}}`
	if string(patch) != want {
		t.Errorf("patch %s, want %s", patch, want)
	}
	if err := api.OpenGate(t.Context(), gpu.Pod{Namespace: "default", Name: "q"}, protocol.GateFairShare); !apierrors.IsNotFound(err) {
		t.Errorf("an unknown pod: %v, want NotFound", err)
	}
}

// The patch names nothing but the nomination. The resource version makes it fail once the pod has changed.
func TestNominate(t *testing.T) {
	var patches []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPatch || r.URL.Path != "/api/v1/namespaces/default/pods/p/status" || r.Header.Get("Content-Type") != string(types.MergePatchType) {
			status(404, metav1.StatusReasonNotFound)(w, r)
			return
		}
		patch, _ := io.ReadAll(r.Body)
		patches = append(patches, string(patch))
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"kind":"Pod","apiVersion":"v1"}`)
	}))
	defer server.Close()
	api := newClient(t, server.URL)
	for _, node := range []string{"n1", ""} {
		if err := api.Nominate(t.Context(), gpu.Pod{Namespace: "default", Name: "p", UID: "uid-p"}, "7", node); err != nil {
			t.Errorf("Nominate: %v", err)
		}
	}
	want := []string{
		`{"metadata":{"resourceVersion":"7","uid":"uid-p"},"status":{"nominatedNodeName":"n1"}}`,
		`{"metadata":{"resourceVersion":"7","uid":"uid-p"},"status":{"nominatedNodeName":null}}`,
	}
	check.Equal(t, "patches", want, patches)
}

func TestPodAndAnnotateNode(t *testing.T) {
	var patch []byte
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch {
		case r.Method == http.MethodGet && r.URL.Path == "/api/v1/namespaces/default/pods/p":
			if r.URL.RawQuery != "" {
				t.Errorf("the read asks for %q: a resourceVersion would let a cache answer", r.URL.RawQuery)
			}
			fmt.Fprint(w, `{"kind":"Pod","apiVersion":"v1","metadata":{"name":"p","namespace":"default","uid":"uid-p"}}`)
		case r.Method == http.MethodPatch && r.URL.Path == "/api/v1/nodes/n1":
			patch, _ = io.ReadAll(r.Body)
			fmt.Fprint(w, `{"kind":"Node","apiVersion":"v1"}`)
		default:
			status(404, metav1.StatusReasonNotFound)(w, r)
		}
	}))
	defer server.Close()
	api := newClient(t, server.URL)
	if pod, err := api.Pod(t.Context(), "default", "p"); err != nil || pod.UID != "uid-p" {
		t.Errorf("Pod: %v", err)
	}
	if _, err := api.Pod(t.Context(), "default", "q"); !apierrors.IsNotFound(err) {
		t.Errorf("an unknown pod: %v, want NotFound", err)
	}
	for _, name := range []string{"../../nodes/n1", "a/b", ".."} {
		if _, err := api.Pod(t.Context(), "default", name); err == nil {
			t.Errorf("a pod named %q was read", name)
		}
	}
	if err := api.AnnotateNode(t.Context(), "n1", protocol.AnnotationFreed, "now"); err != nil {
		t.Errorf("AnnotateNode: %v", err)
	}
	if want := `{"metadata":{"annotations":{` + strconv.Quote(protocol.AnnotationFreed) + `:"now"}}}`; string(patch) != want {
		t.Errorf("patch %s, want %s", patch, want)
	}
	if err := api.AnnotateNode(t.Context(), "n2", "k", "v"); !apierrors.IsNotFound(err) {
		t.Errorf("an unknown node: %v, want NotFound", err)
	}
}
