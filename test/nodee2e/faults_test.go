package nodee2e

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/framework"
)

// TestKubelet restarts the kubelet, above all without its checkpoint. TestFaults kills it while pods start.
func TestKubelet(t *testing.T) {
	c := startCluster(t, cardMiB, cardMiB, 8138, cardMiB)

	c.run(t, "pods are bound while the kubelet is stopped", func(s *scenario) {
		s.createAndWait(s.pods(4, 2)...)
		stillRunning := s.expectRunning()
		check.Must(s, s.node.kubelet.Kill())
		s.create(repeat(12, func() *framework.PodWrapper { return s.pod(1 + s.random.Int64N(2)) })...)
		s.create(repeat(4, func() *framework.PodWrapper { return s.pod(1).Container("second", 1) })...)
		s.waitBound()
		check.Must(s, s.node.kubelet.Start(s.Context()))
		s.deleteRejected(0, pluginAway)
		s.waitConsistent()
		stillRunning()
	})
	c.run(t, "the kubelet loses its checkpoint", func(s *scenario) {
		// Those with one card come later: they would fill the smallest card.
		s.createAndWait(setCards(s.pod(4), 2, 20), setCards(s.pod(8), 4, 0), setCards(s.pod(2), 2, 0))
		s.createAndWait(s.pods(6, 2)...)
		stillRunning := s.expectRunning()
		s.restartWithoutCheckpoint(func() {})
		s.otherDevices = true
		s.waitConsistent()
		stillRunning()
		// The kubelet calls Allocate again for the containers that it restarts. The others keep running without an entry in
		// the checkpoint.
		for _, name := range s.names()[1:5] {
			s.killContainer(name)
		}
		stillRunning = s.expectRunning()
		// To the kubelet, the rest of the node is empty.
		s.createAndWait(s.pods(4, 3)...)
		stillRunning()
	})
	c.run(t, "the machine restarts and the kubelet loses its checkpoint", func(s *scenario) {
		s.createAndWait(repeat(10, func() *framework.PodWrapper { return s.randomPod(1 + s.random.Int64N(4)) })...)
		s.restartWithoutCheckpoint(s.killAllContainers)
		s.create(s.pod(1)) // The kubelet admits it after all others.
		s.deleteRejected(s.made)
		// If an init container had devices, the kubelet has no entry for them any more.
		s.otherDevices, s.lateRejections = true, true
		s.waitConsistent()
		s.create(repeat(8, func() *framework.PodWrapper { return s.pod(1 + s.random.Int64N(2)) })...)
		s.deleteRejected(s.made)
		s.waitConsistent()
	})
	c.run(t, "the Node object is deleted", func(s *scenario) {
		s.createAndWait(repeat(6, func() *framework.PodWrapper { return s.pod(2).Container("second", 1) })...)
		stillRunning := s.expectRunning()
		check.Must(s, s.Client.CoreV1().Nodes().Delete(s.Context(), s.node.name, metav1.DeleteOptions{}))
		check.Must(s, s.node.kubelet.Restart(s.Context()))
		s.waitCards(s) // It also checks the number of cards and the inventory.
		s.waitConsistent()
		stillRunning()
		s.createAndWait(s.pods(4, 1)...)
	})
}

// TestFaults kills the device plugin and the kubelet while pods with one, two and four cards start, TestOutages what both depend on. In
// isolation mode driver the limit of each container is compared too, of which every other one is above the request and annotated otherwise
// later. In each scene some 20 pods start. The long form repeats the scenes in mode none.
func TestFaults(t *testing.T) {
	startLimited(t).testFaults(t, []fault{
		{"the plugin is killed three times", func(s *scenario) {
			for range 3 {
				s.sleepRandomly()
				restartPlugin(s)
			}
		}},
		{"the kubelet is killed three times", func(s *scenario) {
			for range 3 {
				s.sleepRandomly()
				check.Must(s, s.node.kubelet.Restart(s.Context()))
			}
		}},
		{"the plugin and the kubelet are killed, and pods are created and deleted before they restart", func(s *scenario) {
			s.sleepRandomly()
			check.Must(s, s.node.kubelet.Kill()) // First, or it writes that the node has no device left, and no pod is bound to the node.
			check.Must(s, s.node.plugin.Kill())
			s.makeRoom(s.used() - 4)
			s.create(s.pods(8, 1)...)
			s.waitOneCardBound()
			check.Must(s, s.node.kubelet.Start(s.Context()))
			check.Must(s, s.node.plugin.Start(s.Context()))
		}},
	})
}

// TestOutages makes a card fail, and kills containerd and the API server. The API server's fault comes last: its clients come back late.
func TestOutages(t *testing.T) {
	c := startLimited(t)
	c.run(t, "a card fails and recovers", (*scenario).testFailingCard)
	c.testFaults(t, []fault{
		{"containerd is killed", func(s *scenario) {
			s.sleepRandomly()
			check.Must(s, s.node.containerd.Restart(s.Context()))
		}},
		{"the plugin is killed while the API server is stopped", func(s *scenario) {
			s.sleepRandomly()
			check.Must(s, s.APIServer.Kill())
			s.sleepRandomly()
			restartPlugin(s)
			time.Sleep(3 * time.Second) // The plugin and the kubelet fail to reach the API server several times.
			check.Must(s, s.APIServer.Start(s.Context()))
		}},
	})
}

// fault is a fault that a scene of testFaults plays.
type fault struct {
	title string
	play  func(s *scenario)
}

func restartPlugin(s *scenario) { check.Must(s, s.node.plugin.Restart(s.Context())) }

// startLimited starts a cluster in isolation mode driver.
func startLimited(t *testing.T) *cluster {
	t.Helper()
	c := startCluster(t, cardMiB, cardMiB, 8138, cardMiB)
	check.Must(t, c.node.addCDISpecification())
	c.limit(t)
	c.waitCards(t)
	return c
}

// testFaults plays the faults in each isolation mode.
func (c *cluster) testFaults(t *testing.T, faults []fault) {
	for _, mode := range []string{"driver", "none"}[:inLong(2, 1)] {
		c.limit(t, "--isolation="+mode)
		c.waitCards(t)
		c.testFaultsIn(t, mode, faults)
	}
}

func (c *cluster) testFaultsIn(t *testing.T, mode string, faults []fault) {
	pods, given := 0, 0
	for _, test := range faults {
		c.run(t, test.title+" (mode "+mode+")", func(s *scenario) {
			// A restarted kubelet admits pods before it has freed the devices of deleted pods. All its remaining free devices
			// may then belong to another card.
			s.otherDevices = true
			s.createAndWait(s.randomCards(s.total() / 8)...)
			s.createAndWait(s.lend(s.randomPods(s.total() / 8))...) // They would fill the smallest card.
			for range inLong(4, 2) {
				s.makeRoom(s.total() / 4)
				s.waitTerminated()
				stillRunning := s.expectRunning()
				s.changeLimits()
				s.create(append(s.lend(s.randomPods(s.total()/4)), s.randomCards(s.total()/4)...)...)
				test.play(s)
				s.waitCards(s)
				s.waitOneCardBound()
				s.deleteUnschedulable() // Pods with several cards of which no set has room.
				s.deleteRejected(s.made)
				if mode == "driver" {
					s.waitLimits(mode)
					s.checkShares()
				}
				s.waitConsistent()
				stillRunning()
			}
			if mode == "driver" && s.notGiven >= s.given { // Some were matched to their pods by order.
				s.Errorf("of the containers that asked for a limit above their request, %d have it, and %d don't", s.given, s.notGiven)
			}
			pods, given = pods+s.made, given+s.given
		})
	}
	t.Logf("mode %s: %d pods, and %d times the limit above the request of a container was compared", mode, pods, given)
	if want := 10 * len(faults); pods < want { // They are random: 23 in a scene on average.
		t.Errorf("mode %s: only %d pods, want %d", mode, pods, want)
	}
}

// waitOneCardBound waits until every pod with one card has a node.
func (s *scenario) waitOneCardBound() {
	s.Helper()
	s.waitNone("with one card is without a node", func(pod *corev1.Pod) bool {
		return pod.Labels[protocol.LabelCount] == "" && pod.Spec.NodeName == ""
	})
}

// testFailingCard: a card that fails keeps its pods and gets no others until it has recovered.
func (s *scenario) testFailingCard() {
	s.limit(s, "--health-quiet-period=1h")
	s.waitCards(s)
	s.createAndWait(repeat(8, func() *framework.PodWrapper { return s.pod(3).InitContainer("init", 3) })...)
	before := s.onFirstCard()
	// The deletion makes this card the best fit for the next pods.
	s.delete(before[0])
	s.waitTerminated()
	before = before[1:]
	stillRunning := s.expectRunning()
	check.Must(s, s.node.driver.Xid("0", 48))
	s.waitHealth(0, false)
	// A restart of the plugin doesn't make the card healthy.
	check.Must(s, s.node.plugin.Restart(s.Context()))
	s.waitPlugin()
	// A kubelet that starts checks the devices of init containers that have ended again.
	check.Must(s, s.node.kubelet.Restart(s.Context()))
	s.waitPlugin()
	// The kubelet's free amount is the memory of the healthy cards, minus the allocations on all cards.
	s.createAndWait(s.pods(4, 2)...)
	stillRunning()
	if after := s.onFirstCard(); !slices.Equal(before, after) {
		s.Errorf("the failed card has the pods %v, and had %v", after, before)
	}
	s.limit(s)
	s.waitHealth(0, true)
	s.waitCards(s)
	stillRunning()
	s.delete(before[:2]...)
	s.waitTerminated()
	s.createAndWait(s.pods(7, 3)...) // The other cards have room for six at most.
	if after := s.onFirstCard(); len(after) <= len(before)-2 {
		s.Errorf("the recovered card has only the pods %v", after)
	}
}

// waitHealth waits until the inventory lists a card as healthy, or as unhealthy, and the extender has seen that no card or one is
// unhealthy. After a restart of the API server the extender's watch of nodes may pause for half a minute
// (k8s.io/client-go tools/cache/reflector.go).
func (s *scenario) waitHealth(card int, healthy bool) {
	s.Helper()
	s.Eventually(fmt.Sprintf("card %d is healthy: %t", card, healthy), func(ctx context.Context) error {
		node, err := s.Client.CoreV1().Nodes().Get(ctx, s.node.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		inventory, err := protocol.ParseInventory(node.Annotations)
		if err == nil && inventory.Cards[card].Healthy() != healthy {
			err = fmt.Errorf("the inventory has %q", inventory.Cards[card].Unhealthy)
		}
		if err != nil {
			return err
		}
		seen, err := s.Metrics(ctx, framework.MetricCards)
		if unhealthy := seen[framework.Series(framework.MetricCards, "health", "unhealthy")]; err == nil && (unhealthy == 0) != healthy {
			err = fmt.Errorf("the extender sees %v unhealthy cards", unhealthy)
		}
		return err
	})
}

// onFirstCard returns the names of the pods whose annotations name card 0.
func (s *scenario) onFirstCard() (names []string) {
	s.Helper()
	for _, pod := range s.list() {
		if pod.Annotations[protocol.AnnotationIndex] == "0" {
			names = append(names, pod.Name)
		}
	}
	return names
}

// randomPods returns pods of all shapes with this total request.
func (s *scenario) randomPods(total int64) (pods []*framework.PodWrapper) {
	for total > 0 {
		pod := s.randomPod(min(total, 1+s.random.Int64N(4)))
		total -= framework.GPUMemOf(pod.Obj())
		pods = append(pods, pod)
	}
	return pods
}

// sleepRandomly gives the next fault a random place in the sequence.
func (s *scenario) sleepRandomly() {
	time.Sleep(time.Duration(s.random.IntN(400)) * time.Millisecond)
}

// waitPlugin waits until the device plugin is ready.
func (s *scenario) waitPlugin() {
	s.Eventually("the plugin is ready", func(ctx context.Context) error {
		_, err := framework.Fetch(ctx, s.node.metrics.URL("http")+"/readyz")
		return err
	})
}
