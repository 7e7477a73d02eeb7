package install

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/pages"
)

// controlPlaneNode runs commands in a mount namespace in which $dir/kubernetes is /etc/kubernetes. $dir/home is the
// administrator's home.
type controlPlaneNode struct {
	t   *testing.T
	dir string
}

// startControlPlaneNode returns a node with the kubeconfig files that kubeadm creates.
func startControlPlaneNode(t *testing.T, c *controlplane.ControlPlane) controlPlaneNode {
	t.Helper()
	n := controlPlaneNode{t: t, dir: t.TempDir()}
	for _, folder := range []string{"etc/kubernetes", "kubernetes", "home/.kube"} {
		must(t, os.MkdirAll(filepath.Join(n.dir, folder), 0o755))
	}
	command := n.command("true")
	if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
		t.Skipf("no mount namespace can be made here: %v: %s", err, out)
	}
	n.copy(c.KubeconfigPath, "home/.kube/config", "kubernetes/admin.conf")
	for file, user := range map[string]string{"scheduler.conf": "system:kube-scheduler", "kubelet.conf": "system:node:" + node} {
		path, err := c.Kubeconfig(user)
		must(t, err)
		n.copy(path, "kubernetes/"+file)
	}
	return n
}

// command returns the command line that runs a program on the node.
func (n controlPlaneNode) command(args ...string) []string {
	const mounts = `mount -t overlay overlay -o "lowerdir=$1/etc:/etc" /etc; mount --bind "$1/kubernetes" /etc/kubernetes
		cd "$1/home"; shift; exec "$@"`
	return append([]string{"unshare", "--mount", "--map-root-user", "sh", "-ec", mounts, "sh", n.dir}, args...)
}

// run runs commands on the node and returns their output.
func (n controlPlaneNode) run(commands string) string {
	n.t.Helper()
	kubectl, err := kubectlPath()
	must(n.t, err)
	args := n.command("bash", "-euo", "pipefail", "-c", commands)
	command := exec.CommandContext(n.t.Context(), args[0], args[1:]...)
	// kubeadm is always the pinned version, even if the control plane has another version.
	tools := filepath.Join(controlplane.Repository(n.t), "bin", "kube") + ":" + filepath.Dir(kubectl)
	command.Env = []string{"HOME=" + n.dir + "/home", "PATH=" + tools + ":" + os.Getenv("PATH")}
	out, err := command.CombinedOutput()
	if err != nil {
		n.t.Fatalf("%s\n%v: %s", commands, err, out)
	}
	return string(out)
}

func (n controlPlaneNode) copy(path string, targets ...string) {
	n.t.Helper()
	data, err := os.ReadFile(path)
	must(n.t, err)
	for _, target := range targets {
		must(n.t, os.WriteFile(filepath.Join(n.dir, target), data, 0o600))
	}
}

// manifest returns a component's manifest, as text and as a pod.
func (n controlPlaneNode) manifest(component string) (text string, pod *corev1.Pod) {
	n.t.Helper()
	data, err := os.ReadFile(filepath.Join(n.dir, "kubernetes/manifests", component+".yaml"))
	must(n.t, err)
	must(n.t, yaml.UnmarshalStrict(data, &pod))
	return string(data), pod
}

// TestKubeadm runs the commands of docs/install.md with the real kubeadm: install, restore, upload, upgrade, undo.
func TestKubeadm(t *testing.T) {
	t.Parallel()
	page, err := pages.ReadKubeadm()
	must(t, err)
	c := framework.StartForTest(t, framework.Options{Bare: true, ControlPlane: controlplane.Options{WithoutScheduler: true}})
	ns := c.DefaultNamespace(t)
	ns.AddNodes(framework.MakeNode(node).Unit(gpu.GiB).Cards(1, 16))
	n := startControlPlaneNode(t, c.ControlPlane)
	n.run(`printf '%s\n' 'apiVersion: kubeadm.k8s.io/v1beta4' 'kind: ClusterConfiguration' "kubernetesVersion: $(kubeadm version -o short)" > cluster.yaml
		kubeadm init phase control-plane all --config cluster.yaml
		kubeadm init phase upload-config kubeadm --config cluster.yaml --kubeconfig ~/.kube/config`)
	n.copy(filepath.Join(controlplane.Repository(t), "config", "scheduler-config.yaml"), "home/scheduler-config.yaml")
	const scheduler = "kube-scheduler"
	before, _ := n.manifest(scheduler)
	// kubeadm reads the API server's address from this pod.
	_, pod := n.manifest("kube-apiserver")
	pod.Spec.NodeName = node
	_, err = c.Client.CoreV1().Pods(pod.Namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	must(t, err)

	// As Alibaba's guide edits it by hand (docs/migration.md).
	const theirs = "--config=/etc/kubernetes/scheduler-policy-config.yaml"
	n.run("sed -i 's|^    - kube-scheduler$|&\\n    - " + theirs + "|' /etc/kubernetes/manifests/kube-scheduler.yaml")
	if diff := n.run("kubeadm upgrade diff v1.99.0"); !strings.Contains(diff, "\n-    - "+theirs) {
		t.Errorf("an upgrade that removes what was edited by hand shows:\n%s", diff)
	}
	n.run(page.Install)
	if got, _ := n.manifest(scheduler); strings.Contains(got, theirs) {
		t.Errorf("after the installation the manifest is\n%s", got)
	}
	n.startScheduler(c.ControlPlane)
	// No extender runs. The Event shows that kube-scheduler calls it.
	ns.Create(ns.Pod("pod", 1))
	ns.WaitEvent("pod", "/gpushare-scheduler/filter")

	n.run(page.Restore)
	if got, _ := n.manifest(scheduler); got != before {
		t.Errorf("restored, the manifest is\n%s", got)
	}

	n.run(page.Install + page.Upload)
	diff := n.run("kubeadm upgrade diff v1.99.0")
	if entry := regexp.MustCompile("(?m)^[-+].*gpushare"); entry.MatchString(diff) || !strings.Contains(diff, "kube-scheduler:v1.99.0") {
		t.Errorf("an upgrade changes:\n%s", diff)
	}

	n.run(page.Undo + page.Restore) // The second command shows what the cluster keeps.
	if got, _ := n.manifest(scheduler); got != before {
		t.Errorf("undone, the manifest is\n%s", got)
	}
	if _, err := os.Stat(filepath.Join(n.dir, "kubernetes/gpushare")); !os.IsNotExist(err) {
		t.Errorf("undone, the folder is left: %v", err)
	}
}

// startScheduler runs kube-scheduler as its manifest specifies until the test ends.
func (n controlPlaneNode) startScheduler(c *controlplane.ControlPlane) {
	n.t.Helper()
	_, pod := n.manifest("kube-scheduler")
	program := filepath.Join(controlplane.KubeDir(controlplane.Repository(n.t)), "kube-scheduler")
	port := "--secure-port=" + controlplane.ReservePortForTest(n.t).String()
	args := n.command(append([]string{program, port}, pod.Spec.Containers[0].Command[1:]...)...)
	unshare, err := exec.LookPath(args[0])
	must(n.t, err)
	controlplane.RunForTest(n.t, &controlplane.Process{
		Name: "kube-scheduler", Path: unshare, Args: args[1:], LogPath: filepath.Join(c.Dir, "logs", "kube-scheduler.log"),
	})
}
