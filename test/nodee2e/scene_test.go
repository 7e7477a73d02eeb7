package nodee2e

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// patience limits every wait. It is not a performance target: a state that is not reached by then is not reached at all.
const patience = 2 * time.Minute

// rig is a control plane with the extender and one real node, with a watcher that checks the node all the time.
type rig struct {
	bed     *framework.Cluster
	node    *node
	watcher *watcher
	// ended holds the pods whose containers a test has ended, so that the kubelet restarts them.
	ended map[string]bool
}

// startRig starts a rig with cards of these sizes in MiB. It is stopped when the test ends. Rigs run in parallel, because
// most of their time is waiting.
func startRig(t *testing.T, cards ...uint64) *rig {
	t.Helper()
	t.Parallel()
	requireNode(t)
	r := &rig{ended: map[string]bool{}, bed: framework.StartForTest(t, framework.Options{ControlPlane: controlplane.Options{
		ControllerManager: true,
		// The programs under test run as processes, so no controller may create pods for their manifests.
		ExtraArgs: map[string][]string{"kube-controller-manager": {"--controllers=*,-daemonset,-deployment"}},
	}})}
	// The path is short because it contains sockets.
	dir, err := os.MkdirTemp("", "gpunode-")
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r.node, err = startNode(ctx, r.bed, dir, "real", cards...)
	t.Cleanup(func() {
		if t.Failed() {
			for _, p := range r.node.processes() {
				t.Logf("the end of %s:\n%s", p.LogPath, p.Tail(15))
			}
			t.Logf("the node left its logs in %s", dir)
		}
		if err := r.node.stop(); err != nil {
			t.Error(err)
		}
		if !t.Failed() {
			must(t, os.RemoveAll(dir))
		}
	})
	must(t, err)

	r.watcher, err = newWatcher(r)
	must(t, err)
	watching, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); r.watcher.run(watching) }()
	t.Cleanup(func() { stop(); <-done })
	return r
}

// awaitCards waits until the node offers its cards.
func (r *rig) awaitCards(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	must(t, r.node.awaitCards(ctx))
}

// telling matches the plugin's metrics that are logged if they are not 0.
var telling = regexp.MustCompile(`^gpushare_device_plugin_(allocations|matches|other_card|annotation)\S* [1-9]`)

// report logs the results of the whole test. It fails the test for each error among them, such as a wrong card, an
// unexpected restart of a container, or a card above its total.
func (r *rig) report(t *testing.T) {
	t.Helper()
	found := r.watcher.findings()
	testimonies, err := r.node.testimonies()
	must(t, err)
	wrong, containers := found.mistaken(testimonies)
	refused := 0
	for _, pod := range found.Pods {
		if pod.Status.Reason == "UnexpectedAdmissionError" {
			refused++
		}
	}
	restarted := restarts(testimonies)
	t.Logf("%d pods, %d of them refused by the kubelet; %d GPU containers started, %d on another card than annotated in the end, "+
		"%d cards over their total, %d annotations repaired, %d restarts of containers (the test ended those of %d pods itself); "+
		"looked %d times, fullest cards %v of %v MiB", len(found.Pods), refused, containers, len(wrong), len(found.Overfull),
		len(found.Repaired), len(restarted), len(r.ended), found.Looks, found.Fullest, r.node.cards)
	for _, container := range restarted {
		if !r.ended[container.pod] {
			wrong = append(wrong, fmt.Sprintf("container %s of pod %s was started again", container.name, container.pod))
		}
	}
	if body, err := framework.Fetch(context.Background(), r.node.metrics.URL("http")+"/metrics"); err == nil {
		for line := range strings.SplitSeq(string(body), "\n") {
			if telling.MatchString(line) {
				t.Logf("since the plugin's last start: %s", line)
			}
		}
	}
	for _, crash := range r.node.kubelet.Crashes() {
		t.Logf("the kubelet crashed: %s", crash)
	}
	for _, repaired := range found.Repaired {
		t.Logf("repaired: %s", repaired)
	}
	for _, finding := range slices.Concat(wrong, found.Overfull) {
		t.Error(finding)
	}
	for _, over := range found.Overpromised {
		t.Logf("for a moment: %s", over)
	}
	if found.Err != nil || found.Looks == 0 || containers == 0 {
		t.Errorf("the watcher looked %d times at %d containers: %v", found.Looks, containers, found.Err)
	}
}

// scene is one test's namespace on a rig. Its pods are removed when it ends.
type scene struct {
	*testing.T
	*rig
	name   string
	random *rand.Rand
	made   int
	// otherDevices is true if the kubelet's records may name devices of another card than the one that the container got.
	// There are three reasons: the kubelet has lost its records, too few devices are free because it still counts those of
	// deleted pods, or the scheduler chose a card while the node did. The containers aren't affected.
	otherDevices bool
	// guessing is true if no API reports which pod the kubelet serves. A container that was matched to the wrong pod gets that
	// pod's total request in its environment. Its card may have no room for the rest of its own pod, which is then rejected.
	guessing bool
	// deleted holds the names of the pods that the scene itself has deleted.
	deleted map[string]bool
}

// play runs a part of a test in its own scene. At the end it compares all sources. If a part fails, the test ends, because
// the next part relies on the state of the node.
func (r *rig) play(t *testing.T, title string, act func(s *scene)) {
	t.Helper()
	passed := t.Run(title, func(t *testing.T) {
		from := time.Now()
		s := r.scene(t)
		act(s)
		s.settle()
		t.Logf("%d pods in %s", s.made, time.Since(from).Round(time.Second/10))
	})
	if !passed {
		t.FailNow()
	}
}

// scene creates a scene. It is swept when the test ends.
func (r *rig) scene(t *testing.T) *scene {
	t.Helper()
	namespace, err := r.bed.Client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "scene-"},
	}, metav1.CreateOptions{})
	must(t, err)
	s := &scene{
		T: t, rig: r, name: namespace.Name, random: rand.New(rand.NewPCG(1, uint64(len(t.Name())))), deleted: map[string]bool{},
	}
	eventually(t, "the namespace has its ServiceAccount", func(ctx context.Context) error {
		_, err := r.bed.Client.CoreV1().ServiceAccounts(s.name).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	t.Cleanup(s.sweep)
	return s
}

// sweep removes the scene's pods and waits until their containers are gone, so that the next scene starts on an empty
// node.
func (s *scene) sweep() {
	if s.Failed() {
		return // No scene follows.
	}
	ctx := context.Background()
	err := s.bed.Client.CoreV1().Pods(s.name).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](1)}, metav1.ListOptions{})
	if err != nil {
		s.Errorf("sweeping the pods of %s: %v", s.name, err)
	}
	err = wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
		list, err := s.bed.Client.CoreV1().Pods(s.name).List(ctx, metav1.ListOptions{})
		if err != nil || len(list.Items) > 0 {
			return false, nil
		}
		running, err := s.node.running()
		return len(running) == 0, err
	})
	if err != nil {
		s.Errorf("the pods of %s don't go: %v", s.name, err)
	}
}

// edit changes a pod before it is created.
type edit func(*corev1.Pod)

// with adds a container. first adds an init container, and beside adds a sidecar.
func with(name string, memory int64) edit { return add(container(name, memory)) }

func first(name string, memory int64) edit { return addInit(container(name, memory)) }

func beside(name string, memory int64) edit { return addSidecar(container(name, memory)) }

func add(c corev1.Container) edit {
	return func(pod *corev1.Pod) { pod.Spec.Containers = append(pod.Spec.Containers, c) }
}

func addInit(c corev1.Container) edit {
	c.Args = []string{"-for=100ms"}
	return func(pod *corev1.Pod) { pod.Spec.InitContainers = append(pod.Spec.InitContainers, c) }
}

func addSidecar(c corev1.Container) edit {
	c.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
	return func(pod *corev1.Pod) { pod.Spec.InitContainers = append(pod.Spec.InitContainers, c) }
}

// tell sets the argument of the pod's containers, except init containers and sidecars.
func tell(pod *corev1.Pod, argument string) {
	for i := range pod.Spec.Containers {
		pod.Spec.Containers[i].Args = []string{argument}
	}
}

// stubborn makes the containers ignore SIGTERM until the grace period, in seconds, is over.
func stubborn(grace int64) edit {
	return func(pod *corev1.Pod) {
		pod.Spec.TerminationGracePeriodSeconds = &grace
		tell(pod, "-stubborn")
	}
}

// onNode sets the node in the pod's spec, so that no scheduler handles the pod and the extender chooses no card for it.
func onNode(name string) edit { return func(pod *corev1.Pod) { pod.Spec.NodeName = name } }

// container returns a container. If memory is 0, it requests no GPU memory.
func container(name string, memory int64) corev1.Container {
	c := corev1.Container{
		Name: name, Image: witnessImage, ImagePullPolicy: corev1.PullNever,
		Env: []corev1.EnvVar{
			{Name: "CONTAINER", Value: name},
			{Name: "POD_UID", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.uid"}}},
		},
		VolumeMounts: []corev1.VolumeMount{{Name: "testimony", MountPath: "/testimony"}},
	}
	if memory > 0 {
		c.Resources.Limits = corev1.ResourceList{protocol.ResourceMemory: *resource.NewQuantity(memory, resource.DecimalSI)}
	}
	return c
}

// pod returns a pod with one container that requests GPU memory, in units.
func (s *scene) pod(memory int64, edits ...edit) *corev1.Pod {
	s.made++
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.name, Name: fmt.Sprintf("pod-%03d", s.made)},
		Spec: corev1.PodSpec{
			Containers: []corev1.Container{container("main", memory)},
			Volumes: []corev1.Volume{{Name: "testimony", VolumeSource: corev1.VolumeSource{
				HostPath: &corev1.HostPathVolumeSource{Path: s.node.witnessDir()},
			}}},
			HostNetwork:                   true,
			AutomountServiceAccountToken:  new(false),
			EnableServiceLinks:            new(false),
			TerminationGracePeriodSeconds: ptr.To[int64](5),
		},
	}
	for _, edit := range edits {
		edit(pod)
	}
	return pod
}

// any returns a pod of random shape: one to three GPU containers, sometimes with an init container or a sidecar.
func (s *scene) any(largest int64) *corev1.Pod {
	size := func() int64 { return 1 + s.random.Int64N(largest) }
	var edits []edit
	switch s.random.IntN(6) {
	case 0:
		edits = append(edits, with("second", size()))
	case 1:
		edits = append(edits, with("second", size()), with("third", size()))
	case 2:
		edits = append(edits, first("init", size()))
	case 3:
		edits = append(edits, beside("sidecar", size()))
	case 4:
		edits = append(edits, with("plain", 0))
	}
	return s.pod(size(), edits...)
}

// burst creates all pods at the same time.
func (s *scene) burst(pods ...*corev1.Pod) {
	s.Helper()
	var group errgroup.Group
	group.SetLimit(16)
	for _, pod := range pods {
		group.Go(func() error {
			_, err := s.bed.Client.CoreV1().Pods(s.name).Create(s.Context(), pod, metav1.CreateOptions{})
			return err
		})
	}
	must(s, group.Wait())
}

// times returns n pods.
func times(n int, pod func() *corev1.Pod) []*corev1.Pod {
	pods := make([]*corev1.Pod, n)
	for i := range pods {
		pods[i] = pod()
	}
	return pods
}

// delete deletes pods with their own grace periods. It doesn't wait until they are gone.
func (s *scene) delete(names ...string) {
	s.Helper()
	for _, name := range names {
		s.deleted[name] = true
		must(s, s.bed.Client.CoreV1().Pods(s.name).Delete(s.Context(), name, metav1.DeleteOptions{}))
	}
}

// list returns the scene's pods.
func (s *scene) list(ctx context.Context) ([]corev1.Pod, error) {
	list, err := s.bed.Client.CoreV1().Pods(s.name).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(list.Items, func(a, b corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	return list.Items, nil
}

// names returns the names of the scene's pods that aren't terminating.
func (s *scene) names() []string {
	s.Helper()
	pods, err := s.list(s.Context())
	must(s, err)
	var names []string
	for i := range pods {
		if pods[i].DeletionTimestamp == nil {
			names = append(names, pods[i].Name)
		}
	}
	return names
}

// awaitCards waits until the node offers its cards.
func (s *scene) awaitCards() {
	s.Helper()
	s.rig.awaitCards(s)
}

// remove deletes all pods of the scene and waits until they are gone.
func (s *scene) remove() {
	s.Helper()
	s.delete(s.names()...)
	s.gone(func(*corev1.Pod) bool { return true })
}

// removeFailed waits until the kubelet has admitted or failed every pod, and deletes the failed ones. The test fails if there
// are more than most of them. A pod whose message matches one of excused isn't counted: a kubelet fails pods for good while
// no device plugin is registered.
func (s *scene) removeFailed(most int, excused ...*regexp.Regexp) {
	s.Helper()
	eventually(s, "no pod is pending", func(ctx context.Context) error {
		pods, err := s.list(ctx)
		if err != nil {
			return err
		}
		for i := range pods {
			if pods[i].Status.Phase == corev1.PodPending {
				return fmt.Errorf("pod %s is: %s", pods[i].Name, conditions(&pods[i]))
			}
		}
		return nil
	})
	pods, err := s.list(s.Context())
	must(s, err)
	var failed []string
	pardoned := 0
	for i := range pods {
		if pods[i].Status.Phase != corev1.PodFailed {
			continue
		}
		if slices.ContainsFunc(excused, func(words *regexp.Regexp) bool { return words.MatchString(pods[i].Status.Message) }) {
			pardoned++
		} else {
			failed = append(failed, fmt.Sprintf("%s: %s: %s", pods[i].Name, pods[i].Status.Reason, pods[i].Status.Message))
		}
		s.deleted[pods[i].Name] = true
		must(s, s.bed.Client.CoreV1().Pods(s.name).Delete(s.Context(), pods[i].Name, metav1.DeleteOptions{}))
	}
	s.Logf("the kubelet failed %d of %d pods, and %d for want of a plugin", len(failed), len(pods), pardoned)
	if len(failed) > 0 {
		s.Logf("one of them: %s", failed[0])
	}
	if len(failed) > most {
		s.Errorf("the kubelet failed %d pods, want no more than %d:\n%s", len(failed), most, strings.Join(failed, "\n"))
	}
	s.gone(func(pod *corev1.Pod) bool { return pod.Status.Phase == corev1.PodFailed })
}

// gone waits until no pod is left for which which returns true.
func (s *scene) gone(which func(*corev1.Pod) bool) {
	s.Helper()
	eventually(s, "pods are gone", func(ctx context.Context) error {
		pods, err := s.list(ctx)
		if err != nil {
			return err
		}
		for i := range pods {
			if which(&pods[i]) {
				return fmt.Errorf("pod %s is there", pods[i].Name)
			}
		}
		return nil
	})
}

// bound waits until every pod of the scene has a node.
func (s *scene) bound() {
	s.Helper()
	eventually(s, "all pods are bound", func(ctx context.Context) error {
		pods, err := s.list(ctx)
		if err != nil {
			return err
		}
		for i := range pods {
			if pods[i].Spec.NodeName == "" {
				return fmt.Errorf("pod %s is not: %s", pods[i].Name, conditions(&pods[i]))
			}
		}
		return nil
	})
}

// settle waits until the scene's pods run and all sources agree. A pod that the kubelet failed counts as a disagreement
// until it is removed.
func (s *scene) settle() {
	s.Helper()
	eventually(s, "everything agrees", func(ctx context.Context) error {
		pods, err := s.list(ctx)
		if err != nil {
			return err
		}
		for i := range pods {
			if pods[i].Spec.NodeName == "" || terminal(&pods[i]) {
				return fmt.Errorf("pod %s is %s: %s %s", pods[i].Name, pods[i].Status.Phase, pods[i].Status.Message, conditions(&pods[i]))
			}
		}
		truth, err := s.look(ctx)
		if err != nil {
			return err
		}
		if s.otherDevices {
			truth.kubelet = nil
		}
		truth.guessed = s.guessing
		if wrong := truth.disagreements(s.node.cards); len(wrong) > 0 {
			return fmt.Errorf("%s", strings.Join(wrong, "\n"))
		}
		return nil
	})
}

func conditions(pod *corev1.Pod) string {
	var out []string
	for _, c := range pod.Status.Conditions {
		if c.Status != corev1.ConditionTrue && c.Message != "" {
			out = append(out, c.Message)
		}
	}
	return strings.Join(out, "; ")
}

// endContainers ends all processes of all containers at once, including sandboxes.
func (s *scene) endContainers() {
	s.Helper()
	running, err := s.node.running()
	must(s, err)
	for _, c := range running {
		s.ended[c.PodUID] = true
	}
	// A process may end by itself before it is killed.
	must(s, s.node.machine.run(s.Context(), "/bin/sh", "-c",
		`for f in /run/containerd/io.containerd.runtime.v2.task/k8s.io/*/init.pid; do kill -KILL "$(cat "$f")" || :; done`))
	eventually(s, "no container runs", func(context.Context) error {
		running, err := s.node.running()
		if err == nil && len(running) > 0 {
			err = fmt.Errorf("%d run", len(running))
		}
		return err
	})
}

// endContainer ends a pod's only container and waits until it runs again on the same card.
func (s *scene) endContainer(name string) {
	s.Helper()
	pod, err := s.bed.Client.CoreV1().Pods(s.name).Get(s.Context(), name, metav1.GetOptions{})
	must(s, err)
	before, err := s.node.find(pod.UID, "main")
	must(s, err)
	had, err := before.card()
	must(s, err)
	s.ended[before.PodUID] = true
	must(s, s.node.end(s.Context(), before))
	eventually(s, "the container of pod "+name+" is started again", func(context.Context) error {
		after, err := s.node.find(pod.UID, "main")
		if err == nil && after.ID == before.ID {
			err = errors.New("it is the one that was ended")
		}
		if err != nil {
			return err
		}
		if has, err := after.card(); err != nil || has != had {
			s.Errorf("the container of pod %s had card %d and was started again with card %d (%v)", name, had, has, err)
		}
		return nil
	})
}

// withoutCheckpoint stops the kubelet, calls meanwhile, and starts the kubelet without its checkpoint.
func (s *scene) withoutCheckpoint(meanwhile func()) {
	s.Helper()
	must(s, s.node.kubelet.Kill())
	meanwhile()
	must(s, os.Remove(s.node.checkpoint()))
	must(s, s.node.kubelet.Start(s.Context()))
	s.awaitCards()
}

// unharmed returns a check that the containers that run now are still running. The check ignores the pods that the scene has
// deleted since.
func (s *scene) unharmed() (check func()) {
	s.Helper()
	before, err := s.node.running()
	must(s, err)
	return func() {
		s.Helper()
		after, err := s.node.running()
		must(s, err)
		pods := s.watcher.findings().Pods
		for _, was := range before {
			if pod := pods[was.PodUID]; pod != nil && pod.Namespace == s.name && s.deleted[pod.Name] {
				continue
			}
			if !slices.ContainsFunc(after, func(is sighting) bool {
				return is.ID == was.ID && is.Pid == was.Pid
			}) {
				s.Errorf("container %s of pod %s no longer runs as %s, process %d", was.Container, was.PodUID, was.ID, was.Pid)
			}
		}
	}
}

// eventually waits until the condition returns nil.
func eventually(t testing.TB, what string, condition func(context.Context) error) {
	t.Helper()
	framework.Eventually(t, what, condition)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
}
