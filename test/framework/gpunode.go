package framework

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/fakenvml"
	"github.com/gpushare/gpushare/test/simkubelet"
)

// NodeSpec describes a GPU node.
type NodeSpec struct {
	Name string
	// MemoryUnit is the device plugin's --memory-unit; by default that of the cluster.
	MemoryUnit string
	// Cards is the memory of each card in MiB.
	Cards  []uint64
	Labels map[string]string
	// PluginArgs are additional flags.
	PluginArgs []string
	// WithoutPlugin doesn't start the device plugin; the test can call StartPlugin.
	WithoutPlugin bool
	// KubeletThroughProxy puts a proxy between the kubelet and the API server, so that a test can inject faults.
	KubeletThroughProxy bool
	// Kubelet configures the simulated kubelet. AddNode sets its name, client and folders.
	Kubelet simkubelet.Options
}

// Node is a running GPU node.
type Node struct {
	Name    string
	Machine fakenvml.Machine
	Cards   []fakenvml.Card
	Kubelet *simkubelet.Kubelet
	Plugin  *controlplane.Process
	// Proxy is nil without NodeSpec.KubeletThroughProxy.
	Proxy *controlplane.Proxy

	stop func() error
}

// AddNode starts a GPU node and returns when pods can be scheduled to its cards.
func (c *Cluster) AddNode(ctx context.Context, spec NodeSpec) (*Node, error) {
	// The index, unlike the node's name, keeps the paths of the sockets short.
	dir := filepath.Join(c.options.Dir, "n"+strconv.Itoa(len(c.nodes)))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	node := &Node{Name: spec.Name, Machine: fakenvml.NewMachine(dir)}
	for i, memory := range spec.Cards {
		node.Cards = append(node.Cards, fakenvml.Card{
			UUID:  fmt.Sprintf("GPU-%08x-%04x-4000-8000-%012x", len(c.nodes), i, len(c.nodes)*1000+i),
			Model: "Tesla V100-SXM2-16GB", MiB: memory, NUMANode: i % 2,
		})
	}
	if err := node.Machine.SetCards(node.Cards...); err != nil {
		return nil, err
	}

	o := spec.Kubelet
	o.NodeName, o.Client, o.Root, o.LiftNotReadyTaint = spec.Name, c.Client, dir, true
	o.Labels = map[string]string{protocol.LabelShared: "true"}
	maps.Copy(o.Labels, spec.Labels)
	if spec.KubeletThroughProxy {
		var err error
		if o.Client, node.Proxy, err = c.proxiedClient(ctx); err != nil {
			return nil, fmt.Errorf("node %s: %w", spec.Name, err)
		}
	}
	kubelet, err := simkubelet.New(o)
	if err != nil {
		return nil, fmt.Errorf("node %s: %w", spec.Name, err)
	}
	node.Kubelet = kubelet
	running, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- kubelet.Run(running) }()
	node.stop = sync.OnceValue(func() error {
		stop()
		return errors.Join(node.Plugin.Kill(), <-done)
	})

	kubeconfig, err := c.kubeconfigFor(ctx, node)
	if err != nil {
		stop()
		return nil, errors.Join(err, <-done)
	}
	node.Plugin = &controlplane.Process{
		Name: "gpushare-device-plugin " + spec.Name, Path: c.Binary("gpushare-device-plugin"),
		Args: append([]string{
			"--kubeconfig=" + kubeconfig, "--node-name=" + spec.Name, "--memory-unit=" + cmp.Or(spec.MemoryUnit, c.options.MemoryUnit),
			"--device-plugin-dir=" + filepath.Join(dir, "device-plugins"),
			"--pod-resources-socket=" + filepath.Join(dir, "pod-resources", "kubelet.sock"),
			"--nvml-library=" + c.Binary("fake-nvml/libnvidia-ml.so.1"),
			"--listen-address=", "-v=2",
		}, spec.PluginArgs...),
		Env:     node.Machine.Env(),
		LogPath: filepath.Join(dir, "device-plugin.log"),
	}
	c.nodes = append(c.nodes, node)
	if spec.WithoutPlugin {
		return node, c.awaitObject(ctx, node, func(*corev1.Node) bool { return true })
	}
	return node, c.StartPlugin(ctx, node)
}

// kubeconfigFor returns the kubeconfig of the node's device plugin.
func (c *Cluster) kubeconfigFor(ctx context.Context, node *Node) (string, error) {
	if !c.options.Guard {
		return c.pluginKubeconfig, nil
	}
	if err := c.awaitObject(ctx, node, func(*corev1.Node) bool { return true }); err != nil {
		return "", err
	}
	object, err := c.Client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	return c.NodeKubeconfig(ctx, metav1.NamespaceSystem, "gpushare-device-plugin", object)
}

// StartPlugin starts a node's device plugin and returns when pods can be scheduled to the node's cards.
func (c *Cluster) StartPlugin(ctx context.Context, node *Node) error {
	if err := node.Plugin.Start(ctx); err != nil {
		return err
	}
	return c.awaitNode(ctx, node, len(node.Cards))
}

// proxiedClient returns an administrator's client with its own proxy.
func (c *Cluster) proxiedClient(ctx context.Context) (kubernetes.Interface, *controlplane.Proxy, error) {
	const account = "simulated-kubelet"
	system := c.Client.CoreV1().ServiceAccounts(metav1.NamespaceSystem)
	_, err := system.Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{})
	if err == nil {
		_, err = c.Client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: account},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: metav1.NamespaceSystem, Name: account}},
		}, metav1.CreateOptions{})
	}
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, nil, fmt.Errorf("making an account for the kubelet: %w", err)
	}
	path, err := c.ServiceAccountKubeconfig(ctx, metav1.NamespaceSystem, account)
	if err != nil {
		return nil, nil, err
	}
	proxy, err := c.StartProxy()
	if err != nil {
		return nil, nil, err
	}
	if path, err = proxy.Kubeconfig(path); err != nil {
		return nil, nil, err
	}
	config, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return nil, nil, fmt.Errorf("reading the kubelet's kubeconfig: %w", err)
	}
	config.QPS = -1 // No limit.
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, nil, fmt.Errorf("making the kubelet's client: %w", err)
	}
	return client, proxy, nil
}

// awaitNode waits until the Node object has the cards and their memory, and a card takes pods: the kubelet has the plugin's devices.
func (c *Cluster) awaitNode(ctx context.Context, node *Node, cards int) error {
	err := c.awaitObject(ctx, node, func(object *corev1.Node) bool {
		count := object.Status.Allocatable[protocol.ResourceCount]
		memory := object.Status.Allocatable[protocol.ResourceMemory]
		inventory, err := protocol.ParseInventory(object.Annotations)
		healthy := slices.ContainsFunc(inventory.Cards, func(c gpu.Card) bool { return c.Healthy() })
		return err == nil && healthy && len(inventory.Cards) == cards && count.Value() == int64(cards) && !memory.IsZero()
	})
	if err != nil {
		return fmt.Errorf("cards not reported: %w\n%s", err, node.Plugin.Tail(10))
	}
	return nil
}

// awaitObject waits until the Node object exists, has no taints, and ready returns true.
func (c *Cluster) awaitObject(ctx context.Context, node *Node, ready func(*corev1.Node) bool) error {
	err := wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		object, err := c.Client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
		if err != nil {
			return false, nil // Not found yet.
		}
		return len(object.Spec.Taints) == 0 && ready(object), nil
	})
	if err != nil {
		return fmt.Errorf("waiting for node %s: %w", node.Name, err)
	}
	return nil
}

// AddNodeForTest starts a GPU node like AddNode. It stops the node and deletes its object when the test ends.
func (c *Cluster) AddNodeForTest(t testing.TB, spec NodeSpec) *Node {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	node, err := c.AddNode(ctx, spec)
	check.Must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of %s:\n%s", node.Plugin.LogPath, node.Plugin.Tail(15))
		}
		err := node.Stop()
		if err = errors.Join(err, c.Client.CoreV1().Nodes().Delete(context.Background(), node.Name, metav1.DeleteOptions{})); err != nil {
			t.Error(err)
		}
	})
	return node
}

// Stop ends the node's programs. The Node object stays, as after a power failure. Stopping twice is no error.
func (n *Node) Stop() error { return n.stop() }

// Env returns the environment variables that the device plugin set for the pod's container, or nil if it has never run.
func (n *Node) Env(pod *corev1.Pod, container string) map[string]string {
	for _, c := range n.Kubelet.Containers() {
		if c.PodUID == pod.UID && c.Container == container {
			return c.Env
		}
	}
	return nil
}
