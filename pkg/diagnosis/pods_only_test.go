package diagnosis

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

// TestPodsOnly checks what a pod and its group show of the cause without any node.
func TestPodsOnly(t *testing.T) {
	rejected := func(reasons string) func(*corev1.Pod) {
		return condition(corev1.PodReasonUnschedulable, "0/5 nodes are available: "+reasons+". preemption: 0/5 nodes are available: 5 No victims.")
	}
	created := func(ago time.Duration) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.CreationTimestamp = metav1.NewTime(now.Add(-ago)) }
	}
	waits := &GroupWait{Group: "ml/train", Reason: reasons.GroupIncomplete(1, 2)}
	for name, test := range map[string]struct {
		change func(*corev1.Pod)
		wait   *GroupWait
		want   Diagnosis
	}{
		"gated":     {gated, nil, Diagnosis{Reason: reasons.Gated, Message: "the pod is held back by its scheduling gates: quota"}},
		"a new pod": {created(time.Second), nil, Diagnosis{Reason: reasons.Fits, Message: "nodes can't be listed: kube-scheduler has not tried it yet"}},
		"no scheduler tries it": {created(18 * time.Minute), nil, Diagnosis{
			Reason: reasons.NotTried, Message: `scheduler "default-scheduler" has not tried it for 18m: is a scheduler of this name running?`}},
		"full": {rejected("1 Insufficient cpu, 4 no GPU card has enough free memory"), nil, Diagnosis{
			Reason: reasons.Full, Message: "0/5 nodes are available: 1 Insufficient cpu, 4 no GPU card has enough free memory"}},
		"full by the nodes' sums": {rejected("5 Insufficient aliyun.com/gpu-mem"), nil, Diagnosis{
			Reason: reasons.Full, Message: "0/5 nodes are available: 5 Insufficient aliyun.com/gpu-mem"}},
		"fragmented is better than full": {
			rejected("1 no GPU card has enough free memory, though the node's cards together have, 4 no GPU card has enough free memory"), nil, Diagnosis{
				Reason: reasons.Fragmented, Message: "0/5 nodes are available: 1 no GPU card has enough free memory, though the node's cards together have, 4 no GPU card has enough free memory"}},
		"an amount in bytes": {func(p *corev1.Pod) {
			rejected("5 Insufficient aliyun.com/gpu-mem")(p)
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{protocol.ResourceMemory: resource.MustParse("2Gi")}
		}, nil, Diagnosis{
			Reason: reasons.Full, Message: "0/5 nodes are available: 5 Insufficient aliyun.com/gpu-mem; the request 2Gi is 2147483648 units: write a plain number"}},
		"unhealthy": {rejected("5 the GPU cards that are large enough are unhealthy"), nil, Diagnosis{
			Reason: reasons.Unhealthy, Message: "0/5 nodes are available: 5 the GPU cards that are large enough are unhealthy"}},
		"too large": {rejected("5 the pod asks for more GPU memory than any card of the node has"), nil, Diagnosis{
			Reason: reasons.TooLarge, Message: "0/5 nodes are available: 5 the pod asks for more GPU memory than any card of the node has"}},
		"kept for a group": {rejected("5 free GPU memory is kept for group ml/train"), nil, Diagnosis{
			Reason: reasons.ReservedForOther, Message: "0/5 nodes are available: 5 free GPU memory is kept for group ml/train"}},
		"CPU is kept for a pod": {rejected("5 free CPU, memory or pods of the node are kept for pod ml/large"), nil, Diagnosis{
			Reason: reasons.ReservedForOther, Message: "0/5 nodes are available: 5 free CPU, memory or pods of the node are kept for pod ml/large"}},
		"no node can be used": {rejected("5 node(s) didn't match Pod's node affinity/selector"), nil, Diagnosis{
			Reason: reasons.NoNode, Message: "0/5 nodes are available: 5 node(s) didn't match Pod's node affinity/selector"}},
		"something else than GPU memory": {rejected("5 Insufficient cpu"), nil, Diagnosis{
			Reason: reasons.OtherConstraint, Message: "0/5 nodes are available: 5 Insufficient cpu"}},
		"the extender is down": {condition(corev1.PodReasonSchedulerError, `Post "http://127.0.0.1:12345/gpushare-scheduler/filter": connection refused`), nil, Diagnosis{
			Reason: reasons.SchedulerError, Message: "the extender does not answer kube-scheduler's filter call: connection refused"}},
		"another error": {condition(corev1.PodReasonSchedulerError, "binding rejected"), nil, Diagnosis{Reason: reasons.SchedulerError, Message: "binding rejected"}},
		"waits for its group": {rejected("5 gang: 1 of 2 members exist"), waits, Diagnosis{
			Reason: reasons.WaitsForGroup, Message: "group ml/train waits: 1 of 2 members exist"}},
		"an invalid group": {rejected("5 Insufficient cpu"), &GroupWait{Group: "ml/train", Reason: reasons.GroupInvalid("gd1 says 2, gd2 says 3")}, Diagnosis{
			Reason: reasons.InvalidGroup, Message: "group ml/train is invalid: gd1 says 2, gd2 says 3"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := PodsOnly(nil, now).Diagnose(pod(7, test.change), test.wait)
			check.Equal(t, "the result", test.want, got)
		})
	}
}
