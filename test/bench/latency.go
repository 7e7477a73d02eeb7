package main

import (
	"context"
	"fmt"
	"time"
)

// minLatencyPods is the smallest number of pods in a run at a rate, latencySeconds the shortest time that such a run takes.
const (
	minLatencyPods = 100
	latencySeconds = 10
)

// measureLatency creates pods at each of the rates, and compares their times until they are bound.
func measureLatency(ctx context.Context, s *bench, kinds []*kind, o options) error {
	for _, rate := range o.rates {
		pods := max(minLatencyPods, int(rate*latencySeconds))
		for _, k := range kinds {
			k.results = nil
		}
		for round := range o.rounds {
			memory := sizes(pods, o.seed+int64(round))
			for _, k := range kinds {
				t, err := s.run(ctx, k, memory, rate)
				if err != nil {
					return fmt.Errorf("%s: %w", k.name, err)
				}
				k.results = append(k.results, t)
			}
		}
		base := kinds[0].middle(func(t result) float64 { return t.p50.Seconds() })
		for _, k := range kinds {
			p50 := k.middle(func(t result) float64 { return t.p50.Seconds() })
			p99 := k.middle(func(t result) float64 { return t.p99.Seconds() })
			cycle := k.middle(func(t result) float64 { return t.cycle.Seconds() })
			fmt.Printf("%5.0f pods/s   %-12s p50 %6.1f ms (%+.1f)   p99 %6.1f ms   cycle %.2f ms\n", rate, k.name, 1e3*p50, 1e3*(p50-base), 1e3*p99, 1e3*cycle)
		}
	}
	return nil
}

// pace returns a function that blocks until the next pod may be created: rate pods per second, or at once if rate is 0.
func pace(ctx context.Context, rate float64) (next func()) {
	begin, made := time.Now(), 0
	return func() {
		if rate == 0 {
			return
		}
		due := begin.Add(time.Duration(float64(made) / rate * float64(time.Second)))
		made++
		select {
		case <-time.After(time.Until(due)):
		case <-ctx.Done():
		}
	}
}
