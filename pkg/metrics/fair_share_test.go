package metrics

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/gpushare/gpushare/pkg/dispatch"
)

func TestFairShareMetrics(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	f := NewFairShare(registry)
	f.Tenants(func() error { return nil }, func() []dispatch.Tenant {
		return []dispatch.Tenant{{Name: "alice", Share: 8, Allocated: 6, Waiting: 6, PassedOver: 2, Infeasible: 1}}
	}, func() int { return 1 })
	f.PodGranted(time.Second)
	f.ChargeExpired()
	f.GateOpened(true)
	f.GateOpened(false)
	f.GateOpened(false)
	f.Reclaimed("evicted")
	f.Reclaimed("refused")
	f.PodReclaimed(4)
	f.PodReclaimed(8)
	f.ReclaimFailed()
	want := `
# HELP gpushare_extender_fair_share_charges_expired_total Number of pods that were not bound in time after their turn.
# TYPE gpushare_extender_fair_share_charges_expired_total counter
gpushare_extender_fair_share_charges_expired_total 1
# HELP gpushare_extender_fair_share_evicted_pods_total Number of pods evicted for tenants below their share.
# TYPE gpushare_extender_fair_share_evicted_pods_total counter
gpushare_extender_fair_share_evicted_pods_total 2
# HELP gpushare_extender_fair_share_gate_writes_total Number of writes that remove the scheduling gate of a pod, by result: opened or failed.
# TYPE gpushare_extender_fair_share_gate_writes_total counter
gpushare_extender_fair_share_gate_writes_total{result="failed"} 2
gpushare_extender_fair_share_gate_writes_total{result="opened"} 1
# HELP gpushare_extender_fair_share_invalid_namespaces Number of namespaces whose labels or annotations for fair sharing are invalid, so that default values are used.
# TYPE gpushare_extender_fair_share_invalid_namespaces gauge
gpushare_extender_fair_share_invalid_namespaces 1
# HELP gpushare_extender_fair_share_reclaimed_units_total GPU memory of the pods that were evicted for tenants below their share.
# TYPE gpushare_extender_fair_share_reclaimed_units_total counter
gpushare_extender_fair_share_reclaimed_units_total 12
# HELP gpushare_extender_fair_share_reclaims_total Number of attempts to evict pods for tenants below their share, by result: evicted, refused or failed.
# TYPE gpushare_extender_fair_share_reclaims_total counter
gpushare_extender_fair_share_reclaims_total{result="evicted"} 1
gpushare_extender_fair_share_reclaims_total{result="failed"} 0
gpushare_extender_fair_share_reclaims_total{result="refused"} 1
# HELP gpushare_extender_fair_share_useless_reclaims_total Number of pods and groups that got no room although pods were evicted for them.
# TYPE gpushare_extender_fair_share_useless_reclaims_total counter
gpushare_extender_fair_share_useless_reclaims_total 1
# HELP gpushare_extender_tenant_allocated_units GPU memory of the bound pods of a tenant, and of its pods that had their turn and are not bound yet.
# TYPE gpushare_extender_tenant_allocated_units gauge
gpushare_extender_tenant_allocated_units{tenant="alice"} 6
# HELP gpushare_extender_tenant_share_units GPU memory that a tenant should have, by its weight, its guaranteed amount and its demand.
# TYPE gpushare_extender_tenant_share_units gauge
gpushare_extender_tenant_share_units{tenant="alice"} 8
# HELP gpushare_extender_tenant_waiting_pods Number of pods of a tenant that wait for their turn, by state: passed_over pods fit nowhere now, infeasible ones would fit nowhere if all cards were free, or were not bound after their last turns.
# TYPE gpushare_extender_tenant_waiting_pods gauge
gpushare_extender_tenant_waiting_pods{state="infeasible",tenant="alice"} 1
gpushare_extender_tenant_waiting_pods{state="next",tenant="alice"} 3
gpushare_extender_tenant_waiting_pods{state="passed_over",tenant="alice"} 2
`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "gpushare_extender_fair_share_charges_expired_total",
		"gpushare_extender_fair_share_evicted_pods_total", "gpushare_extender_fair_share_reclaimed_units_total",
		"gpushare_extender_fair_share_reclaims_total", "gpushare_extender_fair_share_useless_reclaims_total", "gpushare_extender_fair_share_gate_writes_total", "gpushare_extender_fair_share_invalid_namespaces", "gpushare_extender_tenant_allocated_units",
		"gpushare_extender_tenant_share_units", "gpushare_extender_tenant_waiting_pods"); err != nil {
		t.Error(err)
	}
	if n := testutil.CollectAndCount(registry, "gpushare_extender_fair_share_wait_seconds"); n != 1 {
		t.Errorf("%d histograms of the wait", n)
	}
}
