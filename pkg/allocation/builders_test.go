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
			pod.Cores += c.Cores
			pod.AppRequests = append(pod.AppRequests, c.Request)
		}
	}
	pod.Request = max(pod.Request, init)
	if pod.Assumed && pod.Placement == nil {
		pod.Placement = pod.Demand().On(pod.Assignment.Indexes()...)
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
		assumedOn(card)(pod)
		pod.Assignment.AssumeTime = start.Add(time.Duration(at) * time.Second)
	}
}

// assumedOn sets the extender's annotations for a pod with these cards.
func assumedOn(cards ...int) podOption {
	return func(pod *Pod) {
		pod.Assumed, pod.HasAssumeTime, pod.Cards = true, true, len(cards)
		pod.Assignment.Cards = nil
		for _, card := range cards {
			pod.Assignment.Cards = append(pod.Assignment.Cards, protocol.AssignedCard{Index: card})
		}
	}
}

// labelled sets the number of cards that the pod's label names.
func labelled(cards int) podOption { return func(pod *Pod) { pod.Cards = cards } }

// cores sets the computing that the container added last asks for.
func cores(percent gpu.Cores) podOption {
	return func(pod *Pod) { pod.Containers[len(pod.Containers)-1].Cores = percent }
}

// created sets the creation time, in seconds after start.
func created(at int) podOption {
	return func(pod *Pod) { pod.Created = start.Add(time.Duration(at) * time.Second) }
}

func version(v uint64) podOption { return func(pod *Pod) { pod.Version = v } }

func assigned(pod *Pod) { pod.Assigned = true }
func leaving(pod *Pod)  { pod.Leaving = true }
func ended(pod *Pod)    { pod.Ended = true }
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
func onCard(card int, ids ...string) Allocation { return onCards([]int{card}, ids...) }

// onCards returns the allocation of these devices on several cards of 16 units.
func onCards(cards []int, ids ...string) Allocation {
	var of []gpu.Card
	for _, card := range cards {
		of = append(of, gpu.Card{Index: card, Memory: 16})
	}
	a := Give(Container{Request: gpu.Memory(len(ids))}, of)
	a.Devices, a.At = NewDeviceSet(ids), start
	return a
}

// holding returns the allocation of this memory on a card.
func holding(card int, memory gpu.Memory) Allocation {
	return Give(Container{Request: memory}, []gpu.Card{{Index: card, Memory: 16}})
}

// noCard is the allocation of a container that was given no card, unknownCard that of one with another plugin's response.
var noCard, unknownCard = Allocation{}, Allocation{Unknown: true}

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
