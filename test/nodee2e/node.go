package nodee2e

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/fakenvml"
	"github.com/gpushare/gpushare/test/testbed"
)

//go:embed kubelet.yaml containerd.toml
var configs embed.FS

// cniConf makes the network "ready" that no pod uses.
const cniConf = `{"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "loopback"}]}`

// node is a real GPU node, but for its GPUs: kubelet, containerd and runc, and the device plugin on a fake driver.
type node struct {
	name string
	// cards are their memories, in MiB; the unit is GiB.
	cards   []uint64
	machine *machine
	driver  fakenvml.Machine

	containerd, plugin *controlplane.Process
	kubelet            *supervised

	bed *testbed.Bed
	// port is the kubelet's for its health, metrics the plugin's.
	port, metrics *controlplane.Port
}

// startNode starts a node and returns when pods can be scheduled to its cards.
func startNode(ctx context.Context, bed *testbed.Bed, dir, name string, cards ...uint64) (n *node, err error) {
	n = &node{name: name, cards: cards, bed: bed, driver: fakenvml.NewMachine(dir)}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("starting node %s: %w", name, err), n.stop())
		}
	}()
	if err := n.setCards(); err != nil {
		return n, err
	}
	if n.port, err = controlplane.ReservePort(); err != nil {
		return n, err
	}
	if n.metrics, err = controlplane.ReservePort(); err != nil {
		return n, err
	}
	if n.machine, err = startMachine(ctx, dir); err != nil {
		return n, err
	}
	if err := n.startContainerd(ctx); err != nil {
		return n, err
	}
	if err := n.startKubelet(ctx); err != nil {
		return n, err
	}
	if err := n.startPlugin(ctx); err != nil {
		return n, err
	}
	return n, n.awaitCards(ctx)
}

func (n *node) setCards() error {
	var cards []fakenvml.Card
	for i, memory := range n.cards {
		cards = append(cards, fakenvml.Card{UUID: cardUUID(i), Model: "Tesla V100-SXM2-16GB", MiB: memory, NUMANode: i % 2})
	}
	return n.driver.SetCards(cards...)
}

func cardUUID(index int) string { return fmt.Sprintf("GPU-%08d-0000-4000-8000-000000000000", index) }

// outside returns a folder of the machine's /var as this process finds it.
func (n *node) outside(inVar string) string { return filepath.Join(n.machine.dir, "var", inVar) }

func (n *node) witnessDir() string { return n.outside("witness") }

func (n *node) podResourcesSocket() string {
	return n.outside("lib/kubelet/pod-resources/kubelet.sock")
}

func (n *node) startContainerd(ctx context.Context) (err error) {
	config, err := configs.ReadFile("containerd.toml")
	if err != nil {
		return err
	}
	for path, content := range map[string]string{
		"lib/containerd.toml": string(config), "lib/cni-conf/none.conflist": cniConf, "lib/static-pods/.keep": "", "witness/.keep": "",
	} {
		if err := os.MkdirAll(filepath.Dir(n.outside(path)), 0o755); err != nil {
			return fmt.Errorf("making the machine's folders: %w", err)
		}
		if err := os.WriteFile(n.outside(path), []byte(content), 0o600); err != nil {
			return fmt.Errorf("configuring the machine: %w", err)
		}
	}
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return err
	}
	images, err := buildImages(ctx, root, n.machine.dir)
	if err != nil {
		return err
	}
	if n.containerd, err = n.machine.process("containerd", "containerd", "--config=/var/lib/containerd.toml"); err != nil {
		return err
	}
	n.containerd.Ready = func(ctx context.Context) error { return n.machine.run(ctx, "ctr", "version") }
	if err := n.containerd.Start(ctx); err != nil {
		return err
	}
	return n.machine.run(ctx, "ctr", "--namespace=k8s.io", "images", "import", "--snapshotter=native", images)
}

func (n *node) startKubelet(ctx context.Context) error {
	kubeconfig, err := n.bed.Kubeconfig("system:node:"+n.name, "system:nodes")
	if err != nil {
		return err
	}
	template, err := configs.ReadFile("kubelet.yaml")
	if err != nil {
		return err
	}
	values := map[string]string{"HEALTHZ_PORT": n.port.String()}
	config := filepath.Join(n.machine.dir, "kubelet.yaml")
	text := os.Expand(string(template), func(name string) string { return values[name] })
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return fmt.Errorf("configuring the kubelet: %w", err)
	}
	process, err := n.machine.process("kubelet", n.bed.Binary("kube/kubelet"),
		"--config="+config, "--kubeconfig="+kubeconfig, "--hostname-override="+n.name,
		"--node-labels="+protocol.LabelShared+"=true", "-v=2")
	if err != nil {
		return err
	}
	process.Ready = controlplane.HTTPReady(n.port.URL("http") + "/healthz")
	n.kubelet = supervise(process)
	return n.kubelet.Start(ctx)
}

// startPlugin runs the device plugin outside of the machine, as a pod of it would: with the kubelet's folders only, and
// with the rights of its ServiceAccount.
func (n *node) startPlugin(ctx context.Context) error {
	kubeconfig, err := n.bed.ServiceAccountKubeconfig(ctx, "kube-system", "gpushare-device-plugin")
	if err != nil {
		return err
	}
	n.plugin = &controlplane.Process{
		Name: "gpushare-device-plugin", Path: n.bed.Binary("gpushare-device-plugin"),
		Args: []string{
			"--kubeconfig=" + kubeconfig, "--node-name=" + n.name,
			"--device-plugin-dir=" + n.outside("lib/kubelet/device-plugins"),
			"--pod-resources-socket=" + n.podResourcesSocket(),
			"--nvml-library=" + n.bed.Binary("fake-nvml/libnvidia-ml.so.1"),
			"--listen-address=" + n.metrics.Address(), "-v=2",
		},
		Env:     n.driver.Env(),
		LogPath: filepath.Join(n.machine.dir, "logs", "gpushare-device-plugin.log"),
	}
	return n.plugin.Start(ctx)
}

// awaitCards waits until the kubelet has the node's memory to give, the API server shows it and the cards, and nothing
// keeps pods away.
func (n *node) awaitCards(ctx context.Context) error {
	var last error
	var total int64
	for _, card := range n.cards {
		total += gibibytes(card)
	}
	err := wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		// What the API server says may be from before a restart.
		if units, err := n.allocatable(ctx); err != nil || units != total {
			last = errors.Join(fmt.Errorf("the kubelet has %d units to give", units), err)
			return false, nil
		}
		object, err := n.bed.Client.CoreV1().Nodes().Get(ctx, n.name, metav1.GetOptions{})
		if err != nil {
			last = err
			return false, nil
		}
		inventory, err := protocol.ParseInventory(object.Annotations)
		count, memory := object.Status.Allocatable[protocol.ResourceCount], object.Status.Allocatable[protocol.ResourceMemory]
		last = errors.Join(fmt.Errorf("count %s, memory %s, taints %v, inventory %v",
			count.String(), memory.String(), object.Spec.Taints, inventory), err)
		return err == nil && len(inventory.Cards) == len(n.cards) && count.Value() == int64(len(n.cards)) &&
			memory.Value() == total && len(object.Spec.Taints) == 0, nil
	})
	if err != nil {
		return fmt.Errorf("node %s doesn't show its cards: %w: %w", n.name, err, last)
	}
	return nil
}

// gibibytes are the whole units of a card.
func gibibytes(mebibytes uint64) int64 { return int64(mebibytes / 1024) }

// processes returns every program of the node.
func (n *node) processes() []*controlplane.Process {
	var out []*controlplane.Process
	if n.kubelet != nil {
		out = append(out, n.kubelet.process)
	}
	for _, p := range []*controlplane.Process{n.plugin, n.containerd} {
		if p != nil {
			out = append(out, p)
		}
	}
	return out
}

// stop ends the node with its containers. Its folder and its Node object stay.
func (n *node) stop() error {
	var errs []error
	if n.kubelet != nil {
		errs = append(errs, n.kubelet.Kill())
	}
	for _, p := range n.processes() {
		errs = append(errs, p.Kill())
	}
	if n.machine != nil {
		errs = append(errs, n.machine.stop())
	}
	for _, port := range []*controlplane.Port{n.port, n.metrics} {
		if port != nil {
			port.Release()
		}
	}
	return errors.Join(errs...)
}
