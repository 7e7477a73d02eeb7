package allocation

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// TestRandomPods admits random pods with one, two and four cards as a kubelet does, in an order that the plugin doesn't know. Most of
// them have the same total request. A trivial model checks each decision: what the scheduler chose is what the container gets, and
// no card is given out beyond its memory or cores.
func TestRandomPods(t *testing.T) {
	for name, world := range map[string]world{
		"the scheduler chose all cards":                 {},
		"and the plugin restarts":                       {restarts: true},
		"some pods are bound without the scheduler":     {direct: true, restarts: true},
		"the kubelet can't be asked, the order decides": {silent: true},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(40) {
				world := world
				world.T, world.random, world.pods, world.record = t, rand.New(rand.NewPCG(seed, 0)), map[string]*worldPod{}, NewRecord(nil)
				world.cards = newCards(16, 16, 24, 16, 8)
				for range 150 {
					world.step()
				}
				if t.Failed() {
					t.Fatalf("seed %d", seed)
				}
			}
		})
	}
}

// world is a node with its kubelet, and the scheduler of its pods.
type world struct {
	*testing.T
	direct, restarts, silent bool

	random *rand.Rand
	cards  []gpu.Card
	pods   map[string]*worldPod
	record *Record
	made   int
	// admitting is the pod that the kubelet admits.
	admitting *worldPod
}

// worldPod is a pod on the node.
type worldPod struct {
	Pod
	// given is what its containers really got, by name.
	given map[string]gpu.Placement
	// entries are those of the kubelet's checkpoint.
	entries []Entry
}

func (p *worldPod) admitted() bool { return len(p.given) == len(p.Containers) }

func (w *world) step() {
	switch w.random.IntN(8) {
	case 0, 1, 2:
		w.create()
	case 3, 4, 5:
		if pod := w.pick(func(p *worldPod) bool { return !p.admitted() }); pod != nil {
			w.admit(pod)
		}
	case 6:
		if pod := w.pick((*worldPod).admitted); pod != nil {
			w.record.Remove(pod.UID)
			delete(w.pods, pod.Name)
		}
	case 7:
		if w.restarts {
			w.record = NewRecord(nil)
			w.sync()
		}
	}
	for card, used := range w.used(func(p *worldPod) []gpu.Placement { return slices.Collect(maps.Values(p.given)) }) {
		if used.Memory > w.cards[card].Memory || used.Cores > gpu.CardCores {
			w.Errorf("card %d of %d units: %+v is given", card, w.cards[card].Memory, used)
		}
	}
}

// create creates a pod that the scheduler has bound, or one with nodeName.
func (w *world) create() {
	n := []int{1, 1, 2, 4}[w.random.IntN(4)]
	options := []podOption{main(8), version(uint64(w.made))}
	if !w.silent {
		options = append(options, cores(gpu.Cores(w.random.IntN(3)*4*8)))
		if w.random.IntN(4) == 0 {
			options = append(options, container("second", 4), cores(4))
		}
	}
	pod := newPod("pod-"+strconv.Itoa(w.made), append(options, labelled(n))...)
	pod.Version = w.random.Uint64N(1000) // The order of the binds tells nothing.
	w.made++
	if !w.direct || w.random.IntN(2) == 0 {
		chosen := w.schedule(pod.Demand())
		if len(chosen) < n {
			return
		}
		assumedOn(chosen...)(&pod)
		pod.Assignment.AssumeTime, pod.Placement = start.Add(time.Duration(w.made)*time.Second), pod.Demand().On(chosen...)
	}
	w.pods[pod.Name] = &worldPod{Pod: pod, given: map[string]gpu.Placement{}}
}

// schedule returns random cards with room beside what the annotations name and the containers have; too few if there aren't any.
func (w *world) schedule(demand gpu.Demand) (chosen []int) {
	used := w.used(func(p *worldPod) []gpu.Placement {
		if p.Assumed {
			return []gpu.Placement{p.Placement}
		}
		return slices.Collect(maps.Values(p.given))
	})
	for _, card := range w.random.Perm(len(w.cards)) {
		free := gpu.Share{Memory: w.cards[card].Memory.Sub(used[card].Memory), Cores: gpu.CardCores.Sub(used[card].Cores)}
		if len(chosen) < demand.Cards && free.Memory >= demand.Memory && free.Cores >= demand.Cores {
			chosen = append(chosen, card)
		}
	}
	slices.Sort(chosen)
	return chosen
}

// used adds up placements by card.
func (w *world) used(of func(*worldPod) []gpu.Placement) map[int]gpu.Share {
	sum := map[int]gpu.Share{}
	for _, pod := range w.pods {
		for _, placement := range of(pod) {
			for _, s := range placement {
				sum[s.Card] = gpu.Share{Card: s.Card, Memory: sum[s.Card].Memory + s.Memory, Cores: sum[s.Card].Cores + s.Cores}
			}
		}
	}
	return sum
}

func (w *world) pick(match func(*worldPod) bool) *worldPod {
	var names []string
	for name, pod := range w.pods {
		if match(pod) {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	slices.Sort(names)
	return w.pods[names[w.random.IntN(len(names))]]
}

// admit calls Decide for each container of a pod, twice as the kubelet does. A pod of which one is rejected fails.
func (w *world) admit(pod *worldPod) {
	w.admitting = pod
	for _, c := range pod.Containers {
		preferred := w.decide(c.Request, Preference{})
		preference := Preference{}
		if preferred.Pod != nil {
			preference = Preference{ContainerKey{preferred.Pod.UID, preferred.Container.Name}, preferred.Match, preferred.Indexes()}
		}
		d := w.decide(c.Request, preference)
		w.compare(pod, c, d)
		if d.Rejection != nil {
			w.record.Remove(pod.UID)
			delete(w.pods, pod.Name)
			return
		}
		w.made++
		given := Give(d.Container, d.Cards)
		given.Devices, given.At = NewDeviceSet([]string{strconv.Itoa(w.made)}), start
		w.record.Add(ContainerKey{d.Pod.UID, d.Container.Name}, given)
		pod.given[c.Name] = given.Cards
		pod.entries = append(pod.entries, Entry{ContainerKey{pod.UID, c.Name}, given})
		w.sync()
	}
}

// compare checks a decision about a container.
func (w *world) compare(pod *worldPod, c Container, d Decision) {
	what := fmt.Sprintf("pod %s, container %s, annotated %v", pod.Name, c.Name, pod.Assignment.Indexes())
	switch {
	case w.silent:
	case d.Pod == nil || d.Pod.UID != pod.UID || d.Container.Name != c.Name:
		w.Errorf("%s: matched %+v", what, d.Pod)
	case !w.direct && (d.Result != ResultKept || !slices.Equal(d.Indexes(), pod.Assignment.Indexes())):
		w.Errorf("%s: got cards %v, %q, %v", what, d.Indexes(), d.Result, d.Rejection)
	case d.Rejection == nil && len(d.Cards) != pod.NumCards():
		w.Errorf("%s: got cards %v, want %d", what, d.Indexes(), pod.NumCards())
	}
}

// decide decides about the call for a container, with the answers of a kubelet that admits its pod.
func (w *world) decide(request gpu.Memory, preferred Preference) Decision {
	s := Snapshot{Cards: w.cards, Given: w.record.Snapshot(), Preferred: preferred, Refreshed: true}
	k := &kubelet{states: map[string]KubeletState{}, silent: w.silent}
	for _, name := range slices.Sorted(maps.Keys(w.pods)) {
		pod := w.pods[name]
		s.Pods = append(s.Pods, pod.Pod)
		for _, c := range pod.Containers {
			state := StateAbsent
			if pod.given[c.Name] != nil {
				state = StateAllocated
			} else if pod == w.admitting {
				state = StateWaiting
			}
			if !w.silent {
				k.states[name+"/"+c.Name] = state
			}
		}
	}
	return k.decide(s, request)
}

// sync has the record read the kubelet's checkpoint.
func (w *world) sync() {
	var entries []Entry
	for _, pod := range w.pods {
		entries = append(entries, pod.entries...)
	}
	w.record.Sync(entries, start.Add(time.Hour), apiPods{})
}
