package simkubelet

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

const (
	// version is the simulated kubelet version.
	version = "v1.36.3"
	// retryInterval is the time between two attempts to register.
	retryInterval = time.Second
	// leaseDuration is how long a node without a renewed Lease counts as alive, in seconds.
	leaseDuration = 40
)

// node maintains the Node object (kubelet_node_status.go).
type node struct {
	options       Options
	devices       *devices
	statusChanged chan struct{} // Buffer of one: the devices have changed.

	mu         sync.Mutex
	registered bool
	seen       *corev1.Node // As last read or created; never modified.
}

func newNode(options Options, devices *devices) *node {
	n := &node{options: options, devices: devices, statusChanged: make(chan struct{}, 1)}
	n.seen = n.initial()
	return n
}

func (n *node) initial() *corev1.Node {
	labels := map[string]string{
		corev1.LabelHostname: n.options.NodeName, corev1.LabelOSStable: runtime.GOOS, corev1.LabelArchStable: runtime.GOARCH,
	}
	maps.Copy(labels, n.options.Labels)
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.options.NodeName, Labels: labels},
		Status: corev1.NodeStatus{
			Capacity: n.options.capacity(), Allocatable: n.options.capacity(),
			Conditions: conditions(nil),
			Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeInternalIP, Address: hostIP}, {Type: corev1.NodeHostName, Address: n.options.NodeName},
			},
			NodeInfo: corev1.NodeSystemInfo{
				KubeletVersion: version, OperatingSystem: runtime.GOOS, Architecture: runtime.GOARCH,
				OSImage: "simulated", ContainerRuntimeVersion: "sim://1",
			},
		},
	}
}

// last returns a copy of the node as last read.
func (n *node) last() *corev1.Node {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.seen.DeepCopy()
}

func (n *node) remember(seen *corev1.Node) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.seen = seen
}

// changed requests an update of the node status.
func (n *node) changed() {
	select {
	case n.statusChanged <- struct{}{}:
	default:
	}
}

// registerUntilDone creates the Node, or adopts the existing one. A kubelet does that once.
func (n *node) registerUntilDone(ctx context.Context) {
	if n.registered {
		return
	}
	// The only error is the end of ctx.
	_ = wait.PollUntilContextCancel(ctx, retryInterval, true, func(ctx context.Context) (bool, error) {
		if err := n.register(ctx); err != nil {
			klog.FromContext(ctx).V(2).Info("Could not register the node", "err", err)
			return false, nil
		}
		n.registered = true
		return true, nil
	})
}

func (n *node) register(ctx context.Context) error {
	nodes := n.options.Client.CoreV1().Nodes()
	seen, err := nodes.Create(ctx, n.initial(), metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		if seen, err = nodes.Get(ctx, n.options.NodeName, metav1.GetOptions{}); err != nil {
			return fmt.Errorf("register node: %w", err)
		}
		seen, err = n.resetExtendedResources(ctx, seen)
	}
	if err != nil {
		return fmt.Errorf("register node: %w", err)
	}
	if n.options.LiftNotReadyTaint {
		if seen, err = n.liftTaint(ctx, seen); err != nil {
			return fmt.Errorf("register node: %w", err)
		}
	}
	n.remember(seen)
	return nil
}

// resetExtendedResources sets all extended resources of an existing node to zero if the device-plugin directory is
// empty, because then the machine could be a new one.
func (n *node) resetExtendedResources(ctx context.Context, existing *corev1.Node) (*corev1.Node, error) {
	files, err := os.ReadDir(n.options.DevicePluginDir)
	if err != nil {
		return nil, fmt.Errorf("look for a checkpoint: %w", err)
	}
	// The kubelet counts every file whose name doesn't start with a dot.
	if slices.ContainsFunc(files, func(f os.DirEntry) bool { return !strings.HasPrefix(f.Name(), ".") }) {
		return existing, nil
	}
	changed := existing.DeepCopy()
	for name := range changed.Status.Capacity {
		if extendedResource(name) {
			changed.Status.Capacity[name] = *resource.NewQuantity(0, resource.DecimalSI)
			changed.Status.Allocatable[name] = *resource.NewQuantity(0, resource.DecimalSI)
		}
	}
	return n.patchStatus(ctx, existing, changed)
}

// liftTaint removes the not-ready taint of a new node.
func (n *node) liftTaint(ctx context.Context, existing *corev1.Node) (*corev1.Node, error) {
	notReady := func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeNotReady }
	if !slices.ContainsFunc(existing.Spec.Taints, notReady) {
		return existing, nil
	}
	taints := slices.DeleteFunc(slices.Clone(existing.Spec.Taints), notReady)
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": existing.ResourceVersion},
		"spec":     map[string]any{"taints": taints},
	})
	if err != nil {
		return nil, fmt.Errorf("marshal taints: %w", err)
	}
	return n.options.Client.CoreV1().Nodes().Patch(ctx, existing.Name, types.MergePatchType, patch, metav1.PatchOptions{})
}

// keepStatus reports the node's resources when devices have changed, and periodically restores fields that belong to
// the kubelet.
func (n *node) keepStatus(ctx context.Context) {
	ticker := time.NewTicker(n.options.StatusInterval)
	defer ticker.Stop()
	for {
		if err := n.updateStatus(ctx); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).V(2).Info("Could not update the node's status", "err", err)
			time.AfterFunc(retryInterval, n.changed)
		}
		select {
		case <-ticker.C:
		case <-n.statusChanged:
		case <-ctx.Done():
			return
		}
	}
}

// updateStatus sets the kubelet's fields and keeps patches of other clients, except that the allocatable amount of
// extended resources is set to their capacity (nodestatus/setters.go, MachineInfo).
func (n *node) updateStatus(ctx context.Context) error {
	existing, err := n.options.Client.CoreV1().Nodes().Get(ctx, n.options.NodeName, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("get node: %w", err)
	}
	changed := existing.DeepCopy()
	status := &changed.Status
	if status.Capacity == nil {
		status.Capacity = corev1.ResourceList{}
	}
	capacity, allocatable, removed := n.devices.capacity(ctx)
	maps.Copy(status.Capacity, n.options.capacity())
	maps.Copy(status.Capacity, capacity)
	for _, name := range removed {
		status.Capacity[corev1.ResourceName(name)] = *resource.NewQuantity(0, resource.DecimalSI)
	}
	if status.Allocatable == nil {
		status.Allocatable = corev1.ResourceList{}
	}
	maps.DeleteFunc(status.Allocatable, func(name corev1.ResourceName, _ resource.Quantity) bool {
		_, there := status.Capacity[name]
		return !there && extendedResource(name)
	})
	maps.Copy(status.Allocatable, status.Capacity)
	maps.Copy(status.Allocatable, allocatable)
	status.Conditions = conditions(status.Conditions)
	// Before the patch: pods that the scheduler sends for the new devices must be admitted with them.
	n.remember(changed)
	if !equality.Semantic.DeepEqual(existing.Status, changed.Status) {
		if changed, err = n.patchStatus(ctx, existing, changed); err != nil {
			return err
		}
	}
	n.remember(changed)
	return nil
}

func (n *node) patchStatus(ctx context.Context, existing, changed *corev1.Node) (*corev1.Node, error) {
	before, err := json.Marshal(existing)
	if err != nil {
		return nil, fmt.Errorf("marshal node: %w", err)
	}
	after, err := json.Marshal(changed)
	if err != nil {
		return nil, fmt.Errorf("marshal node: %w", err)
	}
	patch, err := strategicpatch.CreateTwoWayMergePatch(before, after, corev1.Node{})
	if err != nil {
		return nil, fmt.Errorf("make patch: %w", err)
	}
	patched, err := n.options.Client.CoreV1().Nodes().Patch(ctx, existing.Name, types.StrategicMergePatchType, patch,
		metav1.PatchOptions{}, "status")
	if err != nil {
		return nil, fmt.Errorf("patch node status: %w", err)
	}
	return patched, nil
}

// conditions returns the given conditions with the kubelet's own set. Conditions with the right status stay unchanged.
func conditions(existing []corev1.NodeCondition) []corev1.NodeCondition {
	out := slices.Clone(existing)
	now := metav1.Now()
	for _, want := range []corev1.NodeCondition{
		{Type: corev1.NodeMemoryPressure, Status: corev1.ConditionFalse, Reason: "KubeletHasSufficientMemory"},
		{Type: corev1.NodeDiskPressure, Status: corev1.ConditionFalse, Reason: "KubeletHasNoDiskPressure"},
		{Type: corev1.NodePIDPressure, Status: corev1.ConditionFalse, Reason: "KubeletHasSufficientPID"},
		{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady"},
	} {
		want.LastHeartbeatTime, want.LastTransitionTime = now, now
		i := slices.IndexFunc(out, func(c corev1.NodeCondition) bool { return c.Type == want.Type })
		switch {
		case i < 0:
			out = append(out, want)
		case out[i].Status != want.Status:
			out[i] = want
		}
	}
	return out
}

// keepLease renews the node's Lease. A node status would be sent to every client that watches nodes.
func (n *node) keepLease(ctx context.Context) {
	leases := n.options.Client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	var lease *coordinationv1.Lease
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		var err error
		if lease == nil {
			lease, err = leases.Get(ctx, n.options.NodeName, metav1.GetOptions{})
		}
		now := metav1.NowMicro()
		switch {
		case apierrors.IsNotFound(err):
			lease, err = leases.Create(ctx, &coordinationv1.Lease{
				ObjectMeta: metav1.ObjectMeta{Name: n.options.NodeName, Namespace: corev1.NamespaceNodeLease},
				Spec: coordinationv1.LeaseSpec{
					HolderIdentity: &n.options.NodeName, LeaseDurationSeconds: ptr.To[int32](leaseDuration), RenewTime: &now,
				},
			}, metav1.CreateOptions{})
		case err == nil:
			lease = lease.DeepCopy()
			lease.Spec.RenewTime = &now
			lease, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
		}
		if err != nil {
			lease = nil
			klog.FromContext(ctx).V(2).Info("Could not renew the node's lease", "err", err)
		}
	}, n.options.LeaseInterval)
}
