package gang

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

const (
	// singlesPerSecond is the rate at which placeSingles creates pods.
	singlesPerSecond = 4
	// prompt is how soon most single pods must be bound beside gangs that can't run. lost is when placeSingles gives up.
	prompt, lost = 5 * time.Second, 8 * time.Second
)

// placeSingles creates n single pods of 1 GiB one after another, and deletes each of them soon after it is bound. It fails
// the test unless 95 percent of them are bound promptly.
func (f *fixture) placeSingles(n int, change func(*framework.PodWrapper)) {
	f.Helper()
	seen := f.watchPods()
	defer seen.stop()
	created, removed := map[string]time.Time{}, map[string]bool{}
	ticker := time.NewTicker(time.Second / singlesPerSecond)
	defer ticker.Stop()
	for last := time.Now(); len(removed) < n && time.Since(last) < lost; <-ticker.C {
		if len(created) < n {
			pod := f.Pod(fmt.Sprintf("small-%d", len(created)), 1)
			change(pod)
			last = time.Now()
			created[pod.Name] = last
			f.Create(pod)
		}
		for _, pod := range seen.bound() {
			if !created[pod.Name].IsZero() && !removed[pod.Name] {
				removed[pod.Name] = true
				must(f, f.requestDeletion(f.Context(), pod))
			}
		}
	}
	var waited []time.Duration
	for name, bound := range seen.whenBound() {
		if begun, ok := created[name]; ok {
			waited = append(waited, bound.Sub(begun))
		}
	}
	for _, violation := range seen.violations() {
		f.Error(violation)
	}
	f.checkPrompt(waited, n)
}

// checkPrompt fails the test unless 95 percent of the n pods have waited for a short time only. waited has the pods that were
// bound.
func (f *fixture) checkPrompt(waited []time.Duration, n int) {
	f.Helper()
	slices.Sort(waited)
	late, _ := slices.BinarySearch(waited, prompt)
	share := float64(late) / float64(n)
	if len(waited) > 0 {
		f.Logf("%d of %d single pods were bound within %v, %d in all; of these, half within %v, the last one within %v", late, n, prompt,
			len(waited), waited[len(waited)/2].Round(time.Millisecond), waited[len(waited)-1].Round(time.Millisecond))
	}
	if share < 0.95 {
		f.Errorf("%d of %d single pods were bound within %v", late, n, prompt)
	}
}

// samePod is the change of placeSingles that changes nothing.
func samePod(*framework.PodWrapper) {}

// TestNeverComplete runs single pods beside two gangs of eight that never come together: each of them fits the cards, but seven of its members at
// most fit the node by CPU. pkg/scheduling has a scene in which the extender doesn't know what is missing.
func TestNeverComplete(t *testing.T) {
	c := hasty.Start(t)
	f := newFixture(t, c, 8)
	for _, gang := range []string{"a", "b"} {
		members := f.members(gang, 8, 0, 8)
		for _, pod := range members {
			pod.CPU(9) // Of 64.
		}
		f.Create(members...)
	}
	for _, gang := range []string{"a", "b"} {
		f.waitAnyRejected(gang, "nodes are available")
	}
	f.placeSingles(controlplane.Times(20, 30), samePod)
}

// TestNeverRun runs single pods beside gangs that can't run, and for which cards in use may be reserved.
func TestNeverRun(t *testing.T) {
	c := hasty.Start(t)
	c.RestartExtenderWith(t, flagMaxIdle+"2")
	f := newFixture(t, c, 4, 4)
	for gang, change := range map[string]func(*framework.PodWrapper){
		"cpu":       func(pod *framework.PodWrapper) { pod.CPU(100_000) },
		"scheduler": func(pod *framework.PodWrapper) { pod.Scheduler("nowhere") },
	} {
		members := f.members(gang, 8, 0, 8)
		for _, pod := range members {
			change(pod)
		}
		f.Create(members...)
	}
	f.placeSingles(controlplane.Times(10, 240)*singlesPerSecond, samePod)
	f.CheckLedger()
}

// waitAnyRejected waits until a pod of the gang is pending with a message that contains the reason.
func (f *fixture) waitAnyRejected(gang, reason string) {
	f.Helper()
	f.waitPods(fmt.Sprintf("a pod of %s is rejected: %s", gang, reason), func(pods []corev1.Pod) bool {
		return slices.ContainsFunc(rejected(pods), func(pod corev1.Pod) bool {
			return pod.Labels[framework.LabelGroup] == gang && framework.ContainsAll(framework.SchedulerMessage(&pod), reason)
		})
	})
}
