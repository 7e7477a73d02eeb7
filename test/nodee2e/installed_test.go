package nodee2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
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
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/fakenvml"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/pages"
)

const (
	// page is the documentation page with the commands that the test runs.
	page           = "docs/install.md"
	schedulerImage = "gpushare.test/kube-scheduler"
	// driverDir is the driver's folder on the node.
	driverDir = "/var/lib/fake-driver"
	// adminHome is the administrator's working folder on the control-plane node.
	adminHome = "/var/tmp"
)

// TestInstalled follows an administrator's steps on two real nodes, one with cards and one without: images, chart,
// kube-scheduler's static pod, a sample, upgrade and rollback under load, a drain of the leader's node under load, uninstall.
// It repeats all steps except the drain with the second scheduler. The commands are read from docs/install.md and
// docs/operations.md; the test adds only names of images, files and nodes, and --wait.
//
// These programs are real: etcd, kube-apiserver, kube-controller-manager, kubelet, kube-proxy, containerd, runc and kubeadm.
// kube-scheduler is a static pod made by kubeadm. The extenders and the device plugin are pods of the project's own images.
// These parts are replaced: the driver library, NVIDIA's container runtime that mounts it (nvidiaruntime), and the image of
// kube-scheduler (with the same binary).
func TestInstalled(t *testing.T) {
	if !inNetworkOfItsOwn(t) {
		return
	}
	s := startSite(t)
	filesBefore := s.hostFiles()

	s.installed(t, filesBefore, "Install", corev1.DefaultSchedulerName)
	s.installed(t, filesBefore, "A control plane that you can't touch", "gpushare-scheduler", "images.scheduler.repository="+schedulerImage)
	if os.Getenv(longEnv) != "" {
		t.Run("the kubelet's name of the resource", s.forgotten)
	}
}

// site is a cluster with two nodes. Nothing of the project is installed at first.
type site struct {
	*rig
	// worker is the second node. It has no cards.
	worker *node
	t      *testing.T
	root   string
	desk   desk
}

func startSite(t *testing.T) *site {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience) // includes the build of programs and images
	defer cancel()
	must(t, startNetwork(ctx))
	s := &site{t: t, rig: &rig{ended: map[string]bool{}}}
	s.bed = framework.StartForTest(t, framework.Options{Bare: true, ControlPlane: controlplane.Options{
		WithoutScheduler: true, ControllerManager: true,
		ExtraArgs: map[string][]string{"kube-apiserver": {
			"--bind-address=0.0.0.0", "--advertise-address=" + nodeAddress, "--endpoint-reconciler-type=lease",
		}},
	}})
	var err error
	s.root, err = controlplane.RepositoryRoot()
	must(t, err)
	s.desk = desk{home: t.TempDir(), root: s.root, kubeconfig: s.bed.KubeconfigPath}

	s.node = &node{
		name: "real", cards: []uint64{cardMiB, cardMiB}, bed: s.bed, unlabelled: true,
		network: podNetwork(16, 127), kubeletArgs: []string{"--node-ip=" + nodeAddress},
	}
	s.worker = &node{
		name: "worker", bed: s.bed, unlabelled: true,
		network: podNetwork(128, 254), kubeletArgs: []string{"--node-ip=" + workerAddress},
	}
	dir := s.folderOf(s.node)
	must(t, s.startNode(ctx, dir))
	proxy, err := s.node.startProxy(ctx)
	must(t, err)
	t.Cleanup(func() {
		must(t, proxy.Kill())
		if t.Failed() {
			t.Logf("the end of %s:\n%s", proxy.LogPath, proxy.Tail(15))
		}
	})
	workerDir := s.folderOf(s.worker)
	must(t, s.startWorker(ctx, workerDir))

	s.watcher, err = newWatcher(s.rig)
	must(t, err)
	watching, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); s.watcher.run(watching) }()
	t.Cleanup(func() { stop(); <-done })
	return s
}

// folderOf creates the folder of a node. The node is stopped when the test ends.
func (s *site) folderOf(n *node) string {
	s.t.Helper()
	dir, err := os.MkdirTemp("", "gpunode-")
	must(s.t, err)
	s.t.Cleanup(func() {
		if s.t.Failed() {
			for _, p := range n.processes() {
				s.t.Logf("the end of %s:\n%s", p.LogPath, p.Tail(15))
			}
			s.t.Logf("node %s left its logs in %s", n.name, dir)
		}
		if err := n.stop(); err != nil {
			s.t.Error(err)
		}
		if !s.t.Failed() {
			must(s.t, os.RemoveAll(dir))
		}
	})
	return dir
}

// startNode starts the node with cards, without kube-proxy and the project's programs.
func (s *site) startNode(ctx context.Context, dir string) (err error) {
	n := s.node
	n.driver = fakenvml.NewMachine(filepath.Join(dir, "var", strings.TrimPrefix(driverDir, "/var/")))
	for _, folder := range []string{"etc/kubernetes", "var/lib/kubernetes"} {
		if err := os.MkdirAll(filepath.Join(dir, folder), 0o755); err != nil {
			return err
		}
	}
	if n.machine, err = startMachine(ctx, dir); err != nil {
		return err
	}
	library, err := os.ReadFile(s.bed.Binary("fake-nvml/libnvidia-ml.so.1"))
	if err != nil {
		return err
	}
	kubeconfig, err := s.bed.Kubeconfig("system:kube-scheduler")
	if err != nil {
		return err
	}
	account, err := os.ReadFile(kubeconfig)
	if err != nil {
		return err
	}
	admin, err := os.ReadFile(s.bed.KubeconfigPath)
	if err != nil {
		return err
	}
	runtimeProgram := filepath.Join(dir, "nvidiaruntime")
	build := exec.CommandContext(ctx, "go", "build", "-o", runtimeProgram, "./test/nodee2e/nvidiaruntime")
	build.Dir = s.root
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("building the runtime: %w: %s", err, out)
	}
	wrapper := filepath.Join(dir, "nvidia-container-runtime")
	for path, file := range map[string]file{
		n.outside("lib/fake-driver/libnvidia-ml.so.1"): {mode: 0o755, content: library},
		n.outside("lib/fake-driver/events"):            {mode: 0o644},
		n.outside("lib/kubernetes/scheduler.conf"):     {mode: 0o600, content: account},
		n.outside("tmp/.kube/config"):                  {mode: 0o600, content: admin},
		wrapper:                                        {mode: 0o755, content: []byte("#!/bin/sh\nexec " + runtimeProgram + " " + driverDir + ` "$@"` + "\n")},
	} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, file.content, os.FileMode(file.mode)); err != nil {
			return err
		}
	}
	if err := n.setCards(); err != nil {
		return err
	}
	n.runtimes = `
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
    BinaryName = "` + wrapper + `"
`
	if n.images, err = s.images(ctx, dir); err != nil {
		return err
	}
	if n.port, err = controlplane.ReservePort(); err != nil {
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

// startWorker starts the node without cards. It uses the images of the other node, which must be started first.
func (s *site) startWorker(ctx context.Context, dir string) (err error) {
	n := s.worker
	n.images = s.node.images
	if n.machine, err = startMachine(ctx, dir); err != nil {
		return err
	}
	if n.port, err = controlplane.ReservePort(); err != nil {
		return err
	}
	if err := n.startContainerd(ctx); err != nil {
		return err
	}
	return n.startKubelet(ctx)
}

// version returns the cluster's version as the chart sees it.
func (s *site) version() string {
	info, err := s.bed.Client.Discovery().ServerVersion()
	must(s.t, err)
	return info.GitVersion
}

// images builds the project's images under two tags, and the image of kube-scheduler.
func (s *site) images(ctx context.Context, dir string) (archives []string, err error) {
	for _, tag := range []string{"one", "two"} {
		out := filepath.Join(dir, "images", tag)
		command := exec.CommandContext(ctx, filepath.Join(s.root, "hack", "images", "build.sh"))
		command.Env = append(os.Environ(), "VERSION="+tag, "COMMIT=test", "REGISTRY=gpushare.test", "OUT="+out)
		if out, err := command.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("building the images: %w: %s", err, out)
		}
		for _, image := range []string{"extender", "device-plugin"} {
			archives = append(archives, filepath.Join(out, image+"-"+runtime.GOARCH+".tar"))
		}
	}
	binary, err := os.ReadFile(s.bed.Binary("kube/kube-scheduler"))
	if err != nil {
		return nil, err
	}
	archive := filepath.Join(dir, "images", "kube-scheduler.tar")
	return append(archives, archive), writeImages(archive, file{"usr/local/bin/kube-scheduler", 0o755, binary},
		image{schedulerImage + ":" + s.version(), "scheduler.json", []string{"kube-scheduler"}})
}

// installed installs, uses, upgrades, rolls back and uninstalls the project in the mode that the page describes under this
// heading.
func (s *site) installed(t *testing.T, filesBefore []string, heading, scheduler string, values ...string) {
	passed := t.Run(heading, func(t *testing.T) {
		step := s.steps(t)
		kubeadm, err := pages.ReadKubeadm()
		must(t, err)
		manifest, err := os.ReadFile(s.node.outside("lib/static-pods/kube-scheduler.yaml"))
		must(t, err)
		_, err = s.bed.Client.NodeV1().RuntimeClasses().Create(t.Context(),
			&nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "nvidia"}, Handler: "nvidia"}, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
		values = append([]string{
			"images.extender.repository=gpushare.test/gpushare-extender", "images.extender.tag=one",
			"images.devicePlugin.repository=gpushare.test/gpushare-device-plugin", "images.devicePlugin.tag=one",
			"devicePlugin.runtimeClassName=nvidia",
		}, values...)
		const wait = " --wait --timeout=2m"
		s.desk.run(t, "", command(t, heading, 0, "helm install ")+wait+" --set="+strings.Join(values, ","))
		s.desk.run(t, "", strings.Replace(command(t, "Install", 1, "kubectl label "), "NODE", s.node.name, 1))
		step("helm install: all pods are ready")

		if scheduler == corev1.DefaultSchedulerName {
			s.desk.run(t, s.node.outside("tmp"), block(t, "Tell kube-scheduler", 0))
			s.onControlPlane(t, kubeadm.Install)
			s.awaitScheduler(t, true, 0)
			s.onControlPlane(t, kubeadm.Upload+kubeadm.Logs)
			step("kube-scheduler runs with the extender")
		}
		must(t, s.node.awaitCards(t.Context()))

		s.deploySample(t, scheduler)
		step("a sample Deployment has its card")
		load := s.startLoad(t, "load", scheduler)
		s.desk.run(t, "", command(t, "Upgrade and roll back", 0, "helm upgrade ")+wait+" --set=images.extender.tag=two,images.devicePlugin.tag=two")
		s.mustRun(t, "two")
		if scheduler == corev1.DefaultSchedulerName {
			s.mustBeApart(t)
		}
		step("helm upgrade under load")
		s.desk.run(t, "", command(t, "Upgrade and roll back", 0, "helm rollback ")+wait)
		s.mustRun(t, "one")
		if scheduler == corev1.DefaultSchedulerName {
			s.mustBeApart(t)
		}
		step("helm rollback under load")
		for _, pod := range load(t) {
			if pod.Status.Reason != "UnexpectedAdmissionError" || !pluginAway.MatchString(pod.Status.Message) {
				t.Errorf("pod %s failed, %s: %s", pod.Name, pod.Status.Reason, pod.Status.Message)
			}
		}
		step("the load has ended")

		if scheduler == corev1.DefaultSchedulerName {
			s.onControlPlane(t, kubeadm.Restart)
			s.awaitScheduler(t, true, 1)
			s.drainTheLeader(t)
			step("kube-scheduler was restarted, and the leader's node drained under load")
			s.onControlPlane(t, kubeadm.Undo)
			s.awaitScheduler(t, false, 0)
			now, err := os.ReadFile(s.node.outside("lib/static-pods/kube-scheduler.yaml"))
			must(t, err)
			if !bytes.Equal(now, manifest) {
				t.Errorf("the static pod isn't as it was:\n%s", now)
			}
		}
		s.uninstall(t)
		s.mustLeaveNothing(t, filesBefore)
		step("uninstalled")
	})
	if !passed {
		t.FailNow()
	}
}

// block returns the block of commands with this number under a heading of the page.
func block(t *testing.T, heading string, number int) string {
	t.Helper()
	blocks, err := pages.Commands(page, heading)
	must(t, err)
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
func (s *site) onControlPlane(t *testing.T, commands string) {
	t.Helper()
	prepare := fmt.Sprintf("export HOME=%s PATH=%s:%s:$PATH; cd\n", adminHome, filepath.Dir(s.bed.Binary("kube/kubeadm")), os.Getenv(toolsEnv))
	must(t, s.node.machine.run(t.Context(), "bash", "-euo", "pipefail", "-c", prepare+commands))
}

// awaitScheduler waits until kube-scheduler runs, with or without the extender's configuration and with this number of
// restarts.
func (s *site) awaitScheduler(t *testing.T, extender bool, restarts int32) {
	t.Helper()
	eventually(t, fmt.Sprintf("kube-scheduler runs, with the extender: %t, restarted %d times", extender, restarts), func(ctx context.Context) error {
		pod, err := s.bed.Client.CoreV1().Pods("kube-system").Get(ctx, "kube-scheduler-"+s.node.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		configured := slices.Contains(pod.Spec.Containers[0].Command, "--config=/etc/kubernetes/gpushare/scheduler-config.yaml")
		running := slices.ContainsFunc(pod.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool {
			return c.State.Running != nil && c.RestartCount == restarts
		})
		if configured != extender || !running {
			return fmt.Errorf("configured %t, %+v", configured, pod.Status.ContainerStatuses)
		}
		return nil
	})
}

// steps returns a function that logs the duration of each step.
func (s *site) steps(t *testing.T) func(string) {
	last := time.Now()
	return func(what string) {
		t.Helper()
		t.Logf("%s: %v", what, time.Since(last).Round(time.Second/10))
		last = time.Now()
	}
}

// mustRun fails the test unless all pods of the project use the images with this tag.
func (s *site) mustRun(t *testing.T, tag string) {
	t.Helper()
	eventually(t, "all pods are of tag "+tag, func(ctx context.Context) error {
		pods, err := s.bed.Client.CoreV1().Pods("kube-system").List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=gpushare"})
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
			return fmt.Errorf("%d containers are there", count)
		}
		return nil
	})
}

// testifying makes the pods of a template run the witness program.
func (s *site) testifying(spec *corev1.PodSpec, scheduler string) {
	spec.SchedulerName = scheduler
	spec.AutomountServiceAccountToken = new(false)
	for i := range spec.Containers {
		c := &spec.Containers[i]
		limits := c.Resources
		*c = container(c.Name, 0)
		c.Resources = limits
	}
	spec.Volumes = []corev1.Volume{{Name: "testimony", VolumeSource: corev1.VolumeSource{
		HostPath: &corev1.HostPathVolumeSource{Path: "/var/witness"},
	}}}
}

// deploySample deploys the first sample with an image that exists on the node. It waits until the container has the card
// that the pod's annotation names.
func (s *site) deploySample(t *testing.T, scheduler string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(s.root, "deploy", "samples", "binpack-1.yaml"))
	must(t, err)
	var sample appsv1.Deployment
	must(t, yaml.UnmarshalStrict(text, &sample))
	s.testifying(&sample.Spec.Template.Spec, scheduler)
	sample.Spec.Replicas = ptr.To[int32](3)
	deployments := s.bed.Client.AppsV1().Deployments("default")
	_, err = deployments.Create(t.Context(), &sample, metav1.CreateOptions{})
	must(t, err)
	s.awaitAgreement(t, 3)
}

// awaitAgreement waits until at least the given number of pods run and every container has the card that its pod's
// annotation names.
func (s *site) awaitAgreement(t *testing.T, least int) {
	t.Helper()
	eventually(t, "containers have the cards that are annotated", func(ctx context.Context) error {
		pods, err := s.bed.Client.CoreV1().Pods("default").List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		running, err := s.node.running()
		if err != nil {
			return err
		}
		good := 0
		for i := range pods.Items {
			pod := &pods.Items[i]
			if terminal(pod) || pod.DeletionTimestamp != nil {
				continue
			}
			at := slices.IndexFunc(running, func(c sighting) bool { return c.PodUID == string(pod.UID) })
			if at < 0 {
				return fmt.Errorf("pod %s doesn't run: %s %s", pod.Name, pod.Status.Message, conditions(pod))
			}
			card, err := running[at].card()
			if want := pod.Annotations[protocol.AnnotationIndex]; err != nil || fmt.Sprint(card) != want {
				return fmt.Errorf("pod %s: card %d, annotation %q, %w", pod.Name, card, want, err)
			}
			if pod.Annotations[protocol.AnnotationAssigned] != "true" {
				return fmt.Errorf("pod %s isn't marked as assigned", pod.Name)
			}
			good++
		}
		if good < least {
			return fmt.Errorf("%d pods run, want %d", good, least)
		}
		return nil
	})
}

// pluginAway matches the kubelet's messages for a missing device plugin, as docs/troubleshooting.md lists them.
var pluginAway = regexp.MustCompile(`cannot allocate unregistered device aliyun\.com/gpu-mem|no healthy devices present|` +
	`gpushare\.sock: connect: no such file or directory|endpoint .* has been stopped|the client connection is closing`)

// startLoad creates and deletes pods until stop is called. stop checks that no pod ever had a wrong card and returns the
// pods that failed.
func (s *site) startLoad(t *testing.T, name, scheduler string) (stop func(*testing.T) []*corev1.Pod) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	testimonies, err := s.node.testimonies()
	must(t, err)
	_, earlier := s.watcher.findings().mistaken(testimonies)
	done := make(chan error, 1)
	made := 0
	pods := s.bed.Client.CoreV1().Pods("default")
	go func() {
		done <- func() error {
			var alive []string
			for ctx.Err() == nil {
				pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("%s-%03d", name, made), Labels: map[string]string{"load": name}}}
				pod.Spec.Containers = []corev1.Container{container("main", int64(1+made%4))}
				s.testifying(&pod.Spec, scheduler)
				pod.Spec.TerminationGracePeriodSeconds = ptr.To[int64](1)
				if _, err := pods.Create(context.Background(), pod, metav1.CreateOptions{}); err != nil {
					return err
				}
				made++
				if alive = append(alive, pod.Name); len(alive) > 6 {
					if err := pods.Delete(context.Background(), alive[0], metav1.DeleteOptions{}); err != nil {
						return err
					}
					alive = alive[1:]
				}
				select {
				case <-ctx.Done():
				case <-time.After(500 * time.Millisecond): // the interval of the load
				}
			}
			return nil
		}()
	}()
	t.Cleanup(cancel)
	return func(t *testing.T) (failed []*corev1.Pod) {
		t.Helper()
		cancel()
		must(t, <-done)
		s.awaitAgreement(t, 3)
		testimonies, err := s.node.testimonies()
		must(t, err)
		found := s.watcher.findings()
		wrong, containers := found.mistaken(testimonies)
		why := map[string]int{}
		for _, pod := range found.Pods {
			// A deleted pod ends with an error of its own.
			if !strings.HasPrefix(pod.Name, name+"-") || pod.Status.Phase != corev1.PodFailed || pod.Status.Reason == "" && pod.DeletionTimestamp != nil {
				continue
			}
			failed = append(failed, pod)
			why[pod.Status.Message]++
		}
		t.Logf("%d pods of load; since the start %d GPU containers started, %d with another card than annotated, %d cards over their "+
			"total; pods that the kubelet failed %v; looked %d times", made, containers, len(wrong), len(found.Overfull), why, found.Looks)
		for _, finding := range slices.Concat(wrong, found.Overfull) {
			t.Error(finding)
		}
		if containers-earlier < 6 {
			t.Errorf("only %d GPU containers started", containers-earlier)
		}
		must(t, pods.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "load=" + name}))
		return failed
	}
}

// uninstall follows the documented steps after all GPU pods are gone.
func (s *site) uninstall(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	must(t, s.bed.Client.AppsV1().Deployments("default").DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}))
	must(t, s.bed.Client.CoreV1().Pods("default").DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}))
	eventually(t, "the GPU pods are gone", func(ctx context.Context) error {
		pods, err := s.bed.Client.CoreV1().Pods("default").List(ctx, metav1.ListOptions{})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("%d are there", len(pods.Items))
		}
		return err
	})
	s.desk.run(t, "", block(t, "Uninstall", 0))
}

// forgotten waits until the kubelet has dropped the plugin's resource, five minutes after the plugin went. Then it runs the
// page's next commands and checks that the resource does not come back.
func (s *site) forgotten(t *testing.T) {
	memory := func(ctx context.Context) (capacity string, found bool, err error) {
		object, err := s.bed.Client.CoreV1().Nodes().Get(ctx, s.node.name, metav1.GetOptions{})
		if err != nil {
			return "", false, err
		}
		quantity, found := object.Status.Capacity[protocol.ResourceMemory]
		_, allocatable := object.Status.Allocatable[protocol.ResourceMemory]
		return quantity.String(), found || allocatable, nil
	}
	for deadline := time.Now().Add(7 * time.Minute); ; time.Sleep(time.Second) {
		capacity, found, err := memory(t.Context())
		must(t, err)
		if found && capacity == "0" { // The page's loop, which ran just before, removes it for a moment.
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the kubelet still has %s of it", capacity)
		}
	}
	_, loop, _ := strings.Cut(block(t, "Uninstall", 0), "for node in")
	s.desk.run(t, "", "for node in"+loop)
	// The kubelet writes a changed node status every ten seconds.
	for until := time.Now().Add(30 * time.Second); time.Now().Before(until); time.Sleep(time.Second) {
		if capacity, found, err := memory(t.Context()); err != nil || found {
			t.Fatalf("the node has %s of it again, %v", capacity, err)
		}
	}
}

// mustLeaveNothing checks that nothing of the project is left: no object, no node status, no file on the node.
func (s *site) mustLeaveNothing(t *testing.T, filesBefore []string) {
	t.Helper()
	eventually(t, "nothing of it is left", func(ctx context.Context) error {
		object, err := s.bed.Client.CoreV1().Nodes().Get(ctx, s.node.name, metav1.GetOptions{})
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
			if count, found := list[protocol.ResourceCount]; found {
				return fmt.Errorf("the node still has %s %s", count.String(), protocol.ResourceCount)
			}
		}
		// The kubelet keeps the name of a resource that it has known, with an amount of 0.
		if memory := object.Status.Allocatable[protocol.ResourceMemory]; !memory.IsZero() {
			return fmt.Errorf("the node still gives %s %s", memory.String(), protocol.ResourceMemory)
		}
		if files := s.hostFiles(); !slices.Equal(files, filesBefore) {
			return fmt.Errorf("files %v, before %v", files, filesBefore)
		}
		found, err := s.bed.Find(ctx, func(object metav1.Object) bool {
			return strings.Contains(object.GetName(), "gpushare") || object.GetLabels()["app.kubernetes.io/name"] == "gpushare"
		})
		if err == nil && len(found) > 0 {
			err = fmt.Errorf("objects: %v", found)
		}
		return err
	})
}

// hostFiles lists the files in the folders of a node in which the project's programs may write.
func (s *site) hostFiles() (files []string) {
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
