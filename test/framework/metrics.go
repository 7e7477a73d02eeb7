package framework

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

// Names of metrics that tests read.
const (
	MetricAllocations     = "gpushare_extender_allocations"
	MetricBinds           = "gpushare_extender_binds_total"
	MetricCards           = "gpushare_extender_cards"
	MetricFilteredNodes   = "gpushare_extender_filtered_nodes_total"
	MetricGangFailures    = "gpushare_extender_gang_failures_total"
	MetricGangs           = "gpushare_extender_gangs"
	MetricNominations     = "gpushare_extender_nominations_total"
	MetricPendingPods     = "gpushare_extender_pending_pods"
	MetricRequestProblems = "gpushare_extender_request_problems"
)

// StateAssumed is the value of the label "state" of MetricAllocations for allocations that aren't bound yet.
const StateAssumed = "assumed"

// Series returns the name of a series with the labels, each as a name and a value, in the order of their names.
func Series(metric string, labels ...string) string {
	var pairs []string
	for pair := range slices.Chunk(labels, 2) {
		pairs = append(pairs, fmt.Sprintf("%s=%q", pair[0], pair[1]))
	}
	if len(pairs) == 0 {
		return metric
	}
	return metric + "{" + strings.Join(pairs, ",") + "}"
}

// Metrics returns the extender's series of a metric with their values. A series that has never counted may be missing.
func (c *Cluster) Metrics(ctx context.Context, metric string) (map[string]float64, error) {
	return Scrape(ctx, c.ExtenderURL+"/metrics", metric)
}

// Scrape returns the series of the metrics at a URL with their values.
func Scrape(ctx context.Context, url string, metrics ...string) (map[string]float64, error) {
	body, err := Fetch(ctx, url)
	if err != nil {
		return nil, err
	}
	return ParseMetrics(body, metrics...)
}

// ParseMetrics returns the series of the metrics in a text of Prometheus' format with their values.
func ParseMetrics(text []byte, metrics ...string) (out map[string]float64, err error) {
	out = map[string]float64{}
	for line := range strings.Lines(string(text)) {
		series, figure, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name, _, _ := strings.Cut(series, "{"); !slices.Contains(metrics, name) {
			continue
		}
		if out[series], err = strconv.ParseFloat(figure, 64); err != nil {
			return nil, fmt.Errorf("series %s: %w", series, err)
		}
	}
	return out, nil
}

// Metric returns the value of one of the extender's series, 0 if it is missing.
func (c *Cluster) Metric(t testing.TB, metric string, labels ...string) float64 {
	t.Helper()
	values, err := c.Metrics(t.Context(), metric)
	check.Must(t, err)
	return values[Series(metric, labels...)]
}

// WaitMetric waits until a series of the extender is at least as high.
func (c *Cluster) WaitMetric(t testing.TB, want float64, metric string, labels ...string) {
	t.Helper()
	series := Series(metric, labels...)
	Eventually(t, fmt.Sprintf("%s is at least %v", series, want), func(ctx context.Context) error {
		values, err := c.Metrics(ctx, metric)
		if err == nil && values[series] < want {
			err = fmt.Errorf("it is %v", values[series])
		}
		return err
	})
}

// WaitNoneAssumed waits until all allocations are those of bound pods.
func (c *Cluster) WaitNoneAssumed(t testing.TB) {
	t.Helper()
	series := Series(MetricAllocations, "state", StateAssumed)
	Eventually(t, "no allocation is assumed", func(ctx context.Context) error {
		values, err := c.Metrics(ctx, MetricAllocations)
		if value, found := values[series]; err == nil && (!found || value != 0) {
			err = fmt.Errorf("%s is missing or not 0: %v", series, values)
		}
		return err
	})
}
