package install

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

const (
	namespace = metav1.NamespaceSystem
	ours      = "app.kubernetes.io/name=gpushare"
)

const node = "gpu-1"

var must = check.Must

// cluster is a real control plane, which creates the pods of the installed objects, and one GPU node without a plugin.
type cluster struct {
	*framework.Cluster
	*framework.Node
	t    *testing.T
	root string
	helm helm
	// plugin is the process that runPlugin has started.
	plugin *controlplane.Process
	// logs holds the log files of the project's programs.
	logs []string
}

// start starts everything except the project's programs. The scheduler runs without an extender until giveToScheduler. The test runs beside
// others, since it waits for most of its time.
func start(t *testing.T) *cluster {
	t.Helper()
	t.Parallel()
	o := framework.Options{Bare: true, ControlPlane: controlplane.Options{ControllerManager: true}}
	c := &cluster{Cluster: framework.StartForTest(t, o), t: t, root: controlplane.Repository(t)}
	c.helm = newHelm(t, c.KubeconfigPath)
	c.Node = c.AddNodeForTest(t, framework.NodeSpec{Name: node, Cards: []uint64{16 << 10, 16 << 10}, WithoutPlugin: true})
	return c
}

func (c *cluster) until(what string, condition func(ctx context.Context) (bool, error)) {
	c.t.Helper()
	framework.Eventually(c.t, what, func(ctx context.Context) error {
		done, err := condition(ctx)
		if err == nil && !done {
			err = errors.New("not yet")
		}
		return err
	})
}

// pod waits for a pod of the component that has a node. The real controllers create the pod, and the real scheduler binds it.
func (c *cluster) pod(component string) (pod *corev1.Pod) {
	c.t.Helper()
	selector := ours + ",app.kubernetes.io/component=" + component
	c.until("there is a pod of "+component, func(ctx context.Context) (bool, error) {
		list, err := c.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
		if err != nil {
			return false, err
		}
		for i := range list.Items {
			if p := &list.Items[i]; p.Spec.NodeName != "" && p.DeletionTimestamp == nil {
				pod = p
				return true, nil
			}
		}
		return false, nil
	})
	return pod
}

// process returns a process that runs a pod's container with the arguments of the pod's spec. places maps paths and addresses
// in the container to those outside. Everything else is set like the kubelet sets it.
func (c *cluster) process(pod *corev1.Pod, container, binary string, places map[string]string, extra ...string) *controlplane.Process {
	c.t.Helper()
	var found *corev1.Container
	for i := range pod.Spec.Containers {
		if pod.Spec.Containers[i].Name == container {
			found = &pod.Spec.Containers[i]
		}
	}
	if found == nil {
		c.t.Fatalf("pod %s has no container %s", pod.Name, container)
	}
	environment := map[string]string{"POD_IP": "192.0.2.1", "NODE_NAME": pod.Spec.NodeName}
	args := found.Args
	if len(found.Command) > 0 {
		args = append(append([]string{}, found.Command[1:]...), args...)
	}
	var out []string
	used := map[string]bool{}
	for _, arg := range args {
		for name, value := range environment {
			arg = strings.ReplaceAll(arg, "$("+name+")", value)
		}
		flag, value, _ := strings.Cut(arg, "=")
		for from, to := range places {
			if rest, ok := strings.CutPrefix(value, from); ok {
				arg = flag + "=" + to + rest
				used[from] = true
				break
			}
		}
		out = append(out, arg)
	}
	for from := range places {
		if !used[from] {
			c.t.Errorf("no argument of %s names %s: %q", container, from, args)
		}
	}
	log := filepath.Join(c.Dir, "logs", pod.Name+"-"+container+".log")
	c.logs = append(c.logs, log)
	return &controlplane.Process{Name: container, Path: binary, Args: append(out, extra...), LogPath: log}
}

// account writes a kubeconfig that replaces the pod's files in /var/run/secrets.
func (c *cluster) account(pod *corev1.Pod) string {
	c.t.Helper()
	path, err := c.PodKubeconfig(c.t.Context(), pod)
	must(c.t, err)
	return path
}

// clientOf returns a client with the rights of a kubeconfig.
func (c *cluster) clientOf(kubeconfig string) kubernetes.Interface {
	c.t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	must(c.t, err)
	client, err := kubernetes.NewForConfig(config)
	must(c.t, err)
	return client
}

// runPlugin runs the device plugin of the DaemonSet's pod, and returns the pod.
func (c *cluster) runPlugin() *corev1.Pod {
	c.t.Helper()
	pod := c.pod("device-plugin")
	port := controlplane.ReservePortForTest(c.t)
	plugin := c.process(pod, "device-plugin", c.Binary("gpushare-device-plugin"),
		map[string]string{"/var/lib/kubelet/": filepath.Dir(c.Kubelet.DevicePluginDir()) + "/", ":12346": port.Address(), "127.0.0.1:12347": "127.0.0.1:0"},
		"--kubeconfig="+c.account(pod), "--nvml-library="+c.Binary("fake-nvml/libnvidia-ml.so.1"))
	plugin.Env = c.Machine.Env()
	plugin.Ready = controlplane.HTTPReady(port.URL("http") + "/readyz")
	controlplane.RunForTest(c.t, plugin)
	c.plugin = plugin
	return pod
}

// volume writes the content of a Secret like a mounted volume.
func (c *cluster) volume(secret string) string {
	c.t.Helper()
	object, err := c.Client.CoreV1().Secrets(namespace).Get(c.t.Context(), secret, metav1.GetOptions{})
	must(c.t, err)
	dir := filepath.Join(c.Dir, "volumes", secret)
	must(c.t, os.MkdirAll(dir, 0o700))
	for name, data := range object.Data {
		must(c.t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
	}
	return dir
}

// gpuPod returns a pod that requests GPU memory.
func gpuPod(name, scheduler string, memory int64) *corev1.Pod {
	return framework.MakePod(name).Namespace(metav1.NamespaceDefault).Scheduler(scheduler).GPUMem(memory).Obj()
}

// mustGetACard creates the pod and waits until its container runs with the card in the pod's annotation.
func (c *cluster) mustGetACard(pod *corev1.Pod) {
	c.t.Helper()
	pod, err := c.Client.CoreV1().Pods(pod.Namespace).Create(c.t.Context(), pod, metav1.CreateOptions{})
	must(c.t, err)
	c.until("pod "+pod.Name+" is assigned", func(ctx context.Context) (bool, error) {
		live, err := c.Client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		env := c.Kubelet.Env(pod.UID, "main")
		if live.Annotations[protocol.AnnotationAssigned] != "true" || env == nil {
			return false, fmt.Errorf("annotations %v, environment %v", live.Annotations, env)
		}
		if card := live.Annotations[protocol.AnnotationIndex]; env[protocol.AnnotationIndex] != card {
			return false, fmt.Errorf("its annotation has card %s, its container has %s", card, env[protocol.AnnotationIndex])
		}
		return true, nil
	})
}

// mustHaveForbiddenNothing fails the test if the logs of the project's programs contain a forbidden request.
func (c *cluster) mustHaveForbiddenNothing() {
	c.t.Helper()
	for _, log := range c.logs {
		data, err := os.ReadFile(log)
		must(c.t, err)
		for line := range strings.Lines(string(data)) {
			if strings.Contains(strings.ToLower(line), "forbidden") {
				c.t.Errorf("%s: %s", filepath.Base(log), line)
			}
		}
	}
}

// installed lists the project's objects of every kind on the API server.
func (c *cluster) installed(ctx context.Context) ([]string, error) {
	return c.Find(ctx, func(object metav1.Object) bool {
		return object.GetLabels()["app.kubernetes.io/name"] == "gpushare" || strings.Contains(object.GetName(), "gpushare")
	})
}

// mustLeaveNothing uninstalls the project and waits until the API server has no object of it.
func (c *cluster) mustLeaveNothing() {
	c.t.Helper()
	c.helm.run(c.t, "uninstall", "gpushare", "--namespace="+namespace)
	c.until("nothing is left", func(ctx context.Context) (bool, error) {
		found, err := c.installed(ctx)
		if err == nil && len(found) > 0 {
			err = fmt.Errorf("%d objects are left: %s", len(found), strings.Join(found, " "))
		}
		return err == nil, err
	})
}
