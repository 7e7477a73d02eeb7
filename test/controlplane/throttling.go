package controlplane

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// RejectedRequests returns the number of requests that the API server's priority and fairness has rejected (status 429)
// since its start. Benchmarks and load tests check that it is 0, because throttling would distort their figures.
// Requests of c.Client don't count: the group system:masters is exempt.
func (c *ControlPlane) RejectedRequests(ctx context.Context) (int, error) {
	metrics, err := c.Client.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return 0, fmt.Errorf("reading the API server's metrics: %w", err)
	}
	// The rejected metric exists only after a rejection; the dispatched metric shows that the names are still valid.
	if _, found := sumMetric(string(metrics), "apiserver_flowcontrol_dispatched_requests_total"); !found {
		return 0, errors.New("the API server's metrics have no priority and fairness counters")
	}
	rejected, _ := sumMetric(string(metrics), "apiserver_flowcontrol_rejected_requests_total")
	return int(rejected), nil
}

func sumMetric(metrics, name string) (sum float64, found bool) {
	for line := range strings.Lines(metrics) {
		if !strings.HasPrefix(line, name+"{") {
			continue
		}
		fields := strings.Fields(line)
		if value, err := strconv.ParseFloat(fields[len(fields)-1], 64); err == nil {
			sum, found = sum+value, true
		}
	}
	return sum, found
}
