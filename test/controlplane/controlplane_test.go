package controlplane

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpushare/gpushare/test/check"
)

func TestControlPlane(t *testing.T) {
	c := StartForTest(t, Options{Scheduler: SchedulerOptions{Edits: []ConfigEdit{ClientLimits(1000, 1000)}}})
	must(t, c.CreateNodes(t.Context(), readyNode("node-0")))

	t.Run("a pod is bound", func(t *testing.T) {
		createPod(t, c.Client, "plain")
		if got := awaitBound(t, c.Client, "plain"); got != "node-0" {
			t.Errorf("bound to %q, want node-0", got)
		}
	})

	t.Run("manifests can be applied twice, and a ServiceAccount has the rights that they grant", func(t *testing.T) {
		for range 2 {
			must(t, c.Apply(t.Context(), "testdata/accounts.yaml"))
		}
		path, err := c.ServiceAccountKubeconfig(t.Context(), "accounts", "reader")
		must(t, err)
		reader := clientFor(t, path)
		awaitNodes(t, reader)
		if _, err := reader.CoreV1().Pods("").List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
			t.Errorf("listing pods without the right to: got %v, want forbidden", err)
		}
	})

	t.Run("a manifest with an unknown field is rejected", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "wrong.yaml")
		must(t, os.WriteFile(path, []byte("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: wrong}\ndate: {}\n"), 0o600))
		if err := c.Apply(t.Context(), path); err == nil || !strings.Contains(err.Error(), "date") {
			t.Errorf("got %v, want an error that names the field", err)
		}
	})

	t.Run("a client certificate authenticates its user and groups", func(t *testing.T) {
		path, err := c.Kubeconfig("alice", "visitors")
		must(t, err)
		if _, err := clientFor(t, path).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
			t.Errorf("listing nodes as alice: got %v, want forbidden", err)
		}
		path, err = c.Kubeconfig("bob", "system:masters")
		must(t, err)
		if _, err := clientFor(t, path).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{}); err != nil {
			t.Errorf("listing nodes as bob: %v", err)
		}
	})

	t.Run("a paused API server doesn't answer until it is resumed", func(t *testing.T) {
		must(t, c.APIServer.Pause())
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		_, err := c.Client.CoreV1().Nodes().Get(ctx, "node-0", metav1.GetOptions{})
		// The context's timer or the connection's deadline can end first.
		if timeout, ok := errors.AsType[net.Error](err); !ok || !timeout.Timeout() {
			t.Errorf("got %v, want a timeout", err)
		}
		must(t, c.APIServer.Resume())
		_, err = c.Client.CoreV1().Nodes().Get(t.Context(), "node-0", metav1.GetOptions{})
		must(t, err)
	})

	t.Run("after a kill and a start the state is the same", func(t *testing.T) {
		before := c.APIServer.Pid()
		for _, p := range c.Processes() {
			must(t, p.Kill())
		}
		if _, err := c.Client.CoreV1().Nodes().Get(t.Context(), "node-0", metav1.GetOptions{}); err == nil {
			t.Error("an API server that was killed answers")
		}
		for _, p := range []*Process{c.Etcd, c.APIServer, c.Scheduler} {
			must(t, p.Start(t.Context()))
		}
		if c.APIServer.Pid() == before {
			t.Error("the API server is the same process as before")
		}
		if got := awaitBound(t, c.Client, "plain"); got != "node-0" {
			t.Errorf("pod plain is on %q, want node-0", got)
		}
		createPod(t, c.Client, "later")
		awaitBound(t, c.Client, "later")
	})

	t.Run("Stop leaves no process and no port", func(t *testing.T) {
		must(t, c.Stop())
		must(t, c.Stop())
		for _, p := range c.Processes() {
			if p.Running() || !gone(p.Pid()) {
				t.Errorf("%s, process %d, is still there", p.Name, p.Pid())
			}
		}
		// The ports are free again: without SO_REUSEADDR, Listen fails on a port that is in use.
		listener, err := net.Listen("tcp", c.apiPort.Address())
		must(t, err)
		must(t, listener.Close())
	})
}

func TestStartComponentExits(t *testing.T) {
	o := Options{Dir: t.TempDir(), ExtraArgs: map[string][]string{apiServer: {"--no-such-flag"}}}
	if errors.Is(o.Binaries(), ErrNoBinaries) {
		StartForTest(t, o) // Skips or fails, as for every test.
	}
	c, err := Start(t.Context(), o)
	if c != nil {
		t.Error("a control plane was returned beside the error")
	}
	for _, want := range []string{apiServer, "exit status 1", "unknown flag: --no-such-flag", "kube-apiserver.log"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error doesn't contain %q: %v", want, err)
		}
	}
}

func TestBinariesMissing(t *testing.T) {
	err := Options{KubeDir: t.TempDir()}.Binaries()
	if !errors.Is(err, ErrNoBinaries) || !strings.Contains(err.Error(), "make kube") {
		t.Errorf("got %v, want an error that names make kube", err)
	}
}

// readyNode returns a node to which pods can be bound.
func readyNode(name string) *corev1.Node {
	resources := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("64"), corev1.ResourcePods: resource.MustParse("1000")}
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{
		Capacity: resources, Allocatable: resources, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
	}}
}

func createPod(t *testing.T, client kubernetes.Interface, name string) {
	t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "example.invalid/main"}}},
	}
	_, err := client.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{})
	must(t, err)
}

func awaitBound(t *testing.T, client kubernetes.Interface, name string) (node string) {
	t.Helper()
	await(t, "pod "+name+" is bound", func(ctx context.Context) (bool, error) {
		pod, err := client.CoreV1().Pods("default").Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		node = pod.Spec.NodeName
		return node != "", nil
	})
	return node
}

// awaitNodes waits until the client may list nodes: the API server's authorizer learns of a new grant with a delay.
func awaitNodes(t *testing.T, client kubernetes.Interface) {
	t.Helper()
	await(t, "the client may list nodes", func(ctx context.Context) (bool, error) {
		_, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if apierrors.IsForbidden(err) {
			return false, nil
		}
		return err == nil, err
	})
}

func await(t *testing.T, what string, condition wait.ConditionWithContextFunc) {
	t.Helper()
	if err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, readyTimeout, true, condition); err != nil {
		t.Fatalf("waiting until %s: %v", what, err)
	}
}

func clientFor(t *testing.T, kubeconfig string) kubernetes.Interface {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	must(t, err)
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	must(t, err)
	return client
}

var must = check.Must
