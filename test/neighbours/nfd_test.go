package neighbours

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// TestNFD: node-feature-discovery with the configuration of the documentation labels the node with a card, and the DaemonSet of the
// chart with devicePlugin.nodes=discovered gets a pod there, and on no other node. The default configuration writes another label.
func TestNFD(t *testing.T) {
	master, worker, manifests := part(t, "nfd-master"), part(t, "nfd-worker"), part(t, "manifests/node-feature-discovery")
	c := controlplane.StartForTest(t, controlplane.Options{ControllerManager: true})
	must(t, c.Apply(t.Context(), filepath.Join(manifests, "nfd-crds", "nfd-api-crds.yaml"), render(t, "devicePlugin.nodes=discovered")))
	for _, object := range []string{"serviceaccount", "clusterrole", "clusterrolebinding"} {
		must(t, c.Apply(t.Context(), filepath.Join(manifests, "rbac", "master-"+object+".yaml")))
	}
	for _, object := range []string{"serviceaccount", "role", "rolebinding"} {
		must(t, c.Apply(t.Context(), filepath.Join(manifests, "rbac", "worker-"+object+".yaml")))
	}
	framework.Eventually(t, "the API server serves the kinds", func(context.Context) error {
		_, err := c.Client.Discovery().ServerResourcesForGroupVersion("nfd.k8s-sigs.io/v1alpha1")
		return err
	})

	machines := map[string]machine{
		"with-card":    newMachine(t, "0x030200 0x10de", "0x020000 0x8086"), // A card, and a network controller.
		"workstation":  newMachine(t, "0x030000 0x10de", "0x030000 0x8086"), // A card, and a graphics processor of Intel.
		"without-card": newMachine(t, "0x068000 0x10de", "0x030000 0x8086"), // An NVSwitch, and a graphics processor of Intel.
	}
	for name := range machines {
		must(t, c.CreateNodes(t.Context(), framework.MakeNode(name).Obj()))
	}

	kubeconfig, err := c.ServiceAccountKubeconfig(t.Context(), metav1.NamespaceDefault, "nfd-master")
	must(t, err)
	controlplane.RunForTest(t, &controlplane.Process{
		Name: "nfd-master", Path: master, LogPath: filepath.Join(c.Dir, "logs", "nfd-master.log"),
		// It would serve its metrics on all addresses. On this port it can't, and goes on without.
		Args: []string{"-config=", "-kubeconfig=" + kubeconfig, "-port=-1"},
		Env:  []string{"KUBERNETES_NAMESPACE=" + metav1.NamespaceDefault, "NODE_NAME=without-card"},
	})
	kubeconfig, err = c.ServiceAccountKubeconfig(t.Context(), metav1.NamespaceDefault, "nfd-worker")
	must(t, err)
	discover := func(config string) {
		t.Helper()
		for name, machine := range machines {
			command := exec.CommandContext(t.Context(), worker, "-config="+config, "-kubeconfig="+kubeconfig, "-oneshot")
			command.Dir = string(machine)
			command.Env = []string{"KUBERNETES_NAMESPACE=" + metav1.NamespaceDefault, "NODE_NAME=" + name}
			if out, err := command.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
		}
	}
	wantLabels := func(want map[string][]string) {
		t.Helper()
		framework.Eventually(t, "the nodes have their labels", func(ctx context.Context) error {
			nodes, err := c.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			got := map[string][]string{}
			for i := range nodes.Items {
				got[nodes.Items[i].Name] = pciLabels(&nodes.Items[i])
			}
			if diff := cmp.Diff(want, got); diff != "" {
				return fmt.Errorf("-want +got:\n%s", diff)
			}
			return nil
		})
	}
	wantPlugins := func(want ...string) {
		t.Helper()
		framework.Eventually(t, fmt.Sprintf("the nodes %v have a device plugin", want), func(ctx context.Context) error {
			set, err := c.Client.AppsV1().DaemonSets(metav1.NamespaceSystem).Get(ctx, "gpushare-device-plugin", metav1.GetOptions{})
			if err != nil {
				return err
			}
			pods, err := c.Client.CoreV1().Pods(set.Namespace).List(ctx, metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(set.Spec.Selector)})
			if err != nil {
				return err
			}
			got := []string{}
			for i := range pods.Items {
				got = append(got, pods.Items[i].Spec.NodeName)
			}
			slices.Sort(got)
			if desired := set.Status.DesiredNumberScheduled; set.Status.ObservedGeneration != set.Generation || int(desired) != len(want) || !slices.Equal(got, want) {
				return fmt.Errorf("%d are desired, and the pods are on %v", desired, got)
			}
			return nil
		})
	}

	discover("")
	wantLabels(map[string][]string{
		"with-card":    {"pci-0302_10de.present=true"},
		"workstation":  {"pci-0300_10de.present=true", "pci-0300_8086.present=true"},
		"without-card": {"pci-0300_8086.present=true"},
	})
	wantPlugins()

	discover(filepath.Join(controlplane.Repository(t), "deploy", "neighbours", "nfd-worker.yaml"))
	wantLabels(map[string][]string{
		"with-card":    {"pci-10de.present=true"},
		"workstation":  {"pci-10de.present=true", "pci-8086.present=true"},
		"without-card": {"pci-8086.present=true"},
	})
	wantPlugins("with-card", "workstation")
}

// machine is the working directory of an nfd-worker, which reads the machine's devices below host-sys there.
type machine string

// newMachine returns a machine with these PCI devices, each as "CLASS VENDOR".
func newMachine(t *testing.T, devices ...string) machine {
	t.Helper()
	dir := t.TempDir()
	for i, device := range devices {
		class, vendor, _ := strings.Cut(device, " ")
		folder := filepath.Join(dir, "host-sys", "bus", "pci", "devices", fmt.Sprintf("0000:%02x:00.0", i+1))
		must(t, os.MkdirAll(folder, 0o700))
		for file, content := range map[string]string{
			"class": class, "vendor": vendor, "device": "0x20b0", "subsystem_vendor": vendor, "subsystem_device": "0x134f",
		} {
			must(t, os.WriteFile(filepath.Join(folder, file), []byte(content+"\n"), 0o600))
		}
	}
	return machine(dir)
}

// pciLabels returns the labels for the node's PCI devices, in order and without their prefix.
func pciLabels(node *corev1.Node) (labels []string) {
	for _, key := range slices.Sorted(maps.Keys(node.Labels)) {
		if name, found := strings.CutPrefix(key, "feature.node.kubernetes.io/"); found && strings.HasPrefix(name, "pci-") {
			labels = append(labels, name+"="+node.Labels[key])
		}
	}
	return labels
}
