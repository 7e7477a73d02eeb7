package webui

import (
	"cmp"
	"encoding/json"
	"math"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/gpu"
)

const (
	// samplesKept samples at an interval of sampleEvery are one hour.
	sampleEvery = 10 * time.Second
	samplesKept = 360
)

// maxSampledTenants limits the tenants that a sample has one by one: those that have or deserve most.
const maxSampledTenants = 8

// sample is the cluster's memory at one moment, in MiB.
type sample struct {
	at time.Time
	tally
	pending int
	shares  *shareSample // nil if fair sharing is off.
}

// MarshalJSON returns a list, which is shorter than an object: Unix seconds, total, allocated, free on unused cards, free on partly
// used cards, pending pods, and with fair sharing what tenants have.
func (s sample) MarshalJSON() ([]byte, error) {
	list := []any{
		s.at.Unix(), int64(math.Round(s.total)), int64(math.Round(s.allocated)),
		int64(math.Round(s.whole)), int64(math.Round(s.pieces)), s.pending,
	}
	if s.shares != nil {
		list = append(list, s.shares)
	}
	return json.Marshal(list)
}

// shareSample is what tenants have at one moment, in units.
type shareSample struct {
	tenants []dispatch.Tenant
	// others is the sum of the tenants that are not in the list.
	others gpu.Memory
}

// sampleShares returns the tenants that have or deserve most; nil if fair sharing is off.
func sampleShares(tenants []dispatch.Tenant) *shareSample {
	if tenants == nil {
		return nil
	}
	largest := slices.SortedFunc(slices.Values(tenants), func(a, b dispatch.Tenant) int {
		return cmp.Or(cmp.Compare(max(b.Allocated, b.Share), max(a.Allocated, a.Share)), cmp.Compare(a.Name, b.Name))
	})
	// A copy, because samples are kept for an hour and the list can be long.
	s := &shareSample{tenants: slices.Clone(largest[:min(len(largest), maxSampledTenants)])}
	for _, t := range largest[len(s.tenants):] {
		s.others = s.others.Add(t.Allocated)
	}
	return s
}

// MarshalJSON returns a list: what the others have, and then the name, the allocated memory and the share of each tenant.
func (s *shareSample) MarshalJSON() ([]byte, error) {
	list := []any{s.others}
	for _, t := range s.tenants {
		list = append(list, t.Name, t.Allocated, t.Share)
	}
	return json.Marshal(list)
}

// history is the last hour. The zero value is empty.
type history struct{ samples []sample }

// due reports whether it is time for the next sample.
func (h *history) due(now time.Time) bool {
	n := len(h.samples)
	return n == 0 || now.Sub(h.samples[n-1].at) >= sampleEvery
}

func (h *history) add(s sample) {
	if len(h.samples) == samplesKept {
		h.samples = append(h.samples[:0], h.samples[1:]...)
	}
	h.samples = append(h.samples, s)
}
