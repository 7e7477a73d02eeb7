package neighbours

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// TestDRADriver: NVIDIA's DRA driver offers a node's cards in ResourceSlices, so no pod is placed there until the kubelet deletes them.
func TestDRADriver(t *testing.T) {
	program := part(t, "gpu-kubelet-plugin")
	c := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB"})
	node := c.AddNodeForTest(t, framework.NodeSpec{Name: "node", Cards: []uint64{16276, 24576}})
	n := c.NewNamespace(t)
	n.Kubelets = true
	n.Place(n.Pod("before", 4).OnNode(node.Name))
	n.WaitAssigned("before")

	driver := &controlplane.Process{
		Name: "NVIDIA's DRA driver", Path: program, LogPath: filepath.Join(folder(node), "dra-driver.log"), Env: draDriverEnv(t, c, node),
		Ready: func(ctx context.Context) error {
			devices, err := devicesOf(ctx, c, node)
			if err == nil && len(devices) == 0 {
				err = errors.New("it has written no ResourceSlice")
			}
			return err
		},
	}
	t.Cleanup(func() { must(t, driver.Kill()) })
	must(t, driver.Start(t.Context()))
	want := map[string]uint64{}
	for _, card := range node.Cards {
		want[card.UUID] = card.MiB
	}
	got, err := devicesOf(t.Context(), c, node)
	must(t, err)
	check.Equal(t, "the devices in its ResourceSlices", want, got)

	n.Eventually("the inventory has the driver", func(ctx context.Context) error { return wantDriver(ctx, c, node, protocol.DRADriver) })
	n.Eventually("the node is warned about", func(ctx context.Context) error {
		events, err := c.Client.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: "reason=GPUCardSharedTwice"})
		if err == nil && (len(events.Items) != 1 || !strings.Contains(events.Items[0].Message, "ResourceSlices of gpu.nvidia.com")) {
			err = fmt.Errorf("the Events are %v", events.Items)
		}
		return err
	})
	n.CheckLedger()
	n.Create(n.Pod("pod", 4).OnNode(node.Name))
	n.WaitUnschedulable("pod", "1 the node also offers its cards by nvidia.com/gpu or DRA, which excludes sharing them")

	// The driver leaves its ResourceSlices. The kubelet deletes them some time after the registration has ended, by this
	// selector (k8s.io/kubernetes pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go, wipeResourceSlices).
	must(t, driver.Terminate(t.Context()))
	left, err := devicesOf(t.Context(), c, node)
	must(t, err)
	check.Equal(t, "the devices after the driver has ended", want, left)
	must(t, c.Client.ResourceV1().ResourceSlices().DeleteCollection(t.Context(), metav1.DeleteOptions{}, slicesOf(node)))
	n.WaitAssigned("pod")
	must(t, wantDriver(t.Context(), c, node, ""))
	n.CheckLedger()
}

// folder returns the folder with the node's files.
func folder(node *framework.Node) string { return filepath.Dir(node.Machine.CardsFile) }

// draDriverEnv returns the configuration of the DRA driver's plugin: its folders are in the node's folder, and its driver root has the
// fake driver library.
func draDriverEnv(t *testing.T, c *framework.Cluster, node *framework.Node) []string {
	t.Helper()
	dir := folder(node)
	driverRoot, registry := filepath.Join(dir, "driver"), filepath.Join(dir, "registry")
	library, smi := filepath.Join(driverRoot, "usr", "lib64", "libnvidia-ml.so.1"), filepath.Join(driverRoot, "usr", "bin", "nvidia-smi")
	for _, path := range []string{registry, filepath.Dir(library), filepath.Dir(smi)} {
		must(t, os.MkdirAll(path, 0o755))
	}
	must(t, os.Symlink(c.Binary("fake-nvml/libnvidia-ml.so.1"), library))
	must(t, os.WriteFile(smi, nil, 0o755)) // It must exist; the driver runs it only for claims.
	return append(node.Machine.Env(),
		"KUBECONFIG="+c.KubeconfigPath, "NODE_NAME="+node.Name, "IMAGE_NAME=none", "NVIDIA_CDI_HOOK_PATH=/usr/bin/nvidia-cdi-hook",
		"DRIVER_ROOT_CTR_PATH="+driverRoot, "NVIDIA_DRIVER_ROOT="+driverRoot, "CDI_ROOT="+filepath.Join(dir, "cdi"),
		"KUBELET_REGISTRAR_DIRECTORY_PATH="+registry, "KUBELET_PLUGINS_DIRECTORY_PATH="+filepath.Join(dir, "plugins"))
}

// slicesOf selects the driver's ResourceSlices for the node.
func slicesOf(node *framework.Node) metav1.ListOptions {
	return metav1.ListOptions{FieldSelector: fields.Set{
		resourcev1.ResourceSliceSelectorDriver: protocol.DRADriver, resourcev1.ResourceSliceSelectorNodeName: node.Name,
	}.String()}
}

// devicesOf returns the memory in MiB of the cards in the driver's ResourceSlices for the node, by UUID.
func devicesOf(ctx context.Context, c *framework.Cluster, node *framework.Node) (map[string]uint64, error) {
	list, err := c.Client.ResourceV1().ResourceSlices().List(ctx, slicesOf(node))
	if err != nil {
		return nil, err
	}
	memory := map[string]uint64{}
	for _, slice := range list.Items {
		for _, device := range slice.Spec.Devices {
			uuid, capacity := device.Attributes["uuid"].StringValue, device.Capacity["memory"].Value
			if uuid == nil {
				return nil, fmt.Errorf("device %s has no UUID: %v", device.Name, device.Attributes)
			}
			memory[*uuid] = uint64(capacity.Value()) >> 20
		}
	}
	return memory, nil
}

// wantDriver returns an error unless the node's inventory has this DRA driver.
func wantDriver(ctx context.Context, c *framework.Cluster, node *framework.Node, want string) error {
	object, err := c.Client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	inventory, err := protocol.ParseInventory(object.Annotations)
	if err == nil && inventory.DRADriver != want {
		err = fmt.Errorf("it has %q, want %q", inventory.DRADriver, want)
	}
	return err
}
