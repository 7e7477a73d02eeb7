package allocation

import (
	"strconv"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

var start = time.Unix(1_700_000_000, 0)

// podOption changes a pod under construction.
type podOption func(*Pod)

// newPod returns a pod with the UID "uid-NAME", created at start. Its request is that of its containers.
func newPod(name string, options ...podOption) Pod {
	pod := Pod{Pod: gpu.Pod{Name: name, Namespace: "default", UID: gpu.PodUID("uid-" + name)}, Created: start}
	for _, option := range options {
		option(&pod)
	}
	var init gpu.Memory
	for _, c := range pod.Containers {
		if c.Init {
			init = max(init, c.Request)
		} else {
			pod.Request += c.Request
		}
	}
	pod.Request = max(pod.Request, init)
	if pod.Assumed && pod.Placement == nil {
		pod.Placement = gpu.On(pod.Assignment.Cards[0].Index, pod.Request)
	}
	return pod
}

func container(name string, memory gpu.Memory) podOption {
	return func(pod *Pod) { pod.Containers = append(pod.Containers, Container{Name: name, Request: memory}) }
}

// main adds the only container of a simple pod.
func main(memory gpu.Memory) podOption { return container("main", memory) }

// initStep adds the init container "i".
func initStep(memory gpu.Memory) podOption {
	return func(pod *Pod) {
		pod.Containers = append(pod.Containers, Container{Name: "i", Request: memory, Init: true})
	}
}

// assumed sets the extender's annotations; at is in seconds after start.
func assumed(card, at int) podOption {
	return func(pod *Pod) {
		pod.Assumed, pod.HasAssumeTime = true, true
		pod.Assignment = protocol.Assignment{Cards: protocol.OneCard(card, 0), AssumeTime: start.Add(time.Duration(at) * time.Second)}
	}
}

// created sets the creation time, in seconds after start.
func created(at int) podOption {
	return func(pod *Pod) { pod.Created = start.Add(time.Duration(at) * time.Second) }
}

func version(v uint64) podOption { return func(pod *Pod) { pod.Version = v } }

func assigned(pod *Pod) { pod.Assigned = true }
func leaving(pod *Pod)  { pod.Leaving = true }
func ended(pod *Pod)    { pod.Terminal = true }
func mirror(pod *Pod)   { pod.Mirror = true }
func ran(pod *Pod)      { pod.Ran = true }

// running marks the containers added so far as running or, if they are init containers, as ended.
func running(pod *Pod) {
	pod.Ran = true
	for i := range pod.Containers {
		pod.Containers[i].Running = true
	}
}

// onCard returns the allocation of these devices on a card of 16 units.
func onCard(card int, ids ...string) Allocation {
	return Allocation{Card: card, CardMemory: 16, Request: gpu.Memory(len(ids)), Devices: NewDeviceSet(ids), At: start}
}

// newCards returns healthy cards of these sizes, in units.
func newCards(sizes ...gpu.Memory) []gpu.Card {
	cards := make([]gpu.Card, len(sizes))
	for i, size := range sizes {
		cards[i] = gpu.Card{Index: i, UUID: "GPU-" + strconv.Itoa(i), Memory: size, NUMANode: gpu.NoNUMANode}
	}
	return cards
}

// mainOf returns the key of the container "main" of the pod with this name.
func mainOf(pod string) ContainerKey { return ContainerKey{gpu.PodUID("uid-" + pod), "main"} }
