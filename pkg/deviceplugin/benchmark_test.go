package deviceplugin

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/fake"
	events "k8s.io/client-go/tools/record"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
)

// crowd is a node with eight cards and a hundred pods. Forty of the pods have the same size and are not served yet.
type crowd struct {
	plugin  *Plugin
	kubelet *kubelet
	waiting []*corev1.Pod
	free    map[int][]string       // Device IDs by card.
	given   allocation.Allocations // What the other sixty were given.
	request int
}

// newCrowd returns a crowd whose cards have this many units. asked makes the kubelet report which pod it is admitting.
func newCrowd(b *testing.B, memory gpu.Memory, asked bool) *crowd {
	b.Helper()
	o := Options{
		Client: fakeClient(fake.NewClientset()), Events: &events.FakeRecorder{}, NodeName: testNode,
		VisibleDevices: VisibleByUUID, Directory: b.TempDir(),
	}
	c := &crowd{kubelet: newKubelet(b, o.Directory), free: map[int][]string{}, given: allocation.Allocations{}, request: int(memory) / 13}
	if asked {
		o.PodResourcesSocket = filepath.Join(o.Directory, "pods.sock")
		c.kubelet.podResources(o.PodResourcesSocket)
	}
	var err error
	if c.plugin, err = New(o); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(c.plugin.resources.Close)
	cards := newCards(slices.Repeat([]gpu.Memory{memory}, 8)...)
	c.plugin.SetCards(gpu.GiB, cards, nil, nil, "")
	for _, d := range devices(cards) {
		card := strings.IndexByte(digits, d.ID[0])
		c.free[card] = append(c.free[card], d.ID)
	}
	for i := range 100 {
		card, request := i%8, c.request
		if i >= 40 {
			request = max(1, int(memory)/20-i%3)
		}
		pod := newPod("p"+strconv.Itoa(i), main(int64(request)), assumed(card, i), created(i))
		info, err := transformPod(pod)
		check.Must(b, err)
		check.Must(b, c.plugin.pods.informer.GetStore().Add(info))
		if i < 40 {
			c.waiting = append(c.waiting, pod)
			continue
		}
		ids := c.free[card][:request]
		c.free[card] = c.free[card][request:]
		entry := newEntry(b, string(pod.UID), "main", card, ids...)
		c.kubelet.entries = append(c.kubelet.entries, entry)
		given := allocation.Give(allocation.Container{Request: gpu.Memory(request)}, []gpu.Card{{Index: card, Memory: memory}})
		given.Devices, given.Confirmed = allocation.NewDeviceSet(ids), true
		c.given[gpu.PodUID(pod.UID)] = allocation.PodAllocations{"main": given}
	}
	writeCheckpoint(b, o.Directory, c.kubelet.entries...)
	return c
}

// admit serves the forty pods one after the other, as the kubelet does, and records how long each call took.
func (c *crowd) admit(b *testing.B, took map[string][]time.Duration) {
	c.plugin.allocator.snapshots.record = allocation.NewRecord(c.given)
	clear(c.kubelet.admitted)
	free := maps.Clone(c.free)
	for i, pod := range c.waiting {
		available := slices.Concat(slices.Collect(maps.Values(free))...)
		c.kubelet.mu.Lock()
		c.kubelet.admitted[pod.Namespace+"/"+pod.Name] = pod
		c.kubelet.mu.Unlock()

		b.StartTimer()
		begin := time.Now()
		ids := c.plugin.allocator.Prefer(b.Context(), available, nil, c.request)
		preferred := time.Now()
		response, err := c.plugin.allocator.Allocate(b.Context(), ids)
		end := time.Now()
		b.StopTimer()

		took["prefer"] = append(took["prefer"], preferred.Sub(begin))
		took["allocate"] = append(took["allocate"], end.Sub(preferred))
		check.Must(b, err)
		if want := strconv.Itoa(i % 8); response.Envs[protocol.AnnotationIndex] != want {
			b.Fatalf("%s got card %s, want %s", pod.Name, response.Envs[protocol.AnnotationIndex], want)
		}
		free[i%8] = slices.DeleteFunc(slices.Clone(free[i%8]), setOf(ids))
	}
}

func setOf(ids []string) func(string) bool {
	set := make(map[string]bool, len(ids))
	for _, id := range ids {
		set[id] = true
	}
	return func(id string) bool { return set[id] }
}

// BenchmarkAdmission admits forty pods of the same size on a node that has a hundred pods. One operation makes both calls
// for each of them.
func BenchmarkAdmission(b *testing.B) {
	for _, memory := range []gpu.Memory{80, 16276} {
		for _, asked := range []bool{false, true} {
			b.Run(fmt.Sprintf("cards=8x%d/asked=%t", memory, asked), func(b *testing.B) {
				c := newCrowd(b, memory, asked)
				took := map[string][]time.Duration{}
				b.ReportAllocs()
				b.ResetTimer()
				b.StopTimer()
				for range b.N {
					c.admit(b, took)
				}
				for call, durations := range took {
					slices.Sort(durations)
					for _, percent := range []int{50, 99} {
						at := durations[(len(durations)-1)*percent/100]
						b.ReportMetric(float64(at.Microseconds())/1000, fmt.Sprintf("%s-p%d-ms", call, percent))
					}
				}
			})
		}
	}
}

// BenchmarkCheckpoint parses the checkpoint of the same node.
func BenchmarkCheckpoint(b *testing.B) {
	for _, memory := range []gpu.Memory{80, 16276} {
		b.Run(fmt.Sprintf("cards=8x%d", memory), func(b *testing.B) {
			c := newCrowd(b, memory, false)
			data := checkpointData(b, c.kubelet.entries...)
			b.SetBytes(int64(len(data)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := parseCheckpoint(data, &isolation.Backends{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
