package deviceplugin

import (
	"fmt"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// TestAdapters: a container gets the devices and the ports of the adapters near its card, and the record has them, also after a restart of the
// plugin, which reads them from the kubelet's checkpoint. A pod without the label gets nothing.
func TestAdapters(t *testing.T) {
	cards := newCards(16, 16)
	cards[1].RDMAPorts = "mlx5_2:1,mlx5_2:2"
	for label, want := range map[string]allocation.Adapters{
		"": {}, "preferred": {Ports: cards[1].RDMAPorts, Devices: []string{"uverbs3"}}, "required": {Ports: cards[1].RDMAPorts, Devices: []string{"uverbs3"}},
	} {
		t.Run("label "+label, func(t *testing.T) {
			b := newFixture(t)
			k := startKubelet(t, b.dir)
			p, stop := b.start(nil)
			p.SetCards(gpu.GiB, cards, []gpu.Adapter{{Name: "mlx5_0", Device: "uverbs0"}, {Name: "mlx5_2", Device: "uverbs3"}}, nil, "")
			k.awaitDevices(32, 32)
			options := []podOption{main(2), assumed(1, 1)}
			if label != "" {
				options = append(options, fake.RDMA(label))
			}
			pod := newPod("a", options...)
			b.create(p, pod)
			env := k.mustAdmit(pod)["main"]
			if got := env["NCCL_IB_HCA"]; got != want.Ports {
				t.Errorf("NCCL_IB_HCA is %q, want %q", got, want.Ports)
			}
			var devices, wanted []string
			for _, d := range k.responseOf(t, pod).Devices {
				devices = append(devices, fmt.Sprint(d.HostPath, " ", d.ContainerPath, " ", d.Permissions))
			}
			if label != "" {
				wanted = []string{"/dev/infiniband/uverbs3 /dev/infiniband/uverbs3 rw", "/dev/infiniband/rdma_cm /dev/infiniband/rdma_cm rw"}
			}
			check.Equal(t, "devices", wanted, devices)
			recorded := func(p *Plugin, when string) {
				t.Helper()
				if diff := cmp.Diff(want, p.allocator.snapshots.record.Pod("uid-a")["main"].Adapters); diff != "" {
					t.Errorf("%s the record has (-want +got):\n%s", when, diff)
				}
			}
			recorded(p, "at first")
			stop()
			next, _ := b.start(newCards(16, 16))
			await.True(t, "the record", func() bool { return next.allocator.snapshots.record.Pod("uid-a")["main"].Confirmed })
			recorded(next, "after a restart")
		})
	}
}

// TestAdaptersByOrder: without the kubelet's answers, a pod gets no adapter that another one of the same request asks for.
func TestAdaptersByOrder(t *testing.T) {
	b := newFixture(t)
	k := startKubelet(t, b.dir)
	p, _ := b.start(nil)
	cards := newCards(16, 16)
	cards[0].RDMAPorts = "mlx5_0:1"
	p.SetCards(gpu.GiB, cards, []gpu.Adapter{{Name: "mlx5_0", Device: "uverbs0"}}, nil, "")
	k.awaitDevices(32, 32)
	asks, without := newPod("asks", main(2), assumed(0, 1), fake.RDMA("preferred")), newPod("without", main(2), assumed(0, 2))
	b.create(p, asks, without)
	if env := k.mustAdmit(without)["main"]; env["NCCL_IB_HCA"] != "" || len(k.responseOf(t, without).Devices) > 0 {
		t.Errorf("a pod without the label got %v", env)
	}
	b.awaitEvent("GPUAdapterNotGiven container main gets no RDMA adapter: the kubelet can't be asked which of several pods with the same request it starts, and they differ in the label gpushare.aliyun.com/rdma")
}

// TestAdaptersWithCards: cards that are read beside a change come with the adapters of the same listing.
func TestAdaptersWithCards(t *testing.T) {
	s := newCardState()
	set := func(name string) {
		cards := newCards(16)
		cards[0].RDMAPorts = name + ":1"
		s.Set(gpu.GiB, cards, []gpu.Adapter{{Name: name}}, nil, "")
	}
	set("mlx5_0")
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			for i := range 20000 {
				set(fmt.Sprintf("mlx5_%d", i%2))
				if got := s.Get(); got.Cards[0].RDMAPorts != got.Adapters[0].Name+":1" {
					t.Errorf("ports %s with the adapter %s", got.Cards[0].RDMAPorts, got.Adapters[0].Name)
					return
				}
			}
		})
	}
	group.Wait()
}
