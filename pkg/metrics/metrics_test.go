package metrics

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unique"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

// TestMetricsLint checks all metrics with the linter of Prometheus.
func TestMetricsLint(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	e := NewExtender(registry)
	e.Answered("filter", "ok", time.Millisecond)
	e.Filtered(reasons.Full, 3)
	e.BindFinished("bound")
	e.BindResolved("gone")
	e.Requeued()
	e.APIWrite("binding")
	e.CertificateExpires("server", time.Unix(1, 0))
	cards := NewLedger(registry, filledLedger(t), func() error { return nil }, always)
	NewCluster(registry, &fakeCluster{versions: map[string]uint64{"pods": 7}})
	NewGangs(registry).Count(func() map[string]int { return map[string]int{"broken": 1} })

	problems, err := testutil.GatherAndLint(cards.Beside(registry))
	check.Must(t, err)
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	if n, err := testutil.GatherAndCount(registry); err != nil || n < 10 {
		t.Errorf("%d metrics (%v), want all of them", n, err)
	}
}

func TestGangsByPhase(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	NewGangs(registry).Count(func() map[string]int { return map[string]int{"broken": 0, "running": 3} })
	want := `
# HELP gpushare_extender_gangs Number of gangs (groups of pods) by phase; a gang counts once for each of its runs.
# TYPE gpushare_extender_gangs gauge
gpushare_extender_gangs{phase="broken"} 0
gpushare_extender_gangs{phase="running"} 3
`
	check.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(want), "gpushare_extender_gangs"))
}

func TestExtender(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	e := NewExtender(registry)
	e.Filtered(reasons.Full, 3)
	e.Filtered(reasons.Full, 2)
	e.BindFinished("bound")
	e.BindFinished("no_room")
	e.BindFinished("no_room")
	e.BindResolved("gone")
	e.Requeued()
	e.CacheSynced(1500 * time.Millisecond)
	e.APIWrite("binding")
	want := `
# HELP gpushare_extender_api_writes_total Number of writes to the API server without Events, by kind of object.
# TYPE gpushare_extender_api_writes_total counter
gpushare_extender_api_writes_total{kind="binding"} 1
gpushare_extender_api_writes_total{kind="eviction"} 0
gpushare_extender_api_writes_total{kind="node"} 0
gpushare_extender_api_writes_total{kind="nomination"} 0
# HELP gpushare_extender_binds_total Number of bind calls, by result; no_room is a conflict: another pod got the card between filter and bind.
# TYPE gpushare_extender_binds_total counter
gpushare_extender_binds_total{result="bad_request"} 0
gpushare_extender_binds_total{result="bound"} 1
gpushare_extender_binds_total{result="held_back"} 0
gpushare_extender_binds_total{result="in_flight"} 0
gpushare_extender_binds_total{result="invalid_request"} 0
gpushare_extender_binds_total{result="no_room"} 2
gpushare_extender_binds_total{result="not_leading"} 0
gpushare_extender_binds_total{result="not_ready"} 0
gpushare_extender_binds_total{result="rejected"} 0
gpushare_extender_binds_total{result="unconfirmed"} 0
gpushare_extender_binds_total{result="unreachable"} 0
# HELP gpushare_extender_filtered_nodes_total Number of candidate nodes that filter has checked, by result: fits, or the reason for the rejection.
# TYPE gpushare_extender_filtered_nodes_total counter
gpushare_extender_filtered_nodes_total{reason="crowded"} 0
gpushare_extender_filtered_nodes_total{reason="elsewhere"} 0
gpushare_extender_filtered_nodes_total{reason="fits"} 0
gpushare_extender_filtered_nodes_total{reason="fragmented"} 0
gpushare_extender_filtered_nodes_total{reason="full"} 5
gpushare_extender_filtered_nodes_total{reason="limit_below_request"} 0
gpushare_extender_filtered_nodes_total{reason="limit_too_large"} 0
gpushare_extender_filtered_nodes_total{reason="no_adapter"} 0
gpushare_extender_filtered_nodes_total{reason="no_limit_above_request"} 0
gpushare_extender_filtered_nodes_total{reason="no_own_shared_memory"} 0
gpushare_extender_filtered_nodes_total{reason="not_shared"} 0
gpushare_extender_filtered_nodes_total{reason="old_for_cards"} 0
gpushare_extender_filtered_nodes_total{reason="old_for_cores"} 0
gpushare_extender_filtered_nodes_total{reason="old_for_limits"} 0
gpushare_extender_filtered_nodes_total{reason="old_for_rdma"} 0
gpushare_extender_filtered_nodes_total{reason="one_card_only"} 0
gpushare_extender_filtered_nodes_total{reason="reserved"} 0
gpushare_extender_filtered_nodes_total{reason="resources_reserved"} 0
gpushare_extender_filtered_nodes_total{reason="too_large"} 0
gpushare_extender_filtered_nodes_total{reason="unhealthy"} 0
gpushare_extender_filtered_nodes_total{reason="whole_cards"} 0
# HELP gpushare_extender_cache_sync_seconds Time from the start until the caches were synced, in seconds; 0 until then.
# TYPE gpushare_extender_cache_sync_seconds gauge
gpushare_extender_cache_sync_seconds 1.5
# HELP gpushare_extender_requeues_total Number of times that the extender made kube-scheduler retry rejected pods.
# TYPE gpushare_extender_requeues_total counter
gpushare_extender_requeues_total 1
# HELP gpushare_extender_resolved_binds_total Number of resolved binds whose answer was lost, by the state of the pod in the API server.
# TYPE gpushare_extender_resolved_binds_total counter
gpushare_extender_resolved_binds_total{outcome="bound"} 0
gpushare_extender_resolved_binds_total{outcome="gone"} 1
gpushare_extender_resolved_binds_total{outcome="not_bound"} 0
`
	names := []string{"api_writes_total", "binds_total", "filtered_nodes_total", "cache_sync_seconds", "requeues_total", "resolved_binds_total"}
	for i, name := range names {
		names[i] = namespace + "_" + name
	}
	check.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(want), names...))
}

func TestLedgerMetrics(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	notYet := errors.New("not yet")
	ready := notYet
	l := filledLedger(t)
	metrics := NewLedger(registry, l, func() error { return ready }, always).Beside(registry)
	compare := func(want string) {
		t.Helper()
		check.NoError(t, testutil.GatherAndCompare(metrics, strings.NewReader(want)))
	}
	compare(`
# HELP gpushare_extender_cache_synced 1 once the caches are synced and the extender can answer kube-scheduler, 0 before.
# TYPE gpushare_extender_cache_synced gauge
gpushare_extender_cache_synced 0
`)
	ready = nil
	compare(`
# HELP gpushare_extender_card_cores_allocated Computing of a card that pods ask for, in percent of the card; only of nodes that count it.
# TYPE gpushare_extender_card_cores_allocated gauge
gpushare_extender_card_cores_allocated{card="0",node="n1"} 30
gpushare_extender_card_cores_allocated{card="3",node="n1"} 0
# HELP gpushare_extender_card_healthy 1 for a healthy card, 0 for an unhealthy one, which gets no new pods.
# TYPE gpushare_extender_card_healthy gauge
gpushare_extender_card_healthy{card="0",node="n1"} 1
gpushare_extender_card_healthy{card="3",node="n1"} 0
# HELP gpushare_extender_card_memory_allocated_units Allocated memory of a card, in the unit of its node.
# TYPE gpushare_extender_card_memory_allocated_units gauge
gpushare_extender_card_memory_allocated_units{card="0",node="n1"} 60
gpushare_extender_card_memory_allocated_units{card="3",node="n1"} 0
# HELP gpushare_extender_card_memory_units Total memory of a card, in the unit of its node.
# TYPE gpushare_extender_card_memory_units gauge
gpushare_extender_card_memory_units{card="0",node="n1"} 100
gpushare_extender_card_memory_units{card="3",node="n1"} 50
# HELP gpushare_extender_cards Number of cards of all nodes, by health.
# TYPE gpushare_extender_cards gauge
gpushare_extender_cards{health="healthy"} 1
gpushare_extender_cards{health="unhealthy"} 1
# HELP gpushare_extender_allocations Number of allocations of GPU memory, one for each pod that holds some, by state.
# TYPE gpushare_extender_allocations gauge
gpushare_extender_allocations{state="bound"} 1
gpushare_extender_allocations{state="assumed"} 1
# HELP gpushare_extender_cache_synced 1 once the caches are synced and the extender can answer kube-scheduler, 0 before.
# TYPE gpushare_extender_cache_synced gauge
gpushare_extender_cache_synced 1
# HELP gpushare_extender_overfull_cards Number of cards with more memory, cores or containers allocated than they can have. It must be 0.
# TYPE gpushare_extender_overfull_cards gauge
gpushare_extender_overfull_cards 0
# HELP gpushare_extender_simulated_cards Number of cards that don't exist, of nodes for a trial.
# TYPE gpushare_extender_simulated_cards gauge
gpushare_extender_simulated_cards 0
# HELP gpushare_extender_awaited_idle_ratio Part of the memory of all cards that is free and kept for items that wait until their cards in use are free, from 0 to 1.
# TYPE gpushare_extender_awaited_idle_ratio gauge
gpushare_extender_awaited_idle_ratio 0
` + nodeProblems("unhealthy_card"))
}

// The series of each card follow changes of the nodes between scrapes.
func TestCardsFollowChanges(t *testing.T) {
	l, on := ledger.New(), true
	cards := NewLedger(prometheus.NewRegistry(), l, func() error { return nil }, func() bool { return on })
	set := func(node string, cards ...gpu.Card) { l.SetNode(node, ledger.NodeSpec{Unit: gpu.MiB, Cards: cards}) }
	compare := func(what string, want ...string) {
		t.Helper()
		text := ""
		if len(want) > 0 {
			text = `
# HELP gpushare_extender_card_memory_allocated_units Allocated memory of a card, in the unit of its node.
# TYPE gpushare_extender_card_memory_allocated_units gauge
` + strings.Join(want, "\n") + "\n"
		}
		metrics := cards.Beside(prometheus.NewRegistry())
		if err := testutil.GatherAndCompare(metrics, strings.NewReader(text), namespace+"_card_memory_allocated_units"); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	series := func(node string, card, used int) string {
		return fmt.Sprintf(`gpushare_extender_card_memory_allocated_units{card="%d",node="%s"} %d`, card, node, used)
	}
	set("n1", gpu.Card{Index: 0, Memory: 100})
	set("n2", gpu.Card{Index: 0, Memory: 100})
	compare("two nodes", series("n1", 0, 0), series("n2", 0, 0))
	l.SetBound("n2", gpu.Pod{UID: "a", Name: "a", Request: 50}, gpu.On(0, 50), time.Unix(1, 0))
	compare("a pod", series("n1", 0, 0), series("n2", 0, 50))
	set("n2", gpu.Card{Index: 0, Memory: 100}, gpu.Card{Index: 1, Memory: 100})
	compare("another card", series("n1", 0, 0), series("n2", 0, 50), series("n2", 1, 0))
	l.DeleteNode("n1")
	compare("a node is gone", series("n2", 0, 50), series("n2", 1, 0))
	on = false
	compare("a standby")
	on = true
	compare("the leader again", series("n2", 0, 50), series("n2", 1, 0))
}

func TestLedgerMetricsWithoutEachCard(t *testing.T) {
	l := filledLedger(t)
	l.SetNode("n2", ledger.NodeSpec{Unit: gpu.MiB, Simulated: true, Cards: []gpu.Card{{Index: 0, Memory: 100, MaxContainers: 2}}})
	// Another scheduler has bound more to the cards than they can have, of memory, of cores and of containers.
	l.SetBound("n1", gpu.Pod{UID: "c", Name: "c", Request: 41}, gpu.On(0, 41), time.Unix(1, 0))
	l.SetBound("n1", gpu.Pod{UID: "d", Name: "d", Request: 1, Cores: 101}, gpu.Placement{{Card: 3, Memory: 1, Cores: 101}}, time.Unix(1, 0))
	without := ledger.NodeSpec{Problems: []reasons.NodeProblem{{Kind: reasons.NodeWithoutPlugin}, {Kind: reasons.NodeWithoutPlugin}}}
	l.SetNode("n3", without) // A node counts once for each kind.
	l.SetBound("gone", gpu.Pod{UID: "f", Name: "f", Request: 3}, gpu.On(0, 3), time.Unix(1, 0))
	l.SetBound("n2", gpu.Pod{UID: "e", Name: "e", Request: 3, Containers: 3}, gpu.Placement{{Card: 0, Memory: 3, Containers: 3}}, time.Unix(1, 0))
	registry := prometheus.NewPedanticRegistry()
	cards := NewLedger(registry, l, func() error { return nil }, never)
	err := testutil.GatherAndCompare(cards.Beside(registry), strings.NewReader(`
# HELP gpushare_extender_cards Number of cards of all nodes, by health.
# TYPE gpushare_extender_cards gauge
gpushare_extender_cards{health="healthy"} 2
gpushare_extender_cards{health="unhealthy"} 1
# HELP gpushare_extender_allocations Number of allocations of GPU memory, one for each pod that holds some, by state.
# TYPE gpushare_extender_allocations gauge
gpushare_extender_allocations{state="bound"} 5
gpushare_extender_allocations{state="assumed"} 1
# HELP gpushare_extender_cache_synced 1 once the caches are synced and the extender can answer kube-scheduler, 0 before.
# TYPE gpushare_extender_cache_synced gauge
gpushare_extender_cache_synced 1
# HELP gpushare_extender_overfull_cards Number of cards with more memory, cores or containers allocated than they can have. It must be 0.
# TYPE gpushare_extender_overfull_cards gauge
gpushare_extender_overfull_cards 3
# HELP gpushare_extender_simulated_cards Number of cards that don't exist, of nodes for a trial.
# TYPE gpushare_extender_simulated_cards gauge
gpushare_extender_simulated_cards 1
# HELP gpushare_extender_awaited_idle_ratio Part of the memory of all cards that is free and kept for items that wait until their cards in use are free, from 0 to 1.
# TYPE gpushare_extender_awaited_idle_ratio gauge
gpushare_extender_awaited_idle_ratio 0
`+nodeProblems("gone", "without_plugin", "unhealthy_card", "overfull_card", "overfull_card", "unknown_card")))
	check.NoError(t, err)
}

// TestRDMAPorts: a card near active ports of adapters has a series with their number, and others have none.
func TestRDMAPorts(t *testing.T) {
	l := ledger.New()
	l.SetNode("n1", ledger.NodeSpec{Unit: gpu.MiB, Cards: []gpu.Card{{Memory: 100, RDMAPorts: "mlx5_0:1,mlx5_1:1"}, {Index: 1, Memory: 100}}})
	registry := prometheus.NewPedanticRegistry()
	cards := NewLedger(registry, l, func() error { return nil }, always)
	err := testutil.GatherAndCompare(cards.Beside(registry), strings.NewReader(`
# HELP gpushare_extender_card_rdma_ports Active ports of the RDMA adapters near a card; only of cards that have one.
# TYPE gpushare_extender_card_rdma_ports gauge
gpushare_extender_card_rdma_ports{card="0",node="n1"} 2
`), namespace+"_card_rdma_ports")
	check.NoError(t, err)
}

// TestCoresNotCounted: a node whose device plugin is too old for cores has no series for them.
func TestCoresNotCounted(t *testing.T) {
	l := ledger.New()
	l.SetNode("n1", ledger.NodeSpec{Unit: gpu.MiB, Support: placement.Support{Cores: reasons.OldForCores}, Cards: []gpu.Card{{Memory: 100}}})
	registry := prometheus.NewPedanticRegistry()
	cards := NewLedger(registry, l, func() error { return nil }, always)
	for name, want := range map[string]int{"card_memory_units": 1, "card_cores_allocated": 0} {
		if n, err := testutil.GatherAndCount(cards.Beside(registry), namespace+"_"+name); err != nil || n != want {
			t.Errorf("%s: %d series, %v, want %d", name, n, err, want)
		}
	}
}

// nodeProblems returns the series of problems of nodes if there is one node for each of kinds.
func nodeProblems(kinds ...string) string {
	count := map[string]int{}
	for _, kind := range kinds {
		count[kind]++
	}
	var out strings.Builder
	out.WriteString("# HELP gpushare_extender_node_problems Number of nodes with a problem, as kubectl inspect gpushare lists them, by problem.\n" +
		"# TYPE gpushare_extender_node_problems gauge\n")
	for _, kind := range reasons.NodeProblemKinds() {
		fmt.Fprintf(&out, "gpushare_extender_node_problems{problem=%q} %d\n", kind, count[kind.String()])
	}
	return out.String()
}

func always() bool { return true }

func never() bool { return false }

// The idle part of reserved memory is counted in bytes, since nodes can have different units, and each card once.
func TestAwaitedIdleRatio(t *testing.T) {
	l := ledger.New()
	l.SetNode("n1", ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{{Index: 0, Memory: 12}}})
	l.SetNode("n2", ledger.NodeSpec{Unit: gpu.MiB, Cards: []gpu.Card{{Index: 0, Memory: 4 << 10}}})
	l.SetBound("n1", gpu.Pod{UID: "runs", Request: 8}, gpu.On(0, 8), time.Unix(2, 0))
	registry := prometheus.NewPedanticRegistry()
	NewLedger(registry, l, func() error { return nil }, never)
	want := func(ratio string) {
		t.Helper()
		if err := testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP gpushare_extender_awaited_idle_ratio Part of the memory of all cards that is free and kept for items that wait until their cards in use are free, from 0 to 1.
# TYPE gpushare_extender_awaited_idle_ratio gauge
gpushare_extender_awaited_idle_ratio `+ratio+"\n"), "gpushare_extender_awaited_idle_ratio"); err != nil {
			t.Error(err)
		}
	}
	want("0")
	request := []ledger.Request{{Pod: gpu.Pod{UID: "waits", Request: 12}, Nodes: []string{"n1"}}}
	if !l.ReserveAwaited(ledger.Item{ID: "waits"}, request, time.Unix(1, 0)) {
		t.Fatal("nothing is reserved")
	}
	want("0.25")
	l.Remove("runs")
	want("0.75")
}

// What is stranded is reported only if something is expected.
func TestStrandedRatio(t *testing.T) {
	l := ledger.New()
	l.SetNode("n1", ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{{Index: 0, Memory: 12}}})
	registry := prometheus.NewPedanticRegistry()
	NewLedger(registry, l, func() error { return nil }, never)
	if n, err := testutil.GatherAndCount(registry, "gpushare_extender_stranded_ratio"); n != 0 || err != nil {
		t.Errorf("%d series, error %v", n, err)
	}
	kind := placement.Kind{Frequency: 1, Shape: placement.Shape{Demand: gpu.Demand{Cards: 1, Memory: 1}, NodeResources: placement.NodeResources{CPU: 1000}}}
	l.Expect([]placement.Kind{kind}, 0, placement.Binpack, func(unique.Handle[string]) []string { return []string{"n1"} })
	l.SetNodeResources("n1", placement.NodeResources{}, placement.NodeResources{})
	help := "Part of the memory of all cards that is free, but that no expected kind of pod can use, because its node has too little of this free; " +
		"only with --node-policy=least-waste."
	if err := testutil.GatherAndCompare(registry, strings.NewReader("# HELP gpushare_extender_stranded_ratio "+help+`
# TYPE gpushare_extender_stranded_ratio gauge
gpushare_extender_stranded_ratio{lacks="cpu"} 1
gpushare_extender_stranded_ratio{lacks="cpu_and_memory"} 0
gpushare_extender_stranded_ratio{lacks="memory"} 0
`), "gpushare_extender_stranded_ratio"); err != nil {
		t.Error(err)
	}
}

// filledLedger returns a ledger of one node with a card that two pods share, and an unhealthy card.
func filledLedger(t *testing.T) *ledger.Ledger {
	t.Helper()
	l := ledger.New()
	l.SetNode("n1", ledger.NodeSpec{Unit: gpu.MiB, Cards: []gpu.Card{
		{Index: 0, Memory: 100}, {Index: 3, Memory: 50, Unhealthy: "Xid 79"},
	}})
	l.SetBound("n1", gpu.Pod{UID: "a", Name: "a", Request: 50}, gpu.On(0, 50), time.Unix(1, 0))
	if _, err := l.Reserve("n1", gpu.Pod{UID: "b", Name: "b", Request: 10, Cores: 30}, placement.Binpack, time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	return l
}

func TestLeader(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	l := NewLeader(registry)
	for _, leads := range []bool{false, true, false} {
		l.LeadershipChanged(leads)
	}
	problems, err := testutil.GatherAndLint(registry)
	if err != nil || len(problems) > 0 {
		t.Errorf("lint: %v, %v", problems, err)
	}
	err = testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP gpushare_extender_leadership_changes_total Number of times that this replica became leader or stopped being leader.
# TYPE gpushare_extender_leadership_changes_total counter
gpushare_extender_leadership_changes_total 2
# HELP gpushare_extender_leading 1 while this replica is the leader, 0 while it is a standby.
# TYPE gpushare_extender_leading gauge
gpushare_extender_leading 0
`))
	check.NoError(t, err)
}

// fakeCluster is a ClusterState.
type fakeCluster struct {
	versions map[string]uint64
}

func (f *fakeCluster) WatchVersions() map[string]uint64 { return f.versions }

func TestCluster(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	state := &fakeCluster{}
	NewCluster(registry, state)
	want := func(text string) {
		t.Helper()
		check.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(text)))
	}
	want("")
	*state = fakeCluster{versions: map[string]uint64{"pods": 12, "nodes": 11}}
	want(`
# HELP gpushare_extender_watch_resource_version Last resource version that the watch of a resource has received from the API server. It stops increasing if the watch is stale.
# TYPE gpushare_extender_watch_resource_version gauge
gpushare_extender_watch_resource_version{resource="nodes"} 11
gpushare_extender_watch_resource_version{resource="pods"} 12
`)
}

// TestRequestSeriesAtStart checks that all series exist from the start. An alert sees the first panic only if the counter
// was zero before.
func TestRequestSeriesAtStart(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	NewExtender(registry)
	if n, err := testutil.GatherAndCount(registry, "gpushare_extender_request_duration_seconds"); err != nil || n != 12 {
		t.Errorf("%d series (%v), want three outcomes of four verbs", n, err)
	}
}
