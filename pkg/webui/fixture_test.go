package webui

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/scheduling"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// source is a Source that a test sets up.
type source struct {
	ledger *ledger.Ledger

	mu       sync.Mutex
	notReady error
	pending  []*clustercache.PodInfo
	problems []*clustercache.PodInfo
	reported []*clustercache.PodInfo
	tenants  []dispatch.Tenant
	groups   []gang.Report
	noGroups error
}

func (s *source) Ready() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.notReady
}

func (s *source) setReady(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.notReady = err
}

func (s *source) ChangesSince(revision uint64) ledger.Changes { return s.ledger.ChangesSince(revision) }

func (s *source) OwnerOf(namespace, name string) string { return noOwner(namespace, name) }

// noOwner is the owner of pods without a controller.
func noOwner(_, _ string) string { return "" }

func (s *source) setPending(pods ...*clustercache.PodInfo) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending, s.problems = nil, nil
	for _, pod := range pods {
		if pod.RequestProblem != "" {
			s.problems = append(s.problems, pod)
		} else {
			s.pending = append(s.pending, pod)
		}
	}
}

func (s *source) setReported(pods ...*clustercache.PodInfo) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reported = pods
}

func (s *source) setTenants(tenants ...dispatch.Tenant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tenants = tenants
}

func (s *source) Groups() ([]gang.Report, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.groups, s.noGroups
}

func (s *source) setGroups(err error, groups ...gang.Report) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.groups, s.noGroups = groups, err
}

// Explain returns the diagnosis TooLarge for all pods. The message has the number of nodes.
func (s *source) Explain() *scheduling.Explanation {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := &scheduling.Explanation{At: time.Now(), Pending: s.pending, RequestProblems: s.problems, Reported: s.reported, Tenants: s.tenants, Stranded: s.ledger.Stranded()}
	for range s.pending {
		e.Diagnoses = append(e.Diagnoses, diagnosis.Diagnosis{Reason: reasons.TooLarge, Message: fmt.Sprintf("%d nodes, all too small", len(s.ledger.NodeCards()))})
	}
	return e
}

// fixture is a running board behind a real HTTP server.
type fixture struct {
	*source
	t     *testing.T
	board *Board
	url   string
	stop  func()
}

func start(t *testing.T, standby func() error) *fixture {
	t.Helper()
	return startWithTimeout(t, standby, 0)
}

// startWithTimeout sets the server's read and write timeouts; 0 means none.
func startWithTimeout(t *testing.T, standby func() error, timeout time.Duration) *fixture {
	t.Helper()
	s := &fixture{source: &source{ledger: ledger.New()}, t: t}
	s.board = NewBoard(Options{Source: s.source, Standby: standby, Version: "v1.2.3", Clock: clock.RealClock{}})
	server := httptest.NewUnstartedServer(s.board.Handler())
	server.Config.ReadTimeout, server.Config.WriteTimeout = timeout, timeout
	server.Start()
	s.url = server.URL + Path + "/"
	t.Cleanup(server.Close)
	stop := await.Run(t, s.board.Run)
	s.stop = func() {
		stop()
		server.CloseClientConnections()
	}
	return s
}

// awaitViewers waits until the number of viewers is want.
func (s *fixture) awaitViewers(want int, timeout time.Duration) {
	s.t.Helper()
	for deadline := time.Now().Add(timeout); ; time.Sleep(time.Millisecond) {
		s.board.mu.Lock()
		viewers := s.board.viewers
		s.board.mu.Unlock()
		if viewers == want {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("%d viewers after %v, want %d", viewers, timeout, want)
		}
	}
}

func spec(sizes ...gpu.Memory) ledger.NodeSpec {
	out := ledger.NodeSpec{Unit: gpu.GiB}
	for i, size := range sizes {
		out.Cards = append(out.Cards, gpu.Card{Index: i, UUID: fmt.Sprintf("GPU-%d", i), Memory: size, NUMANode: gpu.NoNUMANode})
	}
	return out
}

func pod(name string, request gpu.Memory) gpu.Pod {
	return gpu.Pod{UID: gpu.PodUID("uid-" + name), Namespace: "default", Name: name, Request: request}
}

// page is the decoded state of a viewer.
type page struct {
	Seq      uint64            `json:"seq"`
	Status   status            `json:"status"`
	Nodes    []nodeView        `json:"nodes"`
	Pending  []pendingView     `json:"pending"`
	Problems []problemView     `json:"problems"`
	Reports  []reportView      `json:"reports"`
	Stranded []strandedView    `json:"stranded"`
	Tenants  []tenantView      `json:"tenants"`
	Groups   []runView         `json:"groups"`
	Words    map[string]string `json:"words"`
	Samples  []json.RawMessage `json:"samples"`
}

// data returns the decoded data.json.
func (s *fixture) data() page {
	s.t.Helper()
	response, err := http.Get(s.url + "data.json")
	check.Must(s.t, err)
	defer response.Body.Close()
	var out page
	check.Must(s.t, json.NewDecoder(response.Body).Decode(&out))
	return out
}

// event is a server-sent event.
type event struct {
	name, data string
	seq        uint64
}

// viewer reads a stream like a browser.
type viewer struct {
	t          *testing.T
	body       io.Closer
	lines      *bufio.Scanner
	status     int
	compressed bool
}

func (s *fixture) view(compressed bool) *viewer {
	s.t.Helper()
	request, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, s.url+"events", nil)
	check.Must(s.t, err)
	request.Header.Set("Accept-Encoding", "identity")
	if compressed {
		request.Header.Set("Accept-Encoding", "br;q=1, gzip")
	}
	response, err := http.DefaultTransport.RoundTrip(request)
	check.Must(s.t, err)
	s.t.Cleanup(func() { _ = response.Body.Close() })
	v := &viewer{t: s.t, body: response.Body, status: response.StatusCode, compressed: compressed}
	if response.StatusCode != http.StatusOK {
		return v
	}
	reader := io.Reader(response.Body)
	if (response.Header.Get("Content-Encoding") == "gzip") != compressed {
		s.t.Fatalf("Content-Encoding %q", response.Header.Get("Content-Encoding"))
	}
	if compressed {
		if reader, err = gzip.NewReader(response.Body); err != nil {
			s.t.Fatal(err)
		}
	}
	v.lines = bufio.NewScanner(reader)
	v.lines.Buffer(nil, 64<<20)
	return v
}

// next returns the next event, or false at the end of the stream.
func (v *viewer) next() (event, bool) {
	v.t.Helper()
	var e event
	for v.lines.Scan() {
		key, value, _ := strings.Cut(v.lines.Text(), ": ")
		switch key {
		case "event":
			e.name = value
		case "id":
			seq, err := strconv.ParseUint(value, 10, 64)
			check.Must(v.t, err)
			e.seq = seq
		case "data":
			e.data = value
		case "":
			return e, true
		}
	}
	if err := v.lines.Err(); err != nil && (!v.compressed || !errors.Is(err, io.ErrUnexpectedEOF)) {
		v.t.Fatalf("the stream ended with an error: %v", err)
	}
	return event{}, false
}

// follower applies events to its copy of the state.
type follower struct {
	page
	nodes  map[string]nodeView
	deltas int
}

// await applies events from the stream until done returns true.
func (f *follower) await(v *viewer, done func() bool) {
	v.t.Helper()
	for f.nodes == nil || !done() {
		e, ok := v.next()
		if !ok {
			v.t.Fatal("the stream ended")
		}
		f.take(v.t, e)
	}
}

func (f *follower) take(t *testing.T, e event) {
	t.Helper()
	if strings.ContainsAny(e.data, "<\u2028") {
		t.Errorf("markup in %s", e.data)
	}
	switch e.name {
	case "whole":
		f.page = page{}
		check.Must(t, json.Unmarshal([]byte(e.data), &f.page))
		f.nodes = map[string]nodeView{}
		for _, n := range f.Nodes {
			f.nodes[n.Name] = n
		}
		if f.Seq != e.seq {
			t.Errorf("the complete state %d is in event %d", f.Seq, e.seq)
		}
	case "delta":
		f.deltas++
		if e.seq != f.Seq+1 {
			t.Errorf("event %d was followed by %d", f.Seq, e.seq)
		}
		f.Seq = e.seq
		var d struct {
			Nodes    []nodeView
			Removed  []string
			Pending  *[]pendingView
			Problems *[]problemView
			Reports  *[]reportView
			Tenants  *[]tenantView
			Groups   *[]runView
			Sample   json.RawMessage
			Status   *status
		}
		check.Must(t, json.Unmarshal([]byte(e.data), &d))
		for _, name := range d.Removed {
			delete(f.nodes, name)
		}
		for _, n := range d.Nodes {
			f.nodes[n.Name] = n
		}
		if d.Pending != nil {
			f.Pending = *d.Pending
		}
		if d.Problems != nil {
			f.Problems = *d.Problems
		}
		if d.Reports != nil {
			f.Reports = *d.Reports
		}
		if d.Tenants != nil {
			f.Tenants = *d.Tenants
		}
		if d.Groups != nil {
			f.Groups = *d.Groups
		}
		if d.Sample != nil {
			f.Samples = append(f.Samples, d.Sample)
		}
		if d.Status != nil {
			f.Status = *d.Status
		}
	}
}

// pending returns a pending pod with kube-scheduler's message about it.
func pending(name string, request gpu.Memory, message string) *clustercache.PodInfo {
	p := pod(name, request)
	return &clustercache.PodInfo{PodUse: eligibility.PodUse{Pod: p}, Pending: &diagnosis.Pod{Pod: p, Message: message}}
}

// wrong returns a pod with a request problem.
func wrong(name string) *clustercache.PodInfo {
	return &clustercache.PodInfo{PodUse: eligibility.PodUse{Pod: pod(name, 0)}, RequestProblem: "gpu-mem is 0"}
}
