package inspect

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/fake"
)

// TestStranded: a pod without GPU memory leaves too little CPU on n1 for the kind of pods that exists. -o wide and JSON say so, if all nodes are
// shown.
func TestStranded(t *testing.T) {
	n1 := inventoryNode(t, "n1", "10.0.0.1", gpu.GiB, gpu.Card{Index: 0, Memory: 16}).offers(corev1.ResourceCPU, 8)
	n2 := inventoryNode(t, "n2", "10.0.0.2", gpu.GiB, gpu.Card{Index: 0, Memory: 16}).offers(corev1.ResourceCPU, 8)
	other := fake.Pod("other", 0, fake.On("n1"), fake.CPU(6))
	shares := fake.Pod("shares", 4, fake.Bound("n2", 0), fake.CPU(4))
	api := newFakeAPI(t, Objects{Nodes: []*corev1.Node{n1.Node, n2.Node}, Pods: []*corev1.Pod{other, shares}})
	for args, want := range map[string]string{
		"-o wide": "16 GiB free, of no use: the node lacks CPU", "-o json": `"cpu": 16`, "": "", "-o wide n1": "",
	} {
		stdout, stderr, err := execute(t, api, strings.Fields(args)...)
		if err != nil || stderr != "" {
			t.Fatalf("%q: %v %s", args, err, stderr)
		}
		if stranded := strings.Contains(stdout, "of no use") || strings.Contains(stdout, `"stranded"`); stranded != (want != "") || !strings.Contains(stdout, want) {
			t.Errorf("%q prints\n%s\nwant %q", args, stdout, want)
		}
	}
}
