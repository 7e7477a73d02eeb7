package nodee2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/framework"
)

// TestLimits: in isolation mode driver NVIDIA's own hook sets exactly the limit of each container, on the container's own cgroup and
// its cards. Only the driver is simulated: checkLimits reads what the hook has set from the driver's files, not through the plugin.
// TestFaults compares the limits while the node's programs are killed.
func TestLimits(t *testing.T) {
	c := startCluster(t, cardMiB, cardMiB, 8138, cardMiB)
	check.Must(t, c.node.addCDISpecification())
	c.RestartExtenderWith(t, "--overuse-policy=evict")
	c.testCDI(t)
	c.limit(t)
	c.waitCards(t)
	c.run(t, "limits of each of several cards", func(s *scenario) {
		s.createAndWait(setCards(s.pod(6), 3, 0), setCards(s.pod(4).Container("second", 2), 2, 0), setCards(s.pod(4), 1, 0))
		s.waitLimits("driver")
		s.checkShares()
		s.checkDevices()
	})
	c.run(t, "a pod that sets the variables itself gains nothing", (*scenario).testOwnVariables)
	c.run(t, "no container starts where its limit would not hold", (*scenario).testNoHook) // Other reasons: pkg/isolation and pkg/deviceplugin.
	c.run(t, "a limit that the driver ignores is reported", (*scenario).testIgnoredLimit)
	c.run(t, "a change of the mode counts for new containers", (*scenario).testModeChange)
	c.run(t, "a pod that borrows is evicted when its card is low on free memory", (*scenario).testBorrower)
}

// limit starts the plugin again in isolation mode driver, with additional flags.
func (c *cluster) limit(t testing.TB, flags ...string) {
	t.Helper()
	check.Must(t, c.node.restartPlugin(t.Context(), append([]string{
		"--isolation=driver", "--usage-interval=200ms",
		"--cgroup-root=" + c.node.machine.path("sys/fs/cgroup"), "--cdi-directories=" + c.node.machine.path("run/cdi"),
	}, flags...)...))
}

// waitLimits waits until the pods run and the plugin has read their limits back, and compares the limits with the requests.
func (s *scenario) waitLimits(annotation string) {
	s.Helper()
	s.waitConsistent()
	s.Eventually("the plugin reports the limits as "+annotation, func(context.Context) error {
		for _, pod := range s.list() {
			if got := pod.Annotations[protocol.AnnotationIsolation]; !strings.HasPrefix(got, annotation) || (annotation == "driver" && got != annotation) {
				return fmt.Errorf("pod %s has %q", pod.Name, got)
			}
		}
		return nil
	})
}

// checkShares compares the limits of all running containers with what these containers request.
func (s *scenario) checkShares() {
	s.Helper()
	running, err := s.node.running()
	check.Must(s, err)
	limited, names := 0, map[types.UID]string{}
	for _, pod := range s.list() {
		names[pod.UID] = pod.Name
	}
	for _, o := range running {
		request, err := strconv.Atoi(o.Env[protocol.EnvContainer])
		if err != nil {
			continue // The container requests no GPU memory.
		}
		limited++
		want := strconv.Itoa(request * 1024)
		if given := o.Env[protocol.EnvMemoryLimit]; given != "" {
			want = given
			s.checkGiven(names[o.podUID()], given, o.Env[protocol.AnnotationDevice])
		} else if card, err := strconv.Atoi(o.Env[protocol.AnnotationDevice]); err == nil && min(s.limits[names[o.podUID()]], card*1024) > request*1024 {
			s.notGiven++
		}
		if o.Env[limitEnv] != want || o.Env[requestEnv] != "0" {
			s.Errorf("container %s of pod %s has the limit %q and the request %q, want %s and 0",
				o.Container, o.PodUID, o.Env[limitEnv], o.Env[requestEnv], want)
		}
	}
	s.checkLimits(limited)
}

// checkGiven compares the limit above its request that a container was given, in MiB, with the one that its pod was created with, at most the memory
// of its card in GiB. A container whose pod was matched by order has none.
func (s *scenario) checkGiven(pod, given, card string) {
	s.Helper()
	s.given++
	memory, err := strconv.Atoi(card)
	check.Must(s, err)
	if want := min(s.limits[pod], memory*1024); given != strconv.Itoa(want) {
		s.Errorf("a container of pod %s has the limit %s, want %d", pod, given, want)
	}
}

// lend gives every other one of these pods a limit above its request.
func (s *scenario) lend(pods []*framework.PodWrapper) []*framework.PodWrapper {
	for _, pod := range pods {
		if s.random.IntN(2) == 0 {
			continue
		}
		s.limits[pod.Name] = int(framework.GPUMemOf(pod.Obj()))*1024 + 512*(1+s.random.IntN(16))
		text := fmt.Sprint(s.limits[pod.Name]) + "Mi"
		for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
			if limit(&c) > 0 {
				metav1.SetMetaDataAnnotation(&pod.ObjectMeta, protocol.AnnotationLimit(c.Name), text)
			}
		}
	}
	return pods
}

// changeLimits annotates other limits on all pods, also where there were none.
func (s *scenario) changeLimits() {
	for _, pod := range s.list() {
		s.Annotate(pod.Name, map[string]string{protocol.AnnotationLimit(framework.MainContainer): []string{"9Gi", "1Mi", "much"}[s.random.IntN(3)]})
	}
}

func (s *scenario) testOwnVariables() {
	_, err := s.Client.CoreV1().ConfigMaps(s.ID).Create(s.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "variables"}, Data: map[string]string{limitEnv: "99999", requestEnv: "99999"},
	}, metav1.CreateOptions{})
	check.Must(s, err)
	from := s.pod(3)
	from.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{
		LocalObjectReference: corev1.LocalObjectReference{Name: "variables"}}}}
	s.createAndWait(limited(s.pod(2), 99999), from)
	s.waitLimits("driver")
	s.checkShares()
}

// testNoHook replaces the toolkit's specification by one without the hook for all cards.
func (s *scenario) testNoHook() {
	path := s.node.machine.path("run/cdi/nvidia.json")
	whole, err := os.ReadFile(path)
	check.Must(s, err)
	check.Must(s, os.WriteFile(path, []byte(strings.ReplaceAll(string(whole), "apply-cuda-memory-limits", "update-ldcache")), 0o600))
	s.waitHealth(0, false)
	s.create(s.pod(1))
	s.Eventually("the reason is in the node's inventory", func(ctx context.Context) error {
		node, err := s.Client.CoreV1().Nodes().Get(ctx, s.node.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, card := range protocol.ParseNode(node).Cards {
			if !strings.Contains(card.Unhealthy, "has no hook apply-cuda-memory-limits") {
				return fmt.Errorf("card %d: %q", card.Index, card.Unhealthy)
			}
		}
		return nil
	})
	if running, err := s.node.running(); err != nil || len(running) > 0 {
		s.Errorf("%d containers run, %v", len(running), err)
	}
	check.Must(s, os.WriteFile(path, whole, 0o600))
	s.waitHealth(0, true)
	s.waitCards(s)
	s.waitLimits("driver")
	s.checkShares()
}

func (s *scenario) testIgnoredLimit() {
	check.Must(s, s.node.setCards("limits=ignored"))
	s.create(s.pod(2))
	s.waitLimits("driver: container ")
	check.Must(s, s.node.setCards())
	s.Eventually("an Event reports the limit", func(ctx context.Context) error {
		events, err := s.Client.CoreV1().Events(s.ID).List(ctx, metav1.ListOptions{FieldSelector: "reason=GPULimitNotInForce"})
		if err == nil && len(events.Items) == 0 {
			err = errors.New("there is none")
		}
		return err
	})
}

func (s *scenario) testModeChange() {
	s.createAndWait(s.pods(3, 2)...)
	s.waitLimits("driver")
	stillRunning := s.expectRunning()
	s.labelNode(`"none"`)
	s.Eventually("the node's mode is none", func(ctx context.Context) error {
		node, err := s.Client.CoreV1().Nodes().Get(ctx, s.node.name, metav1.GetOptions{})
		if mode := protocol.ParseNode(node).Isolation; err == nil && mode != "" {
			err = fmt.Errorf("it is %s", mode)
		}
		return err
	})
	stillRunning()
	before := s.names()
	s.createAndWait(s.pods(2, 3)...)
	s.killContainer(before[0]) // It is started with its limit.
	s.waitConsistent()
	s.checkLimits(3)
	s.labelNode("null")
	s.waitHealth(0, true)
}

// testBorrower: two pods fill one card. The older one, which uses no more than its limit, is evicted when the other one uses what it requests.
func (s *scenario) testBorrower() {
	borrower, within := s.pod(2), s.pod(5)
	s.limits[borrower.Name] = 6 << 10
	metav1.SetMetaDataAnnotation(&borrower.ObjectMeta, protocol.AnnotationLimit(framework.MainContainer), "6Gi")
	s.createAndWait(borrower)
	s.createAndWait(within)
	s.waitLimits("driver")
	s.checkShares()
	card := s.Get(borrower.Name).Annotations[protocol.AnnotationIndex]
	if other := s.Get(within.Name).Annotations[protocol.AnnotationIndex]; card != "2" || other != card || s.given != 1 {
		s.Fatalf("the pods are on the cards %s and %s, and %d containers have limits above their requests", card, other, s.given)
	}
	s.deleted[borrower.Name] = true
	stillRunning := s.expectRunning()
	use := func(mib map[string]int64) {
		processes, err := s.node.processesOn(2, s.list(), mib)
		check.Must(s, err)
		check.Must(s, s.node.driver.SetProcesses(processes...))
	}
	defer use(nil)
	use(map[string]int64{borrower.Name: 5900, within.Name: 2000}) // Of 8138.
	s.WaitEvent(borrower.Name, "GPUMemoryOveruseEvicted", "it uses 5900 MiB of GPU memory and requests 2048 MiB with a limit of 6144 MiB")
	s.WaitGone(borrower.Name)
	use(map[string]int64{within.Name: 5 << 10})
	s.waitConsistent()
	stillRunning()
	if pod := s.Get(within.Name); pod.DeletionTimestamp != nil || pod.Annotations[protocol.AnnotationOveruse] != "" {
		s.Errorf("the pod within its request: %v", pod.ObjectMeta)
	}
}

func (s *scenario) labelNode(value string) {
	s.Helper()
	patch := []byte(`{"metadata":{"labels":{"` + protocol.LabelIsolation + `":` + value + `}}}`)
	_, err := s.Client.CoreV1().Nodes().Patch(s.Context(), s.node.name, types.MergePatchType, patch, metav1.PatchOptions{})
	check.Must(s, err)
}
