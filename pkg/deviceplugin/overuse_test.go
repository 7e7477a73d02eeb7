package deviceplugin

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/fake"
)

// TestOveruse: a pod above its request is annotated as long as it is, with one Event. Package usage tests what counts.
func TestOveruse(t *testing.T) {
	b := newFixture(t)
	p, _ := b.start(newCards(16))
	await.True(t, "the annotator", func() bool { return p.node.informer.HasSynced() })
	pod, none := newPod("greedy", main(2)), newPod("none", main(0))
	stale := newPod("stale", main(2), fake.Annotation(protocol.AnnotationOveruse, `{"usedMiB":3,"requestedMiB":2,"cards":{"0":{"usedMiB":3,"requestedMiB":2}}}`))
	lost := newPod("lost", main(2))
	// Its second container runs too. The kubelet has lost its checkpoint, and only the first one has been given a card since.
	half := newPod("half", main(2), container("second", 3))
	// Its second container, which requests more, doesn't run now, so the measurement has only the first one.
	restarting := newPod("restarting", main(2), container("second", 3))
	b.create(p, pod, none, stale, lost, half, restarting)
	give := func(uid gpu.PodUID, container string, request gpu.Memory) {
		p.allocator.snapshots.record.Add(allocation.ContainerKey{UID: uid, Name: container}, giveOne(0, request))
	}
	give("uid-greedy", "main", 2)
	give("uid-half", "main", 2)
	give("uid-restarting", "main", 2)
	give("uid-restarting", "second", 3)
	measure := func(at time.Time, used uint64) {
		report := protocol.Usage{Time: at, Cards: []protocol.CardUsage{{Index: 0}}}
		for _, name := range []string{"greedy", "none", "lost", "half", "restarting"} {
			report.Containers = append(report.Containers, protocol.ContainerUsage{UID: "uid-" + name, Container: "main", Used: used << 20, Requested: 2 << 30})
		}
		p.overuse.Update(report, nil)
	}
	begin := time.Unix(1_000_000, 0)
	measure(begin, 4096)
	await.True(t, "the annotation of a former plugin to go", func() bool { _, has := b.pod("stale").Annotations[protocol.AnnotationOveruse]; return !has })
	measure(begin.Add(time.Hour), 4096)
	var got protocol.Overuse
	await.True(t, "the annotation", func() bool {
		return json.Unmarshal([]byte(b.pod("greedy").Annotations[protocol.AnnotationOveruse]), &got) == nil && got.At.Equal(begin.Add(time.Hour))
	})
	if got.Used != 4096 || got.Requested != 2048 || !got.Since.Equal(begin) {
		t.Errorf("the annotation is %+v", got)
	}
	b.awaitEvent("GPUMemoryOveruse The pod uses 4096 MiB of GPU memory and requests 2048 MiB")
	for name, what := range map[string]string{"none": "requests nothing", "lost": "was given what is not known", "half": "was given what is known of one container only", "restarting": "is within the requests of all its containers"} {
		if _, has := b.pod(name).Annotations[protocol.AnnotationOveruse]; has {
			t.Errorf("a pod that %s is annotated", what)
		}
	}
	if got := testutil.ToFloat64(p.metrics.overuse); got != 1 {
		t.Errorf("%v pods are counted", got)
	}
	measure(begin.Add(2*time.Hour), 100)
	await.True(t, "the annotation to go", func() bool { _, has := b.pod("greedy").Annotations[protocol.AnnotationOveruse]; return !has })

	// It uses a second card that it was not given. Then that card can't be read, and the pod is within its request of the other.
	both := func(at time.Time, used uint64, cards ...protocol.CardUsage) {
		p.overuse.Update(protocol.Usage{Time: at, Cards: cards, Containers: []protocol.ContainerUsage{
			{UID: "uid-greedy", Container: "main", Used: used << 20, Requested: 2 << 30}, {UID: "uid-greedy", Container: "main", Card: 1, Used: 1 << 30}}}, nil)
	}
	begin = begin.Add(3 * time.Hour)
	both(begin, 4096, protocol.CardUsage{}, protocol.CardUsage{Index: 1})
	both(begin.Add(time.Minute), 4096, protocol.CardUsage{}, protocol.CardUsage{Index: 1})
	await.True(t, "the annotation with both cards", func() bool {
		report, err := protocol.ParseOveruse(b.pod("greedy").Annotations[protocol.AnnotationOveruse])
		return err == nil && report != nil && len(report.Cards) == 2
	})
	changed := false
	p.overuse.annotate = func(gpu.PodUID) { changed = true }
	p.overuse.Update(protocol.Usage{Time: begin.Add(70 * time.Second), Cards: []protocol.CardUsage{{}, {Index: 1, Problem: "Unknown Error"}},
		Containers: []protocol.ContainerUsage{{UID: "uid-greedy", Container: "main", Used: 1 << 30, Requested: 2 << 30}}}, nil)
	if text, _ := p.overuse.Annotation("uid-greedy"); !changed || strings.Contains(text, `"0":`) {
		t.Errorf("after a measurement without its second card the annotation is %s, written: %v", text, changed)
	}
}
