package webui

import (
	"cmp"
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

// sample is the cluster's memory at one moment.
type sample struct {
	// Time is in Unix seconds.
	Time int64 `json:"time"`
	tally
	Pending int `json:"pending"`
	// Shares are nil if fair sharing is off.
	Shares *shareSample `json:"shares,omitempty"`

	// revision is the board's at which the sample was taken.
	revision uint64
}

// shareSample is what tenants have at one moment, in units.
type shareSample struct {
	Tenants []tenantSample `json:"tenants"`
	// Others is the sum of the tenants that are not in the list.
	Others gpu.Memory `json:"others"`
}

type tenantSample struct {
	Name      string     `json:"name"`
	Allocated gpu.Memory `json:"allocated"`
	Share     gpu.Memory `json:"share"`
}

// sampleShares returns the tenants that have or deserve most; nil if fair sharing is off.
func sampleShares(tenants []dispatch.Tenant) *shareSample {
	if tenants == nil {
		return nil
	}
	largest := slices.SortedFunc(slices.Values(tenants), func(a, b dispatch.Tenant) int {
		return cmp.Or(cmp.Compare(max(b.Allocated, b.Share), max(a.Allocated, a.Share)), cmp.Compare(a.Name, b.Name))
	})
	s := &shareSample{}
	for i, t := range largest {
		if i < maxSampledTenants {
			s.Tenants = append(s.Tenants, tenantSample{t.Name, t.Allocated, t.Share})
		} else {
			s.Others = s.Others.Add(t.Allocated)
		}
	}
	return s
}

// history is the last hour. The zero value is empty.
type history struct{ samples []sample }

// due reports whether it is time for the next sample.
func (h *history) due(now time.Time) bool {
	n := len(h.samples)
	return n == 0 || now.Unix()-h.samples[n-1].Time >= int64(sampleEvery/time.Second)
}

// after returns the samples after a revision.
func (h *history) after(revision uint64) []sample {
	i := slices.IndexFunc(h.samples, func(s sample) bool { return s.revision > revision })
	if i < 0 {
		return []sample{}
	}
	return slices.Clone(h.samples[i:])
}

func (h *history) add(s sample) {
	if len(h.samples) == samplesKept {
		h.samples = append(h.samples[:0], h.samples[1:]...)
	}
	h.samples = append(h.samples, s)
}
