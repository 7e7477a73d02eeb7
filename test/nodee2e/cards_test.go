package nodee2e

import (
	"context"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// TestSeveralCards runs pods with one, two and four cards, some of which ask for cores.
func TestSeveralCards(t *testing.T) {
	c := startCluster(t, cardMiB, cardMiB, 24268, cardMiB)

	c.run(t, "a burst of pods with the same total and different numbers of cards", func(s *scenario) {
		before := s.allocations()
		// Each card has room for the shares of all pods, so that they fit in any order.
		pods := append(s.ofTotal4(1, 2, 2, 2, 4, 4, 4), s.withCards(s.pod(4).Container("second", 4), 4))
		s.createAndWait(pods...)
		// The kubelet calls Allocate once for a container, whether it asks for cores or not.
		if got, want := s.allocations()-before, float64(len(pods)+1); got != want {
			s.Errorf("%v calls of Allocate for %v containers", got, want)
		}
	})
	c.run(t, "cores are used up before memory", func(s *scenario) {
		s.create(repeat(12, func() *framework.PodWrapper { return setCards(s.pod(1), 1, 40) })...)
		s.create(repeat(3, func() *framework.PodWrapper { return setCards(s.pod(2), 2, 20) })...)
		if pending := s.deleteUnschedulable(); pending == 0 {
			s.Error("the cores of all pods fit")
		}
		s.waitConsistent()
		s.delete(s.names()[:4]...)
		s.waitTerminated()
		s.createAndWait(repeat(2, func() *framework.PodWrapper { return setCards(s.pod(1), 1, 40) })...)
	})
	c.run(t, "a container restarts with its cards", func(s *scenario) {
		s.createAndWait(setCards(s.pod(4), 2, 50), setCards(s.pod(4), 4, 0), setCards(s.pod(4), 1, 10))
		for _, name := range s.names() {
			s.killContainer(name)
		}
	})
	c.run(t, "a request that can't be divided, with nodeName", func(s *scenario) {
		s.create(s.onNode([]*framework.PodWrapper{setCards(s.pod(3), 2, 0)})...)
		s.waitNone("is pending", func(pod *corev1.Pod) bool { return pod.Status.Phase == corev1.PodPending })
		if message := s.list()[0].Status.Message; !strings.Contains(message, "aliyun.com/gpu-mem 3 can't be divided evenly over 2 cards") {
			s.Errorf("the kubelet says %q", message)
		}
		s.delete(s.names()...)
		s.waitTerminated()
		s.createAndWait(s.onNode(s.ofTotal4(1, 1, 2, 2, 4, 4))...)
	})
	c.run(t, "pods are created and deleted, 95% of the memory is in use", func(s *scenario) {
		s.otherDevices = true // The kubelet counts the devices of deleted pods until the next pod is admitted.
		s.churnCards(inLong(400, 40), s.total()*95/100)
	})
}

// setCards sets the number of cards of a pod, and the percentage of each that each container asks for.
func setCards(pod *framework.PodWrapper, cards int, cores int64) *framework.PodWrapper {
	if cards > 1 {
		pod.Label(protocol.LabelCount, strconv.Itoa(cards))
	}
	for i := range pod.Spec.Containers {
		if c := &pod.Spec.Containers[i]; cores > 0 && limit(c) > 0 {
			c.Resources.Limits[protocol.ResourceCores] = *resource.NewQuantity(cores*int64(cards), resource.DecimalSI)
		}
	}
	return pod
}

// withCards sets the number of cards of a pod. One in two asks for five percent of each: then cores are never scarcer than memory.
func (s *scenario) withCards(pod *framework.PodWrapper, cards int) *framework.PodWrapper {
	return setCards(pod, cards, []int64{0, 5}[s.random.IntN(2)])
}

// ofTotal4 returns pods with the same total request and these numbers of cards.
func (s *scenario) ofTotal4(cards ...int) (pods []*framework.PodWrapper) {
	for _, n := range cards {
		pods = append(pods, s.withCards(s.pod(4), n))
	}
	return pods
}

// randomCards returns pods with random numbers of cards and shares of one or two units on each, with this total at most.
func (s *scenario) randomCards(total int64) (pods []*framework.PodWrapper) {
	for {
		cards := []int{1, 1, 2, 4}[s.random.IntN(4)]
		memory := int64(cards) * (1 + s.random.Int64N(2))
		if total -= memory; total < 0 {
			return pods
		}
		pod := s.pod(memory)
		switch s.random.IntN(6) {
		case 0:
			pod.InitContainer("init", memory)
		case 1:
			if total -= int64(cards); total < 0 {
				s.made--
				return pods
			}
			pod.Container("second", int64(cards))
		case 2:
			ignoreSIGTERM(pod, 2)
		}
		pods = append(pods, s.withCards(pod, cards))
	}
}

// churnCards creates this number of pods and deletes older ones to make room. The requests of all pods together never exceed limit.
// A pod for which no set of cards is left stays pending, and is deleted.
func (s *scenario) churnCards(pods int, limit int64) {
	s.Helper()
	unschedulable := 0
	for s.made < pods {
		created := s.randomCards(min(limit, 4+s.random.Int64N(limit/2)))
		var sum int64
		for _, pod := range created {
			sum += framework.GPUMemOf(pod.Obj())
		}
		s.makeRoom(limit - sum)
		s.waitTerminated()
		s.create(created...)
		unschedulable += s.deleteUnschedulable()
		s.waitConsistent()
	}
	s.Logf("no cards were left for %d of %d pods; %d of %d units are in use", unschedulable, s.made, s.used(), s.total())
}

// deleteUnschedulable waits until kube-scheduler has bound or rejected every pod, and deletes the rejected ones.
func (s *scenario) deleteUnschedulable() (deleted int) {
	s.Helper()
	rejected := func(pod *corev1.Pod) bool {
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
				return true
			}
		}
		return false
	}
	s.waitNone("is neither bound nor rejected", func(pod *corev1.Pod) bool { return pod.Spec.NodeName == "" && !rejected(pod) })
	for _, pod := range s.list() {
		if pod.Spec.NodeName == "" {
			s.delete(pod.Name)
			deleted++
		}
	}
	s.waitNone("is without a node", func(pod *corev1.Pod) bool { return pod.Spec.NodeName == "" })
	return deleted
}

// allocations returns the number of the plugin's decisions so far.
func (s *scenario) allocations() (sum float64) {
	s.Helper()
	s.Eventually("the plugin's metrics", func(ctx context.Context) error {
		values, err := framework.Scrape(ctx, s.node.metrics.URL("http")+"/metrics", "gpushare_device_plugin_allocations_total")
		sum = 0
		for _, value := range values {
			sum += value
		}
		return err
	})
	return sum
}
