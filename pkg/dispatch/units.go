package dispatch

import (
	"cmp"
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

// unit is what is granted at once: a pod, or the members of a group that must be bound together.
type unit struct {
	item fairshare.Item
	kind *kind
	// pods are ordered: the largest first, since they have the least choice.
	pods []*pod
	// constraints are Pod.Constraints of each pod, unless mixed is true: then the pods have different ones. They are here because looking at each pod
	// takes long.
	constraints unique.Handle[string]
	mixed       bool
	// profile is what Failures knows of the unit. Its ShapeKey is that of package gang for a group, because gang reports failures of the group too.
	profile queue.Profile
	// pause is ObstaclePaused or ObstacleBehindFailed if the latest round passed the unit over because of failures, else 0.
	pause reasons.Obstacle
	// triedIn is the number of the latest round that tried it.
	triedIn uint64
	// provisioning is since when the gates of all its pods are open for an autoscaler; zero if one isn't.
	provisioning time.Time
}

// has reports whether the unit consists of these pods.
func (u *unit) has(pods []*pod) bool {
	return len(u.pods) == len(pods) && !slices.ContainsFunc(pods, func(p *pod) bool { return p.unit != u })
}

// obstacle returns why the unit was not granted in the latest round.
func (u *unit) obstacle() reasons.Obstacle { return cmp.Or(u.pause, u.kind.obstacle) }

// enlist makes a unit of a waiting pod. If the pod is in a group, it adds the pod to the waiting members; gatherGroups makes their units.
func (m *Manager) enlist(p *pod) {
	if p.Group == (gang.Key{}) {
		m.addUnit(ledger.PodItemID(p.Pod.Pod), []*pod{p}, false)
		return
	}
	if m.members[p.Group] == nil {
		m.members[p.Group] = map[gpu.PodUID]*pod{}
	}
	m.members[p.Group][p.UID] = p
}

// withdraw removes a pod from its unit. The other pods of the unit wait until the next round makes a new one.
func (m *Manager) withdraw(p *pod) {
	m.leaveGroup(p)
	if p.unit != nil {
		m.removeUnit(p.unit)
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

// addUnit makes a unit of the pods, in place of the one with the same ID. broken is true if it completes a broken group.
func (m *Manager) addUnit(id string, pods []*pod, broken bool) *unit {
	slices.SortFunc(pods, func(a, b *pod) int {
		return cmp.Or(cmp.Compare(b.Request, a.Request), strings.Compare(text(a.RoomKey), text(b.RoomKey)), cmp.Compare(a.UID, b.UID))
	})
	first := pods[0]
	u := &unit{kind: m.kinds.kindOf(pods), pods: pods, constraints: first.Constraints, provisioning: first.provisioning}
	u.kind.units++
	if former := m.units[id]; former != nil {
		u.triedIn = former.triedIn
		m.removeUnit(former)
	}
	item := ledger.Item{ID: id, CompletesGroup: broken, Priority: first.Priority, Entered: first.Created}
	var failedAt time.Time
	var size queue.Size
	for _, p := range pods {
		if p.unit != nil { // A member of a group that started meanwhile is placed alone, for example.
			m.removeUnit(p.unit)
		}
		p.unit = u
		u.mixed = u.mixed || p.Constraints != u.constraints
		size.Memory, size.Cards = size.Memory.Add(p.Request), size.Cards+p.NumCards()
		item.Priority = min(item.Priority, p.Priority) // As in package gang.
		item.Entered = earlier(item.Entered, p.Created)
		u.provisioning = earlier(u.provisioning, p.provisioning)
		if p.failedAt.After(failedAt) {
			failedAt = p.failedAt
		}
	}
	if failedAt.After(item.Entered) {
		item.Entered = failedAt // It enters again, behind others of its priority.
	}
	u.item = fairshare.Item{Item: item, Tenant: m.namespaces[first.Namespace].Tenant, Memory: size.Memory, Value: u}
	u.profile = queue.Profile{Namespace: first.Namespace, ID: id, ShapeKey: u.kind.shapeKey, Size: size, CompletesGroup: broken}
	m.units[id] = u
	m.queue.Add(u.item)
	return u
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

func (m *Manager) removeUnit(u *unit) {
	for _, p := range u.pods {
		if p.unit == u {
			p.unit = nil
		}
	}
	if m.units[u.item.ID] == u {
		u.kind.units--
		if u.kind.units == 0 {
			m.kinds.drop(u.kind)
		}
		delete(m.units, u.item.ID)
		m.queue.Remove(u.item)
	}
}

// gatherGroups makes units of the members that wait: one of those that their group must bind together, and one of each that is
// placed alone. Members of a group of which too few exist are in none.
func (m *Manager) gatherGroups() {
	for _, key := range slices.SortedFunc(maps.Keys(m.members), gang.Key.Compare) {
		waiting := m.members[key]
		startable := m.Groups.Startable(key, m.now)
		in := map[*unit]bool{}
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
			u := m.units[id]
			if u == nil || !u.has(pods) || u.item.CompletesGroup != broken {
				u = m.addUnit(id, pods, broken)
			}
			in[u] = true
		}
		gather(key.ItemID(), startable.Together, false)
		if u := m.units[key.ItemID()]; u != nil {
			u.profile.ShapeKey = startable.Shape
		}
		for _, uid := range startable.Alone {
			if p := waiting[uid]; p != nil {
				gather(ledger.PodItemID(p.Pod.Pod), []gpu.PodUID{uid}, slices.Contains(startable.Completing, uid))
			}
		}
		for _, p := range waiting {
			if p.unit != nil && !in[p.unit] {
				m.removeUnit(p.unit)
			}
		}
	}
}
