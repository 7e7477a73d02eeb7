package gang

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// TestSample runs the Job of the documentation: its four workers wait for a fourth card and are bound together, and a
// failed one is replaced without the others.
func TestSample(t *testing.T) {
	o := framework.Options{MemoryUnit: "GiB"}
	o.ControlPlane.ControllerManager = true
	bed := framework.StartForTest(t, o)
	root, err := controlplane.RepositoryRoot()
	must(t, err)
	f := &fixture{TB: t, bed: bed, namespace: metav1.NamespaceDefault}
	addNode := func(name string, cards int) {
		must(t, bed.CreateNodes(t.Context(), controlplane.Node{Name: name, Unit: gpu.GiB, Cards: controlplane.EqualCards(cards, card)}))
	}
	groups := func(words ...string) {
		t.Helper()
		f.eventually(fmt.Sprintf("kubectl inspect gpushare --groups prints %q", words), func(ctx context.Context) error {
			out, err := exec.CommandContext(ctx, bed.Binary("kubectl-inspect-gpushare"), "--kubeconfig="+bed.KubeconfigPath, "--groups").CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			if got := strings.Join(strings.Fields(string(out)), " "); !strings.Contains(got, strings.Join(words, " ")) {
				return fmt.Errorf("it prints %s", out)
			}
			return nil
		})
	}
	addNode("three-cards", 3)
	must(t, bed.Apply(t.Context(), filepath.Join(root, "deploy", "samples", "gang.yaml")))
	groups("default", "train", "4", "4", "0", "Waiting", "0/1 nodes are available: 1 gang: there is no room for all members at once.")
	f.awaitBound(map[string]int{})

	addNode("another-card", 1)
	groups("default", "train", "4", "4", "4", "Bound")
	f.awaitEvent(f.oldestPod(), "GangBound", "All members of the group are bound")

	f.deletePods(f.oldestPod())
	groups("default", "train", "4", "4", "4", "Bound")
	f.awaitBound(map[string]int{"": 4}) // The Job's pods have no label "group".
	must(t, bed.Client.BatchV1().Jobs(f.namespace).Delete(t.Context(), "train", metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}))
}

// oldestPod returns the name of the pod that was created first, in the extender's order.
func (f *fixture) oldestPod() string {
	f.Helper()
	pods, err := f.pods(f.Context())
	must(f, err)
	if len(pods) == 0 {
		f.Fatal("there are no pods")
	}
	first := &pods[0]
	for i := range pods {
		if at, best := pods[i].CreationTimestamp, first.CreationTimestamp; at.Before(&best) || at.Equal(&best) && pods[i].Name < first.Name {
			first = &pods[i]
		}
	}
	return first.Name
}
