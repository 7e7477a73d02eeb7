package helm

import (
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/strvals"
)

// TestNotes: the text after an installation or an upgrade has the steps that are left, each once, and warns of nothing that is not so. No cluster is
// asked, so an upgrade seems to change kube-scheduler's configuration; the suite test/install upgrades on a real API server.
func TestNotes(t *testing.T) {
	const (
		scheduler  = "Configure kube-scheduler to call the extender."
		changed    = "The configuration of kube-scheduler has changed: give it the new one."
		unreleased = "No release of gpushare has been published yet"
		registry   = "--reset-then-reuse-values --set imageRegistry=registry.example.com\n"
		again      = "The images are those of ghcr.io/gpushare, where no release has been published yet"
		loaded     = "load them into the nodes"
		label      = "kubectl label node NODE gpushare=true\n"
		second     = "    schedulerName: gpushare-scheduler\n"
		stopped    = "No extender runs (extender.replicas=0)."
		pool       = "This release has no extender"
		allow      = "guard.allow.serviceAccounts:\n\n  gpu/pool-b-device-plugin\n"
		simulated  = "no\ncontainer can compute on them. Label no node that has real cards."
		unrefused  = "Pods that don't are not refused"
	)
	parts := []string{scheduler, changed, unreleased, registry, again, loaded, label, second, stopped, pool, allow, simulated, unrefused}
	const elsewhere = "images.extender.repository=a.example/e,images.devicePlugin.repository=a.example/d,"
	renderer := newRenderer(t)
	for name, test := range map[string]struct {
		values  string
		upgrade bool
		want    []string
	}{
		"as it is":                         {"", false, []string{scheduler, unreleased, registry, label}},
		"upgrade":                          {"", true, []string{changed, again}},
		"a registry":                       {"imageRegistry=example.com", false, []string{scheduler, label}},
		"upgrade with a registry":          {"imageRegistry=example.com", true, []string{changed}},
		"images elsewhere":                 {elsewhere, false, []string{scheduler, label}},
		"a mirror":                         {"images.extender.repository=a.example/ghcr.io/gpushare/e,devicePlugin.enabled=false", false, []string{scheduler}},
		"only the extender's elsewhere":    {"images.extender.repository=a.example/e", false, []string{scheduler, unreleased, registry, label}},
		"no replicas":                      {"imageRegistry=a.example,extender.replicas=0", false, []string{stopped, scheduler, label}},
		"certificates in a Secret":         {"imageRegistry=a.example,extender.tls.mode=secret,extender.tls.secretName=a", false, []string{scheduler, label}},
		"no device plugin":                 {"images.extender.repository=a.example/e,devicePlugin.enabled=false,devicePlugin.simulatedCards.count=2", false, []string{scheduler}},
		"nodes by their features":          {elsewhere + "devicePlugin.nodes=discovered", false, []string{scheduler}},
		"second scheduler":                 {"mode=secondScheduler", false, []string{unreleased, registry, second, label}},
		"second scheduler, upgrade":        {elsewhere + "mode=secondScheduler", true, []string{second}},
		"second scheduler, others allowed": {elsewhere + "mode=secondScheduler,secondScheduler.refuseOthers=false", false, []string{second, unrefused, label}},
		"a pool":                           {"images.devicePlugin.repository=a.example/d,mode=devicePlugin,fullnameOverride=pool-b", false, []string{pool, allow}},
		"a pool, upgrade":                  {"images.devicePlugin.repository=a.example/d,mode=devicePlugin,fullnameOverride=pool-b", true, []string{pool}},
		"a trial":                          {"mode=secondScheduler,devicePlugin.simulatedCards.count=2", false, []string{simulated, unreleased, loaded, second, label}},
		"a trial, upgrade":                 {"mode=secondScheduler,devicePlugin.simulatedCards.count=2", true, []string{simulated, again, loaded, second}},
		"a trial with images elsewhere":    {"images.extender.repository=a.example/e,images.simulatedDevicePlugin.repository=a.example/s,devicePlugin.simulatedCards.count=2", false, []string{simulated, scheduler, label}},
	} {
		t.Run(name, func(t *testing.T) {
			values := map[string]any{}
			must(t, strvals.ParseInto("extender.service.clusterIP=10.96.0.15,"+test.values, values))
			files, err := renderer.files(values, common.ReleaseOptions{IsInstall: !test.upgrade, IsUpgrade: test.upgrade})
			must(t, err)
			notes := files["gpushare/templates/NOTES.txt"]
			for _, part := range parts {
				want := 0
				if slices.Contains(test.want, part) {
					want = 1
				}
				if got := strings.Count(notes, part); got != want {
					t.Errorf("%q is there %d times, want %d", part, got, want)
				}
			}
			if t.Failed() || strings.Contains(notes, "\n\n\n") {
				t.Errorf("the notes:\n%s", notes)
			}
		})
	}
}
