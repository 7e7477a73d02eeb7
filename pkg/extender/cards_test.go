package extender

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/apiserver/fake"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// TestSeveralCards follows a pod with two cards and cores through the verbs, from kube-scheduler's JSON to the Binding.
func TestSeveralCards(t *testing.T) {
	c := startCluster(t)
	h := newServer(c.Scheduler).Handler()
	c.addNode("n1", 16, 16, 16)
	c.addNode("n2", 16)
	c.addNode("n3", 16, 16)
	c.addPod(fake.Pod("a", 12, fake.Bound("n1", 0)))
	c.addPod(fake.Pod("b", 12, fake.Cores(80), fake.Bound("n3", 1)))
	c.awaitNode(t, "n1", 1)
	c.awaitNode(t, "n2", 0)
	c.awaitNode(t, "n3", 1)

	pod := fake.Pod("p", 8, fake.Cards(2), fake.Cores(60))
	c.addPod(pod)
	for name, test := range map[string]struct {
		args extenderv1.ExtenderArgs
		want filterResult
	}{
		"two cards and cores": {nodesRequest(pod, "n1", "n2", "n3"), filterResult{
			NodeNames:                  &[]string{"n1"},
			FailedNodes:                extenderv1.FailedNodesMap{"n3": "too few GPU cards have enough free memory and cores, though the node's cards together have"},
			FailedAndUnresolvableNodes: extenderv1.FailedNodesMap{"n2": "the pod asks for more GPU cards than the node has that are large enough"},
		}},
		"an invalid request": {nodesRequest(fake.Pod("invalid", 7, fake.Cards(2)), "n1", "n2"), filterResult{
			NodeNames:                  &[]string{},
			FailedAndUnresolvableNodes: extenderv1.FailedNodesMap{"n1": "container main: aliyun.com/gpu-mem 7 can't be divided evenly over 2 cards"},
		}},
	} {
		got := answer[filterResult](t, post(h, "filter", text(t, test.args)), 200)
		if diff := cmp.Diff(test.want, got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	// Card 0 is the fullest that fits; the other two are equal.
	if got := answer[bindResult](t, post(h, "bind", text(t, bindArgs(pod, "n1"))), 200).Error; got != "" {
		t.Fatal(got)
	}
	bound := c.server.Get(pod)
	if got := bound.Annotations[protocol.AnnotationIndex]; got != "0,1" || bound.Spec.NodeName != "n1" {
		t.Errorf("bound to node %q, cards %q", bound.Spec.NodeName, got)
	}
	inspected := serveOne(h, newRequest("GET", Prefix+"/inspect/n1", "")).Body.String()
	want := `{"nodes":[{"name":"n1","totalGPU":48,"usedGPU":20,"devs":[` +
		`{"id":0,"totalGPU":16,"usedGPU":16,"pods":[{"name":"a","namespace":"default","usedGPU":12},{"name":"p","namespace":"default","usedGPU":4}]},` +
		`{"id":1,"totalGPU":16,"usedGPU":4,"pods":[{"name":"p","namespace":"default","usedGPU":4}]},{"id":2,"totalGPU":16,"usedGPU":0,"pods":[]}]}]}` + "\n"
	if diff := cmp.Diff(want, inspected); diff != "" {
		t.Errorf("inspect (-want +got):\n%s", diff)
	}
}
