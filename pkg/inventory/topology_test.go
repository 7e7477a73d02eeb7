package inventory

import (
	"slices"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/fakenvml"
)

func TestGroups(t *testing.T) {
	for name, test := range map[string]struct {
		cards string
		links []string
		want  []int
	}{
		"no links":                            {"abc", nil, []int{0, 0, 0}},
		"all linked":                          {"abc", []string{"ab", "ac", "bc"}, []int{1, 1, 1}},
		"two groups, and a card without one":  {"abcde", []string{"ad", "ce"}, []int{1, 0, 2, 1, 2}},
		"a ring is divided into linked cards": {"abcd", []string{"ab", "bc", "cd", "ad"}, []int{1, 1, 2, 2}},
		"no cards":                            {"", nil, []int{}},
	} {
		var uuids []string
		for _, card := range test.cards {
			uuids = append(uuids, string(card))
		}
		linked := func(a, b string) bool { return slices.Contains(test.links, a+b) || slices.Contains(test.links, b+a) }
		expect(t, name, test.want, groups(uuids, linked))
	}
}

// TestConnections: the inventory shows which cards are connected, also while one of them can't be read.
func TestConnections(t *testing.T) {
	machine := func(states ...string) []fakenvml.Card {
		cards := []fakenvml.Card{
			{UUID: "GPU-0", MiB: 1024, Options: []string{"nvlink=7", "switch=0"}},
			{UUID: "GPU-1", MiB: 1024, Options: []string{"nvlink=7", "switch=1"}},
			{UUID: "GPU-2", MiB: 1024, Options: []string{"switch=0"}},
			{UUID: "GPU-3", MiB: 1024, Options: []string{"switch=1"}},
		}
		for i, state := range states {
			cards[i].State = state
		}
		return cards
	}
	onMachine(t, machine(), func(t *testing.T, library string, fake fakenvml.Machine) {
		list := func(states ...string) (nvlink, pcieSwitch []int) {
			t.Helper()
			setCards(t, fake, machine(states...)...)
			state, err := List(t.Context(), Options{Library: library, Settings: Settings{Unit: gpu.MiB}})
			must(t, err)
			for _, card := range state.Cards {
				nvlink, pcieSwitch = append(nvlink, card.NVLink), append(pcieSwitch, card.PCIeSwitch)
			}
			return nvlink, pcieSwitch
		}
		nvlink, pcieSwitch := list()
		expect(t, "NVLink", []int{1, 1, 0, 0}, nvlink)
		expect(t, "PCIe switches", []int{1, 2, 1, 2}, pcieSwitch)
		nvlink, pcieSwitch = list("lost")
		expect(t, "NVLink without a lost card", []int{0, 0, 0, 0}, nvlink)
		expect(t, "PCIe switches without a lost card", []int{0, 1, 0, 1}, pcieSwitch)
	})
}

// linkedDevice is a card that answers all questions about connections with one return code.
type linkedDevice struct {
	nvml.Device
	answer nvml.Return
}

func (d *linkedDevice) GetP2PStatus(nvml.Device, nvml.GpuP2PCapsIndex) (nvml.GpuP2PStatus, nvml.Return) {
	return nvml.P2P_STATUS_OK, d.answer
}

func (d *linkedDevice) GetTopologyCommonAncestor(nvml.Device) (nvml.GpuTopologyLevel, nvml.Return) {
	return nvml.TOPOLOGY_INTERNAL, d.answer
}

var cmpConnection = cmp.AllowUnexported(connection{})

// TestConnect: a connection that the driver doesn't report counts as none.
func TestConnect(t *testing.T) {
	for name, test := range map[string]struct {
		answer nvml.Return
		want   connection
	}{
		"all answers":                  {nvml.SUCCESS, connection{true, true}},
		"a card that has no such link": {nvml.ERROR_NOT_SUPPORTED, connection{}},
	} {
		t.Run(name, func(t *testing.T) {
			devices := []device{{uuid: "a", handle: &linkedDevice{answer: test.answer}}, {uuid: "b"}, {uuid: "gone", err: errNoSuchCard}}
			connectAll(devices)
			expect(t, "the connection", test.want, devices[0].peers["b"], cmpConnection)
			expect(t, "the connection of the other card", test.want, devices[1].peers["a"], cmpConnection)
			expect(t, "a card that doesn't answer", peers(nil), devices[2].peers, cmpConnection)
		})
	}
}

// TestKnownConnections: a card that doesn't answer any more keeps its groups.
func TestKnownConnections(t *testing.T) {
	linked := func(index int, uuid string, with ...string) device {
		d := good(index, uuid)
		for _, peer := range with {
			d.add(peer, connection{nvlink: true})
		}
		return d
	}
	r := newRoster(Options{Settings: Settings{Unit: gpu.MiB, QuietPeriod: time.Minute}})
	nvlink := func(devices ...device) (out []int) {
		r.list(devices, time.Unix(0, 0))
		for _, card := range r.state().Cards {
			out = append(out, card.NVLink)
		}
		return out
	}
	expect(t, "at first", []int{1, 1, 2, 2}, nvlink(linked(0, "a", "b"), linked(1, "b", "a"), linked(2, "c", "d"), linked(3, "d", "c")))
	expect(t, "a card is lost", []int{1, 1, 2, 2}, nvlink(lost(0), linked(1, "b"), linked(2, "c", "d"), linked(3, "d", "c")))
	expect(t, "a card is gone", []int{1, 1, 2, 2}, nvlink(linked(0, "b"), linked(1, "c", "d"), linked(2, "d", "c")))
	expect(t, "all are connected", []int{1, 1, 1, 1}, nvlink(linked(0, "a", "b", "c", "d"), linked(1, "b", "a", "c", "d"), linked(2, "c", "d", "a", "b"), linked(3, "d", "c")))
}
