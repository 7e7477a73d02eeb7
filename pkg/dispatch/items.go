package dispatch

import (
	"cmp"
	"crypto/sha256"
	"maps"
	"slices"
	"strings"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// item is what is granted at once: a pod, or the members of a group that must be bound together.
type item struct {
	fairshare.Item
	kind *kind
	// pods are ordered: the largest first, since they have the least choice.
	pods []*pod
	// constraints are Pod.Constraints of each pod, unless mixed is true: then the pods have different ones. They are here because looking at each pod
	// takes long.
	constraints unique.Handle[string]
	mixed       bool
	// profile is what Failures knows of the item. Its ShapeKey is that of package gang for a group, because gang reports failures of the group too.
	profile queue.Profile
	// pause is ObstaclePaused or ObstacleBehindFailed if the latest round passed the item over because of failures, else 0.
	pause reasons.Obstacle
	// provisioning is since when the gates of all its pods are open for an autoscaler; zero if one isn't.
	provisioning time.Time
}

// has reports whether the item consists of these pods.
func (it *item) has(pods []*pod) bool {
	return len(it.pods) == len(pods) && !slices.ContainsFunc(pods, func(p *pod) bool { return p.item != it })
}

// obstacle returns why the item was not granted in the latest round.
func (it *item) obstacle() reasons.Obstacle { return cmp.Or(it.pause, it.kind.obstacle) }

// enlist makes an item of a waiting pod. If the pod is in a group, it adds the pod to the waiting members; gatherGroups makes their items.
func (m *Manager) enlist(p *pod) {
	if p.Group == (gang.Key{}) {
		m.addItem(ledger.PodItemID(p.Pod.Pod), []*pod{p}, false)
		return
	}
	if m.members[p.Group] == nil {
		m.members[p.Group] = map[gpu.PodUID]*pod{}
	}
	m.members[p.Group][p.UID] = p
}

// withdraw removes a pod from its item. The other pods of the item wait until the next round makes a new one.
func (m *Manager) withdraw(p *pod) {
	m.leaveGroup(p)
	if p.item != nil {
		m.removeItem(p.item)
	}
}

// leaveGroup removes a pod from those that wait in groups.
func (m *Manager) leaveGroup(p *pod) {
	if waiting := m.members[p.Group]; waiting != nil {
		delete(waiting, p.UID)
		if len(waiting) == 0 {
			delete(m.members, p.Group)
		}
	}
}

// addItem makes an item of the pods, in place of the one with the same ID. broken is true if it completes a broken group.
func (m *Manager) addItem(id string, pods []*pod, broken bool) *item {
	slices.SortFunc(pods, func(a, b *pod) int {
		return cmp.Or(cmp.Compare(b.Request, a.Request), strings.Compare(a.RoomKey.Value(), b.RoomKey.Value()), cmp.Compare(a.UID, b.UID))
	})
	first := pods[0]
	it := &item{kind: m.kindOf(pods), pods: pods, constraints: first.Constraints, provisioning: first.provisioning}
	it.kind.items++
	if former := m.items[id]; former != nil {
		m.removeItem(former)
	}
	entry := ledger.Item{ID: id, CompletesGroup: broken, Priority: first.Priority, Entered: first.Created}
	var failedAt time.Time
	var size queue.Size
	for _, p := range pods {
		if p.item != nil { // A member of a group that started meanwhile is placed alone, for example.
			m.removeItem(p.item)
		}
		p.item = it
		it.mixed = it.mixed || p.Constraints != it.constraints
		size.Memory, size.Cards = size.Memory.Add(p.Request), size.Cards+p.NumCards()
		entry.Priority = min(entry.Priority, p.Priority) // As in package gang.
		entry.Entered = earlier(entry.Entered, p.Created)
		it.provisioning = earlier(it.provisioning, p.provisioning)
		failedAt = later(failedAt, p.failedAt)
	}
	entry.Entered = later(entry.Entered, failedAt) // After a failure it enters again, behind others of its priority.
	it.Item = fairshare.Item{Item: entry, Tenant: m.namespaces[first.Namespace].Tenant, Memory: size.Memory, Value: it}
	it.profile = queue.Profile{Namespace: first.Namespace, ID: id, ShapeKey: it.kind.shapeKey, Size: size, CompletesGroup: broken}
	m.items[id] = it
	m.queue.Add(it.Item)
	return it
}

func earlier(a, b time.Time) time.Time { return slices.MinFunc([]time.Time{a, b}, time.Time.Compare) }

func later(a, b time.Time) time.Time { return slices.MaxFunc([]time.Time{a, b}, time.Time.Compare) }

// removeItem removes an item. Its pods, which are in no other one, are in none then.
func (m *Manager) removeItem(it *item) {
	for _, p := range it.pods {
		p.item = nil
	}
	it.kind.items--
	if it.kind.items == 0 {
		delete(m.kinds, it.kind.key)
	}
	delete(m.items, it.ID)
	m.queue.Remove(it.Item)
}

// gatherGroups makes items of the members that wait: one of those that their group must bind together, and one of each that is
// placed alone. Members of a group of which too few exist are in none.
func (m *Manager) gatherGroups() {
	for _, key := range slices.SortedFunc(maps.Keys(m.members), gang.Key.Compare) {
		waiting := m.members[key]
		startable := m.Groups.Startable(key, m.now)
		in := map[*item]bool{}
		gather := func(id string, uids []gpu.PodUID, broken bool) {
			var pods []*pod
			for _, uid := range uids {
				if p := waiting[uid]; p != nil {
					pods = append(pods, p)
				}
			}
			if len(pods) == 0 {
				return
			}
			it := m.items[id]
			if it == nil || !it.has(pods) || it.CompletesGroup != broken {
				it = m.addItem(id, pods, broken)
			}
			in[it] = true
		}
		gather(key.ItemID(), startable.Together, false)
		if it := m.items[key.ItemID()]; it != nil {
			it.profile.ShapeKey = startable.Shape
		}
		for _, uid := range startable.Alone {
			if p := waiting[uid]; p != nil {
				gather(ledger.PodItemID(p.Pod.Pod), []gpu.PodUID{uid}, slices.Contains(startable.Completing, uid))
			}
		}
		for _, p := range waiting {
			if p.item != nil && !in[p.item] {
				m.removeItem(p.item)
			}
		}
	}
}

// kind is shared by items that fit the same free resources: if one of them has no room, none has.
type kind struct {
	// key is the RoomKey of the pod, or the RoomKeys of the pods.
	key unique.Handle[string]
	// obstacle is why there was no room at the latest attempt on all nodes: ObstacleNoRoom or ObstacleNeverFits; ObstacleUntried if there was none.
	obstacle reasons.Obstacle
	// retryAt is when all nodes are tried again. Until then only those on which resources are freed.
	retryAt time.Time
	// failedIn is the number of the latest round in which there was no room, and searchedIn that of the latest one that tried all nodes without success.
	failedIn, searchedIn uint64
	// items counts the items of this kind.
	items int
	// shapeKey is queue.Profile.ShapeKey.
	shapeKey string
}

// isDue reports whether all nodes are to be tried.
func (k *kind) isDue(now time.Time) bool { return !now.Before(k.retryAt) }

// failEverywhere records that no node has room. fits reports whether one would have if no pod had GPU memory. The times of the next attempts are spread:
// together they would take long.
func (k *kind) failEverywhere(fits bool, now time.Time) {
	k.obstacle = reasons.ObstacleNoRoom
	if !fits {
		k.obstacle = reasons.ObstacleNeverFits
	}
	k.retryAt = now.Add(queue.Retry - queue.Retry/2*time.Duration(k.shapeKey[0])/256)
}

// kindOf returns the kind of an item that consists of these pods.
func (m *Manager) kindOf(pods []*pod) *kind {
	key := pods[0].RoomKey
	if len(pods) > 1 {
		var all strings.Builder
		for _, p := range pods {
			all.WriteString(p.RoomKey.Value())
			all.WriteByte(0)
		}
		key = unique.Make(all.String())
	}
	found := m.kinds[key]
	if found == nil {
		sum := sha256.Sum256([]byte(key.Value())) // Of a group it can be long.
		found = &kind{key: key, shapeKey: string(sum[:])}
		m.kinds[key] = found
	}
	return found
}
