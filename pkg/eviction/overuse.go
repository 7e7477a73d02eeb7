package eviction

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/apiserver"
	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/queue"
)

// EventOveruseEvicted is the reason of the Event on a pod that is evicted because it uses more than it requests.
const EventOveruseEvicted = "GPUMemoryOveruseEvicted"

// OveruseGroups reports about groups of pods.
type OveruseGroups interface {
	// Membership reports whether a pod is a member of a group, and whether the group would go on without an eviction of its other members if this one
	// ended: its run has been bound, or the pod asks for no cards.
	Membership(uid gpu.PodUID) (member, whole bool)
}

// OveruseEvictor evicts pods that use more GPU memory than they request, from cards that can't keep their promises otherwise: what these pods
// use and what the other pods of the card request is more than the card has. Pods may use memory that is promised to no pod.
//
// While a card is low on free memory, as the device plugin reports it, and pods borrow some of it, it evicts first those above their limits, also
// within their grace period, then those that borrow.
//
// It evicts one pod at a time, the youngest first. Before an eviction it checks the live pods of the node, which show the former one's even if the watch
// doesn't yet. A pod that a disruption budget protects is skipped for a while.
//
// A member of a group is evicted alone: the others may be within their requests. Pods without a group come first, because without
// one of its members a group usually makes no progress. Members of a group that isn't completely bound are not evicted, because package
// gang would then evict the other members.
type OveruseEvictor struct {
	evictor
	groups OveruseGroups
	// Only Run uses the fields below.

	// spared are the pods whose eviction was refused or got no answer in time, for a while.
	spared queue.Pauses[gpu.PodUID]
	// unanswered is when the eviction of a pod of each node last got no answer in time. While it can still take effect, no other pod of the node is evicted.
	unanswered map[string]time.Time
	// cards are those with a pod at the last step, by node and index, on nodes where a pod may use more than it requests; nil if that step wasn't made
	// as the leader.
	cards map[string]map[int]cardSeen
}

// cardSeen is what OveruseEvictor remembers of a card from step to step.
type cardSeen struct {
	// staying are the pods of the card, without those that have ended or are ending.
	staying sets.Set[gpu.PodUID]
	// stale is the time of the last report that can be older than the end of a pod there. It doesn't say what is free now.
	stale time.Time
}

// NewOveruseEvictor returns an OveruseEvictor. It evicts nothing before Run.
func NewOveruseEvictor(o Options, groups OveruseGroups) *OveruseEvictor {
	return &OveruseEvictor{evictor: evictor{o}, groups: groups, spared: queue.Pauses[gpu.PodUID]{}, unanswered: map[string]time.Time{}}
}

// Run evicts pods as needed until ctx ends.
func (o *OveruseEvictor) Run(ctx context.Context) error {
	return background.Every(ctx, o.Clock, queue.Retry, o.Tick)
}

// Tick performs one step of Run. It makes at most one eviction.
func (o *OveruseEvictor) Tick(ctx context.Context) {
	now := o.Clock.Now()
	if o.Leading() != nil || o.Cache.Ready() != nil {
		o.cards = nil
		return
	}
	over := o.Cache.MayOveruse()
	o.spared.Prune(now, queue.LongestPause)
	maps.DeleteFunc(o.unanswered, func(_ string, at time.Time) bool { return now.Sub(at) > o.AnswerLost })
	seen, reported := map[string]map[int]cardSeen{}, sets.New[string]()
	for _, pod := range over {
		if seen[pod.Node] == nil {
			seen[pod.Node] = o.look(pod.Node, now)
		}
		if pod.Overuse.Current(now) {
			reported.Insert(pod.Node)
		}
	}
	o.cards = seen
	for _, name := range sets.List(reported) { // No other node has a victim.
		if _, waits := o.unanswered[name]; waits {
			continue
		}
		for _, victim := range o.choose(name, o.Cache.PodsOn(name), now) {
			// victims can have a pod several times, once for each card.
			if !o.spared.Has(victim.pod.UID, now) && o.evict(ctx, victim) {
				return
			}
		}
	}
}

// choose returns the shares of the pods of a node that are to be evicted, by card, in the order in which they are evicted.
func (o *OveruseEvictor) choose(name string, pods []*clustercache.PodInfo, now time.Time) (victims []share) {
	node, ok := o.Cache.Node(name)
	if !ok {
		return nil
	}
	parsed := protocol.ParseNode(node)
	if parsed.Unit <= 0 {
		return nil // It is not known how much memory its pods request.
	}
	onCards := byCard(name, pods)
	for _, card := range parsed.Cards {
		on := onCards[card.Index]
		var shares []share
		for _, pod := range on {
			if s, ok := o.shareOf(pod, card.Index, parsed.Unit, now); ok {
				shares = append(shares, s)
			}
		}
		chosen := chooseOverusers(parsed.Unit.Bytes(card.Memory), shares)
		if seen := o.cards[name][card.Index]; len(chosen) == 0 && !seen.left(on, now) && lastReport(on, card.Index, now).After(seen.stale) {
			chosen = inOrder(shares, borrows)
			chosen = chosen[:min(len(chosen), 1)] // The next report shows if it was enough.
		}
		victims = append(victims, chosen...)
	}
	return victims
}

// share is a pod's part of one card, in bytes.
type share struct {
	pod  *clustercache.PodInfo
	card int
	// needs is what the pod takes of the card's memory: what it uses for overGrace, else its request.
	needs  uint64
	excess excess
	// spared is true for a pod that is not to be evicted now.
	spared bool
	// member is true for a member of a group.
	member bool
}

// excess is what is reported about a pod's use of a card.
type excess int

const (
	// withinRequest: nothing is reported.
	withinRequest excess = iota
	// overGrace: it has used more than it may for longer than the grace period.
	overGrace
	// aboveLimitOnLowCard: it uses more than it may, and the card is low on free memory.
	aboveLimitOnLowCard
	// borrows: it uses more than it requests and no more than it may, and the card is low on free memory.
	borrows
)

// shareOf returns a pod's share of a card; ok is false for a pod that has none, or that is being deleted.
func (o *OveruseEvictor) shareOf(pod *clustercache.PodInfo, card int, unit gpu.Unit, now time.Time) (s share, ok bool) {
	if pod.Ended || ending(pod, now) {
		return share{}, false
	}
	s = share{pod: pod, card: card, spared: pod.Leaving || pod.Mirror || o.spared.Has(pod.UID, now)}
	for _, part := range pod.Placement {
		if part.Card == card {
			s.needs = unit.Bytes(part.Memory)
		}
	}
	if use := pod.Overuse.On(card); pod.Overuse.Current(now) {
		switch used := uint64(min(use.Used, 1<<32)) << 20; { // A sum of such amounts doesn't overflow.
		case used <= s.needs:
		case !use.ForLowCard():
			s.needs, s.excess = used, overGrace
		case use.Above():
			s.excess = aboveLimitOnLowCard
		default:
			s.excess = borrows // What it borrows can be taken back.
		}
	}
	if s.excess != withinRequest {
		var whole bool
		s.member, whole = o.groups.Membership(pod.UID)
		s.spared = s.spared || s.member && !whole
	}
	return s, s.needs > 0
}

// ending reports whether the pod is being deleted and will end soon. One with a long grace period can keep its memory for days,
// so it isn't waited for that long.
func ending(pod *clustercache.PodInfo, now time.Time) bool {
	return pod.Leaving && !protocol.Overdue(protocol.LeavesBy(pod.DeletionTime, int64(pod.GraceSeconds)), now)
}

// look returns what is to be remembered of the cards of a node. The reports on a card which pods are leaving or have left are stale: they don't say what
// is free once these have ended. A former leader may have evicted a pod since any report was made.
func (o *OveruseEvictor) look(node string, now time.Time) map[int]cardSeen {
	seen := map[int]cardSeen{}
	for index, on := range byCard(node, o.Cache.PodsOn(node)) {
		card := o.cards[node][index]
		if o.cards == nil || card.left(on, now) {
			card.stale = lastReport(on, index, now)
		}
		card.staying = staying(on, now)
		seen[index] = card
	}
	return seen
}

// left reports whether a pod is leaving the card, or has ended or disappeared there since the last step.
func (c cardSeen) left(on []*clustercache.PodInfo, now time.Time) bool {
	return slices.ContainsFunc(on, func(p *clustercache.PodInfo) bool { return ending(p, now) }) || !staying(on, now).IsSuperset(c.staying)
}

// staying returns those of the pods that haven't ended and aren't ending.
func staying(pods []*clustercache.PodInfo, now time.Time) sets.Set[gpu.PodUID] {
	uids := sets.New[gpu.PodUID]()
	for _, pod := range pods {
		if !pod.Ended && !ending(pod, now) {
			uids.Insert(pod.UID)
		}
	}
	return uids
}

// byCard returns, of the pods of a node, those that have a share of each card, or are reported to use it without one.
func byCard(node string, pods []*clustercache.PodInfo) map[int][]*clustercache.PodInfo {
	on := map[int][]*clustercache.PodInfo{}
	for _, pod := range pods {
		cards := sets.New(pod.Placement.Cards()...)
		if pod.Overuse != nil {
			cards.Insert(slices.Collect(maps.Keys(pod.Overuse.Cards))...)
		}
		for card := range cards {
			if pod.Node == node {
				on[card] = append(on[card], pod)
			}
		}
	}
	return on
}

// lastReport returns the time of the last report because the card of these pods is low on free memory; zero if there is none.
func lastReport(pods []*clustercache.PodInfo, card int, now time.Time) (newest time.Time) {
	for _, pod := range pods {
		if pod.Overuse.Current(now) && pod.Overuse.On(card).ForLowCard() && pod.Overuse.At.After(newest) {
			newest = pod.Overuse.At
		}
	}
	return newest
}

// chooseOverusers returns the pods to evict from a card with this memory so that it can keep its promises. It never returns a pod that is within its
// request, even if these pods alone need more than the card has.
func chooseOverusers(memory uint64, shares []share) []share {
	var sum uint64
	for _, s := range shares {
		sum += s.needs
	}
	candidates := inOrder(shares, overGrace)
	for i, s := range candidates {
		if sum <= memory {
			return candidates[:i]
		}
		sum -= s.needs
	}
	return candidates
}

// inOrder returns the shares of pods that use more than they request, up to this excess, and that are not spared, in the order in which they are
// evicted: by excess, then those without a group first, and of these the youngest.
func inOrder(shares []share, last excess) []share {
	candidates := slices.DeleteFunc(slices.Clone(shares), func(s share) bool { return s.spared || s.excess == withinRequest || s.excess > last })
	slices.SortFunc(candidates, func(a, b share) int {
		return cmp.Or(cmp.Compare(a.excess, b.excess), gpu.TrueFirst(b.member, a.member), b.pod.AssumeTime.Compare(a.pod.AssumeTime),
			cmp.Compare(a.pod.UID, b.pod.UID))
	})
	return candidates
}

// confirm returns the victim as the API server shows it; nil if it must not be evicted after all: the cache can be behind, for the victim or for other
// pods of its card.
func (o *OveruseEvictor) confirm(ctx context.Context, v share) (*clustercache.PodInfo, error) {
	live, err := o.API.PodsOn(ctx, v.pod.Node)
	if err != nil {
		return nil, fmt.Errorf("listing the pods of node %s: %w", v.pod.Node, err)
	}
	pods := make([]*clustercache.PodInfo, len(live))
	for i := range live {
		pods[i] = clustercache.NewPodInfo(&live[i])
	}
	for _, other := range o.choose(v.pod.Node, pods, o.Clock.Now()) {
		if other.pod.UID == v.pod.UID && other.card == v.card {
			return other.pod, nil
		}
	}
	return nil, nil
}

// evict evicts a pod. It reports whether the next eviction must wait for the next step.
func (o *OveruseEvictor) evict(ctx context.Context, v share) (wait bool) {
	logger := klog.FromContext(ctx).WithValues("pod", klog.KRef(v.pod.Namespace, v.pod.Name), "node", v.pod.Node, "card", v.card)
	pod, err := o.confirm(ctx, v)
	if err != nil {
		logger.Error(err, "Pod that uses more GPU memory than it requests not evicted")
		return true
	} else if pod == nil {
		return true // The watch is behind.
	}
	_, gone, err := o.request(ctx, pod.Pod, false)
	if gone {
		return true
	}
	o.Observer.OveruserEvicted(resultOf(err))
	use := pod.Overuse.On(v.card)
	switch {
	case err == nil:
		logger.Info("Evicted a pod that uses more GPU memory than it requests", "usedMiB", use.Used, "requestedMiB", use.Requested)
		o.Recorder.Event(apiserver.Reference(pod.Pod), corev1.EventTypeWarning, EventOveruseEvicted, fmt.Sprintf(
			"Evicted from GPU card %d of node %s: it %s, and the card has too little memory for what other pods request", v.card, v.pod.Node, use))
	case answered(err):
		o.spared.Extend(pod.UID, o.Clock.Now(), queue.Retry, queue.LongestPause)
		logger.Error(err, "Pod that uses more GPU memory than it requests not evicted", "result", resultOf(err))
		return false
	default:
		if timedOut(err) {
			now := o.Clock.Now()
			o.unanswered[v.pod.Node] = now
			o.spared.Extend(pod.UID, now, 2*o.AnswerLost, queue.LongestPause) // Other pods of the node get their turn.
		}
		logger.Error(err, "Pod that uses more GPU memory than it requests not evicted: the API server, or a webhook that it calls, doesn't answer")
	}
	return true
}
