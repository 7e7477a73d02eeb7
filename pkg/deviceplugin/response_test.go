package deviceplugin

import (
	"maps"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

func TestResponse(t *testing.T) {
	card, two := []gpu.Card{{Index: 3, UUID: "GPU-3", Memory: 64}}, []gpu.Card{{Index: 0, UUID: "GPU-0", Memory: 16}, {Index: 3, UUID: "GPU-3", Memory: 64}}
	container := allocation.Container{Request: 2}
	ofTwo := map[string]string{
		"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-3", "ALIYUN_COM_GPU_MEM_IDX": "0,3", "ALIYUN_COM_GPU_MEM_POD": "5",
		"ALIYUN_COM_GPU_MEM_CONTAINER": "1", "ALIYUN_COM_GPU_MEM_DEV": "16,64", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
	}
	withCores := maps.Clone(ofTwo)
	withCores["ALIYUN_COM_GPU_CORE_CONTAINER"] = "30"
	devices := []string{"nvidia.com/gpu=GPU-3", "limit=2"}
	env := func(visible string) map[string]string {
		return map[string]string{
			"NVIDIA_VISIBLE_DEVICES": visible, "ALIYUN_COM_GPU_MEM_IDX": "3", "ALIYUN_COM_GPU_MEM_POD": "5",
			"ALIYUN_COM_GPU_MEM_CONTAINER": "2", "ALIYUN_COM_GPU_MEM_DEV": "64",
		}
	}
	limited := containerLimit{Edits: isolation.Edits{Devices: devices}}
	for name, test := range map[string]struct {
		by        VisibleDevices
		strategy  DeviceListStrategy
		cards     []gpu.Card
		container allocation.Container
		position  int
		env       map[string]string
		cdi       []string
		containerLimit
	}{
		"environment":                {VisibleByUUID, ListByEnv, card, container, 3, env("GPU-3"), nil, containerLimit{}},
		"CDI by UUID":                {VisibleByUUID, ListByCDI, card, container, 3, env("GPU-3"), []string{"nvidia.com/gpu=GPU-3"}, containerLimit{}},
		"CDI by index":               {VisibleByIndex, ListByCDI, card, container, 3, env("3"), []string{"nvidia.com/gpu=3"}, containerLimit{}},
		"CDI, a card without a UUID": {VisibleByUUID, ListByCDI, []gpu.Card{{Index: 3, Memory: 64}}, container, 3, env("3"), []string{"nvidia.com/gpu=3"}, containerLimit{}},
		"the driver's current index": {VisibleByIndex, ListByCDI, card, container, 2, env("2"), []string{"nvidia.com/gpu=2"}, containerLimit{}},
		"a limit brings the card":    {VisibleByUUID, ListByEnv, card, container, 3, env("GPU-3"), devices, limited},
		"several cards":              {VisibleByUUID, ListByEnv, two, container, 3, ofTwo, nil, containerLimit{}},
		"several cards by CDI":       {VisibleByUUID, ListByCDI, two, container, 3, ofTwo, []string{"nvidia.com/gpu=GPU-0", "nvidia.com/gpu=GPU-3"}, containerLimit{}},
		"cores":                      {VisibleByUUID, ListByEnv, two, allocation.Container{Request: 2, Cores: 60}, 3, withCores, nil, containerLimit{}},
		"and only once":              {VisibleByUUID, ListByCDI, card, container, 3, env("GPU-3"), devices, limited},
	} {
		t.Run(name, func(t *testing.T) {
			cards := newCardState()
			cards.Set(gpu.GiB, test.cards, nil, map[int]int{3: test.position}, "")
			r := &responses{cards: cards, visibleBy: test.by, strategy: test.strategy, disableIsolation: func() bool { return false }}
			pod := &allocation.Pod{Pod: gpu.Pod{Request: 5}}
			got := r.withCards(allocation.Decision{Pod: pod, Cards: test.cards, Container: test.container}, test.containerLimit)
			check.Equal(t, "environment", test.env, got.Envs)
			var cdi []string
			for _, device := range got.CdiDevices {
				cdi = append(cdi, device.Name)
			}
			check.Equal(t, "CDI devices", test.cdi, cdi)
			if refused := r.withoutCard(5, 2); len(refused.CdiDevices) > 0 {
				t.Errorf("a container without a card got %v", refused.CdiDevices)
			}
		})
	}
}

// The kubelet keeps the response, and starts a container with it after its own restart. The response must name one card
// throughout.
func TestCheckpointKeepsCDI(t *testing.T) {
	b := newFixture(t)
	b.deviceList, b.isolation = ListByCDI, newIsolation(t, isolation.None) // It writes the specification of the cards.
	k, p := b.up(16, 16)
	pod := newPod("a", main(4), assumed(1, 1))
	b.create(p, pod)
	k.mustAdmit(pod)
	var kept pluginapi.ContainerAllocateResponse
	check.Must(t, proto.Unmarshal(k.entries[0].AllocResp, &kept))
	if len(kept.CdiDevices) != 1 || kept.CdiDevices[0].Name != "nvidia.com/gpu="+kept.Envs["NVIDIA_VISIBLE_DEVICES"] {
		t.Errorf("CDI devices %v beside %v", kept.CdiDevices, kept.Envs)
	}
	b.awaitAssigned("a", 1)
}

func TestErrorEnv(t *testing.T) {
	b := newFixture(t)
	b.errorEnv = true
	k := startKubelet(t, b.dir)
	p, stop := b.start(newCards(16))
	k.awaitDevices(16, 16)
	direct := newPod("direct", main(10))
	b.create(p, direct)
	k.mustAdmit(direct)
	b.awaitAssigned("direct", 0)
	// Otherwise the kubelet's own count of devices would reject the next pod.
	k.mu.Lock()
	k.entries[0].DeviceIDs[-1] = k.entries[0].DeviceIDs[-1][:1]
	k.mu.Unlock()

	late := newPod("late", main(8), assumed(0, 1))
	b.create(p, late)
	want := map[string]string{
		"NVIDIA_VISIBLE_DEVICES": "no-gpu-has-8GiB-to-run", "ALIYUN_COM_GPU_MEM_IDX": "-1", "ALIYUN_COM_GPU_MEM_POD": "8",
		"ALIYUN_COM_GPU_MEM_CONTAINER": "8", "ALIYUN_COM_GPU_MEM_DEV": "16",
	}
	check.Equal(t, "the result", want, k.mustAdmit(late)["main"])
	b.awaitEvent("GPUCardRefused container main: pod default/late: no card for 8 units of GPU memory: no GPU card has enough free memory; it starts all the same, without a card")
	if got := counted(t, p, allocation.RefusedFull); got != 1 {
		t.Errorf("counted %v rejections", got)
	}

	// The pod doesn't hold a card either after a restart, when the plugin rebuilds the record from the checkpoint.
	stop()
	p, _ = b.start(newCards(16))
	k.awaitRegistrations(2)
	k.awaitDevices(16, 16)
	if got := p.allocator.snapshots.record.Pod("uid-late")["main"]; got.HasCard() || got.Unknown {
		t.Errorf("-1 in the checkpoint is %+v", got)
	}
	k.mu.Lock()
	k.entries[1].DeviceIDs[-1] = nil
	k.mu.Unlock()
	fits := newPod("fits", main(6), assumed(0, 2))
	b.create(p, fits)
	if got := cardOf(k.mustAdmit(fits)["main"]); got != "0" {
		t.Errorf("fits got card %s", got)
	}
	b.awaitAssigned("fits", 0)
	if got := b.pod("late").Annotations; got["ALIYUN_COM_GPU_MEM_IDX"] != "0" || got["ALIYUN_COM_GPU_MEM_ASSIGNED"] != "false" {
		t.Errorf("late was annotated: %v", got)
	}
}

// TestErrorEnvAfterSelection: a container that starts without a card, because its limit can't be set up, is recorded without adapters and limits.
func TestErrorEnvAfterSelection(t *testing.T) {
	b := newFixture(t)
	b.errorEnv, b.isolation = true, newIsolation(t, isolation.Driver)
	k := startKubelet(t, b.dir)
	p, _ := b.start(nil)
	p.Measure(limiter{})
	cards := reservedCards()
	cards[0].RDMAPorts = "mlx5_0:1"
	p.SetCards(gpu.GiB, cards, []gpu.Adapter{{Name: "mlx5_0", Device: "uverbs0"}}, nil, "")
	k.awaitDevices(30, 30)
	check.Must(t, os.Mkdir(filepath.Join(b.isolation.specs, "gpushare.aliyun.com-memory-limit.json"), 0o755))
	pod := newPod("a", main(2), assumed(0, 1), fake.RDMA("preferred"), fake.Annotation(protocol.AnnotationLimit("main"), "8Gi"))
	b.create(p, pod)
	if got := cardOf(k.mustAdmit(pod)["main"]); got != "-1" {
		t.Fatalf("it got card %s", got)
	}
	got := p.allocator.snapshots.record.Pod("uid-a")["main"]
	check.Equal(t, "record", allocation.Allocation{Devices: got.Devices, At: got.At, Confirmed: got.Confirmed}, got)
}
