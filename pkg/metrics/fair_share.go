package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// FairShare implements scheduling.FairShareObserver.
type FairShare struct {
	registry prometheus.Registerer
	waited   prometheus.Histogram
	expired  prometheus.Counter
	gates    *prometheus.CounterVec
	reclaims *prometheus.CounterVec
	// evicted counts pods; reclaimed is an amount of memory.
	evicted, reclaimed, reclaimsFailed prometheus.Counter
}

// NewFairShare registers the collectors of fair sharing.
func NewFairShare(registry prometheus.Registerer) *FairShare {
	f := &FairShare{
		registry: registry,
		waited:   newHistogram("fair_share_wait_seconds", "Time from the creation of a pod until its turn, in seconds; only pods of tenants.", 0.1, 3),
		expired:  newCounter("fair_share_charges_expired_total", "Number of pods that were not bound in time after their turn."),
		gates: newCounterVec("fair_share_gate_writes_total", "Number of writes that remove the scheduling gate of a pod, by result: opened or "+
			"failed.", "result"),
		reclaims: newCounterVec("fair_share_reclaims_total", "Number of attempts to evict pods for tenants below their share, by result: evicted, "+
			"refused or failed.", "result"),
		evicted:        newCounter("fair_share_evicted_pods_total", "Number of pods evicted for tenants below their share."),
		reclaimed:      newCounter("fair_share_reclaimed_units_total", "GPU memory of the pods that were evicted for tenants below their share."),
		reclaimsFailed: newCounter("fair_share_useless_reclaims_total", "Number of pods and groups that got no room although pods were evicted for them."),
	}
	startAtZero(f.gates, reasons.GateResults()...)
	startAtZero(f.reclaims, reasons.EvictionResults()...)
	registry.MustRegister(f.waited, f.expired, f.gates, f.reclaims, f.evicted, f.reclaimed, f.reclaimsFailed)
	return f
}

// Tenants registers the collector of the tenants, which calls the functions at each scrape. invalid returns the number of namespaces
// with invalid annotations. ready returns an error until the caches are synced; until then nothing is reported.
func (f *FairShare) Tenants(ready func() error, tenants func() []dispatch.Tenant, invalid func() int) {
	share := gaugeDesc("tenant_share_units", "GPU memory that a tenant should have, by its weight, its guaranteed amount and its demand.", "tenant")
	allocated := gaugeDesc("tenant_allocated_units", "GPU memory of the bound pods of a tenant, and of its pods that had their turn and are not "+
		"bound yet.", "tenant")
	waiting := gaugeDesc("tenant_waiting_pods", "Number of pods of a tenant that wait for their turn, by state: passed_over pods fit nowhere "+
		"now, infeasible ones "+
		"would fit nowhere if all cards were free, or were not bound after their last turns.", "tenant", "state")
	namespaces := gaugeDesc("fair_share_invalid_namespaces", "Number of namespaces whose labels or annotations for fair sharing are invalid, so "+
		"that default values are used.")
	f.registry.MustRegister(&gauges{[]*prometheus.Desc{share, allocated, waiting, namespaces}, func(set setGauge) {
		if ready() != nil {
			return
		}
		for _, t := range tenants() {
			set(share, float64(t.Share), t.Name)
			set(allocated, float64(t.Allocated), t.Name)
			set(waiting, float64(t.Waiting-t.PassedOver-t.Infeasible), t.Name, "next")
			set(waiting, float64(t.PassedOver), t.Name, "passed_over")
			set(waiting, float64(t.Infeasible), t.Name, "infeasible")
		}
		set(namespaces, float64(invalid()))
	}})
}

// PodGranted implements dispatch.Observer.
func (f *FairShare) PodGranted(waited time.Duration) { f.waited.Observe(waited.Seconds()) }

// ChargeExpired implements dispatch.Observer.
func (f *FairShare) ChargeExpired() { f.expired.Inc() }

// GateOpened implements scheduling.FairShareObserver.
func (f *FairShare) GateOpened(ok bool) {
	result := reasons.ResultFailed
	if ok {
		result = reasons.ResultOpened
	}
	f.gates.WithLabelValues(string(result)).Inc()
}

// Reclaimed implements eviction.ReclaimObserver.
func (f *FairShare) Reclaimed(result reasons.Result) {
	f.reclaims.WithLabelValues(string(result)).Inc()
}

// PodReclaimed implements eviction.ReclaimObserver.
func (f *FairShare) PodReclaimed(memory gpu.Memory) {
	f.evicted.Inc()
	f.reclaimed.Add(float64(memory))
}

// ReclaimFailed implements dispatch.Observer.
func (f *FairShare) ReclaimFailed() { f.reclaimsFailed.Inc() }
