package neighbours

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/gpushare/gpushare/test/controlplane"
)

// part returns the path of something that `make test-neighbours` puts into bin/kube. It skips the test if it isn't there.
func part(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(controlplane.KubeDir(controlplane.Repository(t)), name)
	if _, err := os.Stat(path); err != nil {
		t.Skipf("SKIPPED: bin/kube/%s is missing: `make test-neighbours` puts it there", name)
	}
	return path
}

// render writes the objects of gpushare's chart with these values to a file, and returns its path.
func render(t *testing.T, values string) string {
	t.Helper()
	out := template(t, "gpushare", filepath.Join(controlplane.Repository(t), "deploy", "helm", "gpushare"),
		"--namespace=kube-system", "--kube-version=1.37.2", "--set=extender.service.clusterIP=10.0.0.15", "--set="+values)
	path := filepath.Join(t.TempDir(), "rendered.yaml")
	must(t, os.WriteFile(path, out, 0o600))
	return path
}

// template returns the objects of a chart as Helm renders them with these flags.
func template(t *testing.T, release, chart string, flags ...string) []byte {
	t.Helper()
	helm, err := controlplane.Tool(t.Context(), "helm")
	must(t, err)
	command := exec.CommandContext(t.Context(), helm, append([]string{"template", release, chart}, flags...)...)
	command.Stderr = os.Stderr
	out, err := command.Output()
	must(t, err)
	return out
}
