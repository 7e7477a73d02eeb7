package neighbours

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

var must = check.Must

// label of a ReplicaSet's pods.
const label = "set"

// TestDescheduler: the descheduler evicts a pod of an over-utilized node although no card of another node has room for it, and the
// pod's replacement comes back. With the policy of the documentation it leaves such nodes alone, and works on others.
func TestDescheduler(t *testing.T) {
	program := part(t, "descheduler")
	c := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB", ControlPlane: controlplane.Options{ControllerManager: true}})
	n := c.NewNamespace(t)
	gpus := func(name string) *framework.NodeWrapper { return framework.MakeNode(name).Unit(gpu.GiB).Cards(2, 16) }
	plain := func(name string) *framework.NodeWrapper { return framework.MakeNode(name).Label("plain", "true") }

	// Two pods of 12 GiB fill a node; another has 12 GiB free, in two pieces. Of 64 CPUs, 40 are requested there, and none here.
	n.AddNodes(gpus("full"), plain("busy"))
	large := newSet(n, n.Pod("large", 12).CPU(20), 2)
	other := newSet(n, n.Pod("other", 0).CPU(10).NodeSelector("plain", "true"), 5)
	large.waitBound()
	other.waitBound()
	n.AddNodes(gpus("pieces"), plain("idle"))
	for i := range 2 {
		n.WantCard(n.Place(n.Pod(fmt.Sprintf("small-%d", i), 10)), n.NodeName("pieces"), i)
	}

	policy, err := os.ReadFile(filepath.Join(controlplane.Repository(t), "deploy", "neighbours", "descheduler-policy.yaml"))
	must(t, err)
	deschedule := func(policy string) {
		t.Helper()
		path := filepath.Join(t.TempDir(), "policy.yaml")
		must(t, os.WriteFile(path, []byte(policy), 0o600))
		port, err := controlplane.ReservePort()
		must(t, err)
		defer port.Release()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		// Without an interval it makes one round.
		out, err := exec.CommandContext(ctx, program, "--kubeconfig="+c.KubeconfigPath, "--policy-config-file="+path,
			"--bind-address=127.0.0.1", "--secure-port="+port.String(), "-v=2").CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}

	deschedule(string(policy))
	if large.replaced() != 0 || other.replaced() == 0 {
		t.Errorf("with the policy of the documentation it evicted %d pods with GPU memory and %d others, want none and some", large.replaced(), other.replaced())
	}
	other.waitBound()

	without := strings.Replace(string(policy), "\nnodeSelector: gpushare!=true\n", "\n", 1)
	deschedule(without)
	if got := large.replaced(); got != 1 {
		t.Errorf("without the node selector it evicted %d pods with GPU memory, want 1", got)
	}
	for _, pod := range large.waitBound() {
		if pod.Spec.NodeName != n.NodeName("full") {
			t.Errorf("pod %s is on %s, where no card has 12 GiB free", pod.Name, pod.Spec.NodeName)
		}
	}
	n.CheckLedger()
}

// set is a ReplicaSet.
type set struct {
	*framework.Namespace
	name  string
	size  int
	known sets.Set[types.UID]
}

// newSet creates a ReplicaSet of such pods, with the pod's name.
func newSet(n *framework.Namespace, pod *framework.PodWrapper, size int) *set {
	n.Helper()
	s := &set{Namespace: n, name: pod.Name, size: size}
	pod.Label(label, s.name).GracePeriod(0) // No kubelet confirms that it has ended.
	client := n.Cluster.Client.AppsV1().ReplicaSets(n.ID)
	n.Cleanup(func() { must(n, client.Delete(context.Background(), s.name, metav1.DeleteOptions{})) })
	_, err := client.Create(n.Context(), &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: s.name},
		Spec: appsv1.ReplicaSetSpec{
			Replicas: new(int32(size)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{label: s.name}},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: pod.Labels}, Spec: pod.Spec},
		},
	}, metav1.CreateOptions{})
	must(n, err)
	return s
}

func (s *set) pods(ctx context.Context) ([]corev1.Pod, error) {
	list, err := s.Pods().List(ctx, metav1.ListOptions{LabelSelector: label + "=" + s.name})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// waitBound waits until all pods of the set are bound, and returns them.
func (s *set) waitBound() (pods []corev1.Pod) {
	s.Helper()
	s.Eventually(s.name+" is bound", func(ctx context.Context) (err error) {
		if pods, err = s.pods(ctx); err != nil {
			return err
		}
		bound := 0
		for i := range pods {
			if pods[i].Spec.NodeName != "" {
				bound++
			}
		}
		if bound != s.size || len(pods) != s.size {
			return fmt.Errorf("%d of %d pods are", bound, len(pods))
		}
		return nil
	})
	s.known = sets.New[types.UID]()
	for i := range pods {
		s.known.Insert(pods[i].UID)
	}
	return pods
}

// replaced returns how many pods of the last waitBound are gone.
func (s *set) replaced() int {
	s.Helper()
	pods, err := s.pods(s.Context())
	must(s, err)
	left := s.known.Clone()
	for i := range pods {
		left.Delete(pods[i].UID)
	}
	return left.Len()
}
