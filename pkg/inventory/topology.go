package inventory

import (
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// maxConnected bounds the number of cards whose connections are read: the driver is asked about each pair.
const maxConnected = 64

// connection is how two cards are connected.
type connection struct {
	// nvlink is true if they reach each other's memory by NVLink, directly or through NVSwitch. pcieSwitch is true if they are
	// behind one PCIe switch.
	nvlink, pcieSwitch bool
}

// peers are the cards with which one card is connected, by UUID.
type peers map[string]connection

// connectAll reads how the cards that answer are connected with each other. A connection that can't be read counts as none: it matters only for
// the choice among sets of cards that fit equally well.
func connectAll(devices []device) {
	if len(devices) > maxConnected {
		return
	}
	for i := range devices {
		for j := range devices[:i] {
			a, b := &devices[j], &devices[i]
			if !a.measurable() || !b.measurable() {
				continue
			}
			if c := connectionOf(a.handle, b.handle); c != (connection{}) {
				a.add(b.uuid, c)
				b.add(a.uuid, c)
			}
		}
	}
}

func (d *device) add(peer string, c connection) {
	if d.peers == nil {
		d.peers = peers{}
	}
	d.peers[peer] = c
}

// connectionOf asks the driver how two cards are connected.
func connectionOf(a, b nvml.Device) (c connection) {
	status, ret := a.GetP2PStatus(b, nvml.P2P_CAPS_INDEX_NVLINK)
	c.nvlink = ret == nvml.SUCCESS && status == nvml.P2P_STATUS_OK
	level, ret := a.GetTopologyCommonAncestor(b)
	c.pcieSwitch = ret == nvml.SUCCESS && level <= nvml.TOPOLOGY_SINGLE
	return c
}

// groups numbers the cards, given by UUID, so that cards of one group are all connected with each other. Groups are counted from
// 1; a card that is in no group with another one has number 0. Connections need not be transitive: with NVLink a card can have
// links to some of the other cards only. Then the cards with the lowest indexes come together.
func groups(uuids []string, connected func(a, b string) bool) []int {
	out := make([]int, len(uuids))
	next := 1
	for i, uuid := range uuids {
		if out[i] != 0 {
			continue
		}
		members := []string{uuid}
		for j := i + 1; j < len(uuids); j++ {
			if out[j] == 0 && !slices.ContainsFunc(members, func(member string) bool { return !connected(member, uuids[j]) }) {
				members, out[j] = append(members, uuids[j]), next
			}
		}
		if len(members) > 1 {
			out[i] = next
			next++
		}
	}
	return out
}

// setGroups sets the groups of the roster's cards from the connections that the driver has reported.
func (r *roster) setGroups() {
	uuids := make([]string, len(r.entries))
	all := map[string]peers{}
	for i := range r.entries {
		uuids[i] = r.entries[i].card.UUID
		all[uuids[i]] = r.entries[i].peers
	}
	// A card that doesn't answer any more is no longer among the others' peers.
	nvlink := groups(uuids, func(a, b string) bool { return all[a][b].nvlink || all[b][a].nvlink })
	pcieSwitch := groups(uuids, func(a, b string) bool { return all[a][b].pcieSwitch || all[b][a].pcieSwitch })
	for i := range r.entries {
		r.entries[i].card.NVLink, r.entries[i].card.PCIeSwitch = nvlink[i], pcieSwitch[i]
	}
}
