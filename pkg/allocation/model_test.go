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

// TestModelOfANode compares decisions with a model of a node with its API server, kubelet and plugin, in which everything happens at the
// worst time: the plugin's watch is behind, plugin and kubelet restart between two calls, pods end and are deleted between the two calls for
// a container. Pods have init containers, sidecars and many containers of few sizes. If the kubelet can be asked and the scheduler has placed all
// pods, each pod must get the cards in its annotations. No card may be given out beyond its memory or cores.
func TestModelOfANode(t *testing.T) {
	for name, test := range map[string]struct{ silent, wide, direct bool }{
		"the kubelet can be asked":                  {},
		"the kubelet can't be asked":                {silent: true},
		"pods have cores and up to four cards":      {wide: true},
		"some pods are bound without the scheduler": {wide: true, direct: true},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := uint64(500); seed < 700; seed++ {
				w := newNodeModel(t, seed)
				w.silent, w.wide, w.direct = test.silent, test.wide, test.direct
				if w.run(120); t.Failed() {
					t.Fatalf("seed %d", seed)
				}
			}
		})
	}
}

// nodeModel is such a node.
type nodeModel struct {
	*testing.T
	rand *rand.Rand
	now  time.Time
	// silent is true if the kubelet can't be asked, wide if pods have cores and up to four cards, and direct if some pods are bound without the
	// scheduler. If the kubelet is silent, a container can be taken for another one of its size, which can have other cores.
	silent, wide, direct bool

	cards []gpu.Card
	log   []modelEvent // What the API server's watch delivers, in order.
	seen  int          // How many of them the plugin has seen.
	pods  map[gpu.PodUID]*modelPod
	made  int

	// The kubelet.
	queue    []gpu.PodUID
	used     map[string]gpu.PodUID // By device.
	entries  []Entry
	file     []Entry // The checkpoint.
	written  time.Time
	admitted map[gpu.PodUID]bool

	// The plugin.
	record   *Record
	cache    map[gpu.PodUID]Pod
	rejected map[gpu.PodUID]bool
	doubtful bool
	restarts int
	// unwritten is true while the kubelet has an answer that it has not written to its checkpoint.
	unwritten bool
}

type modelEvent struct {
	uid gpu.PodUID
	pod *Pod // nil for a deletion.
}

type modelPod struct {
	Pod
	deleted, ended bool
	given          map[string]gpu.Placement
	devices        map[string][]string
}

func newNodeModel(t *testing.T, seed uint64) *nodeModel {
	return &nodeModel{
		T: t, rand: rand.New(rand.NewPCG(seed, 7)), now: start, cards: newCards(16, 16, 24, 8), record: NewRecord(nil),
		pods: map[gpu.PodUID]*modelPod{}, used: map[string]gpu.PodUID{}, admitted: map[gpu.PodUID]bool{},
		cache: map[gpu.PodUID]Pod{}, rejected: map[gpu.PodUID]bool{},
	}
}

// run admits a pod or lets something else happen, so many times.
func (w *nodeModel) run(steps int) {
	for range steps {
		if len(w.queue) == 0 || w.rand.IntN(3) > 0 {
			w.disturb(nil)
		} else {
			i := 0
			if w.rand.IntN(2) == 0 { // A batch, in no order.
				i = w.rand.IntN(len(w.queue))
			}
			p := w.pods[w.queue[i]]
			w.queue = slices.Delete(w.queue, i, i+1)
			w.admit(p)
		}
		if w.check(); w.Failed() {
			return
		}
	}
}

func (w *nodeModel) tick() time.Time { w.now = w.now.Add(time.Second); return w.now }

// publish writes a pod to the API server, and advance delivers n such writes to the plugin.
func (w *nodeModel) publish(p *modelPod) {
	w.made++
	p.Version = uint64(w.made)
	copied := p.Pod
	copied.Containers = slices.Clone(p.Containers)
	w.log = append(w.log, modelEvent{p.UID, &copied})
}

func (w *nodeModel) advance(n int) {
	for ; n > 0 && w.seen < len(w.log); n-- {
		e := w.log[w.seen]
		w.seen++
		if e.pod == nil {
			delete(w.cache, e.uid)
			w.record.Remove(e.uid)
			continue
		}
		w.cache[e.uid] = *e.pod
	}
}

// Exists and Instance implement KnownPods.
func (w *nodeModel) Exists(uid gpu.PodUID) bool     { _, ok := w.cache[uid]; return ok }
func (w *nodeModel) Instance(_ ContainerKey) string { return "" }

func (w *nodeModel) sync() { w.record.Sync(w.file, w.written, w) }

func (w *nodeModel) write() { w.file, w.written = slices.Clone(w.entries), w.tick() }

func (w *nodeModel) live() []*modelPod {
	var out []*modelPod
	for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
		if p := w.pods[uid]; !p.ended && !p.deleted {
			out = append(out, p)
		}
	}
	return out
}

// create creates a pod that the scheduler has bound, on cards that have room, or one with nodeName.
func (w *nodeModel) create() {
	w.made++
	p := &modelPod{given: map[string]gpu.Placement{}, devices: map[string][]string{}}
	name := "p" + strconv.Itoa(w.made)
	n := 1 + w.rand.IntN(2)
	if w.wide {
		n = []int{1, 1, 2, 4}[w.rand.IntN(4)]
	}
	size := func() gpu.Memory { return gpu.Memory(n * (1 + w.rand.IntN(2))) }
	var options []podOption
	for i := range w.rand.IntN(3) {
		m := size()
		if w.rand.IntN(2) == 0 {
			options = append(options, func(pod *Pod) {
				pod.Containers = append(pod.Containers, Container{Name: "i" + strconv.Itoa(i), Request: m, Init: true})
			})
		} else {
			options = append(options, container("s"+strconv.Itoa(i), m))
		}
	}
	for i := range 1 + w.rand.IntN(4) {
		options = append(options, container("c"+strconv.Itoa(i), size()))
		if w.wide {
			options = append(options, cores(gpu.Cores(n*15*w.rand.IntN(3))))
		}
	}
	pod := newPod(name, append(options, labelled(n))...)
	if at := w.tick(); !w.direct || w.rand.IntN(2) == 0 {
		chosen := w.schedule(pod.Demand())
		if chosen == nil {
			return
		}
		assumedOn(chosen...)(&pod)
		pod.Assignment.AssumeTime, pod.Placement = at, pod.Demand().On(chosen...)
	}
	pod.Created = w.now.Truncate(4 * time.Second)
	p.Pod = pod
	w.pods[pod.UID] = p
	w.publish(p)
	w.queue = append(w.queue, pod.UID)
}

// schedule returns random cards with room beside what the annotations name, or what containers without them have; nil if there are too few.
func (w *nodeModel) schedule(demand gpu.Demand) (chosen []int) {
	used := load{}
	for _, other := range w.live() {
		if used.add(other.Placement...); !other.Assumed {
			for _, given := range other.given {
				used.add(given...)
			}
		}
	}
	for _, c := range w.rand.Perm(len(w.cards)) {
		room := w.cards[c].Memory.Sub(used[c].Memory) >= demand.Memory && gpu.CardCores.Sub(used[c].Cores) >= demand.Cores
		if len(chosen) < demand.Cards && room {
			chosen = append(chosen, c)
		}
	}
	if len(chosen) < demand.Cards {
		return nil
	}
	slices.Sort(chosen)
	return chosen
}

func (w *nodeModel) pick(of []*modelPod) *modelPod {
	if len(of) == 0 {
		return nil
	}
	return of[w.rand.IntN(len(of))]
}

// disturb lets something happen, except to the pod that is being admitted, which can only be deleted by force.
func (w *nodeModel) disturb(admitting *modelPod) {
	n := w.rand.IntN(9)
	switch n {
	case 0:
		w.create()
	case 1, 2:
		w.advance(1 + w.rand.IntN(4))
	case 3: // A pod ends. The kubelet knows at once, and then the API server.
		if p := w.pick(slices.DeleteFunc(w.live(), func(p *modelPod) bool { return !w.admitted[p.UID] || p == admitting })); p != nil {
			p.ended, p.Ended, p.Ran = true, true, true
			w.publish(p)
		}
	case 4: // The object of an ended pod is deleted.
		for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
			if p := w.pods[uid]; p.ended && !p.deleted && w.rand.IntN(2) == 0 {
				p.deleted = true
				w.log = append(w.log, modelEvent{uid, nil})
			}
		}
	case 5: // The plugin restarts, but not while the kubelet has an answer that isn't in its checkpoint.
		if w.unwritten {
			return
		}
		w.restarts++
		w.advance(len(w.log))
		w.record, w.rejected, w.doubtful = NewRecord(nil), map[gpu.PodUID]bool{}, false
		w.record.KubeletStarted()
		w.sync()
	case 6:
		w.sync()
	case 7: // Containers of an admitted pod have run.
		if p := w.pick(slices.DeleteFunc(w.live(), func(p *modelPod) bool { return !w.admitted[p.UID] || p == admitting || p.Ran })); p != nil {
			p.Ran = true
			for i := range p.Containers {
				p.Containers[i].Running = true
			}
			w.publish(p)
		}
	}
}

// snapshot, cached and listed are those of package deviceplugin.
func (w *nodeModel) snapshot(pods []Pod) Snapshot {
	return Snapshot{Cards: w.cards, Pods: pods, Given: w.record.Snapshot(), Rejected: w.rejected, KubeletAge: time.Hour}
}

func (w *nodeModel) cached() []Pod {
	var out []Pod
	for _, uid := range slices.Sorted(maps.Keys(w.cache)) {
		out = append(out, w.cache[uid])
	}
	return out
}

func (w *nodeModel) listed() []Pod {
	var out []Pod
	for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
		if p := w.pods[uid]; !p.deleted {
			copied := p.Pod
			copied.Containers = slices.Clone(p.Containers)
			out = append(out, copied)
		}
	}
	return out
}

// ask is the kubelet's PodResources Get, with the interpretation of stateOf.
func (w *nodeModel) ask(c *Candidate, admitting *modelPod) KubeletState {
	p := w.pods[c.Pod.UID]
	if p == nil || p.ended || !w.admitted[p.UID] && p != admitting {
		return StateAbsent
	}
	after := false
	for _, other := range p.Containers {
		if other.Name == c.Container.Name {
			after = true
			if c.Container.Init {
				continue
			}
			if p.devices[other.Name] != nil {
				return StateAllocated
			}
			return StateWaiting
		}
		if after && !other.Init && p.devices[other.Name] != nil {
			return StateAllocated
		}
	}
	return StateWaiting
}

// modelKubelet answers questions while a pod is admitted.
type modelKubelet struct {
	*nodeModel
	admitting *modelPod
}

func (k modelKubelet) State(c Candidate) KubeletState {
	if k.silent {
		return StateUnknown
	}
	return k.ask(&c, k.admitting)
}

func (w *nodeModel) decide(request gpu.Memory, preferred Preference, admitting *modelPod) Decision {
	if w.doubtful {
		w.doubtful = false
		w.sync()
	}
	s := w.snapshot(w.cached())
	s.Preferred, s.Kubelet = preferred, modelKubelet{w, admitting}
	d := Decide(s, request)
	if !d.NeedsFreshRead {
		return d
	}
	w.sync()
	s = w.snapshot(w.listed()).MarkedRead(nil)
	s.Preferred, s.Kubelet = preferred, modelKubelet{w, admitting}
	return Decide(s, request)
}

// collect frees the devices of pods that have ended, as the kubelet does before it allocates.
func (w *nodeModel) collect() {
	ended := func(uid gpu.PodUID) bool { return w.pods[uid].ended }
	maps.DeleteFunc(w.used, func(_ string, uid gpu.PodUID) bool { return ended(uid) })
	w.entries = slices.DeleteFunc(w.entries, func(e Entry) bool { return ended(e.UID) })
}

// admit allocates for the containers of a pod, as the kubelet does.
func (w *nodeModel) admit(p *modelPod) {
	var reusable []string // Devices of init containers.
	for _, c := range p.Containers {
		w.collect()
		ids, preference, ok := w.choose(p, c, reusable)
		if !ok {
			w.fail(p) // "requested number of devices unavailable"
			return
		}
		d := w.decide(c.Request, preference, p)
		w.doubtful = d.Match == ByOrder
		w.compare(p, c, d)
		if d.Rejection != nil {
			if d.Pod != nil {
				w.rejected[d.Pod.UID] = true
			}
			w.fail(p)
			return
		}
		given := Give(d.Container, d.Cards)
		given.Devices, given.At = NewDeviceSet(ids), w.tick()
		w.record.Add(ContainerKey{d.Pod.UID, d.Container.Name}, given)
		w.unwritten = true
		w.sometimesDisturb(4, p)
		w.unwritten = false
		p.given[c.Name], p.devices[c.Name] = given.Cards, ids
		for _, id := range ids {
			w.used[id] = p.UID
		}
		w.entries = append(w.entries, Entry{ContainerKey{p.UID, c.Name}, given})
		w.write()
		reusable = slices.DeleteFunc(reusable, func(id string) bool { return slices.Contains(ids, id) })
		if c.Init {
			reusable = append(reusable, ids...)
		}
		w.sometimesDisturb(4, p)
	}
	w.admitted[p.UID] = true
}

// choose chooses a container's devices: those of init containers first, then those that GetPreferredAllocation returns. It returns
// false if there are too few.
func (w *nodeModel) choose(p *modelPod, c Container, reusable []string) (ids []string, preference Preference, ok bool) {
	ids = slices.Clone(reusable[:min(len(reusable), int(c.Request))])
	missing := int(c.Request) - len(ids)
	if missing == 0 {
		return ids, preference, true
	}
	var cards []int
	if d := w.decide(c.Request, Preference{}, p); d.Pod != nil && len(d.Cards) > 0 {
		preference, cards = Preference{ContainerKey{d.Pod.UID, d.Container.Name}, d.Match}, d.Indexes()
	}
	var wanted, others []string
	for _, card := range w.cards {
		for unit := range card.Memory {
			id := fmt.Sprintf("%d:%d", card.Index, unit)
			switch {
			case w.used[id] != "" || slices.Contains(ids, id):
			case slices.Contains(cards, card.Index):
				wanted = append(wanted, id)
			default:
				others = append(others, id)
			}
		}
	}
	free := slices.Concat(wanted, others)
	if len(free) < missing {
		return nil, preference, false
	}
	restarts := w.restarts
	if w.sometimesDisturb(3, p); w.restarts != restarts {
		preference = Preference{}
	}
	return append(ids, free[:missing]...), preference, true
}

// sometimesDisturb lets something happen once in n calls.
func (w *nodeModel) sometimesDisturb(n int, admitting *modelPod) {
	if w.rand.IntN(n) == 0 {
		w.disturb(admitting)
	}
}

// compare checks a decision about a container, if the kubelet can be asked.
func (w *nodeModel) compare(p *modelPod, c Container, d Decision) {
	what := fmt.Sprintf("pod %s, container %s of %d, annotated %v", p.UID, c.Name, c.Request, p.Assignment.Indexes())
	switch {
	case w.silent:
	case d.Pod == nil || d.Pod.UID != p.UID || d.Container.Name != c.Name:
		w.Errorf("%s: matched %v %v (%v)", what, d.Pod, d.Container, d.Rejection)
	case !w.direct && (d.Rejection != nil || !slices.Equal(d.Indexes(), p.Assignment.Indexes())):
		w.Errorf("%s: got %v: %v %v", what, d.Indexes(), d.Moved, d.Rejection)
	case d.Rejection == nil && len(d.Cards) != p.NumCards():
		w.Errorf("%s: got %v, want %d cards", what, d.Indexes(), p.NumCards())
	}
}

// fail fails the pod that is being admitted.
func (w *nodeModel) fail(p *modelPod) {
	p.ended, p.Ended = true, true
	p.given = nil
	w.publish(p)
}

// check checks that no card is given out beyond its memory or cores.
func (w *nodeModel) check() {
	sum, cores := map[int]gpu.Memory{}, map[int]gpu.Cores{}
	for _, p := range w.live() {
		apps, inits := map[int]gpu.Memory{}, map[int]gpu.Memory{}
		for _, c := range p.Containers {
			for _, s := range p.given[c.Name] {
				cores[s.Card] += s.Cores
				if c.Init {
					inits[s.Card] = max(inits[s.Card], s.Memory)
				} else {
					apps[s.Card] += s.Memory
				}
			}
		}
		for card := range w.cards {
			sum[card] += max(apps[card], inits[card])
		}
	}
	for card, memory := range sum {
		if memory > w.cards[card].Memory || cores[card] > gpu.CardCores {
			w.Errorf("card %d of %d: %d and %d%% of its cores are given", card, w.cards[card].Memory, memory, cores[card])
		}
	}
}
