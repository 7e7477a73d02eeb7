package deviceplugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	cdi "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/usage"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// TestLimitAboveRequest: a container gets the limit that is annotated when it starts, in its environment, as a CDI device if the driver enforces it,
// and in the record, also after a restart of the plugin. Later changes of the annotation change nothing.
func TestLimitAboveRequest(t *testing.T) {
	limited := func(limit string) podOption { return fake.Annotation(protocol.AnnotationLimit("main"), limit) }
	for name, test := range map[string]struct {
		mode isolation.Mode
		pod  []podOption
		// variable is that of the limit in MiB. device is the CDI device of what the driver enforces.
		variable, device string
		allowed, limit   uint64
	}{
		"not annotated, not enforced": {isolation.None, nil, "", "", 0, 0},
		"not annotated":               {isolation.Driver, nil, "", "2048Mi", 0, 2 << 30},
		"not enforced":                {isolation.None, []podOption{limited("8Gi")}, "8192", "", 8 << 30, 0},
		"enforced":                    {isolation.Driver, []podOption{limited("8Gi")}, "8192", "8192Mi", 8 << 30, 8 << 30},
		"rounded up to 128 MiB":       {isolation.Driver, []podOption{limited("8193Mi")}, "8320", "8320Mi", 8320 << 20, 8320 << 20},
		"equal to the request":        {isolation.Driver, []podOption{limited("2Gi")}, "", "2048Mi", 0, 2 << 30},
		"below the request":           {isolation.Driver, []podOption{limited("1Gi")}, "", "2048Mi", 0, 2 << 30},
		"more than the card has":      {isolation.Driver, []podOption{limited("1Ti")}, "15360", "15360Mi", 15 << 30, 15 << 30},
		"invalid":                     {isolation.Driver, []podOption{limited("much")}, "", "2048Mi", 0, 2 << 30},
	} {
		t.Run(name, func(t *testing.T) {
			b, k, p, stop := startIsolated(t, test.mode, limiter{hard: inventory.NoLimit}, reservedCards())
			pod := newPod("a", append(test.pod, main(2), assumed(1, 1))...)
			b.create(p, pod)
			env := k.mustAdmit(pod)["main"]
			if got := env[protocol.EnvMemoryLimit]; got != test.variable {
				t.Errorf("the variable is %q, want %q", got, test.variable)
			}
			var want []string
			if test.device != "" {
				want = []string{"nvidia.com/gpu=GPU-1", "gpushare.aliyun.com/memory-limit=" + test.device}
			}
			check.Equal(t, "devices", want, k.devicesOf(t, pod))
			recorded := func(p *Plugin, when string) {
				t.Helper()
				if got := p.allocator.snapshots.record.Pod("uid-a")["main"]; got.Allowed != test.allowed || got.Limit != test.limit {
					t.Errorf("%s the record has %d and %d, want %d and %d", when, got.Allowed, got.Limit, test.allowed, test.limit)
				}
			}
			recorded(p, "at first")
			stop()
			changed := b.pod("a")
			annotate(changed, map[string]string{protocol.AnnotationLimit("main"): "3Gi"})
			if _, err := b.client.CoreV1().Pods("default").Update(t.Context(), changed, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			next, _ := b.start(reservedCards())
			await.True(t, "the record", func() bool { return next.allocator.snapshots.record.Pod("uid-a")["main"].Confirmed })
			recorded(next, "after a restart and a change of the annotation")
		})
	}
}

// TestLimitGivenAgain: a kubelet that has lost its checkpoint asks again for the devices of a container. It gets the limit that it was given first,
// whatever is annotated now.
func TestLimitGivenAgain(t *testing.T) {
	for name, test := range map[string]struct{ first, later, want string }{
		"another limit":       {"8Gi", "3Gi", "8192"},
		"the annotation gone": {"8Gi", "", "8192"},
		"the first one":       {"", "8Gi", ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t)
			b.servePodResources()
			k, p := b.up(16, 16)
			pod := newPod("a", main(2), assumed(0, 1))
			if test.first != "" {
				annotate(pod, map[string]string{protocol.AnnotationLimit("main"): test.first})
			}
			b.create(p, pod)
			k.mustAdmit(pod)
			changed := b.pod("a")
			delete(changed.Annotations, protocol.AnnotationLimit("main"))
			if test.later != "" {
				annotate(changed, map[string]string{protocol.AnnotationLimit("main"): test.later})
			}
			if _, err := b.client.CoreV1().Pods("default").Update(t.Context(), changed, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			await.True(t, "the plugin knows the change", func() bool {
				info, _ := p.pods.ByUID("uid-a")
				return (info.Containers[0].Limit > 0) == (test.later != "")
			})
			next := k.loseCheckpoint(b, pod)
			if got := next.mustAdmit(changed)["main"][protocol.EnvMemoryLimit]; got != test.want {
				t.Errorf("it gets %q, want %q", got, test.want)
			}
		})
	}
}

// TestLimitOfNextStart: a kubelet that has lost its checkpoint gave a running container the answer for another one. Until the container starts
// again, the record has what it runs with, and its next start finds the CDI device that the checkpoint names.
func TestLimitOfNextStart(t *testing.T) {
	given := func(card int, limit uint64) allocation.Allocation {
		a := giveOne(card, 2)
		a.Limit, a.Devices = limit, allocation.NewDeviceSet([]string{fmt.Sprint(card, limit)})
		return a
	}
	for name, next := range map[string]allocation.Allocation{"another card": given(1, 4<<30), "the same card": given(0, 4<<30)} {
		t.Run(name, func(t *testing.T) {
			dir, record, pods := t.TempDir(), allocation.NewRecord(nil), &runningPods{instance: "first"}
			backends := isolation.NewBackends(isolation.Options{SpecDirs: []string{dir}})
			w := &limitWatch{record: record, backends: backends}
			key := allocation.ContainerKey{UID: "uid-a", Name: "main"}
			kept := func(when string, want ...uint64) {
				t.Helper()
				if w.Keep(t.Context(), false) {
					t.Fatal("it fails")
				}
				var spec cdi.Spec
				text, err := os.ReadFile(filepath.Join(dir, "gpushare.aliyun.com-memory-limit.json"))
				if err = errors.Join(err, json.Unmarshal(text, &spec)); err != nil {
					t.Fatal(err)
				}
				var got []uint64
				for _, device := range spec.Devices {
					_, limit := backends.ModeOf(isolation.Edits{Devices: []string{spec.Kind + "=" + device.Name}})
					got = append(got, limit)
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("%s the specification has (-want +got)\n%s", when, diff)
				}
			}
			record.Sync([]allocation.Entry{{ContainerKey: key, Allocation: given(0, 8<<30)}}, time.Now(), pods)
			kept("at first", 8<<30)
			for range 2 {
				record.Sync([]allocation.Entry{{ContainerKey: key, Allocation: next}}, time.Now(), pods)
				kept("until it starts again", 4<<30, 8<<30)
			}
			if got := record.Pod("uid-a")["main"]; got.Limit != 8<<30 || !slices.Equal(got.Cards.Cards(), []int{0}) {
				t.Errorf("the running container is recorded with the limit %d on %v", got.Limit, got.Cards)
			}
			pods.instance = "second"
			record.Sync([]allocation.Entry{{ContainerKey: key, Allocation: next}}, time.Now(), pods)
			kept("after its start", 4<<30, 8<<30) // Devices are never removed.
		})
	}
}

// runningPods implements allocation.KnownPods: all pods exist, and their containers run with one ID.
type runningPods struct{ instance string }

func (*runningPods) Exists(gpu.PodUID) bool                    { return true }
func (p *runningPods) Instance(allocation.ContainerKey) string { return p.instance }

// TestWithoutItsLimit: an Event says that a container runs without the limit that is annotated, also after the record is lost.
func TestWithoutItsLimit(t *testing.T) {
	b := newFixture(t)
	p, _ := b.start(newCards(16))
	await.True(t, "the annotator", func() bool { return p.node.informer.HasSynced() })
	limited := fake.Annotation(protocol.AnnotationLimit("main"), "8Gi")
	b.create(p, newPod("given", main(2), limited, ran(true)), newPod("lost", main(2), limited, ran(true)), newPod("ended", main(2), limited, ran(false)),
		newPod("none", main(2), ran(true)), newPod("equal", main(8), limited, ran(true)))
	given := giveOne(0, 2)
	given.Allowed = 8 << 30
	p.allocator.snapshots.record.Add(allocation.ContainerKey{UID: "uid-given", Name: "main"}, given)
	for range 2 {
		p.overuse.Update(protocol.Usage{}, nil)
	}
	b.awaitEvent("GPULimitNotInForce Container main runs without the annotated limit above its request; what it uses above its request counts as over-use")
	check.Equal(t, "pods without their limit", sets.New[gpu.PodUID]("uid-lost"), p.overuse.unlimited)
}

// TestPromised: a pod that borrows is reported while its card has less free memory than the others were promised and don't use.
func TestPromised(t *testing.T) {
	b := newFixture(t)
	p, _ := b.start(newCards(16))
	await.True(t, "the annotator", func() bool { return p.node.informer.HasSynced() })
	borrower := newPod("borrower", main(2), ran(true))
	// Nothing is known of what it was given: the kubelet has lost its checkpoint. It uses all that it requests.
	lost := newPod("lost", main(4), assumed(0, 1), ran(true))
	b.create(p, borrower, lost, newPod("idle", main(8), assumed(0, 2)))
	given := giveOne(0, 2)
	given.Allowed = 8 << 30
	p.allocator.snapshots.record.Add(allocation.ContainerKey{UID: "uid-borrower", Name: "main"}, given)
	measure := func(freeMiB uint64) protocol.Usage {
		return protocol.Usage{Time: time.Unix(1_000_000, 0), Cards: []protocol.CardUsage{{Index: 0, Free: new(freeMiB << 20)}}, Containers: []protocol.ContainerUsage{
			{UID: "uid-borrower", Container: "main", Used: 7 << 30, Requested: 2 << 30, Allowed: 8 << 30}, {UID: "uid-lost", Container: "main", Used: 4 << 30}}}
	}
	reported := func() bool { value, _ := p.overuse.Annotation("uid-borrower"); return value != "" }
	promised := p.allocator.InUse
	p.overuse.Update(measure(512), promised())
	if !reported() {
		t.Error("it isn't reported while the card is low on free memory")
	}
	p.overuse.Update(measure(1024), promised())
	if reported() {
		t.Error("it is reported although the card has free memory")
	}
	p.allocator.snapshots.record.Remove("uid-idle")
	b.delete(p, b.pod("idle"))
	p.overuse.Update(measure(0), promised())
	if reported() {
		t.Error("it is reported although no pod needs more: the pod of which nothing is known uses what it requests")
	}
}

// TestPromisedToTerminatingPods: what is promised to a terminating pod needs no free memory, though none of its containers runs.
func TestPromisedToTerminatingPods(t *testing.T) {
	b := newFixture(t)
	p, _ := b.start(newCards(16))
	await.True(t, "the annotator", func() bool { return p.node.informer.HasSynced() })
	leaving := func(pod *corev1.Pod) {
		pod.DeletionTimestamp, pod.Finalizers = new(metav1.Now()), []string{"test/kubelet"}
	}
	slow := func(pod *corev1.Pod) { // For half an hour, of a day.
		leaving(pod)
		pod.DeletionTimestamp, pod.DeletionGracePeriodSeconds = new(metav1.NewTime(time.Now().Add(23*time.Hour+30*time.Minute))), new(int64(86400))
	}
	ended := func(pod *corev1.Pod) { pod.Status.Phase = corev1.PodSucceeded }
	b.create(p, newPod("leaving", main(4), assumed(0, 1), leaving), newPod("slow", main(2), assumed(1, 2), slow),
		newPod("ended", main(1), assumed(0, 3), leaving, ended), newPod("stays", main(8), assumed(0, 4)))
	want := map[gpu.PodUID]usage.KnownPod{
		"uid-leaving": {Held: map[int]uint64{0: 4 << 30}, Leaving: true, EndsSoon: true},
		"uid-slow":    {Held: map[int]uint64{1: 2 << 30}, Leaving: true},
		"uid-ended":   {Leaving: true, EndsSoon: true},
		"uid-stays":   {Held: map[int]uint64{0: 8 << 30}},
	}
	check.Equal(t, "the result", want, p.overuse.known(time.Now(), nil).Pods)
}

// Without the kubelet's answers, pods of the same request are served in the order in which they were assumed. None of them gets the limit of another.
func TestLimitsByOrder(t *testing.T) {
	for _, same := range []bool{false, true} {
		t.Run(fmt.Sprint("equal limits ", same), func(t *testing.T) {
			b := newFixture(t)
			k, p := b.up(16, 16)
			other := "8Gi"
			if !same {
				other = "4Gi"
			}
			first := newPod("first", main(2), assumed(0, 1), fake.Annotation(protocol.AnnotationLimit("main"), "8Gi"))
			second := newPod("second", main(2), assumed(0, 2), fake.Annotation(protocol.AnnotationLimit("main"), other))
			b.create(p, first, second)
			want := map[bool]string{true: "8192", false: ""}[same]
			if got := k.mustAdmit(second)["main"][protocol.EnvMemoryLimit]; got != want {
				t.Errorf("the second pod gets %q, want %q", got, want)
			}
		})
	}
}
