package install

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/controlplane"
)

// controlPlaneNode runs the real kube-scheduler as its static pod's file says, as a kubelet does: another file, another
// process; one that ends is started again.
type controlPlaneNode struct {
	t        *testing.T
	manifest string
	binary   string
	log      string

	stop context.CancelFunc
	done sync.WaitGroup
}

func (n *controlPlaneNode) start() {
	ctx, stop := context.WithCancel(context.Background())
	n.stop = stop
	n.done.Go(func() {
		var running *controlplane.Process
		var last []byte
		ticker := time.NewTicker(50 * time.Millisecond)
		defer ticker.Stop()
		for ctx.Err() == nil {
			data, err := os.ReadFile(n.manifest)
			var pod corev1.Pod
			if err == nil {
				err = yaml.UnmarshalStrict(data, &pod)
			}
			switch {
			case err != nil:
				n.t.Errorf("the static pod: %v", err)
				return
			case !bytes.Equal(data, last) || !running.Running():
				if running != nil {
					_ = running.Kill()
				}
				running = &controlplane.Process{
					Name: "kube-scheduler", Path: n.binary, Args: pod.Spec.Containers[0].Command[1:], LogPath: n.log,
				}
				if err := running.Start(ctx); err != nil {
					n.t.Errorf("starting kube-scheduler: %v", err)
					return
				}
				last = data
			}
			select {
			case <-ctx.Done():
			case <-ticker.C:
			}
		}
		_ = running.Kill()
	})
}

// TestKubeadm gives a real kube-scheduler the configuration as an administrator does, one that it can't read, and takes
// it away again.
func TestKubeadm(t *testing.T) {
	c := controlplane.StartForTest(t, controlplane.Options{WithoutScheduler: true})
	root := repository(t)
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "manifests"), 0o700))
	kubeconfig, err := c.Kubeconfig("system:kube-scheduler")
	must(t, err)
	port := controlplane.ReservePortForTest(t)
	shipped, err := os.ReadFile(filepath.Join(root, "pkg", "kubeadm", "testdata", "kubeadm.yaml"))
	must(t, err)
	before := strings.NewReplacer(
		"/etc/kubernetes/scheduler.conf", kubeconfig,
		"--leader-elect=true", "--leader-elect=true\n    - --secure-port="+port.String(),
	).Replace(string(shipped))
	node := &controlPlaneNode{
		t: t, manifest: filepath.Join(dir, "manifests", "kube-scheduler.yaml"),
		binary: filepath.Join(controlplane.KubeDir(root), "kube-scheduler"), log: filepath.Join(c.Dir, "logs", "kube-scheduler.log"),
	}
	must(t, os.WriteFile(node.manifest, []byte(before), 0o600))
	node.start()
	t.Cleanup(func() {
		node.stop()
		node.done.Wait()
	})

	kubeadm := func(args ...string) (string, error) {
		out, err := exec.Command(filepath.Join(root, "bin", "gpushare-kubeadm"), append(args,
			"--manifest="+node.manifest, "--folder="+filepath.Join(dir, "gpushare"), "--timeout=15s", "--settle=2s")...).CombinedOutput()
		t.Logf("gpushare-kubeadm %s:\n%s", args[0], out)
		return string(out), err
	}
	manifest := func() string {
		data, err := os.ReadFile(node.manifest)
		must(t, err)
		return string(data)
	}

	_, err = kubeadm("install", "--config="+filepath.Join(root, "config", "scheduler-config.yaml"))
	must(t, err)
	installed := manifest()
	// Nobody answers where the configuration leads to: what kube-scheduler says of that shows that it asks.
	must(t, c.CreateNodes(t.Context(), controlplane.Node{Name: "gpu-1", Unit: gpu.GiB, Cards: controlplane.EqualCards(1, 16)}))
	_, err = c.Client.CoreV1().Pods(metav1.NamespaceDefault).Create(t.Context(), gpuPod("asks", "", "1"), metav1.CreateOptions{})
	must(t, err)
	awaitEvent(t, c, "asks", "/gpushare-scheduler/filter")

	t.Run("a configuration that kube-scheduler refuses is rolled back", func(t *testing.T) {
		good, err := os.ReadFile(filepath.Join(root, "config", "scheduler-config.yaml"))
		must(t, err)
		broken := filepath.Join(dir, "broken.yaml")
		must(t, os.WriteFile(broken, []byte(strings.Replace(string(good), "filterVerb:", "filterVerbs:", 1)), 0o600))
		out, err := kubeadm("install", "--config="+broken)
		if err == nil || !strings.Contains(out, "kube-scheduler runs as before") {
			t.Errorf("got %v: %s", err, out)
		}
		if manifest() != installed {
			t.Error("the static pod isn't as it was")
		}
	})

	_, err = kubeadm("undo")
	must(t, err)
	if manifest() != before {
		t.Errorf("undone it is\n%s", manifest())
	}
	if _, err := os.Stat(filepath.Join(dir, "gpushare")); !os.IsNotExist(err) {
		t.Errorf("the folder is left: %v", err)
	}
}

func awaitEvent(t *testing.T, c *controlplane.ControlPlane, pod, text string) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		events, err := c.Client.CoreV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{})
		must(t, err)
		var said []string
		for _, event := range events.Items {
			if event.InvolvedObject.Name == pod && strings.Contains(event.Message, text) {
				return
			}
			said = append(said, event.Message)
		}
		if time.Now().After(deadline) {
			t.Fatalf("no Event of pod %s says %q, but %q", pod, text, said)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
