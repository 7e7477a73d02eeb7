package neighbours

import (
	"context"
	"testing"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// TestOperators: the API server accepts the chart's objects of other operators' kinds (the Prometheus operator's monitors and rules,
// cert-manager's certificates), with no unknown field.
func TestOperators(t *testing.T) {
	kinds := []string{part(t, "crds/prometheus-operator"), part(t, "crds/cert-manager")}
	c := controlplane.StartForTest(t, controlplane.Options{WithoutScheduler: true})
	must(t, c.Apply(t.Context(), kinds...))
	for name, values := range map[string]string{
		"monitors, rules and certificates": "monitoring.authorize=true,monitoring.credentials.name=token,mps.enabled=true,devicePlugin.isolation=mps," +
			"extender.tls.mode=certManager,extender.tls.certManager.issuerRef.name=ca,extender.tls.certManager.issuerRef.kind=ClusterIssuer",
		"the second scheduler's monitors": "mode=secondScheduler",
	} {
		t.Run(name, func(t *testing.T) {
			path := render(t, "monitoring.enabled=true,monitoring.prometheusRule.enabled=true,"+values)
			// The API server serves a kind some time after it was created.
			framework.Eventually(t, "the API server accepts the objects", func(ctx context.Context) error { return c.Apply(ctx, path) })
		})
	}
}
