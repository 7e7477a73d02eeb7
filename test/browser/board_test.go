package browser

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/connlimit"
	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/scheduling"
	"github.com/gpushare/gpushare/pkg/webui"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// source is a fake cluster.
type source struct {
	book  *ledger.Ledger
	clock clock.PassiveClock

	mu       sync.Mutex
	pending  []*clustercache.PodInfo
	problems []*clustercache.PodInfo
	reported []*clustercache.PodInfo
	tenants  []dispatch.Tenant
	groups   []gang.Report
	noGroups error
	// owners are the controllers of bound pods, by namespace/name.
	owners map[string]string
}

func newSource() *source {
	return &source{book: ledger.New(), clock: clock.RealClock{}, owners: map[string]string{}}
}

func (s *source) Ready() error                                { return nil }
func (s *source) ChangesSince(revision uint64) ledger.Changes { return s.book.ChangesSince(revision) }

// Explain diagnoses like the extender, for pods that may run on any node.
func (s *source) Explain() *scheduling.Explanation {
	s.mu.Lock()
	defer s.mu.Unlock()
	object := func(name string) (*corev1.Node, bool) {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, true
	}
	nodes := diagnosis.Nodes(s.book, object, func(gpu.Pod) (since, due time.Time) { return })
	var pending []*diagnosis.Pod
	for _, pod := range s.pending {
		pending = append(pending, pod.Pending)
	}
	e := &scheduling.Explanation{At: s.clock.Now(), Pending: s.pending, RequestProblems: s.problems, Reported: s.reported, Tenants: s.tenants, Stranded: s.book.Stranded()}
	diagnoser := diagnosis.NewDiagnoser(nodes, pending, s.clock.Now())
	e.Diagnoses = diagnoser.DiagnoseAll(pending, func(int) *diagnosis.GroupWait { return nil })
	return e
}

func (s *source) OwnerOf(namespace, name string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.owners[namespace+"/"+name]
}

func (s *source) Groups() ([]gang.Report, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.groups, s.noGroups
}

// pendingPod returns a pending pod with kube-scheduler's message about it; empty if it has not tried the pod.
func pendingPod(pod gpu.Pod, message string, created time.Time) *clustercache.PodInfo {
	object := fake.Pod(pod.Name, int64(pod.Request), fake.Cores(int64(pod.Cores)))
	if pod.Cards > 1 {
		object.Labels = map[string]string{protocol.LabelCount: strconv.Itoa(pod.Cards)}
	}
	object.UID, object.Namespace, object.CreationTimestamp = types.UID(pod.UID), pod.Namespace, metav1.NewTime(created)
	if message != "" {
		object.Status.Conditions = []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: message,
		}}
	}
	return clustercache.NewPodInfo(object)
}

func (s *source) wait(pods ...*clustercache.PodInfo) { s.change(func() { s.pending = pods }) }

// change changes what mu guards.
func (s *source) change(edit func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	edit()
}

// show serves the board until the test ends, and returns the page's address and a function that ends it earlier.
func show(t *testing.T, board *webui.Board) (url string, stop func()) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	return "http://" + listener.Addr().String() + "/ui/", serve(t, board, listener, board.Handler())
}

func serve(t *testing.T, board *webui.Board, listener net.Listener, handler http.Handler) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		check.NoError(t, board.Run(ctx))
	})
	running.Go(func() {
		check.NoError(t, connlimit.Serve(ctx, listener, webui.MaxConnections, nil, handler))
	})
	stop = func() {
		cancel()
		running.Wait()
	}
	t.Cleanup(stop)
	return stop
}

// visit shows the source's board in a new tab, at this address of the page. The test fails if the page complains until it ends.
func visit(t *testing.T, s *source, address string, width, height int64) *Tab {
	t.Helper()
	url, _ := show(t, newBoard(s))
	tab := Start(t, width, height)
	t.Cleanup(tab.WantNoComplaints)
	tab.url = url
	tab.Do(chromedp.Navigate(url + address))
	return tab
}

func newBoard(s *source) *webui.Board {
	return webui.NewBoard(webui.Options{Source: s, Version: "v0.0.0-test", Clock: clock.RealClock{}})
}

// fill creates nodes of equal cards. Some pods use nine tenths of each card.
func fill(s *source, nodes, cards, pods int) {
	random := rand.New(rand.NewPCG(1, 2))
	for n := range nodes {
		name := fmt.Sprintf("gpu-node-%04d", n)
		spec := ledger.NodeSpec{Unit: gpu.GiB}
		for c := range cards {
			spec.Cards = append(spec.Cards, gpu.Card{
				Index: c, UUID: fmt.Sprintf("GPU-%08x-%04x-4000-8000-000000000000", n, c), Model: "NVIDIA A100-SXM4-80GB",
				Memory: 80, NUMANode: gpu.NoNUMANode,
			})
		}
		s.book.SetNode(name, spec)
		for c := range cards {
			difference := random.IntN(72 / pods)
			for p := range pods {
				id := fmt.Sprintf("%d-%d-%d", n, c, p)
				memory := gpu.Memory(72/pods + (p-pods/2)*difference)
				s.book.SetBound(name, gpu.Pod{
					UID: gpu.PodUID(id), Namespace: fmt.Sprintf("team-%02d", random.IntN(40)), Name: "inference-" + id, Request: memory,
				}, gpu.On(c, memory), time.Time{})
			}
		}
	}
}
