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
	// namespace is the pods' namespace.
	namespace string
	// cards is the number of cards that its pods ask for.
	cards int
	// shape is queue.Profile.ShapeKey. That of a group comes from package gang, which reports failures of the group too.
	shape string
	// paused is true if the latest round passed it over because of failures, behindFailed if these were of others.
	paused, behindFailed bool
	// triedIn is the number of the latest round that tried it.
	triedIn uint64
	// provisioning is since when the gates of all its pods are open for an autoscaler; zero if one isn't.
	provisioning time.Time
}

// has reports whether the unit consists of these pods.
func (u *unit) has(pods []*pod) bool {
	return len(u.pods) == len(pods) && !slices.ContainsFunc(pods, func(p *pod) bool { return p.unit != u })
}

// profile returns what Failures knows of the unit.
func (u *unit) profile() queue.Profile {
	return queue.Profile{
		Namespace: u.namespace, ID: u.item.ID, ShapeKey: u.shape, Size: queue.Size{Memory: u.item.Memory, Cards: u.cards},
		CompletesGroup: u.item.CompletesGroup,
	}
}

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

func (m *Manager) addUnit(id string, pods []*pod, broken bool) {
	former := m.units[id]
	if former != nil {
		m.removeUnit(former)
	}
	first := pods[0]
	u := &unit{
		pods: pods, constraints: first.Constraints, namespace: first.Namespace, provisioning: first.provisioning,
		item: fairshare.Item{
			Item:   ledger.Item{ID: id, CompletesGroup: broken, Priority: first.Priority, Entered: first.Created},
			Tenant: m.namespaces[first.Namespace].Tenant,
		},
	}
	if former != nil {
		u.triedIn = former.triedIn
	}
	slices.SortFunc(pods, func(a, b *pod) int {
		return cmp.Or(cmp.Compare(b.Request, a.Request), strings.Compare(text(a.RoomKey), text(b.RoomKey)), cmp.Compare(a.UID, b.UID))
	})
	var failedAt time.Time
	for _, p := range pods {
		if p.unit != nil { // A member of a group that started meanwhile is placed alone, for example.
			m.removeUnit(p.unit)
		}
		p.unit = u
		u.mixed = u.mixed || p.Constraints != u.constraints
		u.item.Memory = u.item.Memory.Add(p.Request)
		u.item.Priority = min(u.item.Priority, p.Priority) // As in package gang.
		if p.Created.Before(u.item.Entered) {
			u.item.Entered = p.Created
		}
		if p.failedAt.After(failedAt) {
			failedAt = p.failedAt
		}
		u.cards += p.NumCards()
		if p.provisioning.Before(u.provisioning) {
			u.provisioning = p.provisioning
		}
	}
	if failedAt.After(u.item.Entered) {
		u.item.Entered = failedAt // It enters again, behind others of its priority.
	}
	u.kind, u.item.Value = m.kinds.kindOf(pods), u
	u.shape = u.kind.shapeKey
	u.kind.units++
	m.units[id] = u
	m.queue.Add(u.item)
}

func (m *Manager) removeUnit(u *unit) {
	for _, p := range u.pods {
		if p.unit == u {
			p.unit = nil
		}
	}
	if m.units[u.item.ID] == u {
		u.kind.units--
		if u.kind.units == 0 && !m.leading {
			m.kinds.drop(u.kind) // Otherwise Tick does it.
		}
		delete(m.units, u.item.ID)
		m.queue.Remove(u.item.ID)
	}
}

// gatherGroups makes units of the members that wait: one of those that their group must bind together, and one of each that is
// placed alone. Members of a group of which too few exist are in none.
func (m *Manager) gatherGroups() {
	for _, key := range slices.SortedFunc(maps.Keys(m.members), gang.Key.Compare) {
		waiting := m.members[key]
		startable := m.Groups.Startable(key, m.now)
		var pods []*pod
		for _, uid := range startable.Together {
			if p := waiting[uid]; p != nil {
				pods = append(pods, p)
			}
		}
		in := map[*unit]bool{}
		gather := func(id string, pods []*pod, broken bool) {
			if u := m.units[id]; u == nil || !u.has(pods) || u.item.CompletesGroup != broken {
				m.addUnit(id, pods, broken)
			}
			in[m.units[id]] = true
		}
		if len(pods) > 0 {
			gather(key.ItemID(), pods, false)
			m.units[key.ItemID()].shape = startable.Shape
		}
		for _, uid := range startable.Alone {
			if p := waiting[uid]; p != nil {
				gather(ledger.PodItemID(p.Pod.Pod), []*pod{p}, slices.Contains(startable.Completing, uid))
			}
		}
		for _, p := range waiting {
			if p.unit != nil && !in[p.unit] {
				m.removeUnit(p.unit)
			}
		}
	}
}
