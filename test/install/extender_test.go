package install

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/test/controlplane"
)

// TestInstall follows an administrator's steps: install, give kube-scheduler the configuration, share a card, upgrade, roll
// back, uninstall.
func TestInstall(t *testing.T) {
	c := start(t)
	c.helm.run(t, "install", "gpushare", chart, "--namespace="+namespace)

	service, err := c.Client.CoreV1().Services(namespace).Get(t.Context(), "gpushare-extender", metav1.GetOptions{})
	must(t, err)
	if got, want := service.Spec.ClusterIP, "10.0.0.15"; got != want {
		t.Errorf("the extender's address is %s, want %s, the 15th of the range", got, want)
	}

	extender := c.runExtender()
	plugin := c.runPlugin()
	c.until("the leader is published", func(ctx context.Context) (bool, error) {
		slice, err := c.Client.DiscoveryV1().EndpointSlices(namespace).Get(ctx, "gpushare-extender", metav1.GetOptions{})
		return err == nil && len(slice.Endpoints) == 1 && slice.Endpoints[0].Addresses[0] == "192.0.2.1", err
	})
	c.giveToScheduler(extender)
	c.mustGetACard(gpuPod("first", "", 10))
	c.mustGetACard(gpuPod("second", "", 10))

	t.Run("the rights", c.testRights)
	t.Run("the pods' security", c.testPodSecurity)
	t.Run("the guard", func(t *testing.T) { c.testGuard(t, plugin) })
	t.Run("the guard's warnings", c.testGuardTemplateKeys)
	t.Run("the examples", c.testExamples)

	t.Run("a call without the scheduler's certificate is rejected", func(t *testing.T) {
		if err := controlplane.HTTPReady(extender.url + "/readyz")(t.Context()); err == nil || !strings.Contains(err.Error(), "certificate") {
			t.Errorf("got %v, want an error about the certificate", err)
		}
	})

	t.Run("an upgrade and a rollback keep address, certificates and leader", func(t *testing.T) {
		before := c.lasting()
		notes := c.helm.run(t, "upgrade", "gpushare", chart, "--namespace="+namespace, "--set=extender.replicas=3,devicePlugin.memoryUnit=GiB")
		if !strings.Contains(notes, "kube-scheduler needs no new configuration.") {
			t.Errorf("the notes after an upgrade that doesn't change kube-scheduler's configuration:\n%s", notes)
		}
		notes = c.helm.run(t, "upgrade", "gpushare", chart, "--namespace="+namespace, "--dry-run=server", "--set=scheduler.weight=50")
		if !strings.Contains(notes, "The configuration of kube-scheduler has changed") {
			t.Errorf("the notes after an upgrade that changes kube-scheduler's configuration:\n%s", notes)
		}
		if diff := cmp.Diff(before, c.lasting()); diff != "" {
			t.Errorf("after the upgrade (-before +now):\n%s", diff)
		}
		c.helm.run(t, "rollback", "gpushare", "1", "--namespace="+namespace)
		if diff := cmp.Diff(before, c.lasting()); diff != "" {
			t.Errorf("after the rollback (-before +now):\n%s", diff)
		}
		c.mustGetACard(gpuPod("third", "", 6))
	})

	t.Run("the address changes when the Service is created again", func(t *testing.T) {
		const address = "10.0.0.16"
		upgrade := []string{"upgrade", "gpushare", chart, "--namespace=" + namespace, "--reset-then-reuse-values", "--set=extender.service.clusterIP=" + address}
		if out, err := c.helm.try(upgrade...); err == nil || !strings.Contains(out, "field is immutable") && !strings.Contains(out, "may not change once set") {
			t.Errorf("with the Service in place: %v: %s", err, out)
		}
		must(t, c.Client.CoreV1().Services(namespace).Delete(t.Context(), "gpushare-extender", metav1.DeleteOptions{}))
		c.helm.run(t, upgrade...)
		now := c.lasting()
		if now["address"] != address || !strings.Contains(now["gpushare-scheduler-config/scheduler-config.yaml"], "urlPrefix: https://"+address+":12345/") {
			t.Errorf("the address is %s, the configuration\n%s", now["address"], now["gpushare-scheduler-config/scheduler-config.yaml"])
		}
		if names := namesIn(t, now["gpushare-extender-tls/tls.crt"]); !slices.Contains(names, address) {
			t.Errorf("the certificate is for %q", names)
		}
		service, err := c.Client.CoreV1().Services(namespace).Get(t.Context(), "gpushare-extender", metav1.GetOptions{})
		must(t, err)
		c.until("the leader is published again", func(ctx context.Context) (bool, error) {
			slice, err := c.Client.DiscoveryV1().EndpointSlices(namespace).Get(ctx, "gpushare-extender", metav1.GetOptions{})
			return err == nil && len(slice.Endpoints) == 1 && slice.OwnerReferences[0].UID == service.UID, err
		})
	})

	t.Run("deleted certificates are created again", func(t *testing.T) {
		before := c.lasting()
		for _, name := range []string{"gpushare-extender-tls", "gpushare-scheduler-tls", "gpushare-scheduler-config"} {
			must(t, c.Client.CoreV1().Secrets(namespace).Delete(t.Context(), name, metav1.DeleteOptions{}))
		}
		c.helm.run(t, "upgrade", "gpushare", chart, "--namespace="+namespace, "--reset-then-reuse-values")
		now := c.lasting()
		for _, key := range []string{"gpushare-extender-tls/ca.crt", "gpushare-extender-tls/tls.crt", "gpushare-scheduler-tls/tls.key", "gpushare-scheduler-config/scheduler-config.yaml"} {
			if now[key] == "" || now[key] == before[key] {
				t.Errorf("%s is as it was, or empty", key)
			}
		}
	})

	c.mustHaveForbiddenNothing()
	c.mustLeaveNothing()
}

// namesIn returns the names in a certificate.
func namesIn(t *testing.T, certificate string) (names []string) {
	t.Helper()
	block, _ := pem.Decode([]byte(certificate))
	if block == nil {
		t.Fatal("no certificate")
	}
	parsed, err := x509.ParseCertificate(block.Bytes)
	must(t, err)
	names = parsed.DNSNames
	for _, ip := range parsed.IPAddresses {
		names = append(names, ip.String())
	}
	return names
}

// extenderAt is a running extender.
type extenderAt struct {
	// url is for kube-scheduler's calls, health for probes and Prometheus.
	url, health string
	process     *controlplane.Process
}

// runExtender runs the extender of one of the Deployment's pods.
func (c *cluster) runExtender() extenderAt {
	c.t.Helper()
	return c.runExtenderOf(c.Binary("gpushare-extender"))
}

// runExtenderOf is runExtender with another binary.
func (c *cluster) runExtenderOf(binary string) extenderAt {
	c.t.Helper()
	pod := c.pod("extender")
	port, health := controlplane.ReservePortForTest(c.t), controlplane.ReservePortForTest(c.t)
	process := c.process(pod, "extender", binary,
		map[string]string{":12345": port.Address(), ":12347": health.Address(), "/tls/": c.volume("gpushare-extender-tls") + "/"},
		"--kubeconfig="+c.account(pod))
	process.Ready = controlplane.HTTPReady(health.URL("http") + "/readyz")
	controlplane.RunForTest(c.t, process)
	return extenderAt{port.URL("https"), health.URL("http"), process}
}

// giveToScheduler restarts the cluster's scheduler with the installed configuration. It replaces host and port, because the
// Service's address has no route here. The certificates are still checked against the name in the configuration.
func (c *cluster) giveToScheduler(e extenderAt) {
	c.t.Helper()
	secret, err := c.Client.CoreV1().Secrets(namespace).Get(c.t.Context(), "gpushare-scheduler-config", metav1.GetOptions{})
	must(c.t, err)
	config := string(secret.Data["scheduler-config.yaml"])
	if !strings.Contains(config, "urlPrefix: https://10.0.0.15:12345/gpushare-scheduler\n") {
		c.t.Fatal("the scheduler's configuration doesn't have the Service's address")
	}
	path := filepath.Join(c.Dir, "installed-scheduler-config.yaml")
	must(c.t, os.WriteFile(path, []byte(config), 0o600))
	must(c.t, c.StartScheduler(c.t.Context(), controlplane.SchedulerOptions{ConfigFile: path, ExtenderURL: e.url}))
}

// lasting returns the objects on which kube-scheduler's configuration relies, and the leader.
func (c *cluster) lasting() map[string]string {
	c.t.Helper()
	out := map[string]string{}
	for _, name := range []string{"gpushare-extender-tls", "gpushare-scheduler-tls", "gpushare-scheduler-config"} {
		secret, err := c.Client.CoreV1().Secrets(namespace).Get(c.t.Context(), name, metav1.GetOptions{})
		must(c.t, err)
		for key, data := range secret.Data {
			out[name+"/"+key] = string(data)
		}
	}
	service, err := c.Client.CoreV1().Services(namespace).Get(c.t.Context(), "gpushare-extender", metav1.GetOptions{})
	must(c.t, err)
	out["address"] = service.Spec.ClusterIP
	lease, err := c.Client.CoordinationV1().Leases(namespace).Get(c.t.Context(), "gpushare-extender", metav1.GetOptions{})
	must(c.t, err)
	if lease.Spec.HolderIdentity != nil {
		out["leader"] = *lease.Spec.HolderIdentity
	}
	return out
}
