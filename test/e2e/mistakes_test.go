package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// mistake is a pod that can't do what its user wants, and what the user must be able to read about it. cause is empty for a
// pod that is listed under the request problems.
type mistake struct {
	pod   *framework.PodWrapper
	cause string
	words []string
}

// TestMistakes makes mistakes of users on a real control plane. kube-scheduler writes its own messages, from which some
// causes are read. The table of `kubectl inspect gpushare --pending` must have each pod's cause and words; its JSON, the page
// and the metrics must agree. The mistakes that need no control plane are in pkg/diagnosis.
func TestMistakes(t *testing.T) {
	c := shared.Start(t)
	s := &scene{c.DefaultNamespace(t)}
	s.nodesForMistakes()
	var all []mistake
	all = append(all, s.mistakenRequests()...)
	all = append(all, s.mistakenPlaces()...)
	all = append(all, s.mistakenGroups()...)
	pods := make([]*framework.PodWrapper, len(all))
	for i := range all {
		pods[i] = all[i].pod
	}
	s.Create(pods...)
	s.Eventually("each mistake has its cause and words", func(ctx context.Context) error {
		_, err := s.compare(ctx)
		return errors.Join(err, s.unexplained(ctx, all))
	})
	s.extenderDown()
	s.CheckLedger()
}

// nodesForMistakes creates a node for each situation, with pods.
func (s *scene) nodesForMistakes() {
	s.Helper()
	cordoned := node("cordoned", 16000)
	cordoned.Spec.Unschedulable = true
	s.AddNodes(node("free", 16000), node("full", 16000), node("pieces", 16000, 16000), node("leaving", 16000), node("failed", 16000, 16000), cordoned)
	s.fill("full", 16000)
	s.fill("pieces", 9000, 9000)
	s.fill("leaving", 16000)
	s.fill("failed", 16000)
	s.DeleteWithGrace("leaving-0", 3600)
	s.failCard("failed", s.CardOf(s.Get("failed-0")))
}

// failCard makes one of a node's two cards unhealthy, as the device plugin does: the kubelet's sum loses its memory. The node gets a label, so that
// a pod which selects it is not placed before kube-scheduler knows the new sum.
func (s *scene) failCard(node string, index int) {
	s.Helper()
	inventory, err := protocol.Inventory{Unit: gpu.MiB, Cards: framework.MakeNode(node).Cards(2, 16000).Unhealthy(index, "Xid 79").CardList()}.Annotation()
	must(s, err)
	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q},"labels":{"card":"failed"}},"status":{"allocatable":{%q:"16000"}}}`,
		protocol.AnnotationInventory, inventory, protocol.ResourceMemory)
	_, err = s.Cluster.Client.CoreV1().Nodes().Patch(s.Context(), s.NodeName(node), types.MergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
	must(s, err)
}

func (s *scene) mistakenRequests() []mistake {
	gi := s.Pod("gi", 0)
	gi.Spec.Containers[0].Resources.Limits = corev1.ResourceList{protocol.ResourceMemory: resource.MustParse("2Gi")}
	limit := func(name string, resource corev1.ResourceName, amount int64) *framework.PodWrapper {
		return s.Pod(name, 0).OnNode("free").Limit(resource, amount)
	}
	labels := s.Pod("labels", 1000).OnNode("free").Label(protocol.AnnotationGroupName, "train").Label(protocol.AnnotationGroupSize, "2")
	return []mistake{
		{limit("typo", "aliyun.com/gpumem", 8000), "", []string{"aliyun.com/gpumem", "write aliyun.com/gpu-mem"}},
		{limit("zero", protocol.ResourceMemory, 0), "", []string{"asks for 0 of aliyun.com/gpu-mem"}},
		{limit("count", protocol.ResourceCount, 1), "", []string{"aliyun.com/gpu-count alone"}},
		{labels, "", []string{protocol.AnnotationGroupName + " is a label of the pod"}},
		{gi, "too_large", []string{"2147483648 units of 1 MiB (write 2048, without Gi)"}},
		{s.Pod("too-large", 20000), "too_large", []string{"the largest has 16000 MiB"}},
		{s.Pod("two-containers", 10000).Container("second", 10000), "too_large", []string{"20000 MiB", "main (10000) and second (10000)", "on one card"}},
		{s.Pod("whole-card", 8000).OnNode("free").WholeCards(1), "other_constraint", []string{"free has room", "Insufficient nvidia.com/gpu"}},
		{s.Pod("cpu", 8000).OnNode("free").CPU(1000), "other_constraint", []string{"free has room", "Insufficient cpu"}},
	}
}

func (s *scene) mistakenPlaces() []mistake {
	return []mistake{
		{s.Pod("selector", 8000).NodeSelector("zone", "mars"), "no_node", []string{"node selector (zone=mars)"}},
		{s.Pod("on-cordoned", 8000).OnNode("cordoned"), "no_node", []string{"cordoned: the node is cordoned"}},
		{s.Pod("on-full", 8000).OnNode("full"), "full", nil},
		{s.Pod("on-pieces", 12000).OnNode("pieces"), "fragmented", []string{"14000 MiB free on pieces", "the largest piece is 7000 MiB"}},
		{s.Pod("on-leaving", 8000).OnNode("leaving"), "waits_for_termination", []string{"default/leaving-0"}},
		{s.Pod("on-failed", 8000).OnNode("failed").NodeSelector("card", "failed"), "failed_card", []string{"failed has room for it", "GPU0 has failed"}},
	}
}

func (s *scene) mistakenGroups() []mistake {
	member := func(name, group, size string) *framework.PodWrapper {
		return s.Pod(name, 1000).OnNode("free").Annotation(protocol.AnnotationGroupName, group).Annotation(protocol.AnnotationGroupSize, size)
	}
	return []mistake{
		{member("gd1", "gd", "2"), "invalid_group", []string{"gd1 says 2, gd2 says 3"}},
		{member("gd2", "gd", "3"), "invalid_group", []string{"gd1 says 2, gd2 says 3"}},
		{member("g0", "none", "0"), "invalid_group", []string{"annotation " + protocol.AnnotationGroupSize + ` is "0"`}},
		{member("gm1", "more", "3"), "waits_for_group", []string{"2 of 3 members exist"}},
		{member("gm2", "more", "3"), "waits_for_group", []string{"2 of 3 members exist"}},
	}
}

// unexplained returns an error that lists the mistakes whose line in the table lacks the cause or the words.
func (s *scene) unexplained(ctx context.Context, mistakes []mistake) error {
	table, err := s.kubectlInspect(ctx, "--pending")
	if err != nil {
		return err
	}
	lines := map[string]string{}
	for line := range strings.Lines(table) {
		if columns := strings.Fields(line); len(columns) > 1 {
			lines[columns[1]] = line
		}
	}
	var errs []error
	for _, m := range mistakes {
		if line := lines[m.pod.Name]; !framework.ContainsAll(line, append(m.words, " "+m.cause+" ")...) {
			errs = append(errs, fmt.Errorf("pod %s: want %s with %q, got %q", m.pod.Name, m.cause, m.words, line))
		}
	}
	return errors.Join(errs...)
}

// extenderDown stops the extender: `kubectl inspect gpushare` reads the API server alone.
func (s *scene) extenderDown() {
	s.Helper()
	must(s, s.Cluster.Extender.Kill())
	down := mistake{s.Pod("late", 1000).OnNode("free"), "scheduler_error", []string{"the extender does not answer", "connection refused"}}
	s.Create(down.pod)
	s.Eventually("the pod's cause is the extender", func(ctx context.Context) error { return s.unexplained(ctx, []mistake{down}) })
	must(s, s.Cluster.Extender.Start(s.Context()))
	s.WaitBound("late")
}
