package metrics

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

func TestEveryMetricIsAsPrometheusLikesIt(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	e := NewExtender(registry)
	e.Answered("filter", "ok", time.Millisecond)
	e.Filtered(placement.Full, 3)
	e.BindFinished("bound")
	e.Settled("gone")
	e.Woken()
	e.APIWrite("binding")
	e.CertificateExpires("server", time.Unix(1, 0))
	NewLedger(registry, standing(t), func() error { return nil }, true)
	NewCluster(registry, &fakeCluster{versions: map[string]uint64{"pods": 7}})

	problems, err := testutil.GatherAndLint(registry)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	if n, err := testutil.GatherAndCount(registry); err != nil || n < 10 {
		t.Errorf("%d metrics (%v): this test shows little", n, err)
	}
}

func TestWhatIsObservedIsCounted(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	e := NewExtender(registry)
	e.Filtered(placement.Full, 3)
	e.Filtered(placement.Full, 2)
	e.BindFinished("bound")
	e.BindFinished("no_room")
	e.BindFinished("no_room")
	e.Settled("gone")
	e.Woken()
	e.Rebuilt(1500 * time.Millisecond)
	e.APIWrite("binding")
	want := `
# HELP gpushare_extender_api_writes_total Writes to the API server, Events left out, by kind of object.
# TYPE gpushare_extender_api_writes_total counter
gpushare_extender_api_writes_total{kind="binding"} 1
# HELP gpushare_extender_binds_total Binds by result; no_room is a conflict: the card went to another pod between filter and bind.
# TYPE gpushare_extender_binds_total counter
gpushare_extender_binds_total{result="bound"} 1
gpushare_extender_binds_total{result="no_room"} 2
# HELP gpushare_extender_filtered_nodes_total Nodes that filter looked at, by what it said of them.
# TYPE gpushare_extender_filtered_nodes_total counter
gpushare_extender_filtered_nodes_total{reason="elsewhere"} 0
gpushare_extender_filtered_nodes_total{reason="fragmented"} 0
gpushare_extender_filtered_nodes_total{reason="full"} 5
gpushare_extender_filtered_nodes_total{reason="not_shared"} 0
gpushare_extender_filtered_nodes_total{reason="too_large"} 0
gpushare_extender_filtered_nodes_total{reason="unhealthy"} 0
gpushare_extender_filtered_nodes_total{reason="whole_cards"} 0
# HELP gpushare_extender_ledger_rebuild_seconds How long it took from the start until the ledger stood; 0 until it does.
# TYPE gpushare_extender_ledger_rebuild_seconds gauge
gpushare_extender_ledger_rebuild_seconds 1.5
# HELP gpushare_extender_queue_wakes_total Times that kube-scheduler was made to look at refused pods again.
# TYPE gpushare_extender_queue_wakes_total counter
gpushare_extender_queue_wakes_total 1
# HELP gpushare_extender_settled_binds_total Binds whose answer was lost, by what had become of them.
# TYPE gpushare_extender_settled_binds_total counter
gpushare_extender_settled_binds_total{outcome="gone"} 1
`
	names := []string{"api_writes_total", "binds_total", "filtered_nodes_total", "ledger_rebuild_seconds", "queue_wakes_total", "settled_binds_total"}
	for i, name := range names {
		names[i] = namespace + "_" + name
	}
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want), names...); err != nil {
		t.Error(err)
	}
}

func TestLedgerMetrics(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	notYet := errors.New("not yet")
	ready := notYet
	NewLedger(registry, standing(t), func() error { return ready }, true)
	compare := func(want string) {
		t.Helper()
		if err := testutil.GatherAndCompare(registry, strings.NewReader(want)); err != nil {
			t.Error(err)
		}
	}
	compare(`
# HELP gpushare_extender_ledger_ready 1 once the ledger stands.
# TYPE gpushare_extender_ledger_ready gauge
gpushare_extender_ledger_ready 0
`)
	ready = nil
	compare(`
# HELP gpushare_extender_card_healthy 1 for a card on which something may be placed.
# TYPE gpushare_extender_card_healthy gauge
gpushare_extender_card_healthy{card="0",node="n1"} 1
gpushare_extender_card_healthy{card="3",node="n1"} 0
# HELP gpushare_extender_card_memory_held_units What of a card's memory is reserved or bound, in its node's unit.
# TYPE gpushare_extender_card_memory_held_units gauge
gpushare_extender_card_memory_held_units{card="0",node="n1"} 60
gpushare_extender_card_memory_held_units{card="3",node="n1"} 0
# HELP gpushare_extender_card_memory_reserved_units What of a card's memory is held for pods that aren't bound yet, in its node's unit.
# TYPE gpushare_extender_card_memory_reserved_units gauge
gpushare_extender_card_memory_reserved_units{card="0",node="n1"} 10
gpushare_extender_card_memory_reserved_units{card="3",node="n1"} 0
# HELP gpushare_extender_card_memory_units A card's memory, in its node's unit.
# TYPE gpushare_extender_card_memory_units gauge
gpushare_extender_card_memory_units{card="0",node="n1"} 100
gpushare_extender_card_memory_units{card="3",node="n1"} 50
# HELP gpushare_extender_cards Cards of all nodes, by health.
# TYPE gpushare_extender_cards gauge
gpushare_extender_cards{health="healthy"} 1
gpushare_extender_cards{health="unhealthy"} 1
# HELP gpushare_extender_holders Pods that hold GPU memory, by state.
# TYPE gpushare_extender_holders gauge
gpushare_extender_holders{state="bound"} 1
gpushare_extender_holders{state="reserved"} 1
# HELP gpushare_extender_ledger_ready 1 once the ledger stands.
# TYPE gpushare_extender_ledger_ready gauge
gpushare_extender_ledger_ready 1
# HELP gpushare_extender_overfull_cards Cards of which more is held than they have. This must be 0.
# TYPE gpushare_extender_overfull_cards gauge
gpushare_extender_overfull_cards 0
`)
}

func TestLedgerMetricsWithoutEachCard(t *testing.T) {
	l := standing(t)
	// Another scheduler has put more on the card than it has.
	l.Hold("n1", gpu.Pod{UID: "c", Name: "c", Request: 41}, gpu.On(0, 41), time.Unix(1, 0))
	registry := prometheus.NewPedanticRegistry()
	NewLedger(registry, l, func() error { return nil }, false)
	err := testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP gpushare_extender_cards Cards of all nodes, by health.
# TYPE gpushare_extender_cards gauge
gpushare_extender_cards{health="healthy"} 1
gpushare_extender_cards{health="unhealthy"} 1
# HELP gpushare_extender_holders Pods that hold GPU memory, by state.
# TYPE gpushare_extender_holders gauge
gpushare_extender_holders{state="bound"} 2
gpushare_extender_holders{state="reserved"} 1
# HELP gpushare_extender_ledger_ready 1 once the ledger stands.
# TYPE gpushare_extender_ledger_ready gauge
gpushare_extender_ledger_ready 1
# HELP gpushare_extender_overfull_cards Cards of which more is held than they have. This must be 0.
# TYPE gpushare_extender_overfull_cards gauge
gpushare_extender_overfull_cards 1
`))
	if err != nil {
		t.Error(err)
	}
}

// standing is a ledger of one node with a card that two pods share, and an unhealthy one.
func standing(t *testing.T) *ledger.Ledger {
	t.Helper()
	l := ledger.New(nil)
	l.SetNode("n1", ledger.NodeSpec{Unit: gpu.MiB, Cards: []gpu.Card{
		{Index: 0, Memory: 100}, {Index: 3, Memory: 50, Unhealthy: "Xid 79"},
	}})
	l.Hold("n1", gpu.Pod{UID: "a", Name: "a", Request: 50}, gpu.On(0, 50), time.Unix(1, 0))
	if _, err := l.Reserve("n1", gpu.Pod{UID: "b", Name: "b", Request: 10}, placement.Binpack, time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	return l
}

func TestALeadersMetrics(t *testing.T) {
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
# HELP gpushare_extender_leadership_changes_total Times that this replica began or ceased to lead.
# TYPE gpushare_extender_leadership_changes_total counter
gpushare_extender_leadership_changes_total 2
# HELP gpushare_extender_leading 1 while this replica leads, 0 while it stands by.
# TYPE gpushare_extender_leading gauge
gpushare_extender_leading 0
`))
	if err != nil {
		t.Error(err)
	}
}

// fakeCluster is a ClusterState.
type fakeCluster struct {
	notReady error
	versions map[string]uint64
	without  int
}

func (f *fakeCluster) Ready() error                     { return f.notReady }
func (f *fakeCluster) WatchVersions() map[string]uint64 { return f.versions }
func (f *fakeCluster) NodesWithoutPlugin() int          { return f.without }

func TestTheClustersStateIsReadAtEachScrape(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	state := &fakeCluster{notReady: errors.New("not yet")}
	NewCluster(registry, state)
	want := func(text string) {
		t.Helper()
		if err := testutil.GatherAndCompare(registry, strings.NewReader(text)); err != nil {
			t.Error(err)
		}
	}
	want("")
	*state = fakeCluster{versions: map[string]uint64{"pods": 12, "nodes": 11}, without: 2}
	want(`
# HELP gpushare_extender_nodes_without_plugin Nodes that share their cards, and whose kubelet has no device plugin for them.
# TYPE gpushare_extender_nodes_without_plugin gauge
gpushare_extender_nodes_without_plugin 2
# HELP gpushare_extender_watch_resource_version Resource version that a watch of the API server has reached. It stays the same where the watch is stale.
# TYPE gpushare_extender_watch_resource_version gauge
gpushare_extender_watch_resource_version{resource="nodes"} 11
gpushare_extender_watch_resource_version{resource="pods"} 12
`)
}

// An alert sees the first panic only if the counter stood at zero before.
func TestOutcomesOfVerbsAreThereFromTheStart(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	NewExtender(registry)
	if n, err := testutil.GatherAndCount(registry, "gpushare_extender_request_duration_seconds"); err != nil || n != 12 {
		t.Errorf("%d series (%v), want three outcomes of four verbs", n, err)
	}
}
