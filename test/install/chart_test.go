package install

import (
	"os/exec"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	k8slabels "k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/extender"
	"github.com/gpushare/gpushare/pkg/leader"
	"github.com/gpushare/gpushare/pkg/schedulerconfig"
)

const chart = "deploy/helm/gpushare"

func TestThePlainManifestsAreWhatTheChartRenders(t *testing.T) {
	path, err := helmPath()
	must(t, err)
	cmd := exec.Command("go", "run", "./hack/manifests", "--check", "--helm="+path)
	cmd.Dir = repository(t)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func TestTheChartPassesHelmLint(t *testing.T) {
	h := newHelm(t, "")
	for name, values := range map[string]string{
		"as it is":         "",
		"on the host":      "extender.reach=host,extender.replicas=1",
		"second scheduler": "mode=secondScheduler,monitoring.enabled=true,devicePlugin.nodes=discovered",
		"cert-manager":     "extender.tls.mode=certManager,extender.tls.certManager.issuerRef.name=ca,extender.allowEvictions=true",
	} {
		t.Run(name, func(t *testing.T) {
			h.run(t, "lint", chart, "--strict", "--set=extender.service.clusterIP=10.96.0.15", "--set="+values)
		})
	}
}

// What can't work is refused before anything is installed, with the value's name.
func TestWrongValuesAreRefused(t *testing.T) {
	h := newHelm(t, "")
	lease := leader.DefaultRenewDeadline.String()
	tests := map[string]struct{ values, want string }{
		"an unknown mode":                  {"mode=sidecar", "at '/mode': value must be one of 'extender', 'secondScheduler'"},
		"a name that is misspelt":          {"devicePlugin.memoryUnits=MiB", "additional properties 'memoryUnits' not allowed"},
		"a unit that is none":              {"devicePlugin.memoryUnit=GB", "at '/devicePlugin/memoryUnit'"},
		"replicas that are words":          {"extender.replicas=two", "at '/extender/replicas': got string, want integer"},
		"a name for an address":            {"extender.service.clusterIP=gpushare-extender", "at '/extender/service/clusterIP'"},
		"an address that is none":          {"extender.service.clusterIP=10.96.0.256", "at '/extender/service/clusterIP'"},
		"an IPv6 address that is none":     {"extender.service.clusterIP=:", "at '/extender/service/clusterIP'"},
		"no address and nobody to ask":     {"extender.replicas=2", "extender.service.clusterIP: no cluster can be asked"},
		"several extenders on one host":    {"extender.reach=host", "extender.replicas: with extender.reach=host there is one extender"},
		"own certificates, nowhere":        {"extender.tls.mode=secret", "at '/extender/tls/secretName'"},
		"cert-manager without an issuer":   {"extender.tls.mode=certManager,extender.service.clusterIP=10.96.0.15", "at '/extender/tls/certManager/issuerRef': missing property 'name'"},
		"a second scheduler of that name":  {"mode=secondScheduler,secondScheduler.name=default-scheduler", "at '/secondScheduler/name'"},
		"a scheduler's name with a quote":  {"mode=secondScheduler,secondScheduler.name=it's", "at '/secondScheduler/name'"},
		"a tag with a blank":               {"images.extender.tag=v1 2", "at '/images/extender/tag'"},
		"an upgrade of no node at a time":  {"devicePlugin.maxUnavailable=0%", "at '/devicePlugin/maxUnavailable'"},
		"a part that is taken away":        {"extender=null", "missing property 'extender'"},
		"binds that outlast the timeout":   {"extender.gangHold=0.1m5s,extender.service.clusterIP=10.96.0.15", "scheduler.httpTimeout: 15s isn't above extender.gangHold and extender.bindTimeout together (0.1m5s, 4s)"},
		"that beside a second scheduler":   {"mode=secondScheduler,scheduler.httpTimeout=5s", "scheduler.httpTimeout: 5s isn't above"},
		"no time to bind":                  {"mode=secondScheduler,extender.bindTimeout=0s", "extender.bindTimeout: 0s isn't above 0s, and 1m at most"},
		"too much time to bind":            {"extender.reach=host,extender.replicas=1,extender.bindTimeout=1m1ms,scheduler.httpTimeout=3m", "extender.bindTimeout: 1m1ms isn't above 0s, and 1m at most"},
		"binds that outlast the Lease":     {"extender.service.clusterIP=10.96.0.15,extender.replicas=1,scheduler.httpTimeout=30s,extender.bindTimeout=" + lease, "extender.bindTimeout: " + lease + " isn't below 10s, for which a leader counts on its Lease"},
		"those of a second scheduler":      {"mode=secondScheduler,scheduler.httpTimeout=30s,extender.bindTimeout=" + lease, "extender.bindTimeout: " + lease + " isn't below 10s"},
		"too long a hold":                  {"mode=secondScheduler,scheduler.httpTimeout=3m,extender.gangHold=61s,extender.gangPatience=3m", "extender.gangHold: 61s is above 1m"},
		"less patience than a hold":        {"mode=secondScheduler,scheduler.httpTimeout=50s,extender.gangHold=40s", "extender.gangPatience: 30s lies below extender.gangHold (40s)"},
		"patience that is no time":         {"extender.gangPatience=30", "at '/extender/gangPatience'"},
		"an account without a namespace":   {"guard.allow.serviceAccounts[0]=velero", "at '/guard/allow/serviceAccounts/0'"},
		"a page's address without a port":  {"extender.ui.listenAddress=127.0.0.1", "at '/extender/ui/listenAddress'"},
		"monitors of a closed port":        {"extender.reach=host,extender.replicas=1,monitoring.enabled=true", "monitoring.enabled: with extender.reach=host"},
		"a folder with a slash at its end": {"devicePlugin.kubeletDirectory=/var/lib/kubelet/", "at '/devicePlugin/kubeletDirectory'"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			out, err := h.try("template", "gpushare", chart, "--set="+test.values)
			if err == nil {
				t.Fatal("it is rendered")
			}
			if !strings.Contains(out, test.want) {
				t.Errorf("it says %q, want %q", out, test.want)
			}
		})
	}
}

// What the chart renders for kube-scheduler has no finding, however kube-scheduler reaches the extender.
func TestSchedulerConfigHasNoFinding(t *testing.T) {
	h := newHelm(t, "")
	for name, values := range map[string]string{
		"as it is":         "extender.service.clusterIP=10.96.0.15",
		"IPv6":             "extender.service.clusterIP=fd00::f",
		"on the host":      "extender.reach=host,extender.replicas=1",
		"own certificates": "extender.service.clusterIP=10.96.0.15,extender.tls.mode=secret,extender.tls.secretName=own",
		"cert-manager":     "extender.service.clusterIP=10.96.0.15,extender.tls.mode=certManager,extender.tls.certManager.issuerRef.name=ca",
		"second scheduler": "mode=secondScheduler",
	} {
		t.Run(name, func(t *testing.T) {
			found := false
			for document := range strings.SplitSeq(h.run(t, "template", "gpushare", chart, "--set="+values), "\n---\n") {
				var object struct{ Data, StringData map[string]string }
				must(t, yaml.Unmarshal([]byte(document), &object))
				text := object.Data["scheduler-config.yaml"] + object.StringData["scheduler-config.yaml"]
				if text == "" {
					continue
				}
				found = true
				config, err := schedulerconfig.Decode([]byte(text))
				must(t, err)
				for _, finding := range schedulerconfig.Check(config, schedulerconfig.Options{
					Path: extender.Prefix, BindTimeout: 4 * time.Second, GangHold: 10 * time.Second,
				}) {
					t.Error(finding)
				}
			}
			if !found {
				t.Error("no configuration is rendered")
			}
		})
	}
}

// Whatever times are taken, the extender is given them, and time enough to look up its binds before it is killed.
func TestTimesReachTheExtender(t *testing.T) {
	h := newHelm(t, "")
	const (
		service = "extender.service.clusterIP=10.96.0.15,"
		host    = "extender.reach=host,extender.replicas=1,"
	)
	for what, test := range map[string]struct{ values, want string }{
		"as they are":              {service, "20 4s 10s 30s"},
		"short binds":              {service + "extender.bindTimeout=500ms", "13 500ms 10s 30s"},
		"just below the Lease":     {service + "extender.bindTimeout=9.9s,scheduler.httpTimeout=20s", "32 9.9s 10s 30s"},
		"that, a second scheduler": {"mode=secondScheduler,extender.bindTimeout=9.9s,scheduler.httpTimeout=20s", "32 9.9s 10s 30s"},
		"a longer Lease": {
			service + "extender.bindTimeout=12s,scheduler.httpTimeout=30s,extender.extraArgs={--leader-elect-renew-deadline=20s,--leader-elect-lease-duration=30s}",
			"36 12s 10s 30s",
		},
		"without a Lease":             {host + "extender.bindTimeout=1m,scheduler.httpTimeout=2m", "132 1m 10s 30s"},
		"a long hold":                 {host + "extender.gangHold=1m,extender.gangPatience=1m,scheduler.httpTimeout=2m", "20 4s 1m 1m"},
		"no groups, and no patience":  {host + "extender.gangHold=0s,extender.gangPatience=0s,scheduler.httpTimeout=5s", "20 4s 0s 0s"},
		"patience for a long absence": {host + "extender.gangPatience=45s", "20 4s 10s 45s"},
	} {
		out := h.run(t, "template", "gpushare", chart, "--set="+test.values)
		var got []string
		for line := range strings.Lines(out) {
			line = strings.TrimPrefix(strings.TrimSpace(line), "- ")
			for _, name := range []string{"terminationGracePeriodSeconds: ", "--bind-timeout=", "--gang-hold=", "--gang-patience="} {
				if value, found := strings.CutPrefix(line, name); found {
					got = append(got, value)
				}
			}
		}
		if strings.Join(got, " ") != test.want {
			t.Errorf("%s: %q, want %q", what, got, test.want)
		}
	}
}

func TestClustersBeforeTheirTimeGetNoPolicies(t *testing.T) {
	h := newHelm(t, "")
	for version, want := range map[string]bool{"v1.29.0": false, "v1.30.0-gke.100": true, "v1.36.3": true} {
		out := h.run(t, "template", "gpushare", chart, "--kube-version="+version, "--set=mode=secondScheduler")
		if got := strings.Contains(out, "kind: ValidatingAdmissionPolicy\n"); got != want {
			t.Errorf("%s: policies %v, want %v", version, got, want)
		}
		image := "registry.k8s.io/kube-scheduler:" + strings.TrimSuffix(version, "-gke.100") + "\n"
		if !strings.Contains(out, image) {
			t.Errorf("%s: no image %s", version, image)
		}
	}
}

func TestThePageIsWhereTheValuesSay(t *testing.T) {
	h := newHelm(t, "")
	const own = "--ui-listen-address="
	for what, test := range map[string]struct{ values, want string }{
		"beside client certificates":  {"", own + "127.0.0.1:12346"},
		"without them":                {"extender.tls.mode=none", ""},
		"on the host":                 {"extender.reach=host,extender.replicas=1", ""},
		"beside the second scheduler": {"mode=secondScheduler", ""},
		"where it is told to":         {"extender.tls.mode=none,extender.ui.listenAddress=:8080", own + ":8080"},
		"nowhere":                     {"extender.ui.enabled=false", "--ui=false"},
	} {
		out := h.run(t, "template", "gpushare", chart, "--set=extender.service.clusterIP=10.96.0.15", "--set="+test.values)
		var got []string
		for line := range strings.Lines(out) {
			if arg := strings.TrimPrefix(strings.TrimSpace(line), "- "); strings.HasPrefix(arg, "--ui") {
				got = append(got, arg)
			}
		}
		if strings.Join(got, " ") != test.want {
			t.Errorf("%s: %q, want %q", what, got, test.want)
		}
	}
}

// The monitors' own kinds aren't known to a bare API server: that they find what is installed is seen here.
func TestTheMonitorsFindTheirPods(t *testing.T) {
	h := newHelm(t, "")
	for mode, part := range map[string]string{"extender": "extender", "secondScheduler": "scheduler"} {
		t.Run(mode, func(t *testing.T) {
			out := h.run(t, "template", "gpushare", chart, "--namespace=gpu", "--set=extender.service.clusterIP=10.96.0.15,monitoring.enabled=true,monitoring.labels.release=prometheus,mode="+mode)
			objects := map[string]*unstructured.Unstructured{}
			for text := range strings.SplitSeq(out, "\n---\n") {
				var object unstructured.Unstructured
				must(t, yaml.Unmarshal([]byte(text), &object.Object))
				if object.Object != nil {
					objects[object.GetKind()+"/"+object.GetName()] = &object
				}
			}
			at := func(name string, path ...string) map[string]string {
				t.Helper()
				found, _, err := unstructured.NestedStringMap(objects[name].Object, path...)
				must(t, err)
				if len(found) == 0 {
					t.Fatalf("%s has no %s", name, strings.Join(path, "."))
				}
				return found
			}
			finds := func(selector, labels map[string]string) {
				t.Helper()
				if !k8slabels.SelectorFromSet(selector).Matches(k8slabels.Set(labels)) {
					t.Errorf("%v doesn't find %v", selector, labels)
				}
			}
			port := func(name string, want float64, path ...string) {
				t.Helper()
				containers, _, err := unstructured.NestedSlice(objects[name].Object, append(path, "containers")...)
				must(t, err)
				for _, container := range containers {
					ports, _, _ := unstructured.NestedSlice(container.(map[string]any), "ports")
					for _, p := range ports {
						if p.(map[string]any)["containerPort"] == want {
							return
						}
					}
				}
				t.Errorf("%s has no port %v", name, want)
			}
			finds(at("ServiceMonitor/gpushare-extender", "spec", "selector", "matchLabels"), objects["Service/gpushare-extender-metrics"].GetLabels())
			finds(at("Service/gpushare-extender-metrics", "spec", "selector"), at("Deployment/gpushare-"+part, "spec", "template", "metadata", "labels"))
			port("Deployment/gpushare-"+part, 12347, "spec", "template", "spec")
			finds(at("PodMonitor/gpushare-device-plugin", "spec", "selector", "matchLabels"), at("DaemonSet/gpushare-device-plugin", "spec", "template", "metadata", "labels"))
			port("DaemonSet/gpushare-device-plugin", 12346, "spec", "template", "spec")
			for _, name := range []string{"ServiceMonitor/gpushare-extender", "PodMonitor/gpushare-device-plugin"} {
				finds(map[string]string{"release": "prometheus"}, objects[name].GetLabels())
			}
		})
	}
}
