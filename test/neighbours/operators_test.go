package neighbours

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
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
	root, err := controlplane.RepositoryRoot()
	must(t, err)
	helm, err := exec.CommandContext(t.Context(), "go", "-C", filepath.Join(root, "hack", "helm"), "tool", "-n", "helm").Output()
	must(t, err)
	for name, values := range map[string]string{
		"monitors, rules and certificates": "monitoring.authorize=true,monitoring.credentials.name=token,mps.enabled=true,devicePlugin.isolation=mps," +
			"extender.tls.mode=certManager,extender.tls.certManager.issuerRef.name=ca,extender.tls.certManager.issuerRef.kind=ClusterIssuer",
		"the second scheduler's monitors": "mode=secondScheduler",
	} {
		t.Run(name, func(t *testing.T) {
			command := exec.CommandContext(t.Context(), strings.TrimSpace(string(helm)), "template", "gpushare", "deploy/helm/gpushare",
				"--namespace=kube-system", "--kube-version=1.37.2", "--set=extender.service.clusterIP=10.0.0.15",
				"--set=monitoring.enabled=true,monitoring.prometheusRule.enabled=true", "--set="+values)
			command.Dir, command.Stderr = root, os.Stderr
			out, err := command.Output()
			must(t, err)
			path := filepath.Join(t.TempDir(), "rendered.yaml")
			must(t, os.WriteFile(path, out, 0o600))
			// The API server serves a kind some time after it was created.
			framework.Eventually(t, "the API server accepts the objects", func(ctx context.Context) error { return c.Apply(ctx, path) })
		})
	}
}
