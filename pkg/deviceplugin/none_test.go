package deviceplugin

import (
	"math"
	"os"
	"testing"

	"google.golang.org/protobuf/testing/protocmp"
	corev1 "k8s.io/api/core/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// TestNoneCostsNothing: in mode none a container gets exactly the environment that it got before there were modes, cards have all of
// their memory, pods within their requests get no annotation, no file is written, and the decision takes no memory.
func TestNoneCostsNothing(t *testing.T) {
	b := newFixtureAlone(t)
	b.isolation = newIsolation(t, isolation.None)
	p, _ := b.start(reservedCards())
	await.True(t, "the node", func() bool { return p.node.informer.HasSynced() })
	pod := newPod("a", main(2), assumed(1, 1))
	b.create(p, pod)
	if got := p.cards.Reported()[0].Memory; got != 16 {
		t.Errorf("the card has %d of 16 units", got)
	}

	known, _ := p.pods.ByUID("uid-a")
	decision := allocation.Decision{Pod: &known, Container: known.Containers[0], Cards: reservedCards()[1:]}
	var limited limitation
	// The count includes what informers allocate meanwhile. What the decision allocates is in every count.
	fewest := math.Inf(1)
	for range 50 {
		fewest = min(fewest, testing.AllocsPerRun(1, func() { decision, limited = p.isolator.Isolate(decision, gpu.GiB) }))
	}
	if fewest > 0 {
		t.Errorf("the mode makes %v allocations", fewest)
	}
	got, err := p.allocator.responses.respond(decision, 2, limited)
	check.Must(t, err)
	want := &pluginapi.ContainerAllocateResponse{Envs: map[string]string{
		"NVIDIA_VISIBLE_DEVICES": "GPU-1", "ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "2",
		"ALIYUN_COM_GPU_MEM_CONTAINER": "2", "ALIYUN_COM_GPU_MEM_DEV": "16",
	}}
	check.Equal(t, "response", want, got, protocmp.Transform())

	p.allocator.snapshots.record.Add(allocation.ContainerKey{UID: "uid-a", Name: "main"}, giveOne(1, 2))
	p.Measure(limiter{})
	if annotations := p.annotator.addFound(&known, nil); len(annotations) > 0 {
		t.Errorf("annotations %v", annotations)
	}
	if files, err := os.ReadDir(b.isolation.specs); err != nil || len(files) != 1 {
		t.Errorf("files %v, %v; want that of NVIDIA's toolkit alone", files, err)
	}
}

// BenchmarkIsolate is the part of Allocate that the isolation mode adds.
func BenchmarkIsolate(b *testing.B) {
	for _, mode := range []isolation.Mode{isolation.None, isolation.Driver} {
		b.Run(string(mode), func(b *testing.B) {
			o := newIsolation(b, mode)
			p := &Plugin{cards: newCardState(), options: Options{Isolation: isolation.Options{CgroupRoot: o.cgroups, SpecDirs: []string{o.specs}}}}
			p.addIsolator()
			p.cards.Set(gpu.GiB, reservedCards(), nil, nil, "")
			p.isolator.SetNode(&corev1.Node{})
			p.isolator.Configure(mode)
			p.isolator.Ask(limiter{})
			decision := allocation.Decision{Cards: reservedCards()[:1], Container: allocation.Container{Request: 2}}
			b.ReportAllocs()
			for b.Loop() {
				if d, _ := p.isolator.Isolate(decision, gpu.GiB); d.Rejection != nil {
					b.Fatal(d.Rejection)
				}
			}
		})
	}
}
