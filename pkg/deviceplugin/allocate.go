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

// allocator answers the kubelet's Allocate and GetPreferredAllocation calls: it matches the pod, selects the card, and records
// what the container got.
//
// turn serializes the decisions. While it is held, the allocator may query the kubelet and search for pods, each within a
// bounded time (askTimeout, searchTimeout).
type allocator struct {
	cards     *cardState
	pods      *podSource
	record    *record
	books     *checkpoint
	resources *podResources
	metrics   *metrics
	events    events.EventRecorder
	// node is the object for an event if no pod was matched.
	node  *corev1.ObjectReference
	reply *reply
	// errorEnv lets a rejected container start without a card instead of failing its pod, as the existing plugin does.
	errorEnv bool
	// notify is called for each pod of which a container got a card or the record changed.
	notify func(gpu.PodUID)
	now    func() time.Time

	// turn is a lock. A call stops waiting for it when the call's context ends.
	turn chan struct{}
	// stale receives a value when the checkpoint may have changed.
	stale chan struct{}
	// reading is held from the read of the checkpoint until the record is updated, so that an older checkpoint can't overwrite
	// a newer one.
	reading sync.Mutex
	// hints and the fields below are guarded by turn.
	hints   map[deviceSet]hint
	refused map[gpu.PodUID]bool
	// met holds the pods of the record that the informer has had in its cache under their own UID.
	met map[gpu.PodUID]bool
	// settled is when the plugin last registered with the kubelet.
	settled time.Time
	// doubtful is true if the last match was by order, which can be wrong, or if there was no match and the container starts
	// without a card. The kubelet's checkpoint then shows which pod it was.
	doubtful bool
}

// hint is the result of GetPreferredAllocation, kept for the Allocate call that follows. The zero value is no result.
type hint struct {
	// container is the matched container.
	container containerKey
	by        match
	// card is the card of the devices that the plugin returned to the kubelet.
	card int
	at   time.Time
}

// hintFor is how long a hint is kept. If Allocate follows at all, it follows at once.
const hintFor = 30 * time.Second

func (a *allocator) take(ctx context.Context) (release func(), err error) {
	select {
	case a.turn <- struct{}{}:
		return func() { <-a.turn }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for another allocation: %w", ctx.Err())
	}
}

// Follow updates the record from the kubelet's checkpoint until the context ends. It doesn't take turn: with the smallest unit
// the file has several megabytes, and the kubelet writes it after each allocation while the next one waits.
func (a *allocator) Follow(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.stale:
		}
		a.Sync(ctx)
		// A burst of pods is handled as one change.
		pause := time.NewTimer(syncPause)
		select {
		case <-ctx.Done():
			pause.Stop()
			return nil
		case <-pause.C:
		}
	}
}

// syncPause is the minimum time between two background reads of the checkpoint, for which no call waits.
const syncPause = 100 * time.Millisecond

// Settle reads the checkpoint of a kubelet that has just started. The kubelet doesn't know a container that is not in its
// checkpoint.
func (a *allocator) Settle(ctx context.Context) {
	release, err := a.take(ctx)
	if err != nil {
		return
	}
	defer release()
	a.settled = a.now()
	clear(a.refused) // The new kubelet admits the rejected pods again that its predecessor had no time to fail.
	a.record.Settle()
	a.Sync(ctx)
	a.resources.Renew()
}

// Sync updates the record from the kubelet's checkpoint. If the file can't be read, its last known content is used.
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

// Allocate selects a card for one container and returns the response for the kubelet. ids are the fake devices.
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

// refuse rejects an allocation, or lets the container start without a card if errorEnv is set. pod is nil if no pod was
// matched; the kubelet's checkpoint then shows which container started in this way.
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

// Prefer returns the devices, out of the available ones, that the allocation should use: those of the card that the pod gets,
// so that the kubelet's checkpoint names the real card. It decides as Allocate does and has the same waits. It returns nil if
// it can't decide: an error would fail the pod, and Allocate makes the final decision.
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
		card.Index, err = promised, nil // Allocate selects this card if it has room by then.
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

// match finds the container for which the kubelet calls Allocate. It returns a refusal if the API server knows no such
// container, or if the match is ambiguous. The caller holds turn.
//
// The kubelet waits during the call. All queries to it together take askTimeout at most, and the search for a pod that is not
// known here takes searchTimeout at most.
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
		// A hint that was found by order is checked again: there may have been no time to query the kubelet about it.
		if !a.doubtful || !a.ruledOut(ask(c)) {
			return s, c, hinted.by, nil
		}
	}
	// If the hint's container is not among the candidates, its pod may not be known here yet. A match by order among the other
	// candidates would be wrong.
	guess := found || hinted.container == (containerKey{})
	if c, by, ok := a.resolve(s, request, ask, false); ok && (by == byKubelet || guess) {
		return s, c, by, nil
	}
	// The informer and the record can be out of date.
	a.Sync(ctx)
	pods, err := a.pods.Search(ctx, func(pods []podView) bool {
		// Only a match by the kubelet ends the search early. A match by order waits for the list, because the right pod may not
		// be among the known ones yet.
		_, by, _ := resolve(a.snapshot(pods).Candidates(request), ask, a.resources.Answers, false)
		return by == byKubelet
	})
	live := a.snapshot(pods)
	live.Preferred = s.Preferred
	interrupted := live.Interrupted(request)
	resized := slices.DeleteFunc(slices.Clone(interrupted), func(c candidate) bool { return !c.Pod.Resized })
	resizes := slices.ContainsFunc(resized, func(c candidate) bool { return ask(c) == waiting })
	// If both a resize and a repeated start are possible, neither is guessed: the kubelet retries both, and after a wrong guess
	// its checkpoint would no longer have the card of the running container.
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

// statusLag is the time after a kubelet's start during which the API server may report containers as running although they
// ended with the machine.
const statusLag = 5 * time.Minute

// asker returns a function that queries the kubelet about each candidate once: the kubelet's state doesn't change while it
// waits for the plugin's response. All queries together take askTimeout at most.
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
	// If the kubelet has not yet known any pod, as after a start of the plugin, it is queried about pods that it must know.
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

// ruledOut reports whether a candidate with this standing can't be the one for which the kubelet calls.
func (a *allocator) ruledOut(where standing) bool {
	return (where == absent || where == holding) && a.resources.Answers()
}

// takeHint removes and returns the hint for these devices, or returns the zero hint. It drops expired hints.
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

// holds returns the hint's container if it is still a candidate.
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

// known returns a snapshot with the pods of the informer's cache. It adds those with a record to met.
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

// snapshot returns a snapshot with these pods. It omits the servings of pods that the informer has known and that are not among
// these pods. Such a pod is deleted: the record learns of a deletion later than the informer, and the informer later than the
// API server.
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

// countOtherDevices counts allocations with devices of another card, which the kubelet's checkpoint then names. There can be
// good reasons, such as devices that an init container with another request had.
func (a *allocator) countOtherDevices(ids []string, card gpu.Card) {
	own := ofCard(card.Index)
	if slices.ContainsFunc(ids, func(id string) bool { return !own(id) }) {
		a.metrics.otherDevices.Inc()
	}
}

// preferredDevices returns size devices: first those of include, then those of the card, then any others. It returns nil if
// fewer than size are available.
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
