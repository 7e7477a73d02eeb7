package install

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// firstMistake is a mistake of an administrator's or a user's first day.
type firstMistake struct {
	what string
	// given makes the mistake; nil if the command itself is the mistake.
	given func()
	// command is what shows it, for a shell, and says the words that it shows. It runs until it does.
	command string
	says    []string
}

// TestFirstDay makes mistakes of a first day on a real control plane, with the real programs: none is silent. The mistakes with pods are in
// package mistakes and in TestMistakes of the suite e2e, those with a driver and a kubelet in the tests of the device plugin.
func TestFirstDay(t *testing.T) {
	t.Parallel()
	c := &cluster{t: t, root: controlplane.Repository(t)}
	c.Cluster = framework.StartForTest(t, framework.Options{Bare: true, ControlPlane: controlplane.Options{ControllerManager: true}})
	c.helm = newHelm(t, c.KubeconfigPath)
	c.show(c.mistakesBeforeInstallation())
	c.Node = c.AddNodeForTest(t, framework.NodeSpec{Name: node, Cards: []uint64{16 << 10, 16 << 10}, WithoutPlugin: true})
	c.helm.run(t, "install", "gpushare", chart, "--namespace="+namespace, "--set=devicePlugin.memoryUnit=MiB,imageRegistry=registry.example.com")
	extender := c.runExtender()
	c.runPlugin()
	c.giveToScheduler(extender)
	c.show(c.mistakesOfNodes())
	c.show(c.mistakesOfUsers())
	c.show(c.mistakesOfCertificates(extender))
	c.show(c.mistakesOfUpgrades())
}

// show makes the mistakes, one after the other.
func (c *cluster) show(mistakes []firstMistake) {
	for _, m := range mistakes {
		if m.given != nil {
			m.given() // Later mistakes need what it starts, so it's a part of the whole test.
		}
		c.t.Run(m.what, func(t *testing.T) {
			framework.Eventually(t, "it says what is wrong", func(context.Context) error {
				out, err := c.helm.tryShell(t, "PATH=$PWD/bin:$PATH\n"+m.command)
				if !framework.ContainsAll(out, m.says...) {
					return errors.Join(fmt.Errorf("want %q in\n%s", m.says, out), err)
				}
				return nil
			})
		})
	}
}

const (
	checkConfig = "gpushare-extender check-scheduler-config -"
	dryRun      = "helm install gpushare " + chart + " --create-namespace --namespace=gpu --dry-run=server "
	// nodeEvents shows the Events of nodes.
	nodeEvents = "kubectl get events -A --field-selector involvedObject.kind=Node -o custom-columns=N:.involvedObject.name,R:.reason,M:.message"
)

func (c *cluster) mistakesBeforeInstallation() []firstMistake {
	return []firstMistake{
		{"urlPrefix has the port of the web page", nil, "sed s/:12345/:12346/ config/scheduler-config.yaml | " + checkConfig,
			[]string{"12346 is the port of the web page, which doesn't serve kube-scheduler"}},
		{"managedResources is misspelt", nil, "sed s/managedResources/managedResource/ config/scheduler-config.yaml | " + checkConfig,
			[]string{`unknown field "extenders[0].managedResource"`}},
		{"managedResources is missing", nil, "sed /managedResources/,\\$d config/scheduler-config.yaml | " + checkConfig,
			[]string{"aliyun.com/gpu-mem is missing: kube-scheduler doesn't send pods that ask for it to the extender, or sends all pods if the list is empty; add it"}},
		{"the chart in a namespace of its own", nil, dryRun,
			[]string{"urlPrefix: https://10.0.0.15:12345/", "kubectl get -n gpu secret gpushare-scheduler-config"}},
		{"the second scheduler, and pods that don't name it", nil, dryRun + "--set=mode=secondScheduler",
			[]string{"must have spec.schedulerName: gpushare-scheduler", "Pods that request aliyun.com/gpu-mem must name the second scheduler"}},
		{"a unit that doesn't exist", nil, dryRun + "--set=devicePlugin.memoryUnit=GB", []string{`devicePlugin.memoryUnit: "GB" is invalid: ` + unitMistake}},
		{"a number as a word", nil, dryRun + "--set=extender.replicas=two", []string{"at '/extender/replicas': got string, want integer"}},
		{"a misspelt value", nil, dryRun + "--set=extender.replica=3", []string{"at '/extender': additional properties 'replica' not allowed"}},
		{"kubectl inspect in a cluster without gpushare", nil, "kubectl inspect gpushare", []string{"none offers aliyun.com/gpu-mem"}},
		{"a flag of a later version", nil, "gpushare-extender --reservation-of-future=1", []string{"unknown flag: --reservation-of-future"}},
		{"a certificate without its key", nil, "gpushare-extender --tls-cert-file=tls.crt", []string{"--tls-cert-file and --tls-key-file must be set together"}},
	}
}

// addNode adds a Node object with a label, without a kubelet.
func (c *cluster) addNode(name, key, value string) {
	c.t.Helper()
	_, err := c.Client.CoreV1().Nodes().Create(c.t.Context(), framework.MakeNode(name).Label(key, value).Obj(), metav1.CreateOptions{})
	must(c.t, err)
}

// label sets a label of the node that has the plugin. The empty value removes it.
func (c *cluster) label(key, value string) {
	c.t.Helper()
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, key, value)
	if value == "" {
		patch = fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, key)
	}
	_, err := c.Client.CoreV1().Nodes().Patch(c.t.Context(), node, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	must(c.t, err)
}

// strayPlugin runs a plugin with other flags on a node of its own. It never gets ready.
func (c *cluster) strayPlugin(name string, args ...string) {
	c.t.Helper()
	n := c.AddNodeForTest(c.t, framework.NodeSpec{
		Name: name, Cards: []uint64{16 << 10}, WithoutPlugin: true, Labels: map[string]string{"gpushare": "stray"}, PluginArgs: append([]string{"--kubeconfig=" + c.KubeconfigPath}, args...),
	})
	must(c.t, n.Plugin.Start(c.t.Context()))
}

func (c *cluster) mistakesOfNodes() []firstMistake {
	const inspect = "kubectl inspect gpushare -o wide"
	return []firstMistake{
		{"gpushare=True on a node", func() { c.addNode("capital", "gpushare", "True") }, inspect,
			[]string{"the label gpushare=True is set, but the node has no cards to share", "gpushare=true"}},
		{"gpu-share=true on a node", func() { c.addNode("dashed", "gpu-share", "true") }, inspect,
			[]string{"the label gpu-share=true has no effect: write gpushare=true"}},
		{"an isolation mode that doesn't exist", func() { c.label("gpushare.aliyun.com/isolation", "mpss") }, inspect,
			[]string{`GPU1 is unhealthy: label gpushare.aliyun.com/isolation of the node: isolation mode "mpss": want none, driver or mps`}},
		{"a mode whose daemons the chart doesn't run", func() { c.label("gpushare.aliyun.com/isolation", "mps") }, inspect,
			[]string{"GPU1 is unhealthy: isolation mode mps: it has no MPS daemon"}},
		{"a configuration that doesn't exist", func() {
			c.label("gpushare.aliyun.com/isolation", "")
			c.label("gpushare.aliyun.com/config", "typo")
		}, nodeEvents,
			[]string{"GPUConfigRejected", "abel gpushare.aliyun.com/config=typo has no effect"}},
		{"a directory that isn't the kubelet's", func() { c.strayPlugin("gpu-2", "--device-plugin-dir="+c.t.TempDir()) }, "kubectl inspect gpushare gpu-2 -d",
			[]string{"the kubelet doesn't have its devices yet"}},
		{"no driver", func() { c.strayPlugin("gpu-3", "--nvml-library=/nowhere/libnvidia-ml.so.1") }, nodeEvents,
			[]string{"GPUCardNotOffered", "o NVIDIA driver library"}},
	}
}

func (c *cluster) mistakesOfUsers() []firstMistake {
	// pod is a command that creates a pod whose resources are these.
	pod := func(name, resources string) string {
		return fmt.Sprintf(`kubectl apply -f - <<< '{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": %q}, "spec": {"containers": [{"name": "main", "image": "a", "resources": %s}]}}'`, name, resources)
	}
	return []firstMistake{
		{"half a unit", nil, pod("half", `{"limits": {"aliyun.com/gpu-mem": "1.5"}}`), []string{"must be an integer"}},
		{"a request without a limit", nil, pod("request", `{"requests": {"aliyun.com/gpu-mem": "2"}}`), []string{"Limit must be set for non overcommitable resources"}},
		{"decimal gigabytes", nil, pod("decimal", `{"limits": {"aliyun.com/gpu-mem": "2G"}}`) + "; kubectl inspect gpushare --pending",
			[]string{"too_large", "if bytes were meant"}},
		{"a weight as a word", nil, "kubectl annotate --overwrite namespace default gpushare.aliyun.com/fair-share-weight=high; kubectl inspect gpushare --shares",
			[]string{`namespace default: annotation gpushare.aliyun.com/fair-share-weight: "high" is not a whole number from 1 to 1000000: the default value is used`}},
	}
}

func (c *cluster) mistakesOfCertificates(extender extenderAt) []firstMistake {
	const pending = "kubectl inspect gpushare --pending"
	// scheduler restarts kube-scheduler with a changed configuration, and creates a pod.
	scheduler := func(pod string, url string, edit controlplane.ConfigEdit) {
		c.t.Helper()
		options := controlplane.SchedulerOptions{
			ConfigFile: filepath.Join(c.Dir, "installed-scheduler-config.yaml"), ExtenderURL: url, Edits: []controlplane.ConfigEdit{edit},
		}
		must(c.t, c.StartScheduler(c.t.Context(), options))
		_, err := c.Client.CoreV1().Pods(metav1.NamespaceDefault).Create(c.t.Context(), gpuPod(pod, "", 1000), metav1.CreateOptions{})
		must(c.t, err)
	}
	unchanged := func(map[string]any) error { return nil }
	volume := filepath.Join(c.Dir, "volumes", "gpushare-extender-tls")
	return []firstMistake{
		{"http in urlPrefix of an extender with a certificate", func() {
			scheduler("plain", strings.Replace(extender.url, "https", "http", 1), func(config map[string]any) error {
				entry := config["extenders"].([]any)[0].(map[string]any)
				delete(entry, "tlsConfig")
				entry["enableHTTPS"] = false
				return nil
			})
		}, pending, []string{"HTTP status 400", "if the extender has a certificate, urlPrefix"}},
		{"a certificate for another name", func() {
			scheduler("named", extender.url, func(config map[string]any) error {
				config["extenders"].([]any)[0].(map[string]any)["tlsConfig"].(map[string]any)["serverName"] = "10.0.0.99"
				return nil
			})
		}, pending, []string{"default", "named", "x509: certificate is valid for", "not 10.0.0.99"}},
		{"a key of another certificate", nil, fmt.Sprintf("gpushare-extender --tls-cert-file=%s/tls.crt --tls-key-file=%s/tls.key --listen-address=127.0.0.1:0 --health-address=",
			volume, c.volume("gpushare-scheduler-tls")), []string{"private key does not match public key"}},
		{"a rotation that writes a broken certificate", func() {
			scheduler("rotated", extender.url, unchanged)
			must(c.t, os.WriteFile(filepath.Join(volume, "tls.crt"), []byte("half"), 0o600))
			c.until("the kubelet's probe", func(context.Context) (bool, error) {
				response, err := http.Get(extender.health + "/readyz")
				if err != nil {
					return false, err
				}
				return strings.Contains(extender.process.Tail(20), "TLS files"), response.Body.Close()
			})
		}, "tail " + extender.process.LogPath, []string{"The changed TLS files can't be used, the previous ones stay in use"}},
	}
}

func (c *cluster) mistakesOfUpgrades() []firstMistake {
	// Helm keeps the former values only of an upgrade that sets none.
	upgrade := "helm upgrade gpushare " + chart + " --set=extender.logLevel=4 --namespace=" + namespace
	return []firstMistake{
		{"an upgrade without the values of the installation", nil, upgrade, []string{"The images are those of ghcr.io/gpushare"}},
		{"another unit while pods run, by that upgrade", func() {
			must(c.t, c.plugin.Terminate(c.t.Context()))
			c.until("the DaemonSet has the new unit", func(context.Context) (bool, error) {
				return slices.Contains(c.pod("device-plugin").Spec.Containers[0].Args, "--memory-unit=GiB"), nil
			})
			c.runPlugin()
		}, nodeEvents, []string{"GPUConfigWaits"}},
	}
}
