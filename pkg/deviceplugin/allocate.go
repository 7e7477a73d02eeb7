package deviceplugin

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
)

// allocator answers Allocate and GetPreferredAllocation. It takes a snapshot, has package allocation decide, and acts.
type allocator struct {
	snapshots  *snapshots
	checkpoint *checkpoint
	kubelet    *podResources
	isolator   *isolator
	responses  *responses
	metrics    *metrics
	// askTimeout bounds all questions for one decision, of which a call needs two at most.
	askTimeout time.Duration
	// annotate is called for each pod whose annotations may have to change.
	annotate func(gpu.PodUID)

	// mu guards the fields below and snapshots. While it is held, the allocator may ask the kubelet and read the pods, for askTimeout and
	// readTimeout at most.
	mu sync.Mutex
	// preferred is what the last GetPreferredAllocation call was matched to, and preferredDevices the devices that it returned: the Allocate call
	// that follows has them.
	preferred        allocation.Preference
	preferredDevices allocation.DeviceSet
	// doubtful is true if the last match can be wrong, or if no pod was matched and the container starts without a card. The
	// kubelet's checkpoint then shows which pod it was.
	doubtful bool
}

// Allocate selects the cards of one container and returns the response for the kubelet. ids are the fake devices.
func (a *allocator) Allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	defer a.metrics.observe(time.Now())
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, err // The kubelet doesn't wait for the answer any more.
	}
	request, devices := gpu.Memory(len(ids)), allocation.NewDeviceSet(ids)
	var preferred allocation.Preference
	if devices == a.preferredDevices { // It counts once: the kubelet gives the devices of an init container to others without asking for a preference.
		preferred, a.preferredDevices = a.preferred, allocation.DeviceSet{}
	}
	decision := a.readAndDecide(ctx, request, preferred)
	decision, limitation := a.isolator.Isolate(decision, a.responses.cards.Get().Unit)
	a.metrics.count(decision, ids)
	a.remember(decision, devices, limitation)
	a.responses.report(ctx, decision, request)
	return a.responses.respond(decision, request, limitation)
}

// Prefer returns the devices, out of the available ones, that the allocation should use: those of the cards that the pod gets, so
// that the kubelet's checkpoint names the real cards. It decides as Allocate does and has the same waits. It returns nil if it
// can't decide: an error would fail the pod, and Allocate makes the final decision.
func (a *allocator) Prefer(ctx context.Context, available, include []string, size int) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	decision := a.readAndDecide(ctx, gpu.Memory(size), allocation.Preference{})
	if len(decision.Cards) == 0 {
		return nil
	}
	ids := chooseDevices(decision.Indexes(), available, include, size)
	container := allocation.ContainerKey{UID: decision.Pod.UID, Name: decision.Container.Name}
	a.preferred, a.preferredDevices = allocation.Preference{Container: container, Match: decision.Match}, allocation.NewDeviceSet(ids)
	return ids
}

// KubeletStarted reads the checkpoint of a kubelet that has just started: that kubelet doesn't know any other container.
func (a *allocator) KubeletStarted(ctx context.Context) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.snapshots.kubeletStarted()
	a.checkpoint.Sync(ctx)
	a.kubelet.Renew()
}

// InUse returns the memory that pods hold on each card, or are annotated with. No allocation is in progress when it is computed.
func (a *allocator) InUse() map[int]gpu.Memory {
	a.mu.Lock()
	defer a.mu.Unlock()
	held := a.snapshots.Cached()
	return held.InUse()
}

// readAndDecide decides from what is known here. If that isn't enough (allocation.Decision.NeedsFreshRead), it reads the record and the pods again: both
// can be out of date. The kubelet waits during the call.
func (a *allocator) readAndDecide(ctx context.Context, request gpu.Memory, preferred allocation.Preference) allocation.Decision {
	if a.doubtful {
		a.doubtful = false
		a.checkpoint.Sync(ctx)
	}
	kubelet := &questions{kubelet: a.kubelet, states: map[allocation.ContainerKey]allocation.KubeletState{}}
	decide := func(snapshot allocation.Snapshot) allocation.Decision {
		var end context.CancelFunc
		kubelet.ctx, end = context.WithTimeout(ctx, a.askTimeout)
		defer end()
		snapshot.Preferred, snapshot.Kubelet = preferred, kubelet
		return allocation.Decide(snapshot, request)
	}
	if decision := decide(a.snapshots.Cached()); !decision.NeedsFreshRead {
		return decision
	}
	a.checkpoint.Sync(ctx)
	pods, err := a.snapshots.pods.Read(ctx)
	return decide(a.snapshots.Of(pods).MarkedRead(err))
}

// questions asks the kubelet what one decision needs to know. The kubelet is asked about each container once: its state doesn't
// change while it waits for the plugin's response.
type questions struct {
	// ctx bounds the questions of one decision.
	ctx     context.Context
	kubelet *podResources
	// states are the answers so far.
	states map[allocation.ContainerKey]allocation.KubeletState
}

// State implements allocation.Kubelet.
func (q *questions) State(c allocation.Candidate) allocation.KubeletState {
	state, answered := q.states[c.Key()]
	if !answered {
		state = q.kubelet.State(q.ctx, c)
		q.states[c.Key()] = state
	}
	return state
}

// remember records what the container was given.
func (a *allocator) remember(d allocation.Decision, devices allocation.DeviceSet, l containerLimit) {
	withoutCard := d.Rejection != nil && a.responses.errorEnv
	a.doubtful = d.Match == allocation.ByOrder || withoutCard && d.Pod == nil
	switch {
	case d.Pod == nil:
		return
	case d.Rejection != nil && !withoutCard:
		a.snapshots.rejected[d.Pod.UID] = true
		return
	}
	var given allocation.Allocation
	if !withoutCard {
		given = allocation.Give(d.Container, d.Cards)
		given.Mode, given.Limit, given.Allowed = string(l.mode), l.limit, l.allowed
		given.Adapters = d.Adapters
	}
	given.Devices, given.At = devices, time.Now()
	a.snapshots.record.Add(allocation.ContainerKey{UID: d.Pod.UID, Name: d.Container.Name}, given)
	a.annotate(d.Pod.UID)
}

// snapshots takes the snapshots for decisions. The allocator's mutex guards its fields.
type snapshots struct {
	cards  *cardState
	pods   *podSource
	record *allocation.Record
	// rejected are the pods of which an allocation was rejected, as long as they exist.
	rejected map[gpu.PodUID]bool
	// registered is when the plugin last registered with the kubelet.
	registered time.Time
}

// Cached returns a snapshot with the pods of the informer's cache.
func (s *snapshots) Cached() allocation.Snapshot { return s.Of(s.pods.Cached()) }

// Of returns a snapshot with these pods.
func (s *snapshots) Of(pods []allocation.Pod) allocation.Snapshot {
	cards := s.cards.Get()
	present := map[gpu.PodUID]bool{}
	for i := range pods {
		present[pods[i].UID] = true
	}
	maps.DeleteFunc(s.rejected, func(uid gpu.PodUID, _ bool) bool { return !present[uid] })
	return allocation.Snapshot{
		Cards: cards.Cards, Adapters: cards.Adapters, Pods: pods, Given: s.record.Snapshot(), Rejected: s.rejected, KubeletAge: time.Since(s.registered),
	}
}

func (s *snapshots) kubeletStarted() {
	s.registered = time.Now()
	clear(s.rejected) // The new kubelet admits the rejected pods again that its predecessor had no time to fail.
	s.record.KubeletStarted()
}

// chooseDevices returns size devices, first those of include, then as many of each card as the container gets of it, then others;
// nil if there are fewer.
func chooseDevices(cards []int, available, include []string, size int) []string {
	if size <= 0 || len(available) < size {
		return nil
	}
	out := slices.Clone(include[:min(size, len(include))])
	chosen := make(map[string]bool, size)
	split := newSplit(cards, size)
	for _, id := range out {
		chosen[id] = true
		split.take(id)
	}
	for _, take := range []func(id string) bool{split.take, func(string) bool { return true }} {
		for _, id := range available {
			if len(out) == size {
				return out
			}
			if !chosen[id] && take(id) {
				out, chosen[id] = append(out, id), true
			}
		}
	}
	return out
}
