package install

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	k8slabels "k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/extender"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/leader"
	"github.com/gpushare/gpushare/pkg/nodeconfig"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/schedulerconfig"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/fakenvml"
)

const chart = "deploy/helm/gpushare"

// render returns the objects that the chart renders with these values, by kind and name.
func (h helm) render(t *testing.T, values string) map[string]*unstructured.Unstructured {
	t.Helper()
	return h.objects(t, "--set="+values)
}

// objects returns the objects that the chart renders with these arguments, by kind and name.
func (h helm) objects(t *testing.T, args ...string) map[string]*unstructured.Unstructured {
	t.Helper()
	args = append([]string{"template", "gpushare", chart, "--namespace=gpu", "--set=extender.service.clusterIP=10.96.0.15"}, args...)
	out := h.run(t, args...)
	objects := map[string]*unstructured.Unstructured{}
	for text := range strings.SplitSeq(out, "\n---\n") {
		var object unstructured.Unstructured
		must(t, yaml.Unmarshal([]byte(text), &object.Object))
		if object.Object != nil {
			objects[object.GetKind()+"/"+object.GetName()] = &object
		}
	}
	return objects
}

// podTemplate returns the pod template of a workload that the chart renders.
func podTemplate(t *testing.T, workload *unstructured.Unstructured) (template corev1.PodTemplateSpec) {
	t.Helper()
	if workload == nil {
		t.Fatal("the chart doesn't render it")
	}
	nested, _, err := unstructured.NestedMap(workload.Object, "spec", "template")
	must(t, err)
	convert(t, nested, &template)
	return template
}

// convert converts an object to a typed one. It fails the test if the object has a field that the type doesn't have.
func convert(t *testing.T, object map[string]any, out any) {
	t.Helper()
	data, err := json.Marshal(object)
	must(t, err)
	must(t, yaml.UnmarshalStrict(data, out))
}

// TestPlainManifests: the manifests in deploy are those that the chart renders.
func TestPlainManifests(t *testing.T) {
	path, err := helmPath()
	must(t, err)
	cmd := exec.Command("go", "run", "./hack/manifests", "--check", "--helm="+path)
	cmd.Dir = controlplane.Repository(t)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func TestHelmLint(t *testing.T) {
	h := newHelm(t, "")
	for name, values := range map[string]string{
		"as it is":         "",
		"on the host":      "extender.reach=host,extender.replicas=1",
		"second scheduler": "mode=secondScheduler,monitoring.enabled=true,devicePlugin.nodes=discovered",
		"cert-manager":     "extender.tls.mode=certManager,extender.tls.certManager.issuerRef.name=ca,extender.allowEvictions=true",
		"native groups":    "extender.nativeGroups=true",
		"network policies": "networkPolicy.enabled=true",
		"a pool of nodes":  "mode=devicePlugin,fullnameOverride=pool-b,monitoring.enabled=true",
		"configurations":   "devicePlugin.config.default=a,devicePlugin.config.map.a.memoryUnit=MiB",
		"MPS":              "mps.enabled=true,devicePlugin.isolation=mps",
		"simulated cards":  "devicePlugin.simulatedCards.count=2",
		"with monitoring":  "monitoring.enabled=true,monitoring.prometheusRule.enabled=true,monitoring.dashboard.enabled=true",
	} {
		t.Run(name, func(t *testing.T) {
			h.run(t, "lint", chart, "--strict", "--set="+values)
		})
	}
	if out, err := h.try("lint", chart, "--set=devicePlugin.memoryUnit=GB"); err == nil || !strings.Contains(out, unitMistake) {
		t.Errorf("with a wrong unit: got %v, want %q in\n%s", err, unitMistake, out)
	}
}

// simulated is the beginning of values with simulated cards.
const simulated = "devicePlugin.simulatedCards.count=2,extender.service.clusterIP=10.96.0.15,"

// unitMistake is the message about a wrong unit, without the value.
const unitMistake = "the unit is GiB, MiB, or a whole number of either, such as 256MiB"

// TestWrongValues: values that can't work are rejected before anything is installed, and the error names the value.
func TestWrongValues(t *testing.T) {
	h := newHelm(t, "")
	lease := leader.DefaultRenewDeadline.String()
	tests := map[string]struct{ values, want string }{
		"simulated cards, limits":           {simulated + "devicePlugin.isolation=driver", "devicePlugin.isolation: it is for real cards: with devicePlugin.simulatedCards leave it"},
		"simulated cards, MPS":              {simulated + "devicePlugin.isolation=mps,mps.enabled=true", "mps.enabled: it is for real cards"},
		"simulated cards, limits by label":  {simulated + "devicePlugin.isolationByLabel=true", "devicePlugin.isolationByLabel: it is for real cards"},
		"simulated cards, a pool's limits":  {simulated + "devicePlugin.config.default=a,devicePlugin.config.map.a.isolation=driver", "devicePlugin.config.map.a.isolation: it is for real cards"},
		"simulated cards by CDI":            {simulated + "devicePlugin.deviceListStrategy=cdi-cri", "devicePlugin.deviceListStrategy: it is for real cards"},
		"simulated cards, driver by CDI":    {simulated + "devicePlugin.driverAccess=cdi", "devicePlugin.driverAccess: it is for real cards"},
		"simulated cards, NVIDIA's runtime": {simulated + "devicePlugin.runtimeClassName=nvidia", "devicePlugin.runtimeClassName: it is for real cards"},
		"simulated cards beside real ones":  {simulated + "devicePlugin.nodes=discovered", "devicePlugin.nodes: it is for real cards"},
		"too many simulated cards":          {"devicePlugin.simulatedCards.count=65", "at '/devicePlugin/simulatedCards/count': maximum: got 65, want 64"},
		"simulated cards in other units":    {simulated + "devicePlugin.simulatedCards.memory=16GB", `devicePlugin.simulatedCards.memory: "16GB" is invalid: a card's memory is a whole number of Mi or Gi, such as 16Gi`},
		"a simulated model with a comma":    {simulated + `devicePlugin.simulatedCards.model=A\,B`, `devicePlugin.simulatedCards.model: "A,B" is invalid: a model consists of`},
		"evictions without the right":       {"extender.overusePolicy=evict,extender.allowEvictions=false", "extender.overusePolicy: evict needs the right to evict"},
		"evictions without the guard":       {"extender.overusePolicy=evict,guard.enabled=false", "extender.overusePolicy: evict believes an annotation of pods"},
		"evictions by no measured use":      {"extender.overusePolicy=evict", "extender.overusePolicy: evict needs the use that the device plugin measures, or no pod is ever evicted: set devicePlugin.hostPID=true"},
		"metrics of no measured use":        {"devicePlugin.usageMetrics=true", "devicePlugin.usageMetrics: the device plugin can't tell which container uses the memory: set devicePlugin.hostPID=true"},
		"fair sharing without the guard":    {"extender.fairShare.mode=dispatch,guard.enabled=false", "extender.fairShare.mode: fair sharing needs the right to patch pods"},
		"a reclaim without the right":       {"extender.fairShare.mode=reclaim,extender.allowEvictions=false", "extender.fairShare.mode: reclaim needs the right to evict"},
		"a reclaim after no duration":       {"extender.fairShare.reclaimAfter=5 min", `extender.fairShare.reclaimAfter: "5 min" is invalid: a duration needs`},
		"a reclaim at once":                 {"extender.fairShare.reclaimAfter=0m0.0s", `extender.fairShare.reclaimAfter: "0m0.0s" is invalid: a duration needs a number above 0`},
		"a tenant that is no label":         {"extender.fairShare.by=label:", `extender.fairShare.by: "label:" is invalid: give namespace, or label: and the key of a label`},
		"an unknown isolation mode":         {"devicePlugin.isolation=vgpu", "at '/devicePlugin/isolation': value must be one of 'none', 'driver', 'mps'"},
		"MPS without daemons":               {"devicePlugin.isolation=mps", "devicePlugin.isolation: mps needs the MPS daemons: set mps.enabled=true"},
		"MPS daemons for no node":           {"mps.enabled=true", "mps.enabled: no node would use the MPS daemons: set devicePlugin.isolation=mps, or"},
		"MPS daemons and a node affinity":   {"mps.enabled=true,devicePlugin.isolation=mps,devicePlugin.affinity.nodeAffinity.x=y", "devicePlugin.affinity: with devicePlugin.isolation=mps the chart sets the node affinity"},
		"shared memory in other units":      {"mps.sharedMemory=1GB", `mps.sharedMemory: "1GB" is invalid: a size is a whole number of Ki, Mi or Gi, such as 1Gi`},
		"an unknown mode":                   {"mode=sidecar", "at '/mode': value must be one of 'extender', 'secondScheduler', 'devicePlugin'"},
		"a misspelt name":                   {"devicePlugin.memoryUnits=MiB", "additional properties 'memoryUnits' not allowed"},
		"an unknown unit":                   {"devicePlugin.memoryUnit=GB", `devicePlugin.memoryUnit: "GB" is invalid: ` + unitMistake},
		"replicas as a word":                {"extender.replicas=two", "at '/extender/replicas': got string, want integer"},
		"a name as an address":              {"extender.service.clusterIP=gpushare-extender", `extender.service.clusterIP: "gpushare-extender" is invalid: give a free IP address of the Service range, such as 10.96.0.15`},
		"an invalid address":                {"extender.service.clusterIP=10.96.0.256", `extender.service.clusterIP: "10.96.0.256" is invalid`},
		"an invalid IPv6 address":           {"extender.service.clusterIP=:", `extender.service.clusterIP: ":" is invalid`},
		"no address and no cluster":         {"extender.replicas=2", "extender.service.clusterIP: no cluster can be asked"},
		"several extenders on one host":     {"extender.reach=host", "extender.replicas: with extender.reach=host there is one extender"},
		"own certificates, no Secret":       {"extender.tls.mode=secret", "at '/extender/tls/secretName'"},
		"cert-manager without an issuer":    {"extender.tls.mode=certManager,extender.service.clusterIP=10.96.0.15", "at '/extender/tls/certManager/issuerRef': missing property 'name'"},
		"the default scheduler's name":      {"mode=secondScheduler,secondScheduler.name=default-scheduler", "secondScheduler.name: default-scheduler is the name of the cluster's own scheduler, which would take the same pods: choose another name, such as gpushare-scheduler"},
		"a scheduler's name with a quote":   {"mode=secondScheduler,secondScheduler.name=it's", `secondScheduler.name: "it's" is invalid: a scheduler's name consists of`},
		"a tag with a blank":                {"images.extender.tag=v1 2", `images.extender.tag: "v1 2" is invalid: a tag consists of letters, digits, _, . and -, such as v0.1.0`},
		"a default that isn't there":        {"devicePlugin.config.map.big.memoryUnit=MiB,devicePlugin.config.default=small", `devicePlugin.config.default: "small" is none of devicePlugin.config.map (big): name the configuration of nodes without the label gpushare.aliyun.com/config, such as standard`},
		"configurations without a default":  {"devicePlugin.config.map.big.memoryUnit=MiB", `devicePlugin.config.default: "" is none of devicePlugin.config.map (big)`},
		"an unknown key of a configuration": {"devicePlugin.config.map.big.unit=MiB", "at '/devicePlugin/config/map/big': additional properties 'unit' not allowed"},
		"a configuration's wrong unit":      {"devicePlugin.config.default=big,devicePlugin.config.map.big.memoryUnit=GB", `devicePlugin.config.map.big.memoryUnit: "GB" is invalid: ` + unitMistake},
		"a configuration's quiet period":    {"devicePlugin.config.default=big,devicePlugin.config.map.big.healthChecks.quietPeriod=5x", `devicePlugin.config.map.big.healthChecks.quietPeriod: "5x" is invalid: a duration needs a number and a unit (ms, s, m or h), such as 5m`},
		"a configuration's name":            {"devicePlugin.config.default=big one,devicePlugin.config.map.big one.memoryUnit=GiB", `devicePlugin.config.map: "big one" is invalid: a configuration's name is the value of a label`},
		"a card by two properties":          {"devicePlugin.config.map.big.excludedCards[0].index=0,devicePlugin.config.map.big.excludedCards[0].model=T4", "at '/devicePlugin/config/map/big/excludedCards/0': maxProperties: got 2, want 1"},
		"an upgrade of no node at a time":   {"devicePlugin.maxUnavailable=0%", `devicePlugin.maxUnavailable: "0%" is invalid: give a number of nodes above 0, such as 1, or a share of them, such as 10%`},
		"a part that is null":               {"extender=null", "missing property 'extender'"},
		"binds longer than the timeout":     {"extender.gangHold=0.1m5s,extender.service.clusterIP=10.96.0.15", "scheduler.httpTimeout: 15s isn't above extender.gangHold and extender.bindTimeout together (0.1m5s, 4s)"},
		"the same, second scheduler":        {"mode=secondScheduler,scheduler.httpTimeout=5s", "scheduler.httpTimeout: 5s isn't above"},
		"no time to bind":                   {"mode=secondScheduler,extender.bindTimeout=0s", "extender.bindTimeout: 0s isn't above 0s, and 1m at most"},
		"too much time to bind":             {"extender.reach=host,extender.replicas=1,extender.bindTimeout=1m1ms,scheduler.httpTimeout=3m", "extender.bindTimeout: 1m1ms isn't above 0s, and 1m at most"},
		"binds longer than the Lease":       {"extender.service.clusterIP=10.96.0.15,extender.replicas=1,scheduler.httpTimeout=30s,extender.bindTimeout=" + lease, "extender.bindTimeout: " + lease + " isn't below 10s, for which a leader counts on its Lease"},
		"the Lease, second scheduler":       {"mode=secondScheduler,scheduler.httpTimeout=30s,extender.bindTimeout=" + lease, "extender.bindTimeout: " + lease + " isn't below 10s"},
		"too long a hold":                   {"mode=secondScheduler,scheduler.httpTimeout=3m,extender.gangHold=61s,extender.gangPatience=3m", "extender.gangHold: 61s is above 1m"},
		"native groups without groups":      {"mode=secondScheduler,extender.nativeGroups=true,extender.gangHold=0s", "extender.nativeGroups: groups are off with extender.gangHold=0s"},
		"less patience than a hold":         {"mode=secondScheduler,scheduler.httpTimeout=50s,extender.gangHold=40s", "extender.gangPatience: 30s lies below extender.gangHold (40s)"},
		"no patience, without groups":       {"mode=secondScheduler,extender.gangHold=0s,extender.gangPatience=0s", "extender.gangPatience: 0s must be above 0s, also with groups off"},
		"patience without a unit":           {"extender.gangPatience=30", `extender.gangPatience: "30" is invalid: a duration needs a number and a unit (ms, s or m), such as 10s or 1m30s`},
		"an account without a namespace":    {"guard.allow.serviceAccounts[0]=velero", `guard.allow.serviceAccounts[0]: "velero" is invalid: give namespace and name of the ServiceAccount, such as velero/velero`},
		"a page's address without a port":   {"extender.ui.listenAddress=127.0.0.1", `extender.ui.listenAddress: "127.0.0.1" is invalid: give an address with a port, such as 127.0.0.1:12346, or :8080 for all addresses`},
		"no client's name":                  {"extender.service.clusterIP=10.96.0.15,extender.tls.clientNames={}", `extender.tls.clientNames[0]: "" is invalid`},
		"a client's name with a blank":      {"extender.service.clusterIP=10.96.0.15,extender.tls.clientNames={kube-scheduler,own #1}", `extender.tls.clientNames[1]: "own #1" is invalid: give the common name of a client's certificate, such as kube-scheduler`},
		"not the certificate's name":        {"extender.service.clusterIP=10.96.0.15,extender.tls.clientNames={other}", "extender.tls.clientNames: with extender.tls.mode=generated the certificate"},
		"monitors without a token":          {"extender.service.clusterIP=10.96.0.15,monitoring.enabled=true,monitoring.authorize=true", "monitoring.credentials.name: with monitoring.authorize=true"},
		"an unknown log format":             {"extender.service.clusterIP=10.96.0.15,logFormat=xml", "at '/logFormat'"},
		"monitors of a closed port":         {"extender.reach=host,extender.replicas=1,monitoring.enabled=true", "monitoring: with extender.reach=host"},
		"alerts on a closed port":           {"extender.reach=host,extender.replicas=1,monitoring.prometheusRule.enabled=true", "monitoring: with extender.reach=host"},
		"a folder with a slash at its end":  {"devicePlugin.podResourcesDirectory=/var/lib/kubelet/", `devicePlugin.podResourcesDirectory: "/var/lib/kubelet/" is invalid: a directory is an absolute path without a slash at its end, such as /var/lib/kubelet`},
		"a folder without one at its start": {"devicePlugin.devicePluginDirectory=plugins", `devicePlugin.devicePluginDirectory: "plugins" is invalid: a directory is an absolute path`},
		"a relative CDI directory":          {"devicePlugin.cdiDirectories={/etc/cdi,run/cdi}", `devicePlugin.cdiDirectories[1]: "run/cdi" is invalid: a directory is an absolute path`},
		"one directory for both":            {"devicePlugin.kubeletDirectory=/data/kubelet", "additional properties 'kubeletDirectory' not allowed"},
		"an unknown way to the driver":      {"devicePlugin.driverAccess=privileged", "at '/devicePlugin/driverAccess'"},
		"an hour as a timeout":              {"scheduler.httpTimeout=1h", `scheduler.httpTimeout: "1h" is invalid: a duration needs`},
		"a hold without a value":            {"extender.gangHold=null", "at '/extender': missing property 'gangHold'"},
		"a guard that is null":              {"guard.enabled=null", "at '/guard': missing property 'enabled'"},
		"a security context that is null":   {"devicePlugin.securityContext=null", "at '/devicePlugin': missing property 'securityContext'"},
		"a repository with a tag":           {"images.extender.repository=extender:v1", `images.extender.repository: "extender:v1" is invalid: give an image's name without a tag`},
		"a class with a blank":              {"devicePlugin.priorityClassName=a b", `devicePlugin.priorityClassName: "a b" is invalid: an object's name consists of at most 253`},
		"a name that YAML doesn't take":     {"fullnameOverride=off", `fullnameOverride: the objects' names would begin with "off": give at most 40 lower-case letters`},
		"an address that is a number":       {"extender.service.clusterIP=10.96", `extender.service.clusterIP: "10.96" is invalid`},
		"fragmentation without the right":   {"extender.service.clusterIP=10.96.0.15,extender.allowEvictions=false,extender.evictFragmented=true", "extender.evictFragmented: it needs the right to evict: set extender.allowEvictions=true"},
		"a part of a node at a time":        {"devicePlugin.maxUnavailable=0.5", `devicePlugin.maxUnavailable: "0.5" is invalid`},
		"a digest without its algorithm":    {"images.devicePlugin.digest=0123", `images.devicePlugin.digest: "0123" is invalid: a digest is sha256: and 64 hexadecimal digits`},
		"a relative kubeconfig":             {"scheduler.kubeconfig=scheduler.conf", `scheduler.kubeconfig: "scheduler.conf" is invalid: give the absolute path of a file, such as /etc/kubernetes/scheduler.conf`},
		"several mistakes, the second one":  {"devicePlugin.memoryUnit=GB,extender.bindTimeout=4", `extender.bindTimeout: "4" is invalid`},
		"several mistakes, the first one":   {"devicePlugin.memoryUnit=GB,extender.bindTimeout=4", `devicePlugin.memoryUnit: "GB" is invalid`},
		"a registry with a scheme":          {"imageRegistry=https://images.example.com", `imageRegistry: "https://images.example.com" is invalid: give a registry without a scheme and without a slash at its end, such as registry.example.com:5000/mirror`},
		"a name with a capital":             {"fullnameOverride=GPU", `fullnameOverride: the objects' names would begin with "GPU": give at most 40 lower-case letters`},
		"too long a name":                   {"nameOverride=" + strings.Repeat("a", 40), `fullnameOverride: the objects' names would begin with "gpushare-aaa`},
		"the chart's own label":             {"devicePlugin.podLabels.app\\.kubernetes\\.io/name=x", "devicePlugin.podLabels: app.kubernetes.io/name is the chart's own label"},
		"two extenders during an update":    {"extender.reach=host,extender.replicas=1,extender.updateStrategy.type=RollingUpdate", "extender.updateStrategy: with extender.reach=host and mode=secondScheduler the old pod must end before the new one starts"},
		"two plugins during an update":      {"devicePlugin.updateStrategy.rollingUpdate.maxSurge=1", "devicePlugin.updateStrategy: with maxSurge two plugins of a node would take the kubelet from each other"},
		"a pool with the extender's name":   {"mode=devicePlugin", "mode: with mode=devicePlugin the release needs a name of its own"},
		"a pool without a plugin":           {"mode=devicePlugin,fullnameOverride=pool-b,devicePlugin.enabled=false", "mode: with mode=devicePlugin and devicePlugin.enabled=false nothing is left to install"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			out, err := h.try("template", "gpushare", chart, "--set="+test.values)
			if err == nil {
				t.Fatal("the chart is rendered")
			}
			if !strings.Contains(out, test.want) {
				t.Errorf("the error is %q, want %q", out, test.want)
			}
		})
	}
	schema, err := os.ReadFile(filepath.Join(controlplane.Repository(t), chart, "values.schema.json"))
	must(t, err)
	if bytes.Contains(schema, []byte(`"pattern"`)) {
		t.Error("the schema's error about a pattern is a regular expression: check the value in templates/_mistakes.tpl")
	}
}

// TestSchedulerConfig: the configuration that the chart renders for kube-scheduler has no finding, in every way
// in which kube-scheduler can reach the extender.
func TestSchedulerConfig(t *testing.T) {
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
					Path: extender.Prefix, BindTimeout: 4 * time.Second, GangHold: 10 * time.Second, Now: time.Now(),
					ReadFile: func(string) ([]byte, error) { return nil, os.ErrNotExist },
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

// TestFlags checks flags of the extender, and the grace period that lets it resolve its binds before it is killed.
func TestFlags(t *testing.T) {
	h := newHelm(t, "")
	const (
		service = "extender.service.clusterIP=10.96.0.15,"
		host    = "extender.reach=host,extender.replicas=1,"
		second  = "mode=secondScheduler,"
		clients = "--client-names="
		page    = "--ui"
	)
	times := []string{"terminationGracePeriodSeconds: ", "--bind-timeout=", "--gang-hold=", "--gang-patience="}
	for name, test := range map[string]struct {
		values string
		// lines are the beginnings of the lines to compare. want has the rest of these lines.
		lines []string
		want  string
	}{
		"the default times":          {service, times, "20 4s 10s 30s"},
		"short binds":                {service + "extender.bindTimeout=500ms", times, "13 500ms 10s 30s"},
		"just below the Lease":       {service + "extender.bindTimeout=9.9s,scheduler.httpTimeout=20s", times, "32 9.9s 10s 30s"},
		"the same, second scheduler": {second + "extender.bindTimeout=9.9s,scheduler.httpTimeout=20s", times, "32 9.9s 10s 30s"},
		"a longer Lease": {
			service + "extender.bindTimeout=12s,scheduler.httpTimeout=30s,extender.extraArgs={--leader-elect-renew-deadline=20s,--leader-elect-lease-duration=30s}",
			times, "36 12s 10s 30s",
		},
		"without a Lease":             {host + "extender.bindTimeout=1m,scheduler.httpTimeout=2m", times, "132 1m 10s 30s"},
		"a long hold":                 {host + "extender.gangHold=1m,extender.gangPatience=1m,scheduler.httpTimeout=2m", times, "20 4s 1m 1m"},
		"no groups":                   {host + "extender.gangHold=0s,scheduler.httpTimeout=5s", times, "20 4s 0s 30s"},
		"patience for a long absence": {host + "extender.gangPatience=45s", times, "20 4s 10s 45s"},

		"the page at the extender's default": {service, []string{page}, ""},
		"the page on the host":               {host, []string{page}, ""},
		"the page in a second scheduler":     {second, []string{page}, ""},
		"the page at an address":             {service + "extender.tls.mode=none,extender.ui.listenAddress=:8080", []string{page}, "-listen-address=:8080"},
		"no fair sharing":                    {service, []string{"--fair-share"}, ""},
		"fair sharing": {
			service + "extender.fairShare.mode=dispatch,extender.fairShare.by=label:team,extender.fairShare.priorityCutoff=1000000,extender.fairShare.provisioning=2",
			[]string{"--fair-share"}, "=dispatch -by=label:team -priority-cutoff=1000000 -provisioning=2",
		},
		"evictions for fragmentation":    {service + "extender.allowEvictions=true,extender.evictFragmented=true", []string{"--evict-"}, "fragmented"},
		"no evictions for fragmentation": {service + "extender.allowEvictions=true", []string{"--evict-"}, ""},
		"no page":                        {service + "extender.ui.enabled=false", []string{page}, "-listen-address="},

		// The signer of the certificates can also sign certificates for other users, so the extender must check the name.
		"client names, generated certificate": {service + "extender.tls.mode=generated", []string{clients}, "kube-scheduler"},
		"client names, a Secret": {
			service + "extender.tls.mode=secret,extender.tls.secretName=mine,extender.tls.clientNames={a,system:kube-scheduler}",
			[]string{clients}, "a,system:kube-scheduler",
		},
		"client names, cert-manager": {service + "extender.tls.mode=certManager,extender.tls.certManager.issuerRef.name=ca", []string{clients}, "kube-scheduler"},
		"client names, no TLS":       {service + "extender.tls.mode=none", []string{clients}, ""},
	} {
		out := h.run(t, "template", "gpushare", chart, "--set="+strings.TrimSuffix(test.values, ","))
		var got []string
		for line := range strings.Lines(out) {
			line = strings.TrimPrefix(strings.TrimSpace(line), "- ")
			for _, begin := range test.lines {
				if rest, found := strings.CutPrefix(line, begin); found {
					got = append(got, rest)
				}
			}
		}
		if strings.Join(got, " ") != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

// TestKubernetesVersions: clusters before 1.30 get no policies, and the second scheduler has the cluster's version.
func TestKubernetesVersions(t *testing.T) {
	h := newHelm(t, "")
	for version, want := range map[string]bool{"v1.29.0": false, "v1.30.0-gke.100": true, "v1.37.2": true} {
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

// TestWithoutPolicies: before Kubernetes 1.30 there is no guard, so the chart rejects what needs it.
func TestWithoutPolicies(t *testing.T) {
	h := newHelm(t, "")
	for _, values := range []string{"extender.overusePolicy=evict", "extender.fairShare.mode=dispatch"} {
		out, err := h.try("template", "gpushare", chart, "--kube-version=1.29", "--set=extender.reach=host,extender.replicas=1,"+values)
		if err == nil || !strings.Contains(out, "set guard.enabled=true, on Kubernetes 1.30 or later") {
			t.Errorf("%s: %v\n%s", values, err, out)
		}
	}
}

// TestLargeNumber: a large number in a file of values, which YAML makes a float, is rendered as an integer.
func TestLargeNumber(t *testing.T) {
	file := filepath.Join(t.TempDir(), "values.yaml")
	must(t, os.WriteFile(file, []byte("extender: {service: {clusterIP: 10.96.0.15}, fairShare: {mode: dispatch, provisioning: 1000000}}\n"), 0o600))
	out := newHelm(t, "").run(t, "template", "gpushare", chart, "--values="+file)
	if !strings.Contains(out, "--fair-share-provisioning=1000000\n") {
		t.Error("the flag is missing")
	}
}

// TestFairShareOff: off without quotes, which YAML makes false, turns fair sharing off, too.
func TestFairShareOff(t *testing.T) {
	file := filepath.Join(t.TempDir(), "values.yaml")
	must(t, os.WriteFile(file, []byte("extender: {service: {clusterIP: 10.96.0.15}, fairShare: {mode: off}}\n"), 0o600))
	out := newHelm(t, "").run(t, "template", "gpushare", chart, "--values="+file)
	if strings.Contains(out, "- --fair-share=") {
		t.Error("fair sharing is on")
	}
}

// TestSameAgain: the chart renders the same text again, so tools that compare it with the cluster, such as Argo CD, find no difference.
// They ask no cluster and know its version without the patch. In the default mode each render makes other certificates.
func TestSameAgain(t *testing.T) {
	h := newHelm(t, "")
	render := func(values string) string {
		t.Helper()
		return h.run(t, "template", "gpushare", chart, "--kube-version=1.37", "--set=extender.service.clusterIP=10.96.0.15", "--set="+values)
	}
	everything := ",monitoring.enabled=true,monitoring.prometheusRule.enabled=true,monitoring.dashboard.enabled=true,networkPolicy.enabled=true," +
		"mps.enabled=true,devicePlugin.isolation=mps,devicePlugin.config.default=a,devicePlugin.config.map.a.memoryUnit=MiB,devicePlugin.config.map.b.memoryUnit=GiB"
	for mode, values := range map[string]string{
		"certificates by cert-manager": "extender.fairShare.mode=reclaim,extender.tls.mode=certManager,extender.tls.certManager.issuerRef.name=ca",
		"certificates in a Secret":     "extender.tls.mode=secret,extender.tls.secretName=tls",
		"no certificates":              "extender.tls.mode=none",
		"a second scheduler":           "mode=secondScheduler,images.scheduler.tag=v1.37.2",
		"a pool of nodes":              "mode=devicePlugin,fullnameOverride=pool-b",
	} {
		if diff := cmp.Diff(render(values+everything), render(values+everything)); diff != "" {
			t.Errorf("%s: the second render differs:\n%s", mode, diff)
		}
	}
	first := render("extender.tls.mode=generated")
	if first == render("extender.tls.mode=generated") {
		t.Error("the certificates are the same again: remove what the documentation says about them")
	}
	out, err := h.try("template", "gpushare", chart, "--kube-version=1.37", "--set=mode=secondScheduler")
	if want := "images.scheduler.tag: the cluster's version is known only as v1.37"; err == nil || !strings.Contains(out, want) {
		t.Errorf("a second scheduler without a tag: got %v, want %q in\n%s", err, want, out)
	}
}

func TestAuthorizedMetrics(t *testing.T) {
	h := newHelm(t, "")
	counts := func(values string) map[string]int {
		out := h.run(t, "template", "gpushare", chart, "--set=extender.service.clusterIP=10.96.0.15,monitoring.enabled=true", "--set="+values)
		counts := map[string]int{}
		for _, what := range []string{"- --authorize-metrics\n", "resources: [tokenreviews]", "resources: [subjectaccessreviews]", "nonResourceURLs: [/metrics]", `credentials: {name: "token", key: "token"}`} {
			counts[what] = strings.Count(out, what)
		}
		return counts
	}
	// the extender, the device plugin, and a monitor for each
	want := map[string]int{
		"- --authorize-metrics\n": 2, "resources: [tokenreviews]": 2, "resources: [subjectaccessreviews]": 2, "nonResourceURLs: [/metrics]": 1,
		`credentials: {name: "token", key: "token"}`: 2,
	}
	check.Equal(t, "with authorize", want, counts("monitoring.authorize=true,monitoring.credentials.name=token"))
	for what := range want {
		want[what] = 0
	}
	check.Equal(t, "by default", want, counts(""))
}

// TestMonitors: the monitors select the installed pods. This is tested on the rendered objects, because a
// bare API server doesn't have the monitors' kinds.
func TestMonitors(t *testing.T) {
	h := newHelm(t, "")
	for mode, part := range map[string]string{"extender": "extender", "secondScheduler": "scheduler"} {
		t.Run(mode, func(t *testing.T) {
			objects := h.render(t, "monitoring.enabled=true,monitoring.labels.release=prometheus,mode="+mode)
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

// TestRulesAndDashboard: both are rendered only if they are enabled, with the content of their files.
func TestRulesAndDashboard(t *testing.T) {
	h := newHelm(t, "")
	const rules, dashboard = "PrometheusRule/gpushare", "ConfigMap/gpushare-dashboard"
	objects := h.render(t, "monitoring.enabled=true")
	if objects[rules] != nil || objects[dashboard] != nil {
		t.Error("they are rendered by default")
	}
	objects = h.render(t, "monitoring.prometheusRule.enabled=true,monitoring.dashboard.enabled=true,monitoring.labels.release=prometheus,"+
		"monitoring.dashboard.annotations.grafana_folder=GPU")
	if objects[rules] == nil || objects[dashboard] == nil {
		t.Fatal("they aren't rendered")
	}
	if diff := cmp.Diff(readYAML(t, chart+"/files/rules.yaml"), objects[rules].Object["spec"]); diff != "" {
		t.Errorf("the rules (-file +rendered):\n%s", diff)
	}
	if got := objects[rules].GetLabels()["release"]; got != "prometheus" {
		t.Errorf("the rules' label is %q", got)
	}
	text, err := os.ReadFile(filepath.Join(controlplane.Repository(t), chart, "files", "dashboard.json"))
	must(t, err)
	got, _, err := unstructured.NestedString(objects[dashboard].Object, "data", "gpushare.json")
	must(t, err)
	if diff := cmp.Diff(strings.TrimSpace(string(text)), strings.TrimSpace(got)); diff != "" {
		t.Errorf("the dashboard (-file +rendered):\n%s", diff)
	}
	if label, folder := objects[dashboard].GetLabels()["grafana_dashboard"], objects[dashboard].GetAnnotations()["grafana_folder"]; label != "1" || folder != "GPU" {
		t.Errorf("the dashboard's label is %q, its folder %q", label, folder)
	}
}

// TestPodLabels: they are added to the chart's own labels, which the selectors need.
func TestPodLabels(t *testing.T) {
	h := newHelm(t, "")
	for name, test := range map[string]struct{ values, workload string }{
		"of the extender":         {"extender.podLabels.team=gpu", "Deployment/gpushare-extender"},
		"of the second scheduler": {"mode=secondScheduler,extender.podLabels.team=gpu", "Deployment/gpushare-scheduler"},
		"of the device plugin":    {"devicePlugin.podLabels.team=gpu", "DaemonSet/gpushare-device-plugin"},
	} {
		workload := h.render(t, test.values)[test.workload]
		want, _, err := unstructured.NestedStringMap(workload.Object, "spec", "selector", "matchLabels")
		must(t, err)
		want["team"] = "gpu"
		check.Equal(t, name, want, podTemplate(t, workload).Labels)
	}
}

// TestUpdateStrategies compares what replaces the defaults.
func TestUpdateStrategies(t *testing.T) {
	h := newHelm(t, "")
	const deployment, daemonSet = "Deployment/gpushare-extender strategy", "DaemonSet/gpushare-device-plugin updateStrategy"
	for name, test := range map[string]struct{ values, field, want string }{
		"the extender's default":          {"", deployment, "rollingUpdate: {maxSurge: 1, maxUnavailable: 0}\ntype: RollingUpdate"},
		"the extender's own":              {"extender.updateStrategy.type=Recreate", deployment, "type: Recreate"},
		"the extender's, on the host":     {"extender.reach=host,extender.replicas=1,extender.updateStrategy.type=Recreate", deployment, "type: Recreate"},
		"the device plugin's default":     {"", daemonSet, "rollingUpdate: {maxUnavailable: 1}"},
		"a share of the device plugins":   {"devicePlugin.maxUnavailable=10%", daemonSet, "rollingUpdate: {maxUnavailable: 10%}"},
		"device plugins only if deleted":  {"devicePlugin.updateStrategy.type=OnDelete", daemonSet, "type: OnDelete"},
		"the device plugin's, other form": {"devicePlugin.updateStrategy.rollingUpdate.maxUnavailable=20%", daemonSet, "rollingUpdate: {maxUnavailable: 20%}"},
	} {
		object, field, _ := strings.Cut(test.field, " ")
		got, _, err := unstructured.NestedMap(h.render(t, test.values)[object].Object, "spec", field)
		must(t, err)
		var want map[string]any
		must(t, yaml.Unmarshal([]byte(test.want), &want))
		check.Equal(t, name, want, got)
	}
}

// TestImageRegistry: one value replaces the registry of every image, and nothing else of its name.
func TestImageRegistry(t *testing.T) {
	h := newHelm(t, "")
	const digest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	for name, test := range map[string]struct{ values, want string }{
		"none":   {"", "ghcr.io/gpushare/gpushare-device-plugin:v0.1.0 ghcr.io/gpushare/gpushare-extender:v0.1.0 registry.k8s.io/kube-scheduler:v1"},
		"a host": {"imageRegistry=registry.example.com", "registry.example.com/gpushare/gpushare-device-plugin:v0.1.0 registry.example.com/gpushare/gpushare-extender:v0.1.0 registry.example.com/kube-scheduler:v1"},
		"a port and a path, beside other names": {
			"imageRegistry=mirror:5000/k8s,images.extender.repository=team/extender,images.devicePlugin.repository=localhost:5001/plugin,images.devicePlugin.digest=" + digest,
			"mirror:5000/k8s/plugin@" + digest + " mirror:5000/k8s/team/extender:v0.1.0 mirror:5000/k8s/kube-scheduler:v1",
		},
	} {
		var got []string
		objects := h.render(t, "mode=secondScheduler,images.scheduler.tag=v1,"+test.values)
		for _, workload := range []string{"DaemonSet/gpushare-device-plugin", "Deployment/gpushare-scheduler"} {
			for _, container := range podTemplate(t, objects[workload]).Spec.Containers {
				got = append(got, container.Image)
			}
		}
		want := strings.Fields(test.want)
		slices.Sort(got)
		slices.Sort(want)
		check.Equal(t, name, want, got)
	}
}

// TestKubeletDirectories: the kubelet's --root-dir changes the path of its PodResources socket, but not the device-plugin
// directory.
func TestKubeletDirectories(t *testing.T) {
	h := newHelm(t, "")
	spec := podTemplate(t, h.render(t, "devicePlugin.podResourcesDirectory=/data/kubelet/pod-resources")["DaemonSet/gpushare-device-plugin"]).Spec
	got := map[string]string{}
	for _, arg := range spec.Containers[0].Args {
		if name, value, _ := strings.Cut(arg, "="); name == "--device-plugin-dir" || name == "--pod-resources-socket" {
			got[name] = value
		}
	}
	for _, mount := range spec.Containers[0].VolumeMounts {
		got["mount "+mount.Name] = mount.MountPath
	}
	for _, volume := range spec.Volumes {
		got["volume "+volume.Name] = volume.HostPath.Path
	}
	want := map[string]string{
		"--device-plugin-dir":    "/var/lib/kubelet/device-plugins",
		"mount device-plugins":   "/var/lib/kubelet/device-plugins",
		"volume device-plugins":  "/var/lib/kubelet/device-plugins",
		"--pod-resources-socket": "/data/kubelet/pod-resources/kubelet.sock",
		"mount pod-resources":    "/data/kubelet/pod-resources",
		"volume pod-resources":   "/data/kubelet/pod-resources",
	}
	check.Equal(t, "the result", want, got)
}

// TestDriverAccess tests how the device plugin's own container gets the driver library from NVIDIA's container runtime.
func TestDriverAccess(t *testing.T) {
	type access struct {
		VisibleDevices, Mount, Source string
		Annotations                   map[string]string
	}
	h := newHelm(t, "")
	for name, test := range map[string]struct {
		values string
		want   access
	}{
		"by the environment variable": {"", access{VisibleDevices: "all"}},
		"by a mount": {"devicePlugin.driverAccess=volume-mounts", access{
			Mount: "/var/run/nvidia-container-devices/all", Source: "/dev/null",
		}},
		"by CDI annotations, beside others": {"devicePlugin.driverAccess=cdi,devicePlugin.podAnnotations.team=gpu", access{
			Annotations: map[string]string{
				"cdi.k8s.io/gpushare": "nvidia.com/gpu=all", "nvidia.cdi.k8s.io/container.device-plugin": "nvidia.com/gpu=all", "team": "gpu",
			},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			template := podTemplate(t, h.render(t, test.values)["DaemonSet/gpushare-device-plugin"])
			container := template.Spec.Containers[0]
			got := access{Annotations: template.Annotations}
			for _, env := range container.Env {
				if env.Name == "NVIDIA_VISIBLE_DEVICES" {
					got.VisibleDevices = env.Value
				}
			}
			for _, mount := range container.VolumeMounts {
				if mount.Name == "visible-devices" {
					got.Mount = mount.MountPath
				}
			}
			for _, volume := range template.Spec.Volumes {
				if volume.Name == "visible-devices" {
					got.Source = volume.HostPath.Path
				}
			}
			check.Equal(t, "the result", test.want, got)
		})
	}
}

// TestDevicePluginOverrides tests the commands of docs/node.md for toolkits and nodes that no option of the chart fits.
func TestDevicePluginOverrides(t *testing.T) {
	h := newHelm(t, "")
	const values = "devicePlugin.securityContext.privileged=true,devicePlugin.securityContext.allowPrivilegeEscalation=true," +
		"devicePlugin.extraVolumes[0].name=driver,devicePlugin.extraVolumes[0].hostPath.path=/usr/lib64," +
		"devicePlugin.extraVolumeMounts[0].name=driver,devicePlugin.extraVolumeMounts[0].mountPath=/driver," +
		"devicePlugin.extraEnv[0].name=NVML_LIBRARY,devicePlugin.extraEnv[0].value=/driver/libnvidia-ml.so.1"
	spec := podTemplate(t, h.render(t, values)["DaemonSet/gpushare-device-plugin"]).Spec
	container := spec.Containers[0]
	want := &corev1.SecurityContext{
		Privileged: new(true), AllowPrivilegeEscalation: new(true), ReadOnlyRootFilesystem: new(true),
		Capabilities:   &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
		SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
	}
	check.Equal(t, "security context", want, container.SecurityContext)
	if last := spec.Volumes[len(spec.Volumes)-1]; last.Name != "driver" || last.HostPath.Path != "/usr/lib64" {
		t.Errorf("the last volume is %v", last)
	}
	if last := container.VolumeMounts[len(container.VolumeMounts)-1]; last.Name != "driver" || last.MountPath != "/driver" {
		t.Errorf("the last mount is %v", last)
	}
	if last := container.Env[len(container.Env)-1]; last.Name != "NVML_LIBRARY" || last.Value != "/driver/libnvidia-ml.so.1" {
		t.Errorf("the last variable is %v", last)
	}
}

// TestSimulatedCards: the plugin gets the image and the cards of the trial, and nothing of a driver. By default nothing of that is there.
func TestSimulatedCards(t *testing.T) {
	h := newHelm(t, "")
	const name = "DaemonSet/gpushare-device-plugin"
	byDefault := podTemplate(t, h.render(t, "extender.replicas=2")[name])
	template := podTemplate(t, h.render(t, "devicePlugin.simulatedCards.count=2,devicePlugin.simulatedCards.memory=40Gi,devicePlugin.simulatedCards.model=NVIDIA A100")[name])
	container := &template.Spec.Containers[0]
	if want := "ghcr.io/gpushare/gpushare-device-plugin-simulated:v0.1.0"; container.Image != want || !slices.Contains(container.Args, "--simulated-cards") {
		t.Errorf("image %s, arguments %q", container.Image, container.Args)
	}
	var variables []string
	for _, variable := range container.Env {
		variables = append(variables, variable.Name+"="+variable.Value)
	}
	want := []string{"NODE_NAME=", fakenvml.LinesEnv + "=GPU-simulated-$(NODE_NAME)-0, NVIDIA A100, 40960, -\nGPU-simulated-$(NODE_NAME)-1, NVIDIA A100, 40960, -"}
	check.Equal(t, "environment", want, variables)
	if template.Spec.RuntimeClassName != nil || len(template.Annotations) > 0 {
		t.Errorf("runtime class %v, annotations %v", template.Spec.RuntimeClassName, template.Annotations)
	}
	var paths []string
	for _, volume := range template.Spec.Volumes {
		paths = append(paths, volume.HostPath.Path)
	}
	check.Equal(t, "paths of the node", []string{"/var/lib/kubelet/device-plugins", "/var/lib/kubelet/pod-resources"}, paths)

	// What is left is as by default.
	plain := &byDefault.Spec.Containers[0]
	container.Args = slices.DeleteFunc(container.Args, func(arg string) bool { return arg == "--simulated-cards" })
	container.Image, container.Env = plain.Image, plain.Env
	if diff := cmp.Diff(byDefault, template); diff != "" {
		t.Errorf("another difference to the default (-default +simulated)\n%s", diff)
	}
	for _, object := range h.render(t, "extender.replicas=2") {
		text, err := json.Marshal(object.Object)
		must(t, err)
		if strings.Contains(strings.ToLower(string(text)), "simulated") || strings.Contains(string(text), "FAKE_NVML") {
			t.Errorf("a trace of simulated cards by default: %s %s", object.GetKind(), object.GetName())
		}
	}
}

// TestAdapters: only a value lets the plugin look for RDMA adapters, and gives it what it needs of the node.
func TestAdapters(t *testing.T) {
	h := newHelm(t, "")
	for values, want := range map[string][]string{
		"":                       {"--sysfs-root="},
		"devicePlugin.rdma=true": {"--sysfs-root=/host/sys", "/sys/bus at /host/sys/bus", "/sys/class at /host/sys/class", "/sys/devices at /host/sys/devices"},
	} {
		spec := podTemplate(t, h.render(t, values)["DaemonSet/gpushare-device-plugin"]).Spec
		container := spec.Containers[0]
		got := slices.DeleteFunc(slices.Clone(container.Args), func(arg string) bool { return !strings.HasPrefix(arg, "--sysfs-root=") })
		for _, volume := range spec.Volumes {
			i := slices.IndexFunc(container.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == volume.Name && m.ReadOnly })
			if path := volume.HostPath.Path; strings.HasPrefix(path, "/sys") && i >= 0 {
				got = append(got, path+" at "+container.VolumeMounts[i].MountPath)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q (-want +got)\n%s", values, diff)
		}
	}
}

// TestMeasuredUse: kubectl inspect finds the loopback port by its name, and only a value gives the plugin the machine's PID namespace.
func TestMeasuredUse(t *testing.T) {
	h := newHelm(t, "")
	for values, want := range map[string]bool{"": false, "devicePlugin.hostPID=true,devicePlugin.usageMetrics=true": true} {
		pod := podTemplate(t, h.render(t, values)["DaemonSet/gpushare-device-plugin"])
		container := pod.Spec.Containers[0]
		if pod.Spec.HostPID != want || slices.Contains(container.Args, "--usage-metrics") != want {
			t.Errorf("%q: hostPID %t, arguments %q", values, pod.Spec.HostPID, container.Args)
		}
		i := slices.IndexFunc(container.Ports, func(p corev1.ContainerPort) bool { return p.Name == protocol.PortUsage })
		if i < 0 || !slices.Contains(container.Args, fmt.Sprintf("--usage-listen-address=127.0.0.1:%d", container.Ports[i].ContainerPort)) {
			t.Errorf("ports %v don't have that of %q", container.Ports, container.Args)
		}
	}
}

// TestIsolation: the plugin gets the machine's cgroups and CDI directory only where limits are possible.
func TestIsolation(t *testing.T) {
	h := newHelm(t, "")
	for values, want := range map[string]struct{ mounts, flag bool }{
		"":                                   {false, false},
		"devicePlugin.isolationByLabel=true": {true, false},
		"devicePlugin.isolation=driver":      {true, true},
		"devicePlugin.config.default=a,devicePlugin.config.map.a.isolation=driver": {true, false},
		"devicePlugin.isolation=mps,mps.enabled=true":                              {false, false},
	} {
		pod := podTemplate(t, h.render(t, values)["DaemonSet/gpushare-device-plugin"])
		container := pod.Spec.Containers[0]
		writable := map[string]bool{}
		for _, mount := range container.VolumeMounts {
			writable[mount.MountPath] = !mount.ReadOnly
		}
		for path, write := range map[string]bool{"/sys/fs/cgroup": false, "/var/run/cdi": true} {
			if got, mounted := writable[path]; mounted != want.mounts || got != (write && want.mounts) {
				t.Errorf("%q: %s is mounted %t, writable %t", values, path, mounted, got)
			}
		}
		if write, mounted := writable["/run/gpushare/mps"]; write || mounted != strings.Contains(values, "mps") {
			t.Errorf("%q: the directory of MPS is mounted %t, writable %t", values, mounted, write)
		}
		if writable["/run/gpushare/mps/shared"] != strings.Contains(values, "mps") {
			t.Errorf("%q: mounts that are writable: %v", values, writable)
		}
		if slices.Contains(container.Args, "--isolation=driver") != want.flag {
			t.Errorf("%q: arguments %q", values, container.Args)
		}
	}
}

// nodeExpressions returns the values that the pod's required node affinity excludes, by label. It has one term.
func nodeExpressions(spec corev1.PodSpec) map[string][]string {
	excluded := map[string][]string{}
	for _, e := range spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchExpressions {
		if e.Operator == corev1.NodeSelectorOpNotIn {
			excluded[e.Key] = e.Values
		}
	}
	return excluded
}

// TestDriverUpgrade: the pods that have the driver open leave a node before the GPU operator unloads it, and MPS daemons only then: programs end
// with them. A user's affinity is added.
func TestDriverUpgrade(t *testing.T) {
	h := newHelm(t, "")
	const state, own = "nvidia.com/gpu-driver-upgrade-state", "devicePlugin.affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight=1"
	objects := h.render(t, "mps.enabled=true,devicePlugin.isolation=mps,"+own)
	for name, want := range map[string][]string{
		"DaemonSet/gpushare-device-plugin": {"pod-deletion-required", "drain-required", "pod-restart-required", "upgrade-failed"},
		"DaemonSet/gpushare-mps":           {"pod-restart-required"},
	} {
		spec := podTemplate(t, objects[name]).Spec
		if diff := cmp.Diff(want, nodeExpressions(spec)[state]); diff != "" || spec.Affinity.PodAntiAffinity == nil {
			t.Errorf("%s: the affinity is %v (-want +got)\n%s", name, spec.Affinity, diff)
		}
	}
}

// TestCDIDirectories: where containers get their cards by CDI, the plugin reads the specifications, and writes one only for limits.
func TestCDIDirectories(t *testing.T) {
	h := newHelm(t, "")
	for values, want := range map[string]struct {
		writable map[string]bool // By the path of the mount.
		flag     string
	}{
		"": {map[string]bool{}, ""},
		"devicePlugin.deviceListStrategy=cdi-cri": {map[string]bool{"/etc/cdi": false, "/var/run/cdi": false}, "--cdi-directories=/etc/cdi,/var/run/cdi"},
		"devicePlugin.deviceListStrategy=cdi-cri,devicePlugin.cdiDirectories={/var/run/cdi},devicePlugin.isolation=driver": {
			map[string]bool{"/var/run/cdi": true}, "--cdi-directories=/var/run/cdi",
		},
	} {
		container := podTemplate(t, h.render(t, values)["DaemonSet/gpushare-device-plugin"]).Spec.Containers[0]
		writable := map[string]bool{}
		for _, mount := range container.VolumeMounts {
			if strings.HasSuffix(mount.MountPath, "/cdi") {
				writable[mount.MountPath] = !mount.ReadOnly
			}
		}
		if diff := cmp.Diff(want.writable, writable); diff != "" {
			t.Errorf("%q (-want +got)\n%s", values, diff)
		}
		if want.flag != "" && !slices.Contains(container.Args, want.flag) {
			t.Errorf("%q: arguments %q", values, container.Args)
		}
	}
}

// TestMPSDaemons: an upgrade ends no program that uses a card, no daemon runs on a node in another mode, and only the container that mounts
// the shared memory is privileged.
func TestMPSDaemons(t *testing.T) {
	h := newHelm(t, "")
	for values, want := range map[string]struct{ label, affinity bool }{
		"mps.enabled=true,devicePlugin.isolation=mps":         {false, true},
		"mps.enabled=true,devicePlugin.isolationByLabel=true": {true, false},
	} {
		object := h.render(t, values)["DaemonSet/gpushare-mps"]
		if object == nil {
			t.Fatalf("%q: no DaemonSet", values)
		}
		if strategy, _, _ := unstructured.NestedString(object.Object, "spec", "updateStrategy", "type"); strategy != "OnDelete" {
			t.Errorf("%q: the update strategy is %s", values, strategy)
		}
		pod := podTemplate(t, object).Spec
		if expressions := nodeExpressions(pod); (pod.NodeSelector[protocol.LabelIsolation] == "mps") != want.label ||
			(expressions[protocol.LabelIsolation] != nil) != want.affinity || pod.NodeSelector["gpushare"] != "true" {
			t.Errorf("%q: node selector %v, affinity %v", values, pod.NodeSelector, expressions)
		}
		if privileged := pod.Containers[0].SecurityContext.Privileged; privileged != nil || !pod.HostPID || *pod.AutomountServiceAccountToken {
			t.Errorf("%q: privileged %v, hostPID %t", values, privileged, pod.HostPID)
		}
		if pod.Containers[0].LivenessProbe != nil {
			t.Errorf("%q: a failed probe of one container would end the programs of all cards", values)
		}
		propagation := map[string]corev1.MountPropagationMode{}
		for _, mount := range slices.Concat(pod.InitContainers[0].VolumeMounts, pod.Containers[0].VolumeMounts) {
			if mount.MountPropagation != nil {
				propagation[mount.MountPath] = *mount.MountPropagation
			}
		}
		if diff := cmp.Diff(map[string]corev1.MountPropagationMode{"/run/gpushare/mps": corev1.MountPropagationBidirectional}, propagation); diff != "" {
			t.Errorf("%q: propagation (-want +got):\n%s", values, diff)
		}
	}
	if h.render(t, "")["DaemonSet/gpushare-mps"] != nil {
		t.Error("the daemons are installed without being switched on")
	}
}

// TestNetworkPolicies: each policy selects its pods, and opens only ports that these pods have, to the peers that the values
// name.
func TestNetworkPolicies(t *testing.T) {
	h := newHelm(t, "")
	const (
		scheduler  = "networkPolicy.schedulers[0].ipBlock.cidr=192.0.2.0/28,"
		prometheus = "networkPolicy.monitoring[0].podSelector.matchLabels.app=prometheus,"
	)
	for name, test := range map[string]struct {
		values string
		// want maps each pod template to its open ports with their peers.
		want map[string]string
	}{
		"as they are": {"", map[string]string{
			"Deployment/gpushare-extender": "extender from anywhere", "DaemonSet/gpushare-device-plugin": "",
		}},
		"with peers": {scheduler + prometheus, map[string]string{
			"Deployment/gpushare-extender": "extender from 192.0.2.0/28, health from app=prometheus", "DaemonSet/gpushare-device-plugin": "metrics from app=prometheus",
		}},
		"beside the second scheduler": {"mode=secondScheduler," + prometheus, map[string]string{
			"Deployment/gpushare-scheduler": "health from app=prometheus", "DaemonSet/gpushare-device-plugin": "metrics from app=prometheus",
		}},
		"on the host's network": {"extender.reach=host,extender.replicas=1", map[string]string{"DaemonSet/gpushare-device-plugin": ""}},
		"with MPS daemons": {"mps.enabled=true,devicePlugin.isolation=mps," + prometheus, map[string]string{
			"Deployment/gpushare-extender": "extender from anywhere, health from app=prometheus", "DaemonSet/gpushare-device-plugin": "metrics from app=prometheus",
			"DaemonSet/gpushare-mps": "metrics from app=prometheus",
		}},
		"with the page": {"extender.ui.listenAddress=:8080,networkPolicy.ui[0].podSelector.matchLabels.app=ingress", map[string]string{
			"Deployment/gpushare-extender": "extender from anywhere, ui from app=ingress", "DaemonSet/gpushare-device-plugin": "",
		}},
		"without device plugin": {"devicePlugin.enabled=false", map[string]string{"Deployment/gpushare-extender": "extender from anywhere"}},
	} {
		t.Run(name, func(t *testing.T) {
			objects := h.render(t, "networkPolicy.enabled=true,"+strings.TrimSuffix(test.values, ","))
			got := map[string]string{}
			for _, object := range objects {
				if object.GetKind() != "NetworkPolicy" {
					continue
				}
				var policy networkingv1.NetworkPolicy
				convert(t, object.Object, &policy)
				selector, err := metav1.LabelSelectorAsSelector(&policy.Spec.PodSelector)
				must(t, err)
				for key, workload := range objects {
					if workload.GetKind() != "Deployment" && workload.GetKind() != "DaemonSet" {
						continue
					}
					if template := podTemplate(t, workload); selector.Matches(k8slabels.Set(template.Labels)) {
						got[key] = openPorts(t, policy.Spec, template.Spec)
					}
				}
			}
			check.Equal(t, "the result", test.want, got)
		})
	}
}

// openPorts returns, as text, the ports of a pod that a policy opens, with their peers. The policy closes all other ports.
func openPorts(t *testing.T, policy networkingv1.NetworkPolicySpec, pod corev1.PodSpec) string {
	t.Helper()
	if !slices.Equal(policy.PolicyTypes, []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}) {
		t.Errorf("policy types %v", policy.PolicyTypes)
	}
	var open []string
	for _, rule := range policy.Ingress {
		peer := "anywhere"
		if len(rule.From) > 0 && rule.From[0].IPBlock != nil {
			peer = rule.From[0].IPBlock.CIDR
		} else if len(rule.From) > 0 {
			peer = metav1.FormatLabelSelector(rule.From[0].PodSelector)
		}
		for _, port := range rule.Ports {
			name := port.Port.StrVal
			if !slices.ContainsFunc(pod.Containers, func(c corev1.Container) bool {
				return slices.ContainsFunc(c.Ports, func(p corev1.ContainerPort) bool { return p.Name == name })
			}) {
				t.Errorf("no container has the port %q", name)
			}
			open = append(open, name+" from "+peer)
		}
	}
	return strings.Join(open, ", ")
}

func readYAML(t *testing.T, path string) (out map[string]any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(controlplane.Repository(t), path))
	must(t, err)
	must(t, yaml.Unmarshal(data, &out))
	return out
}

// example returns the first YAML example below a heading of a page.
func example(t *testing.T, page, heading string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(controlplane.Repository(t), page))
	must(t, err)
	_, section, _ := strings.Cut(string(text), "\n"+heading+"\n")
	_, example, _ := strings.Cut(section, "```yaml\n")
	example, _, _ = strings.Cut(example, "```")
	return example
}

// TestConfigurationKeys: the chart accepts every key of a configuration, as the page's example has them.
func TestConfigurationKeys(t *testing.T) {
	h := newHelm(t, "")
	text := example(t, "docs/node.md", "### Keys of a configuration")
	want, err := nodeconfig.Decode([]byte(text))
	must(t, err)
	var config map[string]any
	must(t, yaml.Unmarshal([]byte(text), &config))
	delete(config, "apiVersion")
	delete(config, "kind")
	values, err := yaml.Marshal(map[string]any{"devicePlugin": map[string]any{"config": map[string]any{
		"default": "all", "map": map[string]any{"all": config},
	}}})
	must(t, err)
	file := filepath.Join(t.TempDir(), "values.yaml")
	must(t, os.WriteFile(file, values, 0o600))
	var configs corev1.ConfigMap
	convert(t, h.objects(t, "--values="+file)["ConfigMap/gpushare-device-plugin"].Object, &configs)
	got, err := nodeconfig.Decode([]byte(configs.Data["all"]))
	must(t, err)
	check.Equal(t, "the result", want, got, cmp.AllowUnexported(inventory.CardMemory{}, inventory.XidSet{}))
}

// TestConfigurations renders the values of the page's example. The plugin can read each configuration, and no flag overrides them.
func TestConfigurations(t *testing.T) {
	h := newHelm(t, "")
	values := filepath.Join(t.TempDir(), "values.yaml")
	must(t, os.WriteFile(values, []byte(example(t, "docs/install.md", "## Configuration per node")), 0o600))
	objects := h.objects(t, "--values="+values, "--set=devicePlugin.memoryUnit=256MiB", "--set=devicePlugin.config.map.unified.memoryUnit=MiB",
		"--set=devicePlugin.config.map.unified.healthChecks.disabledXids={48,all}")

	var configs corev1.ConfigMap
	convert(t, objects["ConfigMap/gpushare-device-plugin"].Object, &configs)
	got := map[string]nodeconfig.Configuration{}
	for name, text := range configs.Data {
		config, err := nodeconfig.Decode([]byte(text))
		if err != nil {
			t.Errorf("%s: %v in\n%s", name, err, text)
		}
		got[name] = config
	}
	memory, err := inventory.NewCardMemory("96Gi", nil)
	must(t, err)
	xids, _ := inventory.ParseXids("48,all")
	want := map[string]nodeconfig.Configuration{
		"standard":     {Unit: new(256 * gpu.MiB)},
		"workstations": {Unit: new(256 * gpu.MiB), Excluded: nodeconfig.Cards{{Model: "NVIDIA T1000"}}},
		"unified":      {Unit: new(gpu.MiB), CardMemory: &memory, DisabledXids: &xids},
	}
	check.Equal(t, "the result", want, got, cmp.AllowUnexported(inventory.CardMemory{}, inventory.XidSet{}))

	spec := podTemplate(t, objects["DaemonSet/gpushare-device-plugin"]).Spec
	args := strings.Join(spec.Containers[0].Args, " ")
	if !strings.Contains(args, "--config=/etc/gpushare/config --default-config=standard") || strings.Contains(args, "--memory-unit") {
		t.Errorf("arguments %s", args)
	}
	mounted := ""
	for _, volume := range spec.Volumes {
		for _, mount := range spec.Containers[0].VolumeMounts {
			if volume.ConfigMap != nil && mount.Name == volume.Name {
				mounted = volume.ConfigMap.Name + " at " + mount.MountPath + mount.SubPath
			}
		}
	}
	if mounted != "gpushare-device-plugin at /etc/gpushare/config" {
		t.Errorf("mounted: %s", mounted)
	}
	if _, without := h.render(t, "")["ConfigMap/gpushare-device-plugin"]; without {
		t.Error("a ConfigMap without configurations")
	}
}
