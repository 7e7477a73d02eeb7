package nodee2e

import (
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

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/framework"
)

// scenario is a part of a test with its own namespace. Its pods are removed when it ends.
type scenario struct {
	*framework.Namespace
	*cluster
	random *rand.Rand
	// made counts the pods of the scenario.
	made int
	// otherDevices is true if the kubelet's records may name devices of another card than the one that the container got.
	// There are three reasons: the kubelet has lost its records, too few devices are free because it still counts those of
	// deleted pods, or the scheduler chose a card while the node did. The containers aren't affected.
	otherDevices bool
	// lateRejections is true if the kubelet may reject pods that it admits again, and report that after it has started the pods that it admitted
	// last.
	lateRejections bool
	// guesses is true if no API reports for which pod the kubelet calls the plugin. A container that was matched to the
	// wrong pod gets that pod's total request in its environment. Its card may have no room for the rest of its own pod,
	// which is then rejected.
	guesses bool
	// limits are the limits above requests, in MiB, by the names of the pods that were created with them.
	limits map[string]int
	// given counts the containers that were seen with such a limit, notGiven those without, although their cards have the memory.
	given, notGiven int
	// deleted holds the names of the pods that the scenario itself has deleted.
	deleted map[string]bool
}

// scenario creates a scenario. When the test ends, its pods are removed and their containers are gone, so that the next
// one starts on an empty node.
func (c *cluster) scenario(t *testing.T) *scenario {
	t.Helper()
	t.Cleanup(func() { // After the removal of the pods.
		if t.Failed() {
			return // No scenario follows.
		}
		check.Must(t, wait.PollUntilContextTimeout(context.Background(), 50*time.Millisecond, framework.Patience, true,
			func(context.Context) (bool, error) {
				running, err := c.node.running()
				return len(running) == 0, err
			}))
	})
	return c.scenarioBeside(t)
}

// scenarioBeside creates a scenario that runs beside another one.
func (c *cluster) scenarioBeside(t *testing.T) *scenario {
	t.Helper()
	s := &scenario{cluster: c, random: rand.New(rand.NewPCG(1, uint64(len(t.Name())))), limits: map[string]int{}, deleted: map[string]bool{}}
	s.Namespace = c.NewNamespace(t)
	s.Kubelets = true
	s.Eventually("the namespace has its ServiceAccount", func(ctx context.Context) error {
		_, err := c.Client.CoreV1().ServiceAccounts(s.ID).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	return s
}

// pod returns a pod whose first container requests GPU memory, in units. Its name is new.
func (s *scenario) pod(memory int64) *framework.PodWrapper {
	s.made++
	return framework.MakePod(fmt.Sprintf("pod-%03d", s.made)).GPUMem(memory).GracePeriod(5)
}

// pods returns n pods with one container.
func (s *scenario) pods(n int, memory int64) []*framework.PodWrapper {
	return repeat(n, func() *framework.PodWrapper { return s.pod(memory) })
}

func repeat(n int, pod func() *framework.PodWrapper) []*framework.PodWrapper {
	pods := make([]*framework.PodWrapper, n)
	for i := range pods {
		pods[i] = pod()
	}
	return pods
}

// randomPod returns a pod of random shape with this total request. Some of these pods ignore SIGTERM.
func (s *scenario) randomPod(total int64) *framework.PodWrapper {
	part := func(of int64) int64 { return 1 + s.random.Int64N(of) }
	var pod *framework.PodWrapper
	switch shape := s.random.IntN(8); {
	case shape == 0 && total >= 2:
		second := part(total - 1)
		pod = s.pod(total-second).Container("second", second)
	case shape == 1 && total >= 3:
		second := part(total - 2)
		third := part(total - second - 1)
		pod = s.pod(total-second-third).Container("second", second).Container("third", third)
	case shape == 2: // The largest request decides.
		pod = s.pod(total).InitContainer("init", part(total))
	case shape == 3:
		pod = s.pod(part(total)).InitContainer("init", total)
	case shape == 4 && total >= 2:
		sidecar := part(total - 1)
		pod = s.pod(total-sidecar).Sidecar("sidecar", sidecar)
	case shape == 5:
		pod = s.pod(total).Container("plain", 0)
	default:
		pod = s.pod(total)
	}
	if got := framework.GPUMemOf(pod.Obj()); got != total {
		panic(fmt.Sprintf("a pod for %d requests %d", total, got))
	}
	if s.random.IntN(8) == 0 {
		ignoreSIGTERM(pod, 2)
	}
	return pod
}

// ignoreSIGTERM makes the containers run through the pod's grace period.
func ignoreSIGTERM(pod *framework.PodWrapper, seconds int64) *framework.PodWrapper {
	setArg(pod, "-ignore-sigterm")
	return pod.GracePeriod(seconds)
}

// setArg sets the argument of the pod's containers, except init containers and sidecars.
func setArg(pod *framework.PodWrapper, argument string) {
	for i := range pod.Spec.Containers {
		pod.Spec.Containers[i].Args = []string{argument}
	}
}

// recordEnv makes the containers of a pod record their environment. Init containers end soon.
func recordEnv(spec *corev1.PodSpec) {
	prepare := func(c *corev1.Container) {
		c.Image, c.ImagePullPolicy, c.Command = recordEnvImage, corev1.PullNever, nil
		c.Env = append(c.Env, corev1.EnvVar{Name: "CONTAINER", Value: c.Name}, corev1.EnvVar{
			Name: "POD_UID", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.uid"}},
		})
		c.VolumeMounts = []corev1.VolumeMount{{Name: "records", MountPath: "/records"}}
	}
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		prepare(c)
		if !isSidecar(c) {
			c.Args = []string{"-for=100ms"}
		}
	}
	for i := range spec.Containers {
		prepare(&spec.Containers[i])
	}
	spec.Volumes = []corev1.Volume{{Name: "records", VolumeSource: corev1.VolumeSource{
		HostPath: &corev1.HostPathVolumeSource{Path: recordsInMachine},
	}}}
	spec.AutomountServiceAccountToken = new(false)
	spec.EnableServiceLinks = new(false)
}

// create creates all pods at the same time.
func (s *scenario) create(pods ...*framework.PodWrapper) {
	s.Helper()
	for _, pod := range pods {
		recordEnv(&pod.Spec)
		pod.Spec.HostNetwork = true
	}
	s.Create(pods...)
}

// createAndWait creates all pods at the same time and waits until the node is consistent.
func (s *scenario) createAndWait(pods ...*framework.PodWrapper) {
	s.Helper()
	s.create(pods...)
	s.waitConsistent()
}

// delete deletes pods with their own grace periods. It doesn't wait until they are gone.
func (s *scenario) delete(names ...string) {
	s.Helper()
	for _, name := range names {
		s.deleted[name] = true
		if err := s.Pods().Delete(s.Context(), name, metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
			check.Must(s, err)
		}
	}
}

// list returns the pods of the scenario, sorted by name.
func (s *scenario) list() []corev1.Pod {
	s.Helper()
	pods, err := s.List(s.Context())
	check.Must(s, err)
	return pods
}

// names returns the names of the pods that aren't terminating.
func (s *scenario) names() (names []string) {
	s.Helper()
	for _, pod := range s.list() {
		if !terminating(&pod) {
			names = append(names, pod.Name)
		}
	}
	return names
}

// total returns the memory of all the node's cards, in units.
func (s *scenario) total() (sum int64) {
	for _, card := range s.node.cards {
		sum += gibibytes(card)
	}
	return sum
}

// used returns the requests of the pods that neither are terminating nor have ended, in units.
func (s *scenario) used() (sum int64) {
	s.Helper()
	for _, pod := range s.list() {
		if !terminating(&pod) && !ended(&pod) {
			sum += framework.GPUMemOf(&pod)
		}
	}
	return sum
}

// makeRoom deletes random pods until the requests of the rest don't exceed limit, in units.
func (s *scenario) makeRoom(limit int64) {
	s.Helper()
	pods := s.list()
	s.random.Shuffle(len(pods), func(i, j int) { pods[i], pods[j] = pods[j], pods[i] })
	used := s.used()
	for i := range pods {
		if used > limit && !terminating(&pods[i]) {
			s.delete(pods[i].Name)
			used -= framework.GPUMemOf(&pods[i])
		}
	}
}

// waitNone waits until no pod matches. what completes "waiting until no pod ...".
func (s *scenario) waitNone(what string, match func(*corev1.Pod) bool) {
	s.Helper()
	s.Eventually("no pod "+what, func(ctx context.Context) error {
		pods, err := s.List(ctx)
		for i := range pods {
			if match(&pods[i]) {
				return fmt.Errorf("pod %s is %s: %s %s", pods[i].Name, pods[i].Status.Phase, pods[i].Status.Message, conditions(&pods[i]))
			}
		}
		return err
	})
}

func (s *scenario) waitTerminated() {
	s.Helper()
	s.waitNone("is terminating", terminating)
}

// waitBound waits until every pod has a node.
func (s *scenario) waitBound() {
	s.Helper()
	s.waitNone("is without a node", func(pod *corev1.Pod) bool { return pod.Spec.NodeName == "" })
}

// waitConsistent waits until the pods run and all sources agree. A pod that the kubelet rejected counts as an
// inconsistency until it is deleted, except a static pod, which no client can delete: a kubelet that starts sometimes makes a
// mirror pod for it before the rejection (fastStaticPodsRegistration in pkg/kubelet/kubelet.go).
func (s *scenario) waitConsistent() {
	s.Helper()
	s.Eventually("the node is consistent", func(ctx context.Context) error {
		pods, err := s.List(ctx)
		if err != nil {
			return err
		}
		for i := range pods {
			if s.lateRejections && pods[i].Status.Phase == corev1.PodFailed {
				s.delete(pods[i].Name)
			}
			if pods[i].Spec.NodeName == "" || ended(&pods[i]) && !protocol.IsMirror(&pods[i]) {
				return fmt.Errorf("pod %s is %s: %s %s", pods[i].Name, pods[i].Status.Phase, pods[i].Status.Message, conditions(&pods[i]))
			}
		}
		state, err := s.readState(ctx)
		if err != nil {
			return err
		}
		if s.otherDevices {
			state.kubelet = nil
		}
		state.guesses = s.guesses
		if found := state.inconsistencies(s.node.cards); len(found) > 0 {
			return errors.New(strings.Join(found, "\n"))
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

// pluginAway matches the kubelet's messages for a missing device plugin, as docs/troubleshooting.md lists them. By its own
// rule the kubelet rejects a pod for good if it admits it before a plugin has registered.
var pluginAway = regexp.MustCompile(`cannot allocate unregistered device [a-z./-]+|no healthy devices present|` +
	`[a-z0-9-]+\.sock: connect: no such file or directory|endpoint .* has been stopped|the client connection is closing`)

// deleteRejected waits until the kubelet has admitted or rejected every pod, and deletes the rejected ones. The test fails
// if there are more than limit, without those whose message matches one of ignored.
func (s *scenario) deleteRejected(limit int, ignored ...*regexp.Regexp) {
	s.Helper()
	s.waitNone("is pending", func(pod *corev1.Pod) bool { return pod.Status.Phase == corev1.PodPending })
	var rejected []string
	without := 0
	for _, pod := range s.list() {
		if pod.Status.Phase != corev1.PodFailed {
			continue
		}
		if slices.ContainsFunc(ignored, func(message *regexp.Regexp) bool { return message.MatchString(pod.Status.Message) }) {
			without++
		} else {
			rejected = append(rejected, fmt.Sprintf("%s: %s: %s", pod.Name, pod.Status.Reason, pod.Status.Message))
		}
		s.delete(pod.Name)
	}
	s.Logf("the kubelet rejected %d pods, and %d without a plugin: %.300q", len(rejected), without, rejected)
	if len(rejected) > limit {
		s.Errorf("the kubelet rejected %d pods, want no more than %d:\n%s", len(rejected), limit, strings.Join(rejected, "\n"))
	}
	s.waitNone("has failed", func(pod *corev1.Pod) bool { return pod.Status.Phase == corev1.PodFailed })
}

// killAllContainers kills all processes of all containers at once, including sandboxes. When it returns, the kubelet finds no running container:
// those that the runtime still reports as running are skipped by a kubelet without a checkpoint, and it never calls Allocate for them
// (k8s.io/kubernetes pkg/kubelet/cm/devicemanager/manager.go, isContainerAlreadyRunning).
func (s *scenario) killAllContainers() {
	s.Helper()
	running, err := s.node.running()
	check.Must(s, err)
	for _, c := range running {
		s.killed[c.PodUID] = true
	}
	// A process may end by itself before it is killed.
	check.Must(s, s.node.machine.run(s.Context(), "/bin/sh", "-c",
		`for f in /run/containerd/io.containerd.runtime.v2.task/k8s.io/*/init.pid; do kill -KILL "$(cat "$f")" || :; done`))
	s.Eventually("no task runs", func(ctx context.Context) error {
		tasks, err := s.node.ctr(ctx, "tasks", "list")
		if err == nil && strings.Contains(tasks, "RUNNING") {
			err = errors.New(tasks)
		}
		return err
	})
	// The runtime's state of a container follows that of its task later. When containerd starts, it reads all tasks before it answers the kubelet.
	check.Must(s, s.node.containerd.Restart(s.Context()))
}

// killContainer kills a pod's only container and waits until it runs again on the same cards.
func (s *scenario) killContainer(name string) {
	s.Helper()
	was, err := s.node.find(s.Get(name).UID, framework.MainContainer)
	check.Must(s, err)
	cards, err := was.cards()
	check.Must(s, err)
	s.killed[was.PodUID] = true
	check.Must(s, s.node.kill(s.Context(), was))
	s.Eventually("the container of pod "+name+" is restarted", func(context.Context) error {
		is, err := s.node.find(was.podUID(), framework.MainContainer)
		if err == nil && is.ID == was.ID {
			err = errors.New("it is the one that was killed")
		}
		if err != nil {
			return err
		}
		if again, err := is.cards(); err != nil || !slices.Equal(cards, again) {
			s.Errorf("the container of pod %s had cards %v and was restarted with cards %v (%v)", name, cards, again, err)
		}
		return nil
	})
}

// restartWithoutCheckpoint stops the kubelet, calls meanwhile, and starts the kubelet without its checkpoint.
func (s *scenario) restartWithoutCheckpoint(meanwhile func()) {
	s.Helper()
	check.Must(s, s.node.kubelet.Kill())
	meanwhile()
	check.Must(s, os.Remove(s.node.checkpoint()))
	check.Must(s, s.node.kubelet.Start(s.Context()))
	s.superviseKubelet()
	s.waitCards(s)
}

// superviseKubelet starts the kubelet again, as systemd does, whenever it panics until the scenario ends. After the loss of its
// checkpoint it calls ManagerImpl.Allocate for several pods at once, each of which deletes the others' entries of devicesToReuse
// (k8s.io/kubernetes pkg/kubelet/cm/devicemanager/manager.go).
func (s *scenario) superviseKubelet() {
	ctx, kubelet, ended := s.Context(), s.node.kubelet, make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-ctx.Done():
				return
			case <-kubelet.Exited():
			}
			if kubelet.ExitCode() != 2 || !strings.Contains(kubelet.Tail(200), "assignment to entry in nil map") {
				return // The scenario has ended it, or will fail.
			}
			s.Log("the kubelet has panicked, and is started again")
			if err := kubelet.Start(ctx); err != nil {
				s.Error(err)
				return
			}
		}
	}()
	s.Cleanup(func() { <-ended })
}

// expectRunning returns a function that checks that the containers that run now are still running. It ignores the pods that the
// scenario has deleted since.
func (s *scenario) expectRunning() (compare func()) {
	s.Helper()
	before, err := s.node.running()
	check.Must(s, err)
	return func() {
		s.Helper()
		after, err := s.node.running()
		check.Must(s, err)
		pods := s.watcher.found().pods
		for _, was := range before {
			if pod := pods[was.PodUID]; pod != nil && pod.Namespace == s.ID && s.deleted[pod.Name] {
				continue
			}
			if !slices.ContainsFunc(after, func(is observed) bool { return is.ID == was.ID && is.Pid == was.Pid }) {
				s.Errorf("container %s of pod %s no longer runs as %s, process %d", was.Container, was.PodUID, was.ID, was.Pid)
			}
		}
	}
}
