package simkubelet

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/util/wait"
	coordinationv1ac "k8s.io/client-go/applyconfigurations/coordination/v1"
	"k8s.io/klog/v2"
)

const (
	// version is the simulated kubelet version.
	version = "v1.37.2"
	// leaseDuration is how long a node without a renewed Lease counts as alive, in seconds.
	leaseDuration = 40
)

// machineCapacity is the capacity of every node.
var machineCapacity = corev1.ResourceList{
	corev1.ResourceCPU:    resource.MustParse("64"),
	corev1.ResourceMemory: resource.MustParse("512Gi"),
	corev1.ResourcePods:   resource.MustParse("110"),
}

// node maintains the Node object (kubelet_node_status.go).
type node struct {
	options       Options
	devices       *devices
	statusChanged chan struct{} // Buffer of one: the devices have changed.
}

func newNode(options Options, devices *devices) *node {
	return &node{options: options, devices: devices, statusChanged: make(chan struct{}, 1)}
}

func (n *node) initial() *corev1.Node {
	labels := map[string]string{
		corev1.LabelHostname: n.options.NodeName, corev1.LabelOSStable: runtime.GOOS, corev1.LabelArchStable: runtime.GOARCH,
	}
	maps.Copy(labels, n.options.Labels)
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.options.NodeName, Labels: labels},
		Status: corev1.NodeStatus{
			Capacity: machineCapacity, Allocatable: machineCapacity,
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

// changed requests an update of the node status.
func (n *node) changed() {
	select {
	case n.statusChanged <- struct{}{}:
	default:
	}
}

// registerUntilDone creates the Node, or adopts the existing one.
func (n *node) registerUntilDone(ctx context.Context) {
	// The only error is the end of ctx.
	_ = wait.PollUntilContextCancel(ctx, retryInterval, true, func(ctx context.Context) (bool, error) {
		if err := n.register(ctx); err != nil {
			klog.FromContext(ctx).V(2).Info("Could not register the node", "err", err)
			return false, nil
		}
		return true, nil
	})
}

func (n *node) register(ctx context.Context) error {
	nodes := n.options.Client.CoreV1().Nodes()
	object, err := nodes.Create(ctx, n.initial(), metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		object, err = nodes.Get(ctx, n.options.NodeName, metav1.GetOptions{})
	}
	if err == nil && n.options.LiftNotReadyTaint {
		err = n.liftTaint(ctx, object)
	}
	if err != nil {
		return fmt.Errorf("register node: %w", err)
	}
	return nil
}

// liftTaint removes the not-ready taint of a new node.
func (n *node) liftTaint(ctx context.Context, object *corev1.Node) error {
	taints := slices.DeleteFunc(slices.Clone(object.Spec.Taints), func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeNotReady })
	if len(taints) == len(object.Spec.Taints) {
		return nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": object.ResourceVersion},
		"spec":     map[string]any{"taints": taints},
	})
	if err == nil {
		_, err = n.options.Client.CoreV1().Nodes().Patch(ctx, object.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	}
	return err
}

// keepStatus reports the node's resources when devices have changed, and periodically restores fields that belong to
// the kubelet.
func (n *node) keepStatus(ctx context.Context) {
	ticker := time.NewTicker(statusInterval)
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
	nodes := n.options.Client.CoreV1().Nodes()
	existing, err := nodes.Get(ctx, n.options.NodeName, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("getting the node: %w", err)
	}
	changed := existing.DeepCopy()
	status := &changed.Status
	capacity, allocatable := n.devices.capacity()
	if status.Capacity == nil {
		status.Capacity = corev1.ResourceList{}
	}
	maps.Copy(status.Capacity, machineCapacity)
	maps.Copy(status.Capacity, capacity)
	status.Allocatable = maps.Clone(status.Capacity)
	maps.Copy(status.Allocatable, allocatable)
	status.Conditions = conditions(status.Conditions)
	if equality.Semantic.DeepEqual(existing.Status, changed.Status) {
		return nil
	}
	before, err := json.Marshal(existing)
	if err != nil {
		return fmt.Errorf("marshal node: %w", err)
	}
	after, err := json.Marshal(changed)
	if err != nil {
		return fmt.Errorf("marshal node: %w", err)
	}
	patch, err := strategicpatch.CreateTwoWayMergePatch(before, after, corev1.Node{})
	if err != nil {
		return fmt.Errorf("making the patch: %w", err)
	}
	if _, err = nodes.Patch(ctx, existing.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil {
		return fmt.Errorf("patch node status: %w", err)
	}
	return nil
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
	name := n.options.NodeName
	leases := n.options.Client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		lease := coordinationv1ac.Lease(name, corev1.NamespaceNodeLease).WithSpec(coordinationv1ac.LeaseSpec().
			WithHolderIdentity(name).WithLeaseDurationSeconds(leaseDuration).WithRenewTime(metav1.NowMicro()))
		if _, err := leases.Apply(ctx, lease, metav1.ApplyOptions{FieldManager: "kubelet", Force: true}); err != nil {
			klog.FromContext(ctx).V(2).Info("Could not renew the node's Lease", "err", err)
		}
	}, statusInterval)
}
