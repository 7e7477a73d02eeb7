package gang

import (
	"hash/maphash"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// The reasons of Events.
const (
	EventInvalid    = "GangInvalid"
	EventIncomplete = "GangIncomplete"
	EventBound      = "GangBound"
	EventNotBound   = "GangNotBound"
	EventEvicted    = "GangEvicted"
	EventPartial    = "GangPartial"
)

// FailurePolicy is what happens to the bound members of a broken run.
type FailurePolicy string

// The failure policies.
const (
	Evict FailurePolicy = "evict"
	Keep  FailurePolicy = "keep"
)

// Options configure a Manager.
type Options struct {
	Ledger *ledger.Ledger
	// Release releases a pod's reservation. If a bind of the pod is in flight or unconfirmed, its outcome decides instead.
	Release func(gpu.PodUID)
	View    ledger.View
	// EligibleNodes returns the nodes that the pod can run on regardless of free resources. It is called rarely, with
	// the Manager's lock held.
	EligibleNodes func(gpu.PodUID) []string
	// Failures are those of all items.
	Failures *queue.Failures
	// AwaitsTurn reports whether the pod must wait for its turn of fair sharing.
	AwaitsTurn func(gpu.Pod) bool
	// Hold is how long a bind call waits for the other members at most.
	Hold time.Duration
	// Patience is how long a plan's reservations last while members are missing, and how long a run may stay broken.
	Patience  time.Duration
	OnFailure FailurePolicy
	// Observer receives what metrics count. It is called with the Manager's lock held and must not block.
	Observer Observer
	// IllegalMove is called for a move that the table of transitions doesn't contain; nil outside tests.
	IllegalMove func(move string)
}

// Observer receives what metrics count.
type Observer interface {
	// BarrierOpened is called when a barrier opens, with the time for which the first member waited.
	BarrierOpened(wait time.Duration)
	// GangBound counts gangs of which all members were bound.
	GangBound()
	// GangFailed counts plans that ended before all members were bound, also those that gave way to others, and bind calls that were rejected after
	// the patience. The reason is one of reasons.GroupFailures.
	GangFailed(reason reasons.Group)
	// GangEvicted counts evicted members of broken runs.
	GangEvicted()
}

// Effects are the actions that the caller of a Manager must perform.
type Effects struct {
	// Requeue is true if kube-scheduler must retry rejected pods.
	Requeue bool
	// RequeueAbove are the priorities of gangs that became whole: kube-scheduler must retry rejected pods of a higher priority, which can preempt
	// their members now.
	RequeueAbove []int32
	// Events are the Events to record.
	Events []Event
	// Evict are the pods to evict.
	Evict []gpu.Pod
	// Verify are the pods to read from the API server. The results are passed to Confirmed or ConfirmedGone.
	Verify []gpu.Pod
}

// Event is an Event to record on a pod.
type Event struct {
	Pod          gpu.Pod
	Warning      bool
	Reason, Text string
}

// Manager holds all groups. mu guards the fields below it and is held for in-memory work only.
type Manager struct {
	Options
	// freed counts how often memory was freed.
	freed atomic.Uint64
	seed  maphash.Seed

	mu      sync.Mutex
	members map[gpu.PodUID]*member
	serial  uint64
	// podGroups are the PodGroups of native groups; nil while these are off.
	podGroups map[Key]PodGroup
	// leading is true between StartLeading and StopLeading. The fields from groups to resumeAt are used only then.
	leading bool
	groups  map[Key]*group
	// planned are the runs in PhasePlanned.
	planned map[*run]bool
	// noRoomFor are the latest results "no room" of runs that are alike, while they may be valid.
	noRoomFor map[roomKey]noRoom
	// work counts the members that the current Tick has tried to place. resumeAt is where the next one continues.
	work     int
	resumeAt *ledger.Item
	// unknownPods are the pods of filter calls that the watch has not reported yet.
	unknownPods map[gpu.PodUID]struct{}
	// sets are the latest sets of candidate nodes. Equal sets are stored once, and most are equal.
	sets    map[uint64]*candidates
	effects Effects
}

// New returns a Manager without members.
func New(o Options) *Manager {
	return &Manager{
		Options: o, members: map[gpu.PodUID]*member{}, unknownPods: map[gpu.PodUID]struct{}{}, groups: map[Key]*group{}, planned: map[*run]bool{},
		noRoomFor: map[roomKey]noRoom{}, sets: map[uint64]*candidates{}, seed: maphash.MakeSeed(),
	}
}

// MemoryFreed records that memory was freed on some node. It takes no lock.
func (mgr *Manager) MemoryFreed() { mgr.freed.Add(1) }

// TakeEffects returns the effects since the last call.
func (mgr *Manager) TakeEffects() Effects {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	out := mgr.effects
	mgr.effects = Effects{}
	return out
}

// StartLeading is called while this process is the leader, before Tick. When it becomes the leader, it divides the members into runs, from what the
// API server knows of them alone. It is unknown which pods another replica rejected, so all of them count as rejected.
func (mgr *Manager) StartLeading(now time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	if mgr.leading {
		return
	}
	mgr.leading = true
	mgr.findWholeRuns()
	members := map[Key][]*member{}
	for _, m := range mgr.members {
		m.groupProblem = mgr.resolve(&m.Member)
		g := mgr.group(m.Gang)
		if m.Cardless {
			g.cardless++
		} else {
			members[m.Gang] = append(members[m.Gang], m)
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(members), Key.Compare) {
		mgr.partition(mgr.groups[key], members[key], now)
	}
}

// StopLeading is called while this process isn't the leader, and when it stops. It rejects the bind calls that wait, releases what
// is reserved for binds that were not granted, and forgets all runs.
func (mgr *Manager) StopLeading(now time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	if !mgr.leading {
		return
	}
	mgr.leading = false
	for _, key := range slices.SortedFunc(maps.Keys(mgr.groups), Key.Compare) {
		for _, r := range mgr.groups[key].runs {
			if r.plan != nil {
				mgr.Failures.Ended(r.plan.profile)
				mgr.endPlan(r, reasons.GroupStopping)
				mgr.Observer.GangFailed(reasons.GroupStopping)
			}
		}
	}
	for _, m := range mgr.members {
		m.run = nil
	}
	mgr.groups, mgr.planned = map[Key]*group{}, map[*run]bool{}
	mgr.noRoomFor, mgr.resumeAt = map[roomKey]noRoom{}, nil
	mgr.effects = Effects{} // The next leader has effects of its own.
}

// SetMember adds or updates a member, as the watch reports it.
func (mgr *Manager) SetMember(m Member, now time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	groupProblem := mgr.resolve(&m)
	known := mgr.members[m.UID]
	if known != nil && known.Gang != m.Gang {
		mgr.removeMember(known, now)
		known = nil
	}
	if known != nil {
		mgr.apply(known, merge(known.Member, m), now)
		return
	}
	mgr.serial++
	known = &member{Member: m, serial: mgr.serial, groupProblem: groupProblem}
	mgr.members[m.UID] = known
	_, filtered := mgr.unknownPods[m.UID]
	delete(mgr.unknownPods, m.UID)
	if filtered {
		mgr.effects.Requeue = true
	}
	if !mgr.leading {
		return
	}
	g := mgr.group(m.Gang)
	if m.Cardless {
		g.cardless++
		return
	}
	r := mgr.findOrBegin(g, known, now)
	mgr.join(r, known)
	mgr.continueRun(r, known, now)
	if unfinished := g.unfinishedRun(); known.Node != "" && r.phase == PhaseRunning && unfinished != nil && unfinished.plan == nil {
		mgr.rehome(unfinished, now) // The pod shows that its run is alive. So members of its controller join the run; in a native group all members do.
		mgr.continueRun(unfinished, nil, now)
	}
}

// apply sets what is known of a member.
func (mgr *Manager) apply(m *member, next Member, now time.Time) {
	r := m.run
	m.ShortOfResources = next.ShortOfResources // This change alone continues no run: kube-scheduler's message can change with each attempt.
	if m.Member == next || r == nil {
		m.Member = next
		return
	}
	found := m.Node == "" && next.Node != ""
	m.recount(func() { m.Member = next })
	if found && r.id == "" && r.phase != PhaseRunning {
		r.id = m.Run
	}
	mgr.continueRun(r, m, now)
}

// Confirmed applies the result of a live read of the pod, but only the part that never changes back: whether the pod is bound,
// terminating or ended. It adds no member.
func (mgr *Manager) Confirmed(m Member, now time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	known := mgr.members[m.UID]
	if known == nil {
		return
	}
	mgr.apply(known, merge(m, known.Member), now) // The rest of the read can be older than the watch.
	known.readAt = now
	if known.run != nil {
		mgr.readAnswered(known.run, now)
	}
}

// ConfirmedGone applies a live read that found that the pod doesn't exist. The watch may report it once more before it reports the deletion.
func (mgr *Manager) ConfirmedGone(uid gpu.PodUID, now time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	m := mgr.members[uid]
	if m == nil || m.run == nil {
		return
	}
	r := m.run
	mgr.removeMember(m, now)
	mgr.readAnswered(r, now)
}

// RemoveMember removes a pod that was deleted or isn't a member any more. It does nothing for other pods.
func (mgr *Manager) RemoveMember(uid gpu.PodUID, now time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	delete(mgr.unknownPods, uid)
	if m := mgr.members[uid]; m != nil {
		mgr.removeMember(m, now)
	}
}

func (mgr *Manager) removeMember(m *member, now time.Time) {
	delete(mgr.members, m.UID)
	r := m.run
	if r == nil {
		if g := mgr.groups[m.Gang]; g != nil {
			g.cardless--
			mgr.removeIfUnused(g)
		}
		return
	}
	mgr.leave(m)
	mgr.continueRun(r, m, now)
}

// Tick ends what has lasted too long and plans the runs that are ready. Only the leader may call it, several times a
// second, once the cache is synced.
func (mgr *Manager) Tick(now time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	unfinished := mgr.unfinished()
	for _, r := range unfinished {
		mgr.due(r, now)
	}
	mgr.planWaiting(unfinished, now)
}

// maxUnknown is the number of remembered pods that the watch has not reported, so that requests for pods that don't exist can't
// exhaust the memory.
const maxUnknown = 20_000

// due handles what has become due for a run. If an earlier one in the same Tick has ended it, nothing is.
func (mgr *Manager) due(r *run, now time.Time) {
	mgr.reportIncomplete(r, now)
	mgr.verify(r, now)
	p := r.plan
	switch {
	case p == nil:
	case r.phase == PhaseBinding:
		if p.last.state == memberExpected && !now.Before(p.expires) {
			mgr.failLast(r, reasons.GroupExpired, now)
		}
	case p.count[memberArrived] > 0:
		if now.Sub(p.firstArrived) >= mgr.Hold && mgr.keepPlaces(r, now) {
			mgr.timeOut(r, now)
		}
	case !now.Before(p.expires) && mgr.keepPlaces(r, now):
		mgr.abandonPlan(r, reasons.GroupExpired, now)
	}
}

// requeueParked requeues the run's unbound members, if any of them was rejected.
func (mgr *Manager) requeueParked(r *run) {
	if r.parked && r.unbound() > 0 {
		r.parked, mgr.effects.Requeue = false, true
	}
}

// requeueUnknown requeues the members of a run that may plan, if it needs candidate nodes for that.
func (mgr *Manager) requeueUnknown(r *run, now time.Time) {
	if r.parked && r.enough() && mgr.pause(r, now) == (reasons.Group{}) && !r.needed().allOffered(r) {
		mgr.requeueParked(r)
	}
}
