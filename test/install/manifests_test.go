package install

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/test/controlplane"
)

// TestManifests: the API server accepts every manifest without a warning about an unknown or repeated field. Manifests with
// kinds of other operators are left out.
func TestManifests(t *testing.T) {
	t.Parallel()
	c := controlplane.StartForTest(t, controlplane.Options{WithoutScheduler: true, ControllerManager: true})
	// The chart's tests and other tests use the same binaries.
	if want := os.Getenv(controlplane.VersionEnv); want != "" {
		version, err := c.Client.Discovery().ServerVersion()
		must(t, err)
		if !strings.HasPrefix(version.GitVersion, want+".") {
			t.Errorf("this is Kubernetes %s, want %s", version.GitVersion, want)
		}
	}
	for _, folder := range []string{"manifests", "guard", "samples", "native-groups", "inspect", "replicas", "second-scheduler"} {
		t.Run(folder, func(t *testing.T) {
			must(t, c.Apply(t.Context(), filepath.Join(controlplane.Repository(t), "deploy", folder)))
		})
	}
	// objects that the plain manifests don't contain
	h := newHelm(t, "")
	for name, values := range map[string]string{
		"network policies, driver by a mount": "networkPolicy.schedulers[0].ipBlock.cidr=192.0.2.0/28," +
			"networkPolicy.monitoring[0].podSelector.matchLabels.app=prometheus,devicePlugin.driverAccess=volume-mounts",
		"driver by CDI, SELinux": "devicePlugin.driverAccess=cdi,devicePlugin.securityContext.seLinuxOptions.type=container_device_plugin_t",
		"a privileged plugin":    "devicePlugin.securityContext.privileged=true,devicePlugin.securityContext.allowPrivilegeEscalation=true",
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			out := h.run(t, "template", "gpushare", chart, "--namespace="+namespace, "--set=networkPolicy.enabled=true,extender.service.clusterIP=10.96.0.15",
				"--set="+values, "--show-only=templates/device-plugin-daemonset.yaml", "--show-only=templates/networkpolicies.yaml")
			must(t, os.WriteFile(filepath.Join(dir, "rendered.yaml"), []byte(out), 0o600))
			must(t, c.Apply(t.Context(), dir))
		})
	}
}
