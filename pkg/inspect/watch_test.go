package inspect

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/test/check"
)

func TestWatch(t *testing.T) {
	api := newFakeAPI(t, objects([]nodeBuilder{legacyNode("node", "10.0.0.1", 16)}))
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	out, errOut := newOutput(), newOutput()
	ended := start(ctx, t, api, out, errOut, "-w", "--no-headers")

	want := ""
	expect := func(what, row string) {
		t.Helper()
		want += row
		out.waitFor(t, what, func(text string) bool { return len(text) >= len(want) })
		if diff := cmp.Diff(want, out.String()); diff != "" {
			t.Fatalf("%s (-want +got):\n%s", what, diff)
		}
	}
	row := func(used string) string { return "node  10.0.0.1  " + used + "/16  " + used + "/16\n" }
	expect("first row", row("0"))

	pod := newPod("pod", 4)
	api.put(pod.on("node", 0))
	expect("row with the pod", row("4"))

	// Changes that are not visible print no row. The next row shows all changes.
	api.put(newPod("no-gpu", 0).plain().bound("node"))
	api.put(pod.with(func(p *corev1.Pod) { p.Annotations["other"] = "changed" }))
	api.put(legacyNode("node", "10.0.0.1", 16).labelled("heartbeat", "1"))
	api.put(newPod("pod-2", 8).on("node", 0))
	expect("row with both pods", row("12"))

	api.put(pod.terminating())
	api.put(pod.phase(corev1.PodSucceeded))
	expect("row without the pod that ended", row("8"))

	api.answerWith(http.StatusServiceUnavailable)
	errOut.waitFor(t, "warning", func(text string) bool {
		return strings.HasPrefix(text, "Warning: this may be old: listing ") && strings.Count(text, "\n") == 1
	})
	api.answerWith(0)
	api.remove(newPod("pod-2", 8))
	expect("row without pods", row("0"))

	interrupt()
	if err := ended(); err != nil {
		t.Errorf("ended with %v", err)
	}
}

// A large cluster is read less often, and a node that doesn't answer doesn't stop a watch for minutes.
func TestPauseAfter(t *testing.T) {
	o := &options{pause: watchPause}
	for reading, want := range map[time.Duration]time.Duration{
		10 * time.Millisecond: watchPause, time.Second: 10 * time.Second, usageTimeout: longestPause,
	} {
		if got := o.pauseAfter(reading); got != want {
			t.Errorf("after %v: %v, want %v", reading, got, want)
		}
	}
}

// TestWatchOneNamespace checks that a watch reads no more than a list with rights in one namespace.
func TestWatchOneNamespace(t *testing.T) {
	api := newFakeAPI(t, objects([]nodeBuilder{legacyNode("node", "10.0.0.1", 16)}, newPod("a", 1).in("ml"), newPod("other", 1)))
	api.namespace = "ml"
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	out, errOut := newOutput(), newOutput()
	ended := start(ctx, t, api, out, errOut, "-w", "--pending", "-n", "ml", "-o", "name")
	out.waitFor(t, "pod", func(text string) bool { return text == "pod/a\n" })
	api.put(newPod("b", 1).in("ml"))
	out.waitFor(t, "second pod", func(text string) bool { return text == "pod/a\npod/a\npod/b\n" })
	interrupt()
	if err := ended(); err != nil || errOut.String() != strings.Repeat(notSeen+"\n", 2) {
		t.Errorf("ended with %v; stderr %q", err, errOut.String())
	}
}

// TestWatchPodGroups checks that a watch reads PodGroups.
func TestWatchPodGroups(t *testing.T) {
	api := newFakeAPI(t, objects([]nodeBuilder{legacyNode("node", "10.0.0.1", 16)}, of("train", newPod("a", 1))))
	api.podGroups = "PodGroup"
	putPodGroups(api, map[string]int32{"train": 3})
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	out := newOutput()
	ended := start(ctx, t, api, out, newOutput(), "-w", "--pending", "--no-headers")
	out.waitFor(t, "pod", func(text string) bool { return strings.HasSuffix(text, "1 of 3 members exist\n") })
	api.put(of("train", newPod("b", 1)))
	out.waitFor(t, "second pod", func(text string) bool { return strings.HasSuffix(text, "2 of 3 members exist\n") })
	interrupt()
	if err := ended(); err != nil {
		t.Errorf("ended with %v", err)
	}
}

func TestWatchOneNodeJSON(t *testing.T) {
	node := legacyNode("node", "10.0.0.1", 16)
	api := newFakeAPI(t, objects([]nodeBuilder{node, legacyNode("other", "10.0.0.2", 16)}))
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	out, errOut := newOutput(), newOutput()
	ended := start(ctx, t, api, out, errOut, "node", "-w", "-o", "json")

	documents := func(text string) (totals []int) {
		decoder := json.NewDecoder(strings.NewReader(text))
		for {
			var report struct{ Cluster struct{ Total int } }
			if decoder.Decode(&report) != nil {
				return totals
			}
			totals = append(totals, report.Cluster.Total)
		}
	}
	out.waitFor(t, "document", func(text string) bool { return len(documents(text)) == 1 })
	api.put(legacyNode("other", "10.0.0.2", 80)) // Not selected.
	api.put(legacyNode("node", "10.0.0.1", 16, 16))
	out.waitFor(t, "second document", func(text string) bool { return len(documents(text)) == 2 })
	api.remove(node)
	errOut.waitFor(t, "word that the node is gone", func(text string) bool { return text == "Node \"node\" is gone.\n" })
	out.waitFor(t, "third document", func(text string) bool { return len(documents(text)) == 3 })
	interrupt()
	if err := ended(); err != nil {
		t.Errorf("ended with %v", err)
	}
	check.Equal(t, "totals", []int{16, 32, 0}, documents(out.String()))
}
