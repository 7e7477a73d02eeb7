package nodee2e

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/fakenvml"
	"github.com/gpushare/gpushare/test/framework"
)

//go:embed kubelet.yaml containerd.toml
var configs embed.FS

// cniConf makes the network "ready". No pod uses it.
const cniConf = `{"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "loopback"}]}`

// driverDir is the folder, on the node, of the driver that containers of the runtime "nvidia" get.
const driverDir = "/var/lib/fake-driver"

// node is a node with a real kubelet, containerd and runc, and with the device plugin on a fake driver.
type node struct {
	name string
	// cards holds the memory of each card in MiB. The unit is GiB.
	cards   []uint64
	machine *machine
	driver  fakenvml.Machine

	containerd, kubelet, plugin *controlplane.Process
	// pluginArgs are the plugin's flags in every test.
	pluginArgs []string

	// network is the list of CNI plugins. images are additional archives of images, tags are additional names by image, and
	// kubeletArgs are additional flags. All are empty in most tests.
	network     string
	images      []string
	tags        map[string]string
	kubeletArgs []string
	// unlabelled is true for a node that another component labels as one that shares its cards.
	unlabelled bool

	cluster *framework.Cluster
	// port is the kubelet's health port. metrics is the plugin's metrics port.
	port, metrics *controlplane.Port
}

// start starts the node in dir and returns when pods can be scheduled to its cards.
func (n *node) start(ctx context.Context, dir string) error {
	n.driver = fakenvml.NewMachine(dir)
	if err := n.setCards(); err != nil {
		return err
	}
	if err := n.startMachine(ctx, dir); err != nil {
		return err
	}
	for _, start := range []func(context.Context) error{n.startContainerd, n.startKubelet, n.startPlugin, n.awaitCards} {
		if err := start(ctx); err != nil {
			return fmt.Errorf("starting node %s: %w", n.name, err)
		}
	}
	return nil
}

func (n *node) startMachine(ctx context.Context, dir string) (err error) {
	if n.port, err = controlplane.ReservePort(); err != nil {
		return err
	}
	if n.metrics, err = controlplane.ReservePort(); err != nil {
		return err
	}
	n.machine, err = startMachine(ctx, dir)
	return err
}

// setCards makes the driver report the node's cards, with these options of the fake driver.
func (n *node) setCards(options ...string) error {
	cards := n.driverCards()
	for i := range cards {
		cards[i].Options = options
	}
	return n.driver.SetCards(cards...)
}

// driverCards returns the node's cards as the driver reports them.
func (n *node) driverCards() (cards []fakenvml.Card) {
	for i, memory := range n.cards {
		cards = append(cards, fakenvml.Card{UUID: cardUUID(i), Model: "Tesla V100-SXM2-16GB", MiB: memory, NUMANode: i % 2})
	}
	return cards
}

func cardUUID(index int) string { return fmt.Sprintf("GPU-%08d-0000-4000-8000-000000000000", index) }

// outside returns the path, for this process, of a folder in the machine's /var.
func (n *node) outside(inVar string) string { return filepath.Join(n.machine.dir, "var", inVar) }

// recordsDir is the folder of recordenv's records, and recordsInMachine its path in the machine.
func (n *node) recordsDir() string { return n.outside("records") }

const recordsInMachine = "/var/records"

func (n *node) devicePluginDir() string { return n.outside("lib/kubelet/device-plugins") }

// checkpoint returns the path of the kubelet's checkpoint, which holds the devices of each container.
func (n *node) checkpoint() string {
	return filepath.Join(n.devicePluginDir(), "kubelet_internal_checkpoint")
}

func (n *node) podResourcesSocket() string {
	return n.outside("lib/kubelet/pod-resources/kubelet.sock")
}

// addStatic writes the manifest of a static pod into the kubelet's folder, and returns a function that removes it.
func (n *node) addStatic(pod *corev1.Pod) (remove func() error, err error) {
	pod.APIVersion, pod.Kind = "v1", "Pod"
	data, err := yaml.Marshal(pod)
	if err != nil {
		return nil, err
	}
	// The file is moved into the folder when it is complete, because the kubelet reads every file that it finds there.
	complete, path := n.outside("lib/static-pod.yaml"), n.outside("lib/static-pods/pod.yaml")
	if err := os.WriteFile(complete, data, 0o600); err != nil {
		return nil, fmt.Errorf("writing a static pod: %w", err)
	}
	return func() error { return os.Remove(path) }, os.Rename(complete, path)
}

func (n *node) startContainerd(ctx context.Context) (err error) {
	if err := n.configureContainerd(); err != nil {
		return err
	}
	images, err := buildImages(n.machine.dir)
	if err != nil {
		return err
	}
	binaries := n.cluster.Binary("kube")
	if n.containerd, err = n.machine.process("containerd", filepath.Join(binaries, "containerd"), "--config=/var/lib/containerd.toml"); err != nil {
		return err
	}
	// containerd looks for its shim there.
	n.containerd.Env = []string{"PATH=" + binaries + ":" + os.Getenv("PATH")}
	n.containerd.Ready = func(ctx context.Context) error {
		_, err := n.ctr(ctx, "version")
		return err
	}
	if err := n.containerd.Start(ctx); err != nil {
		return err
	}
	for _, archive := range append([]string{images}, n.images...) {
		if _, err := n.ctr(ctx, "images", "import", "--local", "--snapshotter=native", archive); err != nil {
			return err
		}
	}
	for image, tag := range n.tags {
		if _, err := n.ctr(ctx, "images", "tag", "--local", image, tag); err != nil {
			return err
		}
	}
	return nil
}

// ctr runs a command of containerd's client in the machine and returns what it prints.
func (n *node) ctr(ctx context.Context, args ...string) (string, error) {
	return n.machine.output(ctx, append([]string{n.cluster.Binary("kube/ctr"), "--namespace=k8s.io"}, args...)...)
}

// configureContainerd writes containerd's configuration and the programs that it runs containers with.
func (n *node) configureContainerd() error {
	template, err := configs.ReadFile("containerd.toml")
	if err != nil {
		return err
	}
	program, err := buildOCIRuntime()
	if err != nil {
		return err
	}
	runtimes := filepath.Join(n.machine.dir, "runtimes")
	values := map[string]string{"RUNTIMES": runtimes, "BINARIES": n.cluster.Binary("kube")}
	wrapper := func(driver string) file {
		return file{mode: 0o755, content: fmt.Appendf(nil, "#!/bin/sh\nexec %s/ociruntime %s '%s' \"$@\"\n", runtimes, n.cluster.Binary("kube/runc"), driver)}
	}
	return writeFiles(map[string]file{
		n.outside("lib/containerd.toml"):                    {mode: 0o600, content: []byte(os.Expand(string(template), func(name string) string { return values[name] }))},
		n.outside("lib/cni-conf/network.conflist"):          {mode: 0o600, content: []byte(cmp.Or(n.network, cniConf))},
		n.outside("lib/static-pods/.keep"):                  {mode: 0o600},
		n.outside("records/.keep"):                          {mode: 0o600},
		filepath.Join(runtimes, "ociruntime"):               {mode: 0o755, content: program},
		filepath.Join(runtimes, "runc"):                     wrapper(""),
		filepath.Join(runtimes, "nvidia-container-runtime"): wrapper(driverDir),
	})
}

// writeFiles writes files by their paths, and makes their folders.
func writeFiles(files map[string]file) error {
	for path, file := range files {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("making the machine's folders: %w", err)
		}
		if err := os.WriteFile(path, file.content, os.FileMode(file.mode)); err != nil {
			return fmt.Errorf("configuring the machine: %w", err)
		}
	}
	return nil
}

func (n *node) startKubelet(ctx context.Context) error {
	kubeconfig, err := n.cluster.Kubeconfig("system:node:"+n.name, "system:nodes")
	if err != nil {
		return err
	}
	if err := n.configureKubelet(); err != nil {
		return err
	}
	args := []string{
		n.cluster.KubeBinary("kubelet"), "--config=" + n.kubeletConfig(), "--kubeconfig=" + kubeconfig,
		"--hostname-override=" + n.name, "-v=2",
	}
	if !n.unlabelled {
		args = append(args, "--node-labels="+protocol.LabelShared+"=true")
	}
	if n.kubelet, err = n.machine.process("kubelet", append(args, n.kubeletArgs...)...); err != nil {
		return err
	}
	n.kubelet.Ready = controlplane.HTTPReady(n.port.URL("http") + "/healthz")
	return n.kubelet.Start(ctx)
}

func (n *node) kubeletConfig() string { return filepath.Join(n.machine.dir, "kubelet.yaml") }

func (n *node) configureKubelet() error {
	template, err := configs.ReadFile("kubelet.yaml")
	if err != nil {
		return err
	}
	text := os.Expand(string(template), func(string) string { return n.port.String() })
	if err := os.WriteFile(n.kubeletConfig(), []byte(text), 0o600); err != nil {
		return fmt.Errorf("configuring the kubelet: %w", err)
	}
	return nil
}

// quietPeriod is the plugin's quiet period, unless a test sets another one.
const quietPeriod = time.Second

// startPlugin starts the device plugin outside of the machine, with the access that its pod would have: the kubelet's
// folders only, and the rights of its ServiceAccount.
func (n *node) startPlugin(ctx context.Context) error {
	kubeconfig, err := n.cluster.ServiceAccountKubeconfig(ctx, "kube-system", "gpushare-device-plugin")
	if err != nil {
		return err
	}
	n.pluginArgs = []string{
		"--kubeconfig=" + kubeconfig, "--node-name=" + n.name,
		"--device-plugin-dir=" + n.devicePluginDir(),
		"--pod-resources-socket=" + n.podResourcesSocket(),
		"--nvml-library=" + n.cluster.Binary("fake-nvml/libnvidia-ml.so.1"),
		"--listen-address=" + n.metrics.Address(), "-v=2",
		// An unhealthy card is healthy again after this time without errors.
		"--health-quiet-period=" + quietPeriod.String(),
	}
	n.plugin = &controlplane.Process{
		Name: "gpushare-device-plugin", Path: n.cluster.Binary("gpushare-device-plugin"), Args: n.pluginArgs,
		Env:     n.driver.Env(),
		LogPath: filepath.Join(n.machine.dir, "logs", "gpushare-device-plugin.log"),
	}
	return n.plugin.Start(ctx)
}

// restartPlugin kills the plugin and starts it with additional flags.
func (n *node) restartPlugin(ctx context.Context, flags ...string) error {
	if err := n.plugin.Kill(); err != nil {
		return err
	}
	n.plugin.Args = slices.Concat(n.pluginArgs, flags)
	return n.plugin.Start(ctx)
}

// awaitCards waits until the kubelet has all of the node's memory, the Node object shows the memory and all cards as healthy, and
// no taint prevents pods from being scheduled to the node.
func (n *node) awaitCards(ctx context.Context) error {
	var last error
	var total int64
	for _, card := range n.cards {
		total += gibibytes(card)
	}
	err := wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		// The Node object may still show the state before a restart.
		if units, err := n.allocatable(ctx); err != nil || units != total {
			last = errors.Join(fmt.Errorf("the kubelet has %d units", units), err)
			return false, nil
		}
		object, err := n.cluster.Client.CoreV1().Nodes().Get(ctx, n.name, metav1.GetOptions{})
		if err != nil {
			last = err
			return false, nil
		}
		inventory, err := protocol.ParseInventory(object.Annotations)
		count, memory := object.Status.Allocatable[protocol.ResourceCount], object.Status.Allocatable[protocol.ResourceMemory]
		last = errors.Join(fmt.Errorf("count %s, memory %s, taints %v, inventory %v",
			count.String(), memory.String(), object.Spec.Taints, inventory), err)
		healthy := !slices.ContainsFunc(inventory.Cards, func(c gpu.Card) bool { return !c.Healthy() })
		return err == nil && healthy && len(inventory.Cards) == len(n.cards) && count.Value() == int64(len(n.cards)) &&
			memory.Value() == total && len(object.Spec.Taints) == 0, nil
	})
	if err != nil {
		return fmt.Errorf("node %s has not all of its cards: %w: %w", n.name, err, last)
	}
	return nil
}

// allocatable returns how many units the kubelet has, allocated or not.
func (n *node) allocatable(ctx context.Context) (units int64, err error) {
	err = n.callPodResources(ctx, func(ctx context.Context, client podresourcesv1.PodResourcesListerClient) error {
		answer, err := client.GetAllocatableResources(ctx, &podresourcesv1.AllocatableResourcesRequest{})
		for _, devices := range answer.GetDevices() {
			if devices.ResourceName == string(protocol.ResourceMemory) {
				units += int64(len(devices.DeviceIds))
			}
		}
		return err
	})
	return units, err
}

// callPodResources calls do with a client of the kubelet's PodResources API. It opens a new connection for each call,
// because the kubelet may have restarted.
func (n *node) callPodResources(ctx context.Context, do func(context.Context, podresourcesv1.PodResourcesListerClient) error) error {
	connection, err := grpc.NewClient("unix:"+n.podResourcesSocket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return do(ctx, podresourcesv1.NewPodResourcesListerClient(connection))
}

// gibibytes returns the number of whole units of a card.
func gibibytes(mebibytes uint64) int64 { return int64(mebibytes / 1024) }

// processes returns the programs of the node that have been started.
func (n *node) processes() []*controlplane.Process {
	return slices.DeleteFunc([]*controlplane.Process{n.kubelet, n.plugin, n.containerd},
		func(p *controlplane.Process) bool { return p == nil })
}

// stop stops the node with its containers. Its folder and its Node object stay.
func (n *node) stop() error {
	var errs []error
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
