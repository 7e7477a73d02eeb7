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
	"k8s.io/apimachinery/pkg/runtime"
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
	for _, values := range []string{
		"", "mode=secondScheduler,monitoring.enabled=true,monitoring.prometheusRule.enabled=true,monitoring.dashboard.enabled=true,networkPolicy.enabled=true",
	} {
		h.run(t, "lint", chart, "--strict", "--set="+values)
	}
}

// simulated is the beginning of values with simulated cards.
const simulated = "devicePlugin.simulatedCards.count=2,extender.service.clusterIP=10.96.0.15,"

// TestWrongValues: values that can't work are rejected before anything is installed, and the error names the value. The tests of hack/helm give each
// value a wrong type and odd texts.
func TestWrongValues(t *testing.T) {
	h := newHelm(t, "")
	type mistake struct{ values, want string }
	reject := func(mistakes ...mistake) {
		t.Helper()
		var values []string
		for _, m := range mistakes {
			values = append(values, m.values)
		}
		out, err := h.try("template", "gpushare", chart, "--set="+strings.Join(values, ","))
		for _, m := range mistakes {
			if err == nil || !strings.Contains(out, m.want) {
				t.Errorf("%s: got %v, want %q in\n%s", m.values, err, m.want, out)
			}
		}
	}
	// All values of a wrong type or name are reported together, and all of a wrong format.
	reject(
		mistake{"mode=sidecar", "at '/mode': value must be one of 'extender', 'secondScheduler', 'devicePlugin'"},
		mistake{"devicePlugin.memoryUnits=MiB", "additional properties 'memoryUnits' not allowed"},
		mistake{"devicePlugin.simulatedCards.count=65", "at '/devicePlugin/simulatedCards/count': maximum: got 65, want 64"},
		mistake{"devicePlugin.config.map.big.excludedCards[0].index=0,devicePlugin.config.map.big.excludedCards[0].model=T4", "at '/devicePlugin/config/map/big/excludedCards/0': maxProperties: got 2, want 1"},
		mistake{"extender.replicas=two", "at '/extender/replicas': got string, want integer"},
		mistake{"extender.gangHold=null", "at '/extender': missing property 'gangHold'"},
		mistake{"extender.tls.mode=secret", "at '/extender/tls/secretName'"},
	)
	reject(mistake{"extender.tls.mode=certManager", "at '/extender/tls/certManager/issuerRef': missing property 'name'"})
	reject(
		mistake{"devicePlugin.simulatedCards.memory=16GB", `devicePlugin.simulatedCards.memory: "16GB" is invalid: a card's memory is a whole number of Mi or Gi, such as 16Gi`},
		mistake{`devicePlugin.simulatedCards.model=A\,B`, `devicePlugin.simulatedCards.model: "A,B" is invalid: a model consists of`},
		mistake{"extender.fairShare.reclaimAfter=0m0.0s", `extender.fairShare.reclaimAfter: "0m0.0s" is invalid: a duration needs a number above 0`},
		mistake{"extender.fairShare.by=label:", `extender.fairShare.by: "label:" is invalid: give namespace, or label: and the key of a label`},
		mistake{"mps.sharedMemory=1GB", `mps.sharedMemory: "1GB" is invalid: a size is a whole number of Ki, Mi or Gi, such as 1Gi`},
		mistake{"devicePlugin.memoryUnit=GB", `devicePlugin.memoryUnit: "GB" is invalid: the unit is GiB, MiB, or a whole number of either, such as 256MiB`},
		mistake{"extender.service.clusterIP=10.96.0.256", `extender.service.clusterIP: "10.96.0.256" is invalid: give a free IP address of the Service range, such as 10.96.0.15`},
		mistake{"secondScheduler.name=it's", `secondScheduler.name: "it's" is invalid: a scheduler's name consists of`},
		mistake{"images.extender.tag=v1 2", `images.extender.tag: "v1 2" is invalid: a tag consists of letters, digits, _, . and -, such as v0.1.0`},
		mistake{"images.extender.repository=extender:v1", `images.extender.repository: "extender:v1" is invalid: give an image's name without a tag`},
		mistake{"images.devicePlugin.digest=0123", `images.devicePlugin.digest: "0123" is invalid: a digest is sha256: and 64 hexadecimal digits`},
		mistake{"imageRegistry=https://images.example.com", `imageRegistry: "https://images.example.com" is invalid: give a registry without a scheme`},
		mistake{"devicePlugin.config.map.big.memoryUnit=GB", `devicePlugin.config.map.big.memoryUnit: "GB" is invalid: the unit is GiB`},
		mistake{"devicePlugin.config.map.big.healthChecks.quietPeriod=5x", `devicePlugin.config.map.big.healthChecks.quietPeriod: "5x" is invalid: a duration needs a number and a unit (ms, s, m or h)`},
		mistake{"devicePlugin.config.map.big one.memoryUnit=GiB", `devicePlugin.config.map: "big one" is invalid: a configuration's name is the value of a label`},
		mistake{"devicePlugin.maxUnavailable=0%", `devicePlugin.maxUnavailable: "0%" is invalid: give a number of nodes above 0, such as 1, or a share of them, such as 10%`},
		mistake{"extender.gangPatience=30", `extender.gangPatience: "30" is invalid: a duration needs a number and a unit (ms, s or m), such as 10s or 1m30s`},
		mistake{"guard.allow.serviceAccounts[0]=velero", `guard.allow.serviceAccounts[0]: "velero" is invalid: give namespace and name of the ServiceAccount, such as velero/velero`},
		mistake{"extender.ui.listenAddress=127.0.0.1", `extender.ui.listenAddress: "127.0.0.1" is invalid: give an address with a port, such as 127.0.0.1:12346, or :8080 for all addresses`},
		mistake{"extender.tls.clientNames={kube-scheduler,own #1}", `extender.tls.clientNames[1]: "own #1" is invalid: give the common name of a client's certificate, such as kube-scheduler`},
		mistake{"devicePlugin.podResourcesDirectory=/var/lib/kubelet/", `devicePlugin.podResourcesDirectory: "/var/lib/kubelet/" is invalid: a directory is an absolute path without a slash at its end, such as /var/lib/kubelet`},
		mistake{"devicePlugin.cdiDirectories={/etc/cdi,run/cdi}", `devicePlugin.cdiDirectories[1]: "run/cdi" is invalid: a directory is an absolute path`},
		mistake{"devicePlugin.priorityClassName=a b", `devicePlugin.priorityClassName: "a b" is invalid: an object's name consists of at most 253`},
		mistake{"scheduler.kubeconfig=scheduler.conf", `scheduler.kubeconfig: "scheduler.conf" is invalid: give the absolute path of a file, such as /etc/kubernetes/scheduler.conf`},
	)
	const service, host, second = "extender.service.clusterIP=10.96.0.15,", "extender.reach=host,extender.replicas=1,", "mode=secondScheduler,"
	lease := leader.DefaultRenewDeadline.String()
	for _, m := range []mistake{
		{simulated + "devicePlugin.isolation=driver", "devicePlugin.isolation: it is for real cards: with devicePlugin.simulatedCards leave it"},
		{simulated + "devicePlugin.isolation=mps,mps.enabled=true", "mps.enabled: it is for real cards"},
		{simulated + "devicePlugin.config.default=a,devicePlugin.config.map.a.isolation=driver", "devicePlugin.config.map.a.isolation: it is for real cards"},
		{"extender.overusePolicy=evict,extender.allowEvictions=false", "extender.overusePolicy: evict needs the right to evict"},
		{"extender.overusePolicy=evict,guard.enabled=false", "extender.overusePolicy: evict believes an annotation of pods"},
		{"extender.overusePolicy=evict", "extender.overusePolicy: evict needs the use that the device plugin measures, or no pod is ever evicted: set devicePlugin.hostPID=true"},
		{"devicePlugin.usageMetrics=true", "devicePlugin.usageMetrics: the device plugin can't tell which container uses the memory: set devicePlugin.hostPID=true"},
		{"extender.fairShare.mode=dispatch,guard.enabled=false", "extender.fairShare.mode: fair sharing needs the right to patch pods"},
		{"extender.fairShare.mode=reclaim,extender.allowEvictions=false", "extender.fairShare.mode: reclaim needs the right to evict"},
		{service + "extender.allowEvictions=false,extender.evictFragmented=true", "extender.evictFragmented: it needs the right to evict: set extender.allowEvictions=true"},
		{"devicePlugin.isolation=mps", "devicePlugin.isolation: mps needs the MPS daemons: set mps.enabled=true"},
		{"mps.enabled=true", "mps.enabled: no node would use the MPS daemons: set devicePlugin.isolation=mps, or"},
		{"mps.enabled=true,devicePlugin.isolation=mps,devicePlugin.affinity.nodeAffinity.x=y", "devicePlugin.affinity: with devicePlugin.isolation=mps the chart sets the node affinity"},
		{"extender.replicas=2", "extender.service.clusterIP: no cluster can be asked"},
		{"extender.reach=host", "extender.replicas: with extender.reach=host there is one extender"},
		{second + "secondScheduler.name=default-scheduler", "secondScheduler.name: default-scheduler is the name of the cluster's own scheduler, which would take the same pods: choose another name"},
		{"devicePlugin.config.map.big.memoryUnit=MiB,devicePlugin.config.default=small", `devicePlugin.config.default: "small" is none of devicePlugin.config.map (big): name the configuration of nodes without the label`},
		{"devicePlugin.config.map.big.memoryUnit=MiB", `devicePlugin.config.default: "" is none of devicePlugin.config.map (big)`},
		{service + "extender.gangHold=0.1m5s", "scheduler.httpTimeout: 15s isn't above extender.gangHold and extender.bindTimeout together (0.1m5s, 4s)"},
		{second + "extender.bindTimeout=0s", "extender.bindTimeout: 0s isn't above 0s, and 1m at most"},
		{host + "extender.bindTimeout=1m1ms,scheduler.httpTimeout=3m", "extender.bindTimeout: 1m1ms isn't above 0s, and 1m at most"},
		{service + "extender.replicas=1,scheduler.httpTimeout=30s,extender.bindTimeout=" + lease, "extender.bindTimeout: " + lease + " isn't below 10s, for which a leader counts on its Lease"},
		{second + "scheduler.httpTimeout=3m,extender.gangHold=61s,extender.gangPatience=3m", "extender.gangHold: 61s is above 1m"},
		{second + "extender.nativeGroups=true,extender.gangHold=0s", "extender.nativeGroups: groups are off with extender.gangHold=0s"},
		{second + "scheduler.httpTimeout=50s,extender.gangHold=40s", "extender.gangPatience: 30s lies below extender.gangHold (40s)"},
		{second + "extender.gangHold=0s,extender.gangPatience=0s", "extender.gangPatience: 0s must be above 0s, also with groups off"},
		{service + "extender.tls.clientNames={other}", "extender.tls.clientNames: with extender.tls.mode=generated the certificate"},
		{service + "monitoring.enabled=true,monitoring.authorize=true", "monitoring.credentials.name: with monitoring.authorize=true"},
		{host + "monitoring.enabled=true", "monitoring: with extender.reach=host"},
		{"fullnameOverride=off", `fullnameOverride: the objects' names would begin with "off": give at most 40 lower-case letters`},
		{"nameOverride=" + strings.Repeat("a", 40), `fullnameOverride: the objects' names would begin with "gpushare-aaa`},
		{"devicePlugin.podLabels.app\\.kubernetes\\.io/name=x", "devicePlugin.podLabels: app.kubernetes.io/name is the chart's own label"},
		{host + "extender.updateStrategy.type=RollingUpdate", "extender.updateStrategy: with extender.reach=host and mode=secondScheduler the old pod must end before the new one starts"},
		{"devicePlugin.updateStrategy.rollingUpdate.maxSurge=1", "devicePlugin.updateStrategy: with maxSurge two plugins of a node would take the kubelet from each other"},
		{"mode=devicePlugin", "mode: with mode=devicePlugin the release needs a name of its own"},
		{"mode=devicePlugin,fullnameOverride=pool-b,devicePlugin.enabled=false", "mode: with mode=devicePlugin and devicePlugin.enabled=false nothing is left to install"},
	} {
		reject(m)
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
		"the default times":    {service, times, "20 4s 10s 30s"},
		"short binds":          {service + "extender.bindTimeout=500ms", times, "13 500ms 10s 30s"},
		"just below the Lease": {service + "extender.bindTimeout=9.9s,scheduler.httpTimeout=20s", times, "32 9.9s 10s 30s"},
		"a longer Lease": {
			service + "extender.bindTimeout=12s,scheduler.httpTimeout=30s,extender.extraArgs={--leader-elect-renew-deadline=20s,--leader-elect-lease-duration=30s}",
			times, "36 12s 10s 30s",
		},
		"without a Lease":             {host + "extender.bindTimeout=1m,scheduler.httpTimeout=2m", times, "132 1m 10s 30s"},
		"patience for a long absence": {host + "extender.gangPatience=45s", times, "20 4s 10s 45s"},

		"the page at the extender's default": {service, []string{page}, ""},
		"the page in a second scheduler":     {second, []string{page}, ""},
		"the page at an address":             {service + "extender.tls.mode=none,extender.ui.listenAddress=:8080", []string{page}, "-listen-address=:8080"},
		"fair sharing": {
			service + "extender.fairShare.mode=dispatch,extender.fairShare.by=label:team,extender.fairShare.priorityCutoff=1000000,extender.fairShare.provisioning=2",
			[]string{"--fair-share"}, "=dispatch -by=label:team -priority-cutoff=1000000 -provisioning=2",
		},
		"evictions for fragmentation": {service + "extender.allowEvictions=true,extender.evictFragmented=true", []string{"--evict-"}, "fragmented"},
		"no page":                     {service + "extender.ui.enabled=false", []string{page}, "-listen-address="},

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

// TestYAMLTypes: YAML makes a large number a float, and off without quotes false. Both are rendered as they are meant.
func TestYAMLTypes(t *testing.T) {
	for values, want := range map[string]string{"mode: dispatch, provisioning: 1000000": "--fair-share-provisioning=1000000\n", "mode: off": ""} {
		file := filepath.Join(t.TempDir(), "values.yaml")
		must(t, os.WriteFile(file, []byte("extender: {service: {clusterIP: 10.96.0.15}, fairShare: {"+values+"}}\n"), 0o600))
		out := newHelm(t, "").run(t, "template", "gpushare", chart, "--values="+file)
		if !strings.Contains(out, want) || want == "" && strings.Contains(out, "- --fair-share=") {
			t.Errorf("%s: fair sharing isn't as given", values)
		}
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

// lines describes the pod of a device plugin: a line for each label, annotation, argument, variable, port and mount, and for what else values change.
func lines(t *testing.T, template corev1.PodTemplateSpec) (lines []string) {
	t.Helper()
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	for key, value := range template.Labels {
		add("label %s=%s", key, value)
	}
	for key, value := range template.Annotations {
		add("annotation %s=%s", key, value)
	}
	add("host PID %t", template.Spec.HostPID)
	container := template.Spec.Containers[0]
	add("image %s", container.Image)
	context, err := runtime.DefaultUnstructuredConverter.ToUnstructured(container.SecurityContext)
	must(t, err)
	for key, value := range context {
		add("security context: %s %v", key, value)
	}
	for _, arg := range container.Args {
		add("%s", arg)
	}
	for _, env := range container.Env {
		add("variable %s=%s", env.Name, env.Value)
	}
	for _, port := range container.Ports {
		add("port %s %d", port.Name, port.ContainerPort)
	}
	for _, mount := range container.VolumeMounts {
		i := slices.IndexFunc(template.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == mount.Name })
		switch source := template.Spec.Volumes[i].VolumeSource; {
		case source.HostPath != nil:
			add("%s: %s, read-only %t", mount.MountPath, source.HostPath.Path, mount.ReadOnly)
		case source.ConfigMap != nil:
			add("%s: ConfigMap %s", mount.MountPath, source.ConfigMap.Name)
		}
	}
	slices.Sort(lines)
	return lines
}

// TestDevicePlugin: what values change of the device plugin's pod, and nothing else.
func TestDevicePlugin(t *testing.T) {
	h := newHelm(t, "")
	render := func(values string) []string {
		t.Helper()
		return lines(t, podTemplate(t, h.render(t, values)["DaemonSet/gpushare-device-plugin"]))
	}
	byDefault := render("")
	const cgroups, cdi, noVariable = "+/sys/fs/cgroup: /sys/fs/cgroup, read-only true", "+/var/run/cdi: /var/run/cdi, read-only false", "-variable NVIDIA_VISIBLE_DEVICES=all"
	for values, want := range map[string][]string{
		"devicePlugin.podLabels.team=gpu": {"+label team=gpu"},
		// The kubelet's --root-dir changes the path of its PodResources socket, but not the device-plugin directory.
		"devicePlugin.podResourcesDirectory=/data/kubelet/pod-resources": {
			"---pod-resources-socket=/var/lib/kubelet/pod-resources/kubelet.sock", "-/var/lib/kubelet/pod-resources: /var/lib/kubelet/pod-resources, read-only true",
			"+--pod-resources-socket=/data/kubelet/pod-resources/kubelet.sock", "+/data/kubelet/pod-resources: /data/kubelet/pod-resources, read-only true",
		},
		// How the container gets the driver library from NVIDIA's container runtime.
		"devicePlugin.driverAccess=volume-mounts": {noVariable, "+/var/run/nvidia-container-devices/all: /dev/null, read-only true"},
		"devicePlugin.driverAccess=cdi,devicePlugin.podAnnotations.team=gpu": {
			noVariable, "+annotation cdi.k8s.io/gpushare=nvidia.com/gpu=all", "+annotation nvidia.cdi.k8s.io/container.device-plugin=nvidia.com/gpu=all", "+annotation team=gpu",
		},
		// The commands of docs/node.md for toolkits and nodes that no option of the chart fits.
		"devicePlugin.securityContext.privileged=true,devicePlugin.securityContext.allowPrivilegeEscalation=true": {
			"-security context: allowPrivilegeEscalation false", "+security context: allowPrivilegeEscalation true", "+security context: privileged true",
		},
		"devicePlugin.extraVolumes[0].name=driver,devicePlugin.extraVolumes[0].hostPath.path=/usr/lib64," +
			"devicePlugin.extraVolumeMounts[0].name=driver,devicePlugin.extraVolumeMounts[0].mountPath=/driver," +
			"devicePlugin.extraEnv[0].name=NVML_LIBRARY,devicePlugin.extraEnv[0].value=/driver/libnvidia-ml.so.1": {
			"+/driver: /usr/lib64, read-only false", "+variable NVML_LIBRARY=/driver/libnvidia-ml.so.1",
		},
		"devicePlugin.simulatedCards.count=2,devicePlugin.simulatedCards.memory=40Gi,devicePlugin.simulatedCards.model=NVIDIA A100": {
			"-image ghcr.io/gpushare/gpushare-device-plugin:v0.1.0", "-variable NVIDIA_DRIVER_CAPABILITIES=utility", noVariable,
			"+--simulated-cards", "+image ghcr.io/gpushare/gpushare-device-plugin-simulated:v0.1.0",
			"+variable " + fakenvml.LinesEnv + "=GPU-simulated-$(NODE_NAME)-0, NVIDIA A100, 40960, -\nGPU-simulated-$(NODE_NAME)-1, NVIDIA A100, 40960, -",
		},
		"devicePlugin.rdma=true": {
			"---sysfs-root=", "+--sysfs-root=/host/sys", "+/host/sys/bus: /sys/bus, read-only true", "+/host/sys/class: /sys/class, read-only true",
			"+/host/sys/devices: /sys/devices, read-only true",
		},
		"devicePlugin.hostPID=true,devicePlugin.usageMetrics=true": {"-host PID false", "+--usage-metrics", "+host PID true"},
		// The machine's cgroups and CDI directory are there only where limits are possible.
		"devicePlugin.isolationByLabel=true": {cgroups, cdi},
		"devicePlugin.isolation=driver":      {"+--isolation=driver", cgroups, cdi},
		"devicePlugin.config.default=a,devicePlugin.config.map.a.isolation=driver": {
			"---memory-unit=GiB", "+--config=/etc/gpushare/config", "+--default-config=a", "+/etc/gpushare/config: ConfigMap gpushare-device-plugin", cgroups, cdi,
		},
		"devicePlugin.isolation=mps,mps.enabled=true": {
			"+--isolation=mps", "+/run/gpushare/mps/shared: /run/gpushare/mps/shared, read-only false", "+/run/gpushare/mps: /run/gpushare/mps, read-only true",
		},
		// Where containers get their cards by CDI, the plugin reads the specifications, and writes one only for limits.
		"devicePlugin.deviceListStrategy=cdi-cri": {
			"---device-list-strategy=envvar", "+--cdi-directories=/etc/cdi,/var/run/cdi", "+--device-list-strategy=cdi-cri",
			"+/etc/cdi: /etc/cdi, read-only true", "+/var/run/cdi: /var/run/cdi, read-only true",
		},
		"devicePlugin.deviceListStrategy=cdi-cri,devicePlugin.cdiDirectories={/var/run/cdi},devicePlugin.isolation=driver": {
			"---device-list-strategy=envvar", "+--cdi-directories=/var/run/cdi", "+--device-list-strategy=cdi-cri", "+--isolation=driver", cgroups, cdi,
		},
	} {
		var got []string
		now := render(values)
		for _, line := range byDefault {
			if !slices.Contains(now, line) {
				got = append(got, "-"+line)
			}
		}
		for _, line := range now {
			if !slices.Contains(byDefault, line) {
				got = append(got, "+"+line)
			}
		}
		check.Equal(t, values, want, got)
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

// TestConfigurations renders the values of the page's example. The plugin can read each configuration.
func TestConfigurations(t *testing.T) {
	h := newHelm(t, "")
	values := filepath.Join(t.TempDir(), "values.yaml")
	must(t, os.WriteFile(values, []byte(example(t, "docs/install.md", "## Configuration per node")), 0o600))
	objects := h.objects(t, "--values="+values, "--set=devicePlugin.memoryUnit=256MiB", "--set=devicePlugin.config.map.unified.memoryUnit=MiB",
		"--set=devicePlugin.config.map.unified.healthChecks.disabledXids={48,all}")

	var configs corev1.ConfigMap
	convert(t, objects["ConfigMap/gpushare-device-plugin"].Object, &configs)
	got := map[string]nodeconfig.Settings{}
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
	standard, workstations, unified := nodeconfig.Defaults(), nodeconfig.Defaults(), nodeconfig.Defaults()
	standard.Unit = 256 * gpu.MiB
	workstations.Unit, workstations.Excluded = 256*gpu.MiB, nodeconfig.Cards{{Model: "NVIDIA T1000"}}
	unified.Unit, unified.CardMemory, unified.Xids.Disabled = gpu.MiB, memory, xids
	want := map[string]nodeconfig.Settings{"standard": standard, "workstations": workstations, "unified": unified}
	check.Equal(t, "the result", want, got, cmp.AllowUnexported(inventory.CardMemory{}, inventory.XidSet{}))

	if _, without := h.render(t, "")["ConfigMap/gpushare-device-plugin"]; without {
		t.Error("a ConfigMap without configurations")
	}
}
