package nodee2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
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
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/fakenvml"
	"github.com/gpushare/gpushare/test/testbed"
)

const (
	chart          = "deploy/helm/gpushare"
	schedulerImage = "gpushare.test/kube-scheduler"
	// driverDir is where the driver lies on the node.
	driverDir = "/var/lib/fake-driver"
	// Where kubeadm has /etc/kubernetes; the machine's /etc is this one's.
	kubernetesDir = "/var/lib/kubernetes"
)

// TestInstalled goes an administrator's way on a real node: images, chart, kube-scheduler's static pod, a sample, upgrade
// and rollback under load, uninstall; then the same with the second scheduler.
//
// Real are etcd, kube-apiserver, kube-controller-manager, kubelet, kube-proxy, containerd and runc; kube-scheduler is a
// static pod as kubeadm makes it, the extenders and the device plugin are pods of the project's own images. Substituted
// are the driver library, NVIDIA's container runtime that mounts it (nvidiaruntime), the image of kube-scheduler (the same
// binary), and /etc/kubernetes (another folder).
func TestInstalled(t *testing.T) {
	if !inNetworkOfItsOwn(t) {
		return
	}
	s := startSite(t)
	filesBefore := s.hostFiles()

	s.installed(t, filesBefore, "the extender of the cluster's scheduler", corev1.DefaultSchedulerName, nil)
	s.installed(t, filesBefore, "the second scheduler", "gpushare-scheduler",
		[]string{"mode=secondScheduler", "images.scheduler.repository=" + schedulerImage})
}

// site is a cluster of one node, on which nothing is installed yet.
type site struct {
	*rig
	t    *testing.T
	root string
	helm helm
}

func startSite(t *testing.T) *site {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	must(t, startNetwork(ctx))
	s := &site{t: t, rig: &rig{ended: map[string]bool{}}}
	s.bed = testbed.StartForTest(t, testbed.Options{Bare: true, ControlPlane: controlplane.Options{
		WithoutScheduler: true, ControllerManager: true,
		ExtraArgs: map[string][]string{"kube-apiserver": {
			"--bind-address=0.0.0.0", "--advertise-address=" + nodeAddress, "--endpoint-reconciler-type=lease",
		}},
	}})
	var err error
	s.root, err = controlplane.RepositoryRoot()
	must(t, err)
	s.helm = helm{path: os.Getenv(helmEnv), home: t.TempDir(), root: s.root, kubeconfig: s.bed.KubeconfigPath}

	dir, err := os.MkdirTemp("", "gpunode-")
	must(t, err)
	var proxy *controlplane.Process
	t.Cleanup(func() {
		processes := s.node.processes()
		if proxy != nil {
			processes = append(processes, proxy)
			must(t, proxy.Kill())
		}
		if t.Failed() {
			for _, p := range processes {
				t.Logf("the end of %s:\n%s", p.LogPath, p.Tail(15))
			}
			t.Logf("the node left its logs in %s", dir)
		}
		if err := s.node.stop(); err != nil {
			t.Error(err)
		}
		if !t.Failed() {
			must(t, os.RemoveAll(dir))
		}
	})
	must(t, s.startNode(ctx, dir))
	proxy, err = s.node.startProxy(ctx)
	must(t, err)

	s.watcher, err = newWatcher(s.rig)
	must(t, err)
	watching, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); s.watcher.run(watching) }()
	t.Cleanup(func() { stop(); <-done })
	return s
}

// startNode starts the node with everything but kube-proxy and the project.
func (s *site) startNode(ctx context.Context, dir string) (err error) {
	n := &node{name: "real", cards: []uint64{cardMiB, cardMiB}, bed: s.bed, driver: fakenvml.NewMachine(filepath.Join(dir, "var", strings.TrimPrefix(driverDir, "/var/")))}
	s.node = n
	n.network, n.kubeletArgs = podNetwork, []string{"--node-ip=" + nodeAddress}
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
	kubeadms, err := os.ReadFile(filepath.Join(s.root, "pkg", "kubeadm", "testdata", "kubeadm.yaml"))
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
		n.outside("lib/fake-driver/libnvidia-ml.so.1"):   {mode: 0o755, content: library},
		n.outside("lib/fake-driver/events"):              {mode: 0o644},
		n.outside("lib/kubernetes/scheduler.conf"):       {mode: 0o600, content: account},
		n.outside("lib/static-pods/kube-scheduler.yaml"): {mode: 0o600, content: s.staticPod(kubeadms)},
		wrapper: {mode: 0o755, content: []byte("#!/bin/sh\nexec " + runtimeProgram + " " + driverDir + ` "$@"` + "\n")},
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
	return n.startKubelet(ctx)
}

// staticPod is kubeadm's, of this Kubernetes and with its files where they are here.
func (s *site) staticPod(kubeadms []byte) []byte {
	text := strings.ReplaceAll(string(kubeadms), "/etc/kubernetes/", kubernetesDir+"/")
	return []byte(strings.Replace(text, "registry.k8s.io/kube-scheduler:v1.33.1", schedulerImage+":"+s.version(), 1))
}

// version is that of the cluster, as the chart sees it.
func (s *site) version() string {
	info, err := s.bed.Client.Discovery().ServerVersion()
	must(s.t, err)
	return info.GitVersion
}

// images builds the project's images twice, under two tags, and that of kube-scheduler.
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

// installed installs, uses, upgrades, rolls back and uninstalls in one of the modes.
func (s *site) installed(t *testing.T, filesBefore []string, mode, scheduler string, values []string) {
	passed := t.Run(mode, func(t *testing.T) {
		step := s.steps(t)
		manifest, err := os.ReadFile(s.node.outside("lib/static-pods/kube-scheduler.yaml"))
		must(t, err)
		_, err = s.bed.Client.NodeV1().RuntimeClasses().Create(t.Context(),
			&nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "nvidia"}, Handler: "nvidia"}, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
		set := append([]string{
			"images.extender.repository=gpushare.test/gpushare-extender", "images.extender.tag=one",
			"images.devicePlugin.repository=gpushare.test/gpushare-device-plugin", "images.devicePlugin.tag=one",
			"devicePlugin.runtimeClassName=nvidia",
		}, values...)
		s.helm.run(t, "install", "gpushare", chart, "--namespace=kube-system", "--wait", "--timeout=2m", "--set="+strings.Join(set, ","))
		step("helm install: all pods are ready")

		kubeadm := func(args ...string) {
			t.Helper()
			must(t, s.node.machine.run(t.Context(), append([]string{s.bed.Binary("gpushare-kubeadm")}, append(args,
				"--manifest=/var/lib/static-pods/kube-scheduler.yaml", "--folder="+kubernetesDir+"/gpushare", "--settle=2s")...)...))
		}
		if scheduler == corev1.DefaultSchedulerName {
			secret, err := s.bed.Client.CoreV1().Secrets("kube-system").Get(t.Context(), "gpushare-scheduler-config", metav1.GetOptions{})
			must(t, err)
			must(t, os.WriteFile(s.node.outside("lib/kubernetes/scheduler-config.yaml"), secret.Data["scheduler-config.yaml"], 0o600))
			kubeadm("install", "--config="+kubernetesDir+"/scheduler-config.yaml")
			kubeadm("install", "--config="+kubernetesDir+"/scheduler-config.yaml")
			step("gpushare-kubeadm install, twice")
		}
		must(t, s.node.awaitCards(t.Context()))

		s.deploySample(t, scheduler)
		step("a sample Deployment has its card")
		load := s.startLoad(t, scheduler)
		s.helm.run(t, "upgrade", "gpushare", chart, "--namespace=kube-system", "--reuse-values", "--wait", "--timeout=2m",
			"--set=images.extender.tag=two,images.devicePlugin.tag=two")
		s.mustRun(t, "two")
		step("helm upgrade under load")
		s.helm.run(t, "rollback", "gpushare", "1", "--namespace=kube-system", "--wait", "--timeout=2m")
		s.mustRun(t, "one")
		step("helm rollback under load")
		load(t)
		step("the load has ended")

		if scheduler == corev1.DefaultSchedulerName {
			kubeadm("undo")
			now, err := os.ReadFile(s.node.outside("lib/static-pods/kube-scheduler.yaml"))
			must(t, err)
			if !bytes.Equal(now, manifest) {
				t.Errorf("the static pod isn't as it was:\n%s", now)
			}
			must(t, os.Remove(s.node.outside("lib/kubernetes/scheduler-config.yaml")))
		}
		s.uninstall(t)
		s.mustLeaveNothing(t, filesBefore)
		step("uninstalled")
	})
	if !passed {
		t.FailNow()
	}
}

// steps logs how long each step took.
func (s *site) steps(t *testing.T) func(string) {
	last := time.Now()
	return func(what string) {
		t.Helper()
		t.Logf("%s: %v", what, time.Since(last).Round(time.Second/10))
		last = time.Now()
	}
}

// mustRun fails the test unless all pods of the project are of the images with this tag.
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

// testifying makes the pods of a template those of the witness.
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

// deploySample deploys the first sample, with an image that exists here, and waits until its container has the card that
// is annotated.
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

// awaitAgreement waits until at least so many pods run, and every container has the card that its pod is annotated with.
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

// startLoad has pods come and go until stop is called, which sees to it that none ever had a wrong card.
func (s *site) startLoad(t *testing.T, scheduler string) (stop func(*testing.T)) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	made := 0
	pods := s.bed.Client.CoreV1().Pods("default")
	go func() {
		done <- func() error {
			var alive []string
			for ctx.Err() == nil {
				pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("load-%03d", made)}}
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
				case <-time.After(500 * time.Millisecond): // The load's own pace.
				}
			}
			return nil
		}()
	}()
	t.Cleanup(cancel)
	return func(t *testing.T) {
		t.Helper()
		cancel()
		must(t, <-done)
		s.awaitAgreement(t, 3)
		testimonies, err := s.node.testimonies()
		must(t, err)
		found := s.watcher.findings()
		wrong, containers := found.mistaken(testimonies)
		failed := 0
		for _, pod := range found.Pods {
			if pod.Status.Phase == corev1.PodFailed {
				failed++
			}
		}
		t.Logf("%d pods of load; %d GPU containers started, %d with another card than annotated, %d cards over their total, %d pods "+
			"failed by the kubelet (while no device plugin was there); looked %d times", made, containers, len(wrong), len(found.Overfull), failed, found.Looks)
		for _, finding := range slices.Concat(wrong, found.Overfull) {
			t.Error(finding)
		}
		if containers < 6 {
			t.Errorf("only %d GPU containers started", containers)
		}
	}
}

// uninstall does what the documents say, after all GPU pods are gone.
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
	s.helm.run(t, "uninstall", "gpushare", "--namespace=kube-system", "--wait", "--timeout=2m")
	eventually(t, "the pods of the project are gone", func(ctx context.Context) error {
		pods, err := s.bed.Client.CoreV1().Pods("kube-system").List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=gpushare"})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("%d are there", len(pods.Items))
		}
		return err
	})
	command := exec.CommandContext(ctx, s.bed.Binary("gpushare-device-plugin"), "--cleanup", "--node-name="+s.node.name, "--kubeconfig="+s.bed.KubeconfigPath)
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("--cleanup: %v: %s", err, out)
	}
}

// mustLeaveNothing looks at all objects, the node's status and the node's files.
func (s *site) mustLeaveNothing(t *testing.T, filesBefore []string) {
	t.Helper()
	eventually(t, "nothing of it is left", func(ctx context.Context) error {
		object, err := s.bed.Client.CoreV1().Nodes().Get(ctx, s.node.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for name := range object.Annotations {
			// The extender's own mark goes with the command that the documents name.
			if strings.Contains(name, "gpushare") && name != "gpushare.aliyun.com/memory-freed" {
				return fmt.Errorf("node annotation %s", name)
			}
		}
		for _, list := range []corev1.ResourceList{object.Status.Capacity, object.Status.Allocatable} {
			if count, found := list[protocol.ResourceCount]; found {
				return fmt.Errorf("the node still has %s %s", count.String(), protocol.ResourceCount)
			}
		}
		// The kubelet keeps the name of a resource that it has known, with nothing to give.
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

// hostFiles lists what lies where the project's programs may write on a node.
func (s *site) hostFiles() (files []string) {
	s.t.Helper()
	for _, dir := range []string{"var/lib/kubelet/device-plugins", "var/lib/static-pods", "var/lib/kubernetes", "var/run/cdi", "run/cdi", "etc/cdi"} {
		entries, err := os.ReadDir(s.node.machine.path(dir))
		if err != nil && !os.IsNotExist(err) {
			s.t.Fatal(err)
		}
		for _, entry := range entries {
			// The kubelet writes its own checkpoint at the first allocation.
			if entry.Name() != "kubelet_internal_checkpoint" {
				files = append(files, filepath.Join(dir, entry.Name()))
			}
		}
	}
	return files
}
