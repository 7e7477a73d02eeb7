package controlplane

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// RejectedRequests returns how many requests the API server's priority and fairness has turned away (status 429) since
// it was started. Benchmarks and load tests check that it is 0: otherwise they measured the throttle. Requests of
// c.Client don't count towards it, the group system:masters being exempt; those of every other kubeconfig do.
func (c *ControlPlane) RejectedRequests(ctx context.Context) (int, error) {
	metrics, err := c.Client.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return 0, fmt.Errorf("reading the API server's metrics: %w", err)
	}
	// The first exists only once something was rejected, so the second shows that the names are still right.
	if _, found := sumMetric(string(metrics), "apiserver_flowcontrol_dispatched_requests_total"); !found {
		return 0, errors.New("the API server's metrics say nothing about priority and fairness")
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
