package webui

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
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
}

func start(t *testing.T, standby func() error) *fixture {
	t.Helper()
	s := &fixture{source: &source{ledger: ledger.New()}, t: t}
	s.board = NewBoard(Options{Source: s.source, Standby: standby, Version: "v1.2.3", Clock: clock.RealClock{}})
	server := httptest.NewServer(s.board.Handler())
	s.url = server.URL + Path + "/"
	t.Cleanup(server.Close)
	await.Run(t, s.board.Run)
	return s
}

// refresh makes the board read its source at the next request.
func (s *fixture) refresh() {
	s.board.mu.Lock()
	defer s.board.mu.Unlock()
	s.board.refreshed = time.Time{}
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

// page is a decoded answer. Of what has not changed it has nil.
type page struct {
	Revision string            `json:"revision"`
	Complete bool              `json:"complete"`
	Status   status            `json:"status"`
	Nodes    []nodeView        `json:"nodes"`
	Names    []string          `json:"names"`
	Pending  []pendingView     `json:"pending"`
	Problems []problemView     `json:"problems"`
	Reports  []reportView      `json:"reports"`
	Stranded []strandedView    `json:"stranded"`
	Tenants  []tenantView      `json:"tenants"`
	Groups   []runView         `json:"groups"`
	Words    map[string]string `json:"words"`
	Samples  []json.RawMessage `json:"samples"`
}

// data returns the decoded data.json with everything.
func (s *fixture) data() page {
	s.t.Helper()
	out, _ := s.since("")
	return out
}

// since returns what has changed since a revision; false if nothing has.
func (s *fixture) since(revision string) (out page, changed bool) {
	s.t.Helper()
	response, err := http.Get(s.url + "data.json?since=" + revision)
	check.Must(s.t, err)
	defer response.Body.Close()
	if response.StatusCode == http.StatusNoContent {
		return page{}, false
	}
	text, err := io.ReadAll(response.Body)
	check.Must(s.t, err)
	if strings.ContainsAny(string(text), "<\u2028") {
		s.t.Errorf("markup in %s", text)
	}
	check.Must(s.t, json.Unmarshal(text, &out))
	return out, true
}

// viewer has what a browser has.
type viewer struct {
	*fixture
	page
	nodes map[string]nodeView
	// parts counts the answers that had only what had changed.
	parts int
}

// ask applies what has changed since the last request.
func (v *viewer) ask() {
	v.t.Helper()
	v.refresh()
	next, changed := v.since(v.Revision)
	if !changed {
		return
	}
	if next.Complete {
		v.page, v.nodes = page{}, map[string]nodeView{}
	} else {
		v.parts++
	}
	v.Revision, v.Status, v.Samples = next.Revision, next.Status, append(v.Samples, next.Samples...)
	if next.Names != nil {
		maps.DeleteFunc(v.nodes, func(name string, _ nodeView) bool { return !slices.Contains(next.Names, name) })
	}
	for _, n := range next.Nodes {
		v.nodes[n.Name] = n
	}
	replace(&v.Pending, next.Pending)
	replace(&v.Problems, next.Problems)
	replace(&v.Reports, next.Reports)
	replace(&v.Tenants, next.Tenants)
	replace(&v.Groups, next.Groups)
}

func replace[Item any](list *[]Item, next []Item) {
	if next != nil {
		*list = next
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
