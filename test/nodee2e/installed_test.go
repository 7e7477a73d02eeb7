package nodee2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/fakenvml"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/pages"
)

const (
	// page is the documentation page with the commands that the test runs.
	page           = "docs/install.md"
	schedulerImage = "gpushare.test/kube-scheduler"
	// adminHome is the administrator's working folder on the control-plane node.
	adminHome = "/var/tmp"
)

// TestInstalled follows an administrator's steps on two real nodes, one with cards and one without: images, chart,
// kube-scheduler's static pod, a sample, upgrade and rollback under load, a drain of the leader's node under load, the loss of the
// leader's network under load, uninstall. The commands are read from docs/install.md and docs/operations.md; the test adds only names of
// images, files and nodes, and --wait.
//
// These programs are real: etcd, kube-apiserver, kube-controller-manager, kubelet, kube-proxy, containerd, runc and kubeadm.
// kube-scheduler is a static pod made by kubeadm. The extenders and the device plugin are pods of the project's own images.
// These parts are replaced: the driver library, NVIDIA's container runtime that mounts it (ociruntime), and the image of
// kube-scheduler (with the same binary).
func TestInstalled(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	s := startInstallation(t)
	s.testInstall(t)
	if os.Getenv(longEnv) != "" {
		t.Run("the kubelet's name of the resource", s.testResourceRemoved)
	}
}

// installation is a cluster with two nodes. Nothing of the project is installed at first.
type installation struct {
	*cluster
	// worker is the second node. It has no cards.
	worker *node
	t      *testing.T
	root   string
	shell  adminShell
}

func startInstallation(t *testing.T) *installation {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*framework.Patience) // includes the build of programs and images
	defer cancel()
	check.Must(t, startNetwork(ctx))
	s := &installation{t: t, cluster: &cluster{}}
	s.Cluster = framework.StartForTest(t, framework.Options{Bare: true, ControlPlane: controlplane.Options{
		WithoutScheduler: true, ControllerManager: true,
		ExtraArgs: map[string][]string{"kube-apiserver": {
			"--bind-address=0.0.0.0", "--advertise-address=" + nodeAddress, "--endpoint-reconciler-type=lease",
			"--kubelet-preferred-address-types=InternalIP", // The nodes' names don't resolve.
		}},
	}})
	var err error
	s.root = controlplane.Repository(t)
	s.shell = adminShell{home: t.TempDir(), root: s.root, kubeconfig: s.KubeconfigPath}

	s.node = &node{
		name: "real", cards: []uint64{cardMiB, cardMiB}, cluster: s.Cluster, unlabelled: true, tags: secondTags,
		network: podNetwork(16, 127), kubeletArgs: []string{
			"--node-ip=" + nodeAddress,
			// For port-forward. Nothing else is in this network.
			"--enable-server=true", "--address=" + nodeAddress, "--anonymous-auth=true",
		},
	}
	s.worker = &node{
		name: "worker", cluster: s.Cluster, unlabelled: true, tags: secondTags,
		network: podNetwork(128, 254), kubeletArgs: []string{"--node-ip=" + workerAddress},
	}
	check.Must(t, s.startNode(ctx, nodeDir(t, s.node)))
	proxy, err := s.node.startProxy(ctx)
	check.Must(t, err)
	t.Cleanup(func() {
		check.Must(t, proxy.Kill())
		if t.Failed() {
			t.Logf("the end of %s:\n%s", proxy.LogPath, proxy.Tail(15))
		}
	})
	s.worker.images = s.node.images
	check.Must(t, s.worker.startMachine(ctx, nodeDir(t, s.worker)))
	check.Must(t, s.worker.startContainerd(ctx))
	check.Must(t, s.worker.startKubelet(ctx))

	s.watch(t)
	return s
}

// startNode starts the node with cards, without kube-proxy and the project's programs.
func (s *installation) startNode(ctx context.Context, dir string) (err error) {
	n := s.node
	n.driver = fakenvml.NewMachine(filepath.Join(dir, "var", strings.TrimPrefix(driverDir, "/var/")))
	for _, folder := range []string{"etc/kubernetes", "var/lib/kubernetes"} {
		if err := os.MkdirAll(filepath.Join(dir, folder), 0o755); err != nil {
			return err
		}
	}
	if err := n.startMachine(ctx, dir); err != nil {
		return err
	}
	library, err := os.ReadFile(s.Binary("fake-nvml/libnvidia-ml.so.1"))
	if err != nil {
		return err
	}
	kubeconfig, err := s.Kubeconfig("system:kube-scheduler")
	if err != nil {
		return err
	}
	account, err := os.ReadFile(kubeconfig)
	if err != nil {
		return err
	}
	admin, err := os.ReadFile(s.KubeconfigPath)
	if err != nil {
		return err
	}
	err = writeFiles(map[string]file{
		n.outside("lib/fake-driver/libnvidia-ml.so.1"): {mode: 0o755, content: library},
		n.outside("lib/fake-driver/events"):            {mode: 0o644},
		n.outside("lib/kubernetes/scheduler.conf"):     {mode: 0o600, content: account},
		n.outside("tmp/.kube/config"):                  {mode: 0o600, content: admin},
	})
	if err != nil {
		return err
	}
	if err := n.setCards(); err != nil {
		return err
	}
	if n.images, err = s.images(ctx, dir); err != nil {
		return err
	}
	if err := n.startContainerd(ctx); err != nil {
		return err
	}
	if err := os.Symlink("/var/lib/static-pods", n.outside("lib/kubernetes/manifests")); err != nil {
		return err
	}
	s.onControlPlane(s.t, fmt.Sprintf(`
		printf '%%s\n' 'apiVersion: kubeadm.k8s.io/v1beta4' 'kind: ClusterConfiguration' 'kubernetesVersion: %s' 'imageRepository: %s' > cluster.yaml
		kubeadm init phase control-plane scheduler --config cluster.yaml
		kubeadm init phase upload-config kubeadm --config cluster.yaml --kubeconfig ~/.kube/config`, s.version(), path.Dir(schedulerImage)))
	return n.startKubelet(ctx)
}

// version returns the cluster's version as the chart sees it.
func (s *installation) version() string {
	info, err := s.Client.Discovery().ServerVersion()
	check.Must(s.t, err)
	return info.GitVersion
}

// secondTags are the names to which the chart is upgraded.
var secondTags = map[string]string{
	"gpushare.test/gpushare-extender:one":      "gpushare.test/gpushare-extender:two",
	"gpushare.test/gpushare-device-plugin:one": "gpushare.test/gpushare-device-plugin:two",
}

// images builds the project's images with the tag "one", and the image of kube-scheduler. A node adds the tag "two".
func (s *installation) images(ctx context.Context, dir string) (archives []string, err error) {
	out := filepath.Join(dir, "images")
	command := exec.CommandContext(ctx, filepath.Join(s.root, "hack", "images", "build.sh"))
	command.Env = append(os.Environ(), "VERSION=one", "COMMIT=test", "REGISTRY=gpushare.test", "OUT="+out)
	if out, err := command.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("building the images: %w: %s", err, out)
	}
	for _, image := range []string{"extender", "device-plugin", "device-plugin-simulated"} {
		archives = append(archives, filepath.Join(out, image+"-"+runtime.GOARCH+".tar"))
	}
	binary, err := os.ReadFile(s.Binary("kube/kube-scheduler"))
	if err != nil {
		return nil, err
	}
	archive := filepath.Join(dir, "images", "kube-scheduler.tar")
	return append(archives, archive), writeImages(archive, file{"usr/local/bin/kube-scheduler", 0o755, binary},
		image{schedulerImage + ":" + s.version(), "scheduler.json", []string{"kube-scheduler"}})
}

// testInstall installs, uses, upgrades, rolls back and uninstalls the project. TestTrial does so with the second scheduler.
func (s *installation) testInstall(t *testing.T) {
	filesBefore := s.hostFiles()
	passed := t.Run("Install", func(t *testing.T) {
		kubeadm, err := pages.ReadKubeadm()
		check.Must(t, err)
		manifest, err := os.ReadFile(s.node.outside("lib/static-pods/kube-scheduler.yaml"))
		check.Must(t, err)
		_, err = s.Client.NodeV1().RuntimeClasses().Create(t.Context(),
			&nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "nvidia"}, Handler: "nvidia"}, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
		const waitFlags = " --wait --timeout=2m"
		const values = "images.extender.repository=gpushare.test/gpushare-extender,images.extender.tag=one," +
			"images.devicePlugin.repository=gpushare.test/gpushare-device-plugin,images.devicePlugin.tag=one," +
			"devicePlugin.runtimeClassName=nvidia,devicePlugin.hostPID=true"
		s.shell.run(t, "", command(t, "Install", 0, "helm install ")+waitFlags+" --set="+values)
		s.shell.run(t, "", strings.Replace(command(t, "Install", 1, "kubectl label "), "NODE", s.node.name, 1))

		s.shell.run(t, s.node.outside("tmp"), block(t, "Tell kube-scheduler", 0))
		s.onControlPlane(t, kubeadm.Install)
		s.awaitScheduler(t, true, 0)
		s.onControlPlane(t, kubeadm.Upload+kubeadm.Logs)
		check.Must(t, s.node.awaitCards(t.Context()))

		s.deploySample(t)
		s.checkUsage(t)
		load := s.startLoad(t, "load")
		s.shell.run(t, "", command(t, "Upgrade and roll back", 0, "helm upgrade ")+waitFlags+" --set=images.extender.tag=two,images.devicePlugin.tag=two")
		s.waitImages(t, "two")
		s.expectSeparateNodes(t)
		s.shell.run(t, "", command(t, "Upgrade and roll back", 0, "helm rollback ")+waitFlags)
		s.waitImages(t, "one")
		s.expectSeparateNodes(t)
		for _, pod := range load(t) {
			if pod.Status.Reason != "UnexpectedAdmissionError" || !pluginAway.MatchString(pod.Status.Message) {
				t.Errorf("pod %s failed, %s: %s", pod.Name, pod.Status.Reason, pod.Status.Message)
			}
		}

		s.onControlPlane(t, kubeadm.Restart)
		s.awaitScheduler(t, true, 1)
		s.drainLeader(t)
		s.cutOffLeader(t)
		s.onControlPlane(t, kubeadm.Undo)
		s.awaitScheduler(t, false, 0)
		now, err := os.ReadFile(s.node.outside("lib/static-pods/kube-scheduler.yaml"))
		check.Must(t, err)
		if !bytes.Equal(now, manifest) {
			t.Errorf("the static pod isn't as it was:\n%s", now)
		}
		s.uninstall(t)
		s.waitNothingLeft(t, filesBefore)
	})
	if !passed {
		t.FailNow()
	}
}

// block returns the block of commands with this number under a heading of the page.
func block(t *testing.T, heading string, number int) string {
	t.Helper()
	blocks, err := pages.Commands(page, heading)
	check.Must(t, err)
	if number >= len(blocks) {
		t.Fatalf("%s shows %d blocks of commands under %q", page, len(blocks), heading)
	}
	return blocks[number]
}

// command returns the only line of a block that begins with prefix, without its comment.
func command(t *testing.T, heading string, number int, prefix string) string {
	t.Helper()
	for line := range strings.Lines(block(t, heading, number)) {
		if strings.HasPrefix(line, prefix) {
			line, _, _ = strings.Cut(line, " #")
			return strings.TrimSpace(line)
		}
	}
	t.Fatalf("%s shows no %q under %q", page, prefix, heading)
	return ""
}

// onControlPlane runs commands of the page as root on the node with cards.
func (s *installation) onControlPlane(t *testing.T, commands string) {
	t.Helper()
	prepare := fmt.Sprintf("export HOME=%s PATH=%s:%s:$PATH; cd\n", adminHome, filepath.Dir(s.Binary("kube/kubeadm")), os.Getenv(toolsEnv))
	check.Must(t, s.node.machine.run(t.Context(), "bash", "-euo", "pipefail", "-c", prepare+commands))
}

// awaitScheduler waits until kube-scheduler runs, with or without the extender's configuration, restarted at least this often. A
// static pod that gets its old manifest back has its old UID, and the kubelet may count the earlier container as a restart.
func (s *installation) awaitScheduler(t *testing.T, extender bool, restarts int32) {
	t.Helper()
	framework.Eventually(t, fmt.Sprintf("kube-scheduler runs, with the extender: %t, restarted at least %d times", extender, restarts), func(ctx context.Context) error {
		pod, err := s.Client.CoreV1().Pods("kube-system").Get(ctx, "kube-scheduler-"+s.node.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		configured := slices.Contains(pod.Spec.Containers[0].Command, "--config=/etc/kubernetes/gpushare/scheduler-config.yaml")
		running := slices.ContainsFunc(pod.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool {
			return c.State.Running != nil && c.RestartCount >= restarts
		})
		if configured != extender || !running {
			return fmt.Errorf("configured %t, %+v", configured, pod.Status.ContainerStatuses)
		}
		return nil
	})
}

// waitImages waits until all pods of the project use the images with this tag.
func (s *installation) waitImages(t *testing.T, tag string) {
	t.Helper()
	framework.Eventually(t, "all pods have images with the tag "+tag, func(ctx context.Context) error {
		pods, err := s.Client.CoreV1().Pods("kube-system").List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=gpushare"})
		if err != nil {
			return err
		}
		count := 0
		for i := range pods.Items {
			for _, container := range pods.Items[i].Spec.Containers {
				if strings.HasPrefix(container.Image, "gpushare.test/gpushare-") {
					count++
					if !strings.HasSuffix(container.Image, ":"+tag) {
						return fmt.Errorf("pod %s has %s", pods.Items[i].Name, container.Image)
					}
				}
			}
		}
		if count < 2 {
			return fmt.Errorf("%d containers exist", count)
		}
		return nil
	})
}

// deploySample deploys the first sample with an image that exists on the node. It waits until the container has the card
// that the pod's annotation names.
func (s *installation) deploySample(t *testing.T) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(s.root, "deploy", "samples", "binpack-1.yaml"))
	check.Must(t, err)
	var sample appsv1.Deployment
	check.Must(t, yaml.UnmarshalStrict(text, &sample))
	recordEnv(&sample.Spec.Template.Spec)
	sample.Spec.Replicas = ptr.To[int32](3)
	deployments := s.Client.AppsV1().Deployments("default")
	_, err = deployments.Create(t.Context(), &sample, metav1.CreateOptions{})
	check.Must(t, err)
	s.waitConsistent(t, 3)
}

// waitConsistent waits until at least the given number of pods run, and annotations and environments agree.
func (s *installation) waitConsistent(t *testing.T, least int) {
	t.Helper()
	framework.Eventually(t, "the containers have the cards of the annotations", func(ctx context.Context) error {
		pods, err := s.Client.CoreV1().Pods("default").List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		now := state{pods: slices.DeleteFunc(pods.Items, func(pod corev1.Pod) bool { return ended(&pod) })}
		if now.running, err = s.node.running(); err != nil {
			return err
		}
		now.ledger, _, _ = annotated(now.pods) // Only the leader has a ledger.
		if found := now.inconsistencies(s.node.cards); len(found) > 0 || len(now.pods) < least {
			return fmt.Errorf("%d pods, want %d: %s", len(now.pods), least, strings.Join(found, "\n"))
		}
		return nil
	})
}

// startLoad creates and deletes pods until stop is called. stop checks that no pod ever had a wrong card and returns the
// pods that failed.
func (s *installation) startLoad(t *testing.T, name string) (stop func(*testing.T) []*corev1.Pod) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	starts, err := s.node.starts()
	check.Must(t, err)
	_, startedBefore := s.watcher.found().wrongCards(starts)
	done := make(chan error, 1)
	pods := s.Client.CoreV1().Pods("default")
	go func() {
		done <- wait.PollUntilContextCancel(ctx, 500*time.Millisecond, true, func() wait.ConditionWithContextFunc {
			created := 0
			return func(context.Context) (bool, error) {
				pod := framework.MakePod(fmt.Sprintf("%s-%03d", name, created)).Label("load", name).GPUMem(int64(1 + created%4)).GracePeriod(1)
				recordEnv(&pod.Spec)
				_, err := pods.Create(context.Background(), pod.Obj(), metav1.CreateOptions{})
				if err == nil && created >= 6 {
					err = pods.Delete(context.Background(), fmt.Sprintf("%s-%03d", name, created-6), metav1.DeleteOptions{})
				}
				created++
				return false, err
			}
		}())
	}()
	t.Cleanup(cancel)
	return func(t *testing.T) (failed []*corev1.Pod) {
		t.Helper()
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		s.waitConsistent(t, 3)
		starts, err := s.node.starts()
		check.Must(t, err)
		found := s.watcher.found()
		wrong, started := found.wrongCards(starts)
		for _, pod := range found.pods {
			// A deleted pod ends with an error of its own.
			deleted := pod.Status.Reason == "" && terminating(pod)
			if strings.HasPrefix(pod.Name, name+"-") && pod.Status.Phase == corev1.PodFailed && !deleted {
				failed = append(failed, pod)
			}
		}
		t.Logf("%d GPU containers started, %d pods failed, %d checks", started-startedBefore, len(failed), found.checks)
		for _, problem := range slices.Concat(wrong, found.overused) {
			t.Error(problem)
		}
		if started-startedBefore < 6 {
			t.Errorf("only %d GPU containers started", started-startedBefore)
		}
		check.Must(t, pods.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "load=" + name}))
		return failed
	}
}

// uninstall follows the documented steps after all GPU pods are gone.
func (s *installation) uninstall(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	check.Must(t, s.Client.AppsV1().Deployments("default").DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}))
	check.Must(t, s.Client.CoreV1().Pods("default").DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}))
	framework.Eventually(t, "the GPU pods are gone", func(ctx context.Context) error {
		pods, err := s.Client.CoreV1().Pods("default").List(ctx, metav1.ListOptions{})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("%d exist", len(pods.Items))
		}
		return err
	})
	s.shell.run(t, "", block(t, "Uninstall", 0))
}

// testResourceRemoved waits until the kubelet has dropped the plugin's resource, five minutes after the plugin ended. Then
// it runs the page's next commands and checks that the resource does not come back.
func (s *installation) testResourceRemoved(t *testing.T) {
	memory := func(ctx context.Context) (capacity string, found bool) {
		object, err := s.Client.CoreV1().Nodes().Get(ctx, s.node.name, metav1.GetOptions{})
		check.Must(t, err)
		quantity, found := object.Status.Capacity[protocol.ResourceMemory]
		_, allocatable := object.Status.Allocatable[protocol.ResourceMemory]
		return quantity.String(), found || allocatable
	}
	framework.Within(t, 7*time.Minute, "the kubelet has dropped the resource", func(ctx context.Context) error {
		// The page's loop, which ran just before, removes it for a moment.
		if capacity, found := memory(ctx); !found || capacity != "0" {
			return fmt.Errorf("the kubelet has %s of the resource", capacity)
		}
		return nil
	})
	_, loop, _ := strings.Cut(block(t, "Uninstall", 0), "for node in")
	s.shell.run(t, "", "for node in"+loop)
	// The kubelet writes a changed node status every second.
	for until := time.Now().Add(10 * time.Second); time.Now().Before(until); time.Sleep(time.Second) {
		if capacity, found := memory(t.Context()); found {
			t.Fatalf("the node has %s of the resource again", capacity)
		}
	}
}

// waitNothingLeft checks that nothing of the project is left: no object, no node status, no file on the node.
func (s *installation) waitNothingLeft(t *testing.T, filesBefore []string) {
	t.Helper()
	framework.Eventually(t, "nothing of the project is left", func(ctx context.Context) error {
		object, err := s.Client.CoreV1().Nodes().Get(ctx, s.node.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for name := range object.Annotations {
			if strings.Contains(name, "gpushare") {
				return fmt.Errorf("node annotation %s", name)
			}
		}
		if value, found := object.Labels[protocol.LabelShared]; found {
			return fmt.Errorf("the node still has the label %s=%s", protocol.LabelShared, value)
		}
		for _, list := range []corev1.ResourceList{object.Status.Capacity, object.Status.Allocatable} {
			for _, name := range []corev1.ResourceName{protocol.ResourceCount, protocol.ResourceCores} {
				if amount, found := list[name]; found {
					return fmt.Errorf("the node still has %s %s", amount.String(), name)
				}
			}
		}
		// The kubelet keeps the name of a resource that it has known, with an amount of 0.
		if memory := object.Status.Allocatable[protocol.ResourceMemory]; !memory.IsZero() {
			return fmt.Errorf("the node still has %s %s", memory.String(), protocol.ResourceMemory)
		}
		if files := s.hostFiles(); !slices.Equal(files, filesBefore) {
			return fmt.Errorf("files %v, before %v", files, filesBefore)
		}
		found, err := s.Find(ctx, func(object metav1.Object) bool {
			return strings.Contains(object.GetName(), "gpushare") || object.GetLabels()["app.kubernetes.io/name"] == "gpushare"
		})
		if err == nil && len(found) > 0 {
			err = fmt.Errorf("objects: %v", found)
		}
		return err
	})
}

// hostFiles lists the files in the folders of a node in which the project's programs may write.
func (s *installation) hostFiles() (files []string) {
	s.t.Helper()
	for _, dir := range []string{"var/lib/kubelet/device-plugins", "var/lib/static-pods", "var/lib/kubernetes", "var/run/cdi", "run/cdi", "etc/cdi"} {
		entries, err := os.ReadDir(s.node.machine.path(dir))
		if err != nil && !os.IsNotExist(err) {
			s.t.Fatal(err)
		}
		for _, entry := range entries {
			// The kubelet creates its own checkpoint at the first allocation.
			if entry.Name() != "kubelet_internal_checkpoint" {
				files = append(files, filepath.Join(dir, entry.Name()))
			}
		}
	}
	return files
}
