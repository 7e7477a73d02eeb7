package scheduling

import (
	"testing"
	"time"
)

// TestCPUScenes are worlds in which an item waits for cards and for CPU of their nodes, while smaller pods take each CPU that becomes free. It
// must run within the time in which all of them end, and the time in which kube-scheduler tries it.
func TestCPUScenes(t *testing.T) {
	// stream keeps the node's other cards busy with pods that need little memory and much CPU.
	stream := func(w *world) {
		c := &crowd{world: w}
		c.keepWaiting(3, func(name string) *memberSet {
			return w.single(name, podSpec{memory: 1, cpu: 1, lasts: w.between(30*time.Second, 2*time.Minute), grace: time.Second})
		})
		w.runFor(5 * time.Minute)
	}
	const within = 10 * time.Minute
	large := podSpec{memory: 16, cpu: 4}
	for name, play := range map[string]func(w *world){
		"a pod that needs a card and half of the CPU": func(w *world) {
			w.api.addNode("n0", "a", 8, 16, 16)
			stream(w)
			j := w.single("large", large)
			w.until(within, "the pod runs", j.runs)
		},
		"a pod that needs all CPU": func(w *world) {
			w.api.addNode("n0", "a", 8, 16, 16, 16)
			stream(w)
			spec := large
			spec.cpu = 8
			j := w.single("large", spec)
			w.until(within, "the pod runs", j.runs)
		},
		"a group that needs a card and half of the CPU of two nodes": func(w *world) {
			w.api.addNode("n0", "a", 8, 16, 16)
			w.api.addNode("n1", "a", 8, 16, 16)
			stream(w)
			j := w.group("large", 2, large)
			w.until(within, "the group runs", j.runs)
		},
		"a pod beside one that holds CPU of its node for ever": func(w *world) {
			w.api.addNode("n0", "a", 8, 16, 16)
			w.api.addNode("n1", "a", 8, 16, 16)
			w.runFor(time.Second)
			w.single("service", podSpec{memory: 1, cpu: 5, constraints: constraints{zone: "a"}})
			stream(w)
			j := w.single("large", large)
			w.until(within, "the pod runs", j.runs)
		},
	} {
		playScene(t, name, worldOptions{replicas: 1}, play)
	}
}
