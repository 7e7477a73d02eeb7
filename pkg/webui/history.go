package webui

import (
	"encoding/json"
	"math"
	"time"
)

const (
	// samplesKept samples at an interval of sampleEvery are one hour.
	sampleEvery = 10 * time.Second
	samplesKept = 360
)

// sample is the cluster's memory at one moment, in MiB.
type sample struct {
	at time.Time
	tally
	pending int
}

// MarshalJSON returns a list of numbers, which is shorter than an object: Unix seconds, total, allocated, free on unused cards,
// free on partly used cards, pending pods.
func (s sample) MarshalJSON() ([]byte, error) {
	return json.Marshal([]int64{
		s.at.Unix(), int64(math.Round(s.total)), int64(math.Round(s.allocated)),
		int64(math.Round(s.whole)), int64(math.Round(s.pieces)), int64(s.pending),
	})
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
