package webui

import (
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"
	"unique"

	"k8s.io/klog/v2"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/scheduling"
	"github.com/gpushare/gpushare/test/check"
)

func TestViewNode(t *testing.T) {
	l := ledger.New()
	nodeSpec := spec(16, 16)
	nodeSpec.Cards[1].Unhealthy, nodeSpec.Simulated = "Xid 79", true
	l.SetNode("n0", nodeSpec)
	l.SetBound("n0", pod("bound", 10), gpu.On(0, 10), time.Time{})
	l.SetBound("n0", pod("elsewhere", 4), gpu.On(5, 4), time.Time{})
	leaving := pod("leaving", 3)
	leaving.Leaving = true
	l.SetBound("n0", leaving, gpu.On(1, 3), time.Time{})
	l.SetBound("n0", pod("presumed", 2), nil, time.Time{})
	l.SetBound("n0", pod("too large", 99), nil, time.Time{})
	if _, err := l.Reserve("n0", pod("assumed", 1), placement.Binpack, time.Time{}); err != nil {
		t.Fatal(err)
	}
	node, _ := l.Node("n0")
	want := nodeView{
		Name: "n0", Unit: "GiB", UnitMiB: 1024, CountsCores: true, Simulated: true,
		Cards: []cardView{
			{ID: 0, Total: 16, Used: 13, UUID: "GPU-0", Pods: []podView{
				{Name: "assumed", Namespace: "default", Memory: 1, State: "assumed"}, {Name: "bound", Namespace: "default", Memory: 10},
				{Name: "presumed", Namespace: "default", Memory: 2, State: "presumed"},
			}},
			{ID: 1, Total: 16, Used: 3, UUID: "GPU-1", Unhealthy: "Xid 79", Pods: []podView{{Name: "leaving", Namespace: "default", Memory: 3, State: "leaving"}}},
			{ID: 5, Used: 4, Vanished: true, Pods: []podView{{Name: "elsewhere", Namespace: "default", Memory: 4}}},
		},
		Problems: []string{"GPU1 is unhealthy: Xid 79", "pods hold 4 (GiB) of GPU5, which the node doesn't report", "pods whose card is not known hold 99 (GiB)"},
		Cardless: []podView{{Name: "too large", Namespace: "default", Memory: 99, State: "presumed"}},
	}
	check.Equal(t, "the result", want, viewNode(node, noOwner))
	check.Equal(t, "tally", tally{Total: 32 << 10, Allocated: 16 << 10, Pieces: 3 << 10}, tallyNode(node))

	l.DeleteNode("n0")
	node, _ = l.Node("n0")
	if got := viewNode(node, noOwner); len(got.Problems) == 0 || len(got.Cards) == 0 || !got.Cards[0].Vanished || got.Simulated {
		t.Errorf("deleted node: %+v", got)
	}
}

// TestViewOwner: operators look for a pod by its controller, and for nodes by their pool.
func TestViewOwner(t *testing.T) {
	l := ledger.New()
	nodeSpec := spec(16)
	nodeSpec.Pool = "a100"
	l.SetNode("n0", nodeSpec)
	l.SetBound("n0", pod("serve-1", 4), gpu.On(0, 4), time.Time{})
	node, _ := l.Node("n0")
	view := viewNode(node, func(namespace, name string) string { return "Deployment/of-" + namespace + "-" + name })
	if got := view.Cards[0].Pods[0].Owner; got != "Deployment/of-default-serve-1" || view.Pool != "a100" {
		t.Errorf("owner %q, pool %q", got, view.Pool)
	}
	owned := &clustercache.PodInfo{PodUse: eligibility.PodUse{Pod: pod("p", 4)}, Owner: unique.Make(clustercache.Owner{Kind: "Job", Name: "train"}), Pending: &diagnosis.Pod{}}
	if got := viewPending(&scheduling.Explanation{Pending: []*clustercache.PodInfo{owned}, Diagnoses: make([]diagnosis.Diagnosis, 1)}); got[0].Owner != "Job/train" {
		t.Errorf("owner of a pending pod: %q", got[0].Owner)
	}
}

// TestViewRDMAPorts: the page gets the ports near a card.
func TestViewRDMAPorts(t *testing.T) {
	l := ledger.New()
	l.SetNode("n", ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{{Memory: 16, RDMAPorts: "mlx5_0:1"}}})
	node, _ := l.Node("n")
	if got := viewNode(node, noOwner).Cards[0].RDMAPorts; got != "mlx5_0:1" {
		t.Errorf("ports %q", got)
	}
}

// TestViewSeveralCards checks that a pod with several cards is on each of them with its part, and what the page gets of a pending one.
func TestViewSeveralCards(t *testing.T) {
	l := ledger.New()
	l.SetNode("n0", spec(16, 16, 16))
	tensor := pod("tensor", 16)
	tensor.Cards, tensor.Cores = 2, 100
	l.SetBound("n0", tensor, tensor.Demand().On(0, 2), time.Time{})
	l.SetBound("n0", pod("one", 6), gpu.On(2, 6), time.Time{})
	node, _ := l.Node("n0")
	part := podView{Name: "tensor", Namespace: "default", Memory: 8, Cores: 50, Cards: 2}
	want := []cardView{
		{ID: 0, Total: 16, Used: 8, UsedCores: 50, UUID: "GPU-0", Pods: []podView{part}},
		{ID: 1, Total: 16, UUID: "GPU-1", Pods: []podView{}},
		{ID: 2, Total: 16, Used: 14, UsedCores: 50, UUID: "GPU-2", Pods: []podView{{Name: "one", Namespace: "default", Memory: 6}, part}},
	}
	check.Equal(t, "the result", want, viewNode(node, noOwner).Cards)

	old := spec(16)
	old.Cores = reasons.OldForCores
	l.SetNode("n1", old)
	if node, _ = l.Node("n1"); viewNode(node, noOwner).CountsCores {
		t.Error("a node whose device plugin is too old counts cores")
	}

	asks := &clustercache.PodInfo{PodUse: eligibility.PodUse{Pod: tensor}, Pending: &diagnosis.Pod{Pod: tensor}}
	invalid := &clustercache.PodInfo{PodUse: eligibility.PodUse{Pod: tensor}, Pending: &diagnosis.Pod{Pod: tensor, RequestError: "not divisible"}}
	got := viewPending(&scheduling.Explanation{
		Pending: []*clustercache.PodInfo{asks, invalid}, Diagnoses: []diagnosis.Diagnosis{{Position: diagnosis.Position{Queued: true, Ahead: 3}}, {}},
	})
	if got[0].Cards != 2 || got[0].Cores != 100 || *got[0].Ahead != 3 || got[1].Cards != 0 || got[1].Ahead != nil {
		t.Errorf("pending: %+v", got)
	}
}

func TestViewNodeUnit(t *testing.T) {
	for name, test := range map[string]struct {
		unit gpu.Unit
		card gpu.Memory
		want string
		mib  float64
	}{
		"GiB":                    {gpu.GiB, 16, "GiB", 1024},
		"MiB":                    {gpu.MiB, 16276, "MiB", 1},
		"multiple of MiB":        {256 * gpu.MiB, 64, "256MiB", 256},
		"unknown, small amounts": {0, 80, "", 1024},
		"unknown, large amounts": {0, 16276, "", 1},
	} {
		node := ledger.Node{NodeSpec: ledger.NodeSpec{Unit: test.unit, Cards: []gpu.Card{{Memory: test.card}}}, Used: []gpu.Memory{0}, UsedCores: []gpu.Cores{0}}
		if got := viewNode(node, noOwner); got.Unit != test.want || got.UnitMiB != test.mib {
			t.Errorf("%s: %q of %v MiB, want %q of %v", name, got.Unit, got.UnitMiB, test.want, test.mib)
		}
	}
}

func TestViewReports(t *testing.T) {
	at := time.UnixMilli(1_800_000_000_000)
	overuse := func(measured time.Time) *protocol.Overuse {
		return &protocol.Overuse{Used: 12288, Requested: 8192, Since: at.Add(-time.Hour), At: measured}
	}
	got := viewReports(&scheduling.Explanation{At: at, Reported: []*clustercache.PodInfo{
		{PodUse: eligibility.PodUse{Pod: pod("above", 8), Node: "n0"}, Overuse: overuse(at.Add(-time.Minute))},
		{PodUse: eligibility.PodUse{Pod: pod("borrows", 8), Node: "n0"}, Overuse: &protocol.Overuse{
			Used: 12288, Requested: 8192, At: at, Cards: map[int]protocol.CardOveruse{0: {Used: 12288, Requested: 8192, Limit: 16384, Short: 1}}}},
		{PodUse: eligibility.PodUse{Pod: pod("no longer measured", 8), Node: "n0"}, Overuse: overuse(at.Add(-time.Hour))},
		{PodUse: eligibility.PodUse{Pod: pod("bypass", 8), Node: "n0"}, WithoutExtender: true},
		{PodUse: eligibility.PodUse{Pod: pod("without its limit", 8), Node: "n1"}, LimitProblem: "its cgroup has no limit", Overuse: overuse(at.Add(-time.Hour))},
	}})
	want := []reportView{
		{Name: "above", Namespace: "default", Node: "n0", Used: 12288, Requested: 8192, Since: at.Add(-time.Hour).UnixMilli()},
		{Name: "borrows", Namespace: "default", Node: "n0", Used: 12288, Requested: 8192, Allowed: 16384, Borrowed: 4096},
		{Name: "bypass", Namespace: "default", Node: "n0", WithoutExtender: true},
		{Name: "without its limit", Namespace: "default", Node: "n1", Limit: "its cgroup has no limit"},
	}
	check.Equal(t, "the result", want, got)
}

func TestViewRuns(t *testing.T) {
	train := gang.Key{Namespace: "ns", Name: "train"}
	since := time.UnixMilli(1_800_000_000_000)
	got := viewRuns([]gang.Report{
		{Group: gang.Key{Namespace: "ns", Name: "eval"}, Reason: reasons.GroupCardless(2)},
		{Group: train, Phase: gang.PhaseRunning, Size: 2, Counted: 2, Bound: []string{"a", "b"}, Memory: 16, Since: since},
		{Group: train, Phase: gang.PhaseBroken, Size: 2, Counted: 2, Bound: []string{"c"}, Pending: []string{"d"}, Memory: 16, Problem: "its size is no number", Since: since},
	})
	want := []runView{
		{Namespace: "ns", Name: "eval", Phase: "incomplete", Reason: "none of its 2 pods asks for cards"},
		{Namespace: "ns", Name: "train", Phase: "running", Size: 2, Counted: 2, Bound: []string{"a", "b"}, Memory: 16, Since: since.UnixMilli()},
		{
			Namespace: "ns", Name: "train", Phase: "broken", Size: 2, Counted: 2, Bound: []string{"c"}, Pending: []string{"d"}, Memory: 16,
			Reason: "invalid group: its size is no number", Since: since.UnixMilli(),
		},
	}
	check.Equal(t, "the result", want, got)
}

// Without fair sharing the page has nothing of it. With it, a sample has the tenants that have or deserve most, and the sum of the others.
func TestShares(t *testing.T) {
	s := &source{ledger: ledger.New()}
	s.ledger.SetNode("n0", spec(16, 16))
	clock := clocktesting.NewFakeClock(time.Unix(1_800_000_000, 0))
	b := NewBoard(Options{Source: s, Clock: clock})
	read := func() (got page) {
		t.Helper()
		clock.Step(sampleEvery)
		b.tick(klog.Background())
		check.Must(t, json.Unmarshal(b.State(""), &got))
		return got
	}
	off := read()
	if sample := string(off.Samples[0]); off.Tenants != nil || sample != `{"time":1800000010,"total":32768,"allocated":0,"whole":32768,"pieces":0,"pending":0}` {
		t.Errorf("without fair sharing: tenants %v, sample %s", off.Tenants, sample)
	}
	tenants := []dispatch.Tenant{
		{Name: "starved", Terms: fairshare.Terms{Weight: 2, Guaranteed: 4}, Share: 9, Waiting: 2, WaitingMemory: 9, Next: pod("p", 8), Obstacle: reasons.ObstacleNoRoom},
		{Name: "", Terms: fairshare.DefaultTerms, Share: 8, Allocated: 20},
	}
	for i := range 8 {
		tenants = append(tenants, dispatch.Tenant{Name: fmt.Sprint("small-", i), Allocated: 1})
	}
	s.setTenants(tenants...)
	on := read()
	want := []tenantView{
		{dispatch.Tenant{Name: "starved", Terms: fairshare.Terms{Weight: 2, Guaranteed: 4}, Share: 9, Waiting: 2, WaitingMemory: 9}, "default/p: no card has room for it now"},
		{Tenant: dispatch.Tenant{Terms: fairshare.DefaultTerms, Share: 8, Allocated: 20}}, {Tenant: dispatch.Tenant{Name: "small-0", Allocated: 1}},
	}
	check.Equal(t, "tenants", want, on.Tenants[:3])
	var got sample
	check.Must(t, json.Unmarshal(on.Samples[1], &got))
	shares := &shareSample{Tenants: []tenantSample{{"", 20, 8}, {"starved", 0, 9}}, Others: 2}
	for i := range maxSampledTenants - 2 {
		shares.Tenants = append(shares.Tenants, tenantSample{fmt.Sprint("small-", i), 1, 0})
	}
	check.Equal(t, "shares of the sample", shares, got.Shares)
}

func TestHistoryLength(t *testing.T) {
	s := &source{ledger: ledger.New()}
	s.ledger.SetNode("n0", spec(16, 16))
	clock := clocktesting.NewFakeClock(time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC))
	b := NewBoard(Options{Source: s, Clock: clock})
	for range 2 * samplesKept {
		b.tick(klog.Background())
		clock.Step(sampleEvery / 2) // Every second tick is too early.
		b.tick(klog.Background())
		clock.Step(sampleEvery / 2)
	}
	s.ledger.SetBound("n0", pod("p", 4), gpu.On(0, 4), time.Time{})
	b.tick(klog.Background())
	var got page
	check.Must(t, json.Unmarshal(b.State(""), &got))
	if len(got.Samples) != samplesKept || cap(b.history.samples) > 2*samplesKept {
		t.Fatalf("%d samples, capacity %d", len(got.Samples), cap(b.history.samples))
	}
	var first, last sample
	check.Must(t, errors.Join(json.Unmarshal(got.Samples[0], &first), json.Unmarshal(got.Samples[samplesKept-1], &last)))
	if want := (sample{Time: clock.Now().Unix(), tally: tally{Total: 32 << 10, Allocated: 4 << 10, Whole: 16 << 10, Pieces: 12 << 10}}); last != want {
		t.Errorf("last sample %v, want %v", last, want)
	}
	if took := last.Time - first.Time; took != int64((samplesKept-1)*sampleEvery/time.Second) {
		t.Errorf("the samples cover %d s", took)
	}
}
