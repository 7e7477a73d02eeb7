package install

import (
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/gpushare/gpushare/test/controlplane"
)

// former returns the path of a part of the earlier version that `make test-upgrade` builds. It skips the test if it isn't there.
func former(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(controlplane.Repository(t), "bin", "former", name)
	if _, err := os.Stat(path); err != nil {
		t.Skip("SKIPPED: bin/former is missing: `make test-upgrade` builds it")
	}
	return path
}

// TestFormerFlags: the extender accepts each flag of an earlier version, and the chart each value.
func TestFormerFlags(t *testing.T) {
	usage, err := exec.CommandContext(t.Context(), former(t, "gpushare-extender"), "--help").CombinedOutput()
	must(t, err)
	flags := regexp.MustCompile(`(?m)^ +(?:-\w, )?--([a-z0-9-]+) ?(\w*).*?(?:\(default "?([^")]+)"?\))?$`).FindAllStringSubmatch(string(usage), -1)
	if len(flags) < 30 {
		t.Fatalf("the earlier version has %d flags:\n%s", len(flags), usage)
	}
	zero := map[string]string{"": "true", "duration": "1s"}
	for _, flag := range flags {
		value := cmp.Or(flag[3], zero[flag[2]], "1") // A text can be 1, too.
		out, err := exec.CommandContext(t.Context(), filepath.Join(controlplane.Repository(t), "bin", "gpushare-extender"), "--"+flag[1]+"="+value, "--help").CombinedOutput()
		if err != nil {
			t.Errorf("--%s=%s: %v: %s", flag[1], value, err, out)
		}
	}
	h := newHelm(t, "")
	h.objects(t, "--values="+former(t, "deploy/helm/gpushare/values.yaml"))
}
