package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	events "k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// allocator answers the kubelet: it finds out which pod is meant, decides on the card, and notes what was given.
//
// One decision is made at a time, under turn; while it is held the kubelet may be asked, and the pods are looked for, each
// within a bounded time (askTimeout, searchTimeout).
type allocator struct {
	cards     *cardState
	pods      *podSource
	record    *record
	books     *checkpoint
	resources *podResources
	metrics   *metrics
	events    events.EventRecorder
	// node is what the events of pods are attached to that nobody knows.
	node  *corev1.ObjectReference
	reply *reply
	// errorEnv makes a container that is refused a card start without one, as the existing plugin does.
	errorEnv bool
	// notify is told of each pod that was given something, or whose record changed.
	notify func(gpu.PodUID)
	now    func() time.Time

	// turn is a lock that a cancelled call doesn't wait for.
	turn chan struct{}
	// stale says that the checkpoint may have changed.
	stale chan struct{}
	// reading is held from reading the checkpoint until the record says so: an older one must not overtake a newer one.
	reading sync.Mutex
	// hints and all below belong to who has the turn.
	hints   map[deviceSet]hint
	refused map[gpu.PodUID]bool
	// met are the pods of the record of which the informer has known an object of their own.
	met map[gpu.PodUID]bool
	// settled is when the plugin registered with the kubelet last.
	settled time.Time
	// doubtful says that the last match was by order, which can mislead, or that there was none and the container starts
	// all the same: the checkpoint tells which pod it really was.
	doubtful bool
}

// hint is what GetPreferredAllocation found, for the Allocate that follows. The zero one says nothing.
type hint struct {
	// container is whose turn it is.
	container containerKey
	by        match
	// card is whose devices the kubelet was told to take.
	card int
	at   time.Time
}

// hintFor is how long a hint is kept; Allocate follows at once if at all.
const hintFor = 30 * time.Second

func (a *allocator) take(ctx context.Context) (release func(), err error) {
	select {
	case a.turn <- struct{}{}:
		return func() { <-a.turn }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for another allocation: %w", ctx.Err())
	}
}

// Follow keeps the record in line with the kubelet's checkpoint until the context ends. It doesn't take the turn: in
// the finest units the file is megabytes, and the kubelet writes it after each allocation, with the next one waiting.
func (a *allocator) Follow(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.stale:
		}
		a.Sync(ctx)
		// A burst of pods is one change.
		pause := time.NewTimer(syncPause)
		select {
		case <-ctx.Done():
			pause.Stop()
			return nil
		case <-pause.C:
		}
	}
}

// syncPause is the least time between two readings of the checkpoint that nobody waits for.
const syncPause = 100 * time.Millisecond

// Settle reads the checkpoint of a kubelet that has just started: what isn't in it the kubelet doesn't know.
func (a *allocator) Settle(ctx context.Context) {
	release, err := a.take(ctx)
	if err != nil {
		return
	}
	defer release()
	a.settled = a.now()
	clear(a.refused) // It admits again what the last one had no time to fail.
	a.record.Settle()
	a.Sync(ctx)
	a.resources.Renew()
}

// Sync reads the kubelet's checkpoint into the record.
func (a *allocator) Sync(ctx context.Context) {
	a.reading.Lock()
	defer a.reading.Unlock()
	bookings, err := a.books.Read()
	if err != nil {
		klog.FromContext(ctx).Error(err, "The kubelet's checkpoint can't be read: going on with what is known already")
	}
	for _, uid := range a.record.Sync(bookings, a.books.Written(), a.pods) {
		a.notify(uid)
	}
}

// Allocate gives one container its card.
func (a *allocator) Allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	start := a.now()
	defer func() { a.metrics.duration.Observe(a.now().Sub(start).Seconds()) }()
	response, result, err := a.allocate(ctx, ids)
	a.metrics.allocations.WithLabelValues(string(result)).Inc()
	return response, err
}

func (a *allocator) allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, outcome, error) {
	if len(ids) == 0 {
		return nil, refusedInvalid, &refusal{refusedInvalid, codes.InvalidArgument, "the kubelet asked for no devices"}
	}
	release, err := a.take(ctx)
	if err != nil {
		return nil, refusedUnavailable, err
	}
	defer release()

	devices, request := newDeviceSet(ids), gpu.Memory(len(ids))
	given := serving{Request: request, Devices: devices, At: a.now()}
	hinted := a.takeHint(devices)
	snapshot, chosen, by, err := a.match(ctx, hinted, request)
	a.metrics.matches.WithLabelValues(string(by)).Inc()
	if err != nil {
		return a.refuse(ctx, given, nil, "", err)
	}
	pod := chosen.Pod
	logger := klog.FromContext(ctx).WithValues("pod", klog.KRef(pod.Namespace, pod.Name), "container", chosen.Container.Name)
	card, result, err := snapshot.Card(pod, chosen.Container.Name)
	if err != nil {
		return a.refuse(klog.NewContext(ctx, logger.WithValues("match", by)), given, pod, chosen.Container.Name, err)
	}
	given.Card, given.CardMemory = card.Index, card.Memory
	a.record.Serve(pod.UID, chosen.Container.Name, given)
	a.notify(pod.UID)
	a.countOtherDevices(ids, card)
	if result == moved {
		why := "card %d, which was chosen for the pod, has no room left for it beside the pods that hold it"
		if promised, ok := snapshot.card(pod.Assignment.Card); ok && snapshot.fits(promised, pod.UID, pod.Request, false) {
			why = "the kubelet was told to take its devices when card %d had no room for the pod, or wasn't the pod's"
		}
		a.events.Eventf(pod.reference(), corev1.EventTypeWarning, eventMoved,
			"container %s got card %d: "+why, chosen.Container.Name, card.Index, pod.Assignment.Card)
	}
	logger.Info("Allocated", "card", card.Index, "memory", request, "result", result, "match", by)
	return a.reply.Given(card, pod.Request, request), result, nil
}

// refuse turns a container away, or lets it start without a card where that is wanted. pod is nil where it isn't known
// which one it is: then the kubelet's checkpoint tells of such a start.
func (a *allocator) refuse(ctx context.Context, given serving, pod *podView, container string, reason error) (*pluginapi.ContainerAllocateResponse, outcome, error) {
	result := refusedUnavailable
	if r := (*refusal)(nil); errors.As(reason, &r) {
		result = r.outcome
	}
	klog.FromContext(ctx).Info("Refused an allocation", "memory", given.Request, "reason", reason.Error(), "startsAnyway", a.errorEnv)
	reference, text, whole := a.node, reason.Error(), given.Request
	if pod != nil {
		reference, text, whole = pod.reference(), fmt.Sprintf("container %s: %v", container, reason), pod.Request
	}
	if a.errorEnv {
		text += "; it starts all the same, without a card"
	}
	a.events.Event(reference, corev1.EventTypeWarning, eventRefused, text)
	if !a.errorEnv {
		if pod != nil {
			a.refused[pod.UID] = true
		}
		return nil, result, reason
	}
	if pod == nil {
		a.doubtful = true
	} else {
		given.Card = noCard
		a.record.Serve(pod.UID, container, given)
	}
	cards, _, _ := a.cards.Get()
	return a.reply.Refused(cards, whole, given.Request), result, nil
}

// Prefer returns the devices that an allocation out of the available ones should take: those of the card that its pod
// gets, so that the kubelet's own books name the real card. It decides as Allocate does, and waits for the same. It
// returns none where it can't tell: an error would fail the pod, and Allocate has the last word.
func (a *allocator) Prefer(ctx context.Context, available, include []string, size int) []string {
	release, err := a.take(ctx)
	if err != nil {
		return nil
	}
	defer release()
	request := gpu.Memory(size)
	snapshot, chosen, by, err := a.match(ctx, hint{}, request)
	if err != nil {
		return nil
	}
	card, _, err := snapshot.Card(chosen.Pod, chosen.Container.Name)
	if promised, _ := snapshot.promised(chosen.Pod, chosen.Container.Name); err != nil && promised != noCard {
		card.Index, err = promised, nil // If there is room by the time that Allocate is called, it is there.
	}
	if err != nil {
		return nil
	}
	ids := preferredDevices(card.Index, available, include, size)
	if len(ids) == size {
		a.hints[newDeviceSet(ids)] = hint{container: chosen.key(), by: by, card: card.Index, at: a.now()}
	}
	return ids
}

// match finds the container that the kubelet asks for. It returns a refusal where that is none that the API server knows,
// or where it can't be told. It is called with the turn.
//
// The kubelet waits meanwhile: it is asked for at most askTimeout, and for a pod not known here searchTimeout is spent.
func (a *allocator) match(ctx context.Context, hinted hint, request gpu.Memory) (*snapshot, candidate, match, error) {
	if a.doubtful {
		a.doubtful = false
		a.Sync(ctx)
	}
	s, ask := a.known(), a.asker(ctx)
	s.Preferred = hinted
	c, found := hinted.holds(s, request)
	if found {
		a.doubtful = hinted.by == byOrder
		// By order alone it was found perhaps for want of time to ask about it.
		if !a.doubtful || !a.ruledOut(ask(c)) {
			return s, c, hinted.by, nil
		}
	}
	// Where the one that the devices were chosen for isn't known here yet, a guess among the others would be wrong.
	guess := found || hinted.container == (containerKey{})
	if c, by, ok := a.resolve(s, request, ask, false); ok && (by == byKubelet || guess) {
		return s, c, by, nil
	}
	// The informer can be behind, and so can the record.
	a.Sync(ctx)
	pods, err := a.pods.Search(ctx, func(pods []podView) bool {
		// A guess can wait for the list: the pod that is meant may not be among those known yet.
		_, by, _ := resolve(a.snapshot(pods).Candidates(request), ask, a.resources.Answers, false)
		return by == byKubelet
	})
	live := a.snapshot(pods)
	live.Preferred = s.Preferred
	interrupted := live.Interrupted(request)
	resized := slices.DeleteFunc(slices.Clone(interrupted), func(c candidate) bool { return !c.Pod.Resized })
	resizes := slices.ContainsFunc(resized, func(c candidate) bool { return ask(c) == waiting })
	// The kubelet tries a resize and a start again, so neither is guessed beside the other: the card of what runs would be
	// lost from the kubelet's books.
	c, by, ok := a.resolve(live, request, ask, true)
	if ok && (!c.Again || !resizes) {
		return live, c, by, nil
	}
	if !ok {
		if c, ok = interruptedOne(interrupted, resized, ask, a.now().Sub(a.settled) < statusLag); ok {
			return live, c, byKubelet, nil
		}
	}
	if err != nil {
		return nil, candidate{}, byNobody, &refusal{refusedUnavailable, codes.Unavailable,
			fmt.Sprintf("no pod known here waits for %s of GPU memory, and the API server can't be asked: %v", request, err)}
	}
	text := fmt.Sprintf("no pod that the API server has on this node waits for %s of GPU memory, and static pods are not supported", request)
	if len(interrupted) > 0 {
		text += "; the kubelet has lost its record of containers that run, and it can't be told whether it asks for one of them"
	}
	return nil, candidate{}, byNobody, &refusal{refusedUnknownPod, codes.FailedPrecondition, text}
}

// statusLag is how long after a kubelet's start the API server may call containers running that ended with the machine.
const statusLag = 5 * time.Minute

// asker asks the kubelet about each candidate once: while it waits for an answer of ours, its own stay the same. All
// together it asks for askTimeout.
func (a *allocator) asker(ctx context.Context) func(candidate) standing {
	told, left := map[containerKey]standing{}, askTimeout
	return func(c candidate) standing {
		answer, ok := told[c.key()]
		if !ok {
			from := time.Now()
			asking, cancel := context.WithTimeout(ctx, left)
			answer = a.resources.Standing(asking, c)
			cancel()
			left -= time.Since(from)
			told[c.key()] = answer
		}
		return answer
	}
}

func (a *allocator) resolve(s *snapshot, request gpu.Memory, ask func(candidate) standing, lastResort bool) (candidate, match, bool) {
	// A kubelet that hasn't known a pod yet, as after a start of the plugin, is asked about some that it has to know.
	answers := func() bool {
		for _, c := range s.Admitted(maxAdmitted) {
			if a.resources.Answers() {
				break
			}
			ask(c)
		}
		return a.resources.Answers()
	}
	c, by, ok := resolve(s.Candidates(request), ask, answers, lastResort)
	a.doubtful = a.doubtful || by == byOrder
	return c, by, ok
}

// ruledOut says whether a candidate that stands there can't be the one that the kubelet is asking for.
func (a *allocator) ruledOut(where standing) bool {
	return (where == absent || where == holding) && a.resources.Answers()
}

// takeHint returns what GetPreferredAllocation found for these devices, and the zero hint if nothing.
func (a *allocator) takeHint(devices deviceSet) hint {
	for set, h := range a.hints {
		if a.now().Sub(h.at) > hintFor {
			delete(a.hints, set)
		}
	}
	h := a.hints[devices]
	delete(a.hints, devices)
	return h
}

// holds returns the candidate that was found, if it still is one.
func (h hint) holds(s *snapshot, request gpu.Memory) (candidate, bool) {
	if h.container == (containerKey{}) {
		return candidate{}, false
	}
	for _, c := range s.Candidates(request) {
		if c.key() == h.container {
			return c, true
		}
	}
	return candidate{}, false
}

// known returns what is known with the pods that the informer has.
func (a *allocator) known() *snapshot {
	pods := a.pods.Cached()
	s := a.snapshot(pods)
	for i := range pods {
		if _, ok := s.Served[pods[i].UID]; ok {
			a.met[pods[i].UID] = true
		}
	}
	return s
}

// snapshot returns what is known with these pods. What was given to pods that the informer has known and that aren't among
// these is left out: they are gone, and the record hears of it later than the informer, and that later than the API server.
func (a *allocator) snapshot(pods []podView) *snapshot {
	cards, _, _ := a.cards.Get()
	given := a.record.Snapshot()
	present := map[gpu.PodUID]bool{}
	for i := range pods {
		present[pods[i].UID] = true
	}
	maps.DeleteFunc(a.refused, func(uid gpu.PodUID, _ bool) bool { return !present[uid] })
	maps.DeleteFunc(a.met, func(uid gpu.PodUID, _ bool) bool { _, ok := given[uid]; return !ok })
	maps.DeleteFunc(given, func(uid gpu.PodUID, _ servings) bool { return a.met[uid] && !present[uid] })
	return &snapshot{Cards: cards, Pods: pods, Served: given, Refused: a.refused}
}

// countOtherDevices counts allocations that the kubelet books on other cards. They can have good reasons, such as
// devices that an init container of another size had.
func (a *allocator) countOtherDevices(ids []string, card gpu.Card) {
	own := ofCard(card.Index)
	if slices.ContainsFunc(ids, func(id string) bool { return !own(id) }) {
		a.metrics.otherDevices.Inc()
	}
}

// preferredDevices returns size devices: those to be included, then those of the card, then any.
func preferredDevices(card int, available, include []string, size int) []string {
	if size <= 0 || len(available) < size {
		return nil
	}
	out := append(make([]string, 0, size), include[:min(size, len(include))]...)
	included := make(map[string]bool, len(out))
	for _, id := range out {
		included[id] = true
	}
	own := ofCard(card)
	for _, ofCard := range []bool{true, false} {
		for _, id := range available {
			if len(out) == size {
				return out
			}
			if own(id) == ofCard && !included[id] {
				out = append(out, id)
			}
		}
	}
	return out
}
