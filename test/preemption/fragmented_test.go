package preemption

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// TestFragmentation plays what kube-scheduler never asks about: the node's sum has room, and no card has.
func TestFragmentation(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB", ExtenderArgs: []string{"--evict-fragmented"}})
	root, err := controlplane.RepositoryRoot()
	must(t, err)
	must(t, bed.Apply(t.Context(), filepath.Join(root, "deploy", "eviction")))
	createPriorities(t, bed, 1, 2, 3, 5, 9, 20, 30)
	never := corev1.PreemptNever
	_, err = bed.Client.SchedulingV1().PriorityClasses().Create(t.Context(), &schedulingv1.PriorityClass{
		ObjectMeta: metav1.ObjectMeta{Name: "polite"}, Value: 9, PreemptionPolicy: &never,
	}, metav1.CreateOptions{})
	must(t, err)

	play(t, bed, "the least that frees one card goes", 3, func(s *stage) {
		s.place("a10", 10, 2, 0)
		s.place("a2", 2, 1, 0)
		s.place("b12", 12, 1, 1)
		s.place("c12", 12, 2, 2)
		s.create("blocked", 8, 9)
		s.evicted("b12")
		s.sits("blocked", 1)
		s.stay("a10", "a2", "c12")
		s.event("b12", "GPUCardEvicted", "for pod "+s.name+"/blocked")
		s.event("blocked", "GPUCardEvicting", "GPU card 1")
	})

	play(t, bed, "the freed card is kept for whom it was freed", 2, func(s *stage) {
		s.kubelet = false // Pods take their time to end.
		s.place("a12", 12, 1, 0)
		s.place("b12", 12, 2, 1)
		s.create("blocked", 6, 9)
		s.evicted("a12")
		s.create("thief", 5, 3)
		s.end("a12")
		s.sits("blocked", 0)
		s.sits("thief", 0) // Beside it there is room.
		s.create("waits", 6, 3)
		s.evicted("b12", "a12") // For its own sake.
		s.stay("blocked", "thief")
	})

	play(t, bed, "nobody goes for a pod that nobody has to go for", 2, func(s *stage) {
		s.guard("guarded", 0)
		s.place("a12", 12, 1, 0, labelled("guarded"))
		s.place("b12", 12, 3, 1)
		// A budget is not broken, equal priority doesn't count, and some pods never preempt. (With a higher one, equal might
		// find the node full in the end, and kube-scheduler itself breaks budgets where nothing else helps.)
		s.create("equal", 8, 1)
		s.create("polite", 8, 9, func(pod *corev1.Pod) {
			pod.Spec.PriorityClassName = "polite"
		})
		s.refused("equal", "no GPU card has enough free memory")
		s.refused("polite", "no GPU card has enough free memory")
		// Whoever may evict is served; rounds for the others would have come first or with it.
		s.create("blocked", 8, 9)
		s.evicted("b12")
		s.sits("blocked", 1)
		s.stay("a12", "equal", "polite")
	})

	play(t, bed, "an extender that is killed in the middle evicts nobody else", 2, func(s *stage) {
		s.kubelet = false
		s.place("a5", 5, 1, 0)
		s.place("a4", 4, 1, 0)
		s.place("b12", 12, 2, 1)
		s.create("blocked", 10, 9)
		s.evicted("a4")
		must(s, bed.Extender.Kill())
		must(s, bed.Extender.Start(s.Context()))
		s.evicted("a4")
		s.end("a4")
		s.sits("blocked", 0)
		s.stay("a5", "b12")
	})

	play(t, bed, "a pod that was nominated in vain gets a card all the same", 3, func(s *stage) {
		s.kubelet = false
		s.place("a12", 12, 1, 0)
		s.place("a4", 4, 30, 0)
		s.place("b8", 8, 5, 1)
		s.place("b5", 5, 30, 1)
		s.place("c8", 8, 30, 2)
		s.place("c5", 5, 30, 2)
		s.create("left", 9, 9)
		s.nominated("left")
		s.evicted("a12")
		s.create("first", 12, 20)
		s.nominated("first")
		// From here on the sum has room for both, and kube-scheduler finds no victim for the other pod.
		s.end("b5")
		s.end("c5")
		s.end("a12")
		s.sits("first", 0)
		s.evicted("b8", "a12")
		s.end("b8")
		s.sits("left", 1)
		s.stay("a4", "c8")
	})
}

// event waits for an Event on the pod that has all the texts.
func (s *stage) event(pod string, texts ...string) {
	s.Helper()
	s.eventually("an Event on pod "+pod+": "+strings.Join(texts, ", "), func() error {
		events, err := s.bed.Client.CoreV1().Events(s.name).List(s.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + pod})
		if err != nil {
			return err
		}
		for _, event := range events.Items {
			line, found := event.Reason+" "+event.Message, true
			for _, text := range texts {
				found = found && strings.Contains(line, text)
			}
			if found {
				return nil
			}
		}
		return errors.New("there is none")
	})
}
