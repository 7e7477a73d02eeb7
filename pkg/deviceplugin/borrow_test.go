package deviceplugin

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
)

// TestLimitAboveRequest: a container gets the limit that is annotated when it starts, in its environment, as a CDI device if the driver enforces it,
// and in the record, also after a restart of the plugin. Later changes of the annotation change nothing.
func TestLimitAboveRequest(t *testing.T) {
	limited := func(limit string) podOption { return annotation(protocol.AnnotationLimit("main"), limit) }
	for name, test := range map[string]struct {
		mode isolation.Mode
		pod  []podOption
		// variable is that of the limit in MiB. device is the CDI device of what the driver enforces.
		variable, device string
		allowed, limit   uint64
	}{
		"not annotated, not enforced":   {isolation.None, nil, "", "", 0, 0},
		"not annotated":                 {isolation.Driver, nil, "", "2048Mi", 0, 2 << 30},
		"not enforced":                  {isolation.None, []podOption{limited("8Gi")}, "8192", "", 8 << 30, 0},
		"enforced":                      {isolation.Driver, []podOption{limited("8Gi")}, "8192", "8192Mi", 8 << 30, 8 << 30},
		"rounded up to 128 MiB":         {isolation.Driver, []podOption{limited("8193Mi")}, "8320", "8320Mi", 8320 << 20, 8320 << 20},
		"equal to the request":          {isolation.Driver, []podOption{limited("2Gi")}, "", "2048Mi", 0, 2 << 30},
		"below the request":             {isolation.Driver, []podOption{limited("1Gi")}, "", "2048Mi", 0, 2 << 30},
		"more than the card has":        {isolation.Driver, []podOption{limited("1Ti")}, "15360", "15360Mi", 15 << 30, 15 << 30},
		"invalid":                       {isolation.Driver, []podOption{limited("much")}, "", "2048Mi", 0, 2 << 30},
		"named by the other annotation": {isolation.None, []podOption{annotation(protocol.AnnotationLimits, `{"main": "4Gi"}`)}, "4096", "", 4 << 30, 0},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t)
			b.isolation = newIsolation(t, test.mode)
			k := startKubelet(t, b.dir)
			p, stop := b.start(nil)
			p.Measure(limiter{hard: inventory.NoLimit})
			p.SetCards(gpu.GiB, reservedCards(), nil, "")
			if test.mode.Limits() {
				k.awaitDevices(30, 30)
			} else {
				k.awaitDevices(32, 32)
			}
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
			if diff := cmp.Diff(want, k.devicesOf(t, pod)); diff != "" {
				t.Errorf("devices: -want +got:\n%s", diff)
			}
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
			first := newPod("first", main(2), assumed(0, 1), annotation(protocol.AnnotationLimit("main"), "8Gi"))
			second := newPod("second", main(2), assumed(0, 2), annotation(protocol.AnnotationLimit("main"), other))
			b.create(p, first, second)
			want := map[bool]string{true: "8192", false: ""}[same]
			if got := k.mustAdmit(second)["main"][protocol.EnvMemoryLimit]; got != want {
				t.Errorf("the second pod gets %q, want %q", got, want)
			}
		})
	}
}
