package install

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/test/controlplane"
)

// Every manifest that needs no other operator's kinds is taken by the API server without a warning about an unknown or
// repeated field.
func TestManifests(t *testing.T) {
	c := controlplane.StartForTest(t, controlplane.Options{WithoutScheduler: true, ControllerManager: true})
	// The chart's own tests and others go by the same binaries.
	if want := os.Getenv(controlplane.VersionEnv); want != "" {
		version, err := c.Client.Discovery().ServerVersion()
		must(t, err)
		if !strings.HasPrefix(version.GitVersion, want+".") {
			t.Errorf("this is Kubernetes %s, want %s", version.GitVersion, want)
		}
	}
	for _, folder := range []string{"manifests", "guard", "samples", "eviction", "inspect", "replicas", "second-scheduler"} {
		t.Run(folder, func(t *testing.T) {
			must(t, c.Apply(t.Context(), filepath.Join(repository(t), "deploy", folder)))
		})
	}
}
