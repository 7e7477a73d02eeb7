package deviceplugin

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/nodeconfig"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// cardView is what is known of the node's cards at one time. What its fields point to doesn't change.
type cardView struct {
	// Unit is the unit in which the cards' memory is counted.
	Unit gpu.Unit
	// All are all cards of the node as the driver reports them, and Cards those that the node reports (report), healthy or not.
	All, Cards  []gpu.Card
	driverIndex map[int]int
	// Adapters are the node's RDMA adapters.
	Adapters []gpu.Adapter
	// Mode is the isolation mode in force.
	Mode isolation.Mode
	// Driver is why no card can be used; empty otherwise. The known cards are still reported to the kubelet, as unhealthy ones.
	Driver string
	// Problem is why the cards can't be reported to the kubelet at all.
	Problem error
	// Changed is closed at the next change.
	Changed <-chan struct{}
}

// Missing returns why no card can be used, whether the cards are reported to the kubelet or not; empty if a card can be used.
func (v cardView) Missing() string {
	if v.Problem != nil {
		return v.Problem.Error()
	}
	return v.Driver
}

// Position returns the driver's current index of a card.
func (v cardView) Position(card int) int {
	if position, ok := v.driverIndex[card]; ok {
		return position
	}
	return card
}

// cardState holds the latest known state of the node's cards. mu guards it.
type cardState struct {
	// bootID is the kernel's ID of the machine's boot, for the inventory. It doesn't change.
	bootID string
	// simulated is true if the cards don't exist. It doesn't change.
	simulated bool

	mu   sync.Mutex
	view cardView
	// excluded selects the cards that the configuration excludes. held is the memory that pods hold on each card; it is nil if it is
	// not known.
	excluded nodeconfig.Cards
	held     map[int]gpu.Memory
	// isolated is what the isolation mode means for each card, by index.
	isolated map[int]cardIsolation
	// sent are the cards of the last message to the kubelet; nil before the first.
	sent    []gpu.Card
	changed chan struct{}
}

var errNoCardsYet = errors.New("the node's cards aren't known yet")

func newCardState() *cardState {
	s := &cardState{view: cardView{Problem: errNoCardsYet, Mode: isolation.None}, changed: make(chan struct{})}
	s.view.Changed = s.changed
	return s
}

// Set replaces the list of cards, whose memory is counted in the unit. If they can't be read, for example while the driver
// restarts, problem is why, and the known cards stay and become unhealthy: pods may run on them. driverIndex maps indices to the
// driver's, where they differ. adapters are the node's RDMA adapters, which must not be changed later.
func (s *cardState) Set(unit gpu.Unit, cards []gpu.Card, adapters []gpu.Adapter, driverIndex map[int]int, problem string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := &s.view
	cards = slices.Clone(cards)
	if len(cards) == 0 && problem != "" {
		unit, cards = v.Unit, slices.Clone(v.All)
		for i := range cards {
			cards[i].Unhealthy = problem
		}
	}
	v.Unit, v.All, v.Adapters, v.driverIndex, v.Driver = unit, cards, adapters, maps.Clone(driverIndex), problem
	s.update()
}

// SetIsolation sets the isolation mode, and what it means for each card, by index. In a mode that limits memory, cards have only the
// memory that can be allocated.
func (s *cardState) SetIsolation(mode isolation.Mode, cards map[int]cardIsolation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.view.Mode == mode && maps.Equal(s.isolated, cards) {
		return
	}
	s.view.Mode, s.isolated = mode, cards
	if !errors.Is(s.view.Problem, errNoCardsYet) {
		s.update()
	}
}

// Exclude sets which cards the configuration excludes. Until SetHeld is called, all of them are reported.
func (s *cardState) Exclude(excluded nodeconfig.Cards) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.Equal(excluded, s.excluded) {
		return
	}
	s.excluded, s.held = excluded, nil
	if s.view.All != nil {
		s.update()
	}
}

// SetHeld sets the memory that pods hold on each card. Excluded cards without such memory are reported no longer.
func (s *cardState) SetHeld(held map[int]gpu.Memory) {
	s.mu.Lock()
	defer s.mu.Unlock()
	known := s.held != nil
	s.held = held
	if s.view.All != nil && (!known || !slices.Equal(s.view.Cards, s.report())) {
		s.update()
	}
}

// Shared returns the UUIDs of the cards that are not excluded or that pods still use. ok is false as long as that is not known.
func (s *cardState) Shared() (uuids []string, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, card := range s.view.All {
		excluded := s.excluded.Has(card)
		if excluded && s.held == nil {
			return nil, false
		}
		if card.UUID != "" && (!excluded || s.held[card.Index] > 0) {
			uuids = append(uuids, card.UUID)
		}
	}
	return uuids, s.view.All != nil
}

// Excludes reports whether any card of the node is excluded, reported or not.
func (s *cardState) Excludes() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.view.All, s.excluded.Has)
}

// ExcludedInVain returns what the configuration names to exclude cards, and no card of the node has; nil as long as the cards aren't known.
func (s *cardState) ExcludedInVain() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.view.All == nil {
		return nil
	}
	return s.excluded.Unmatched(s.view.All)
}

// reasonExcluded is why no new pod is placed on an excluded card.
const reasonExcluded = "excluded by the node's configuration, and still used by pods"

// withoutExcluded returns the cards that the node reports. An excluded card is reported, as an unhealthy one, as long as pods hold memory
// on it, so that this memory is counted. If all cards are excluded, all are reported: without any card the node's old inventory
// would stay.
func withoutExcluded(all []gpu.Card, excluded nodeconfig.Cards, held map[int]gpu.Memory) []gpu.Card {
	none := !slices.ContainsFunc(all, func(c gpu.Card) bool { return !excluded.Has(c) || held[c.Index] > 0 })
	var out []gpu.Card
	for _, c := range all {
		switch {
		case !excluded.Has(c):
		case held == nil || held[c.Index] > 0:
			c.Unhealthy = cmp.Or(c.Unhealthy, reasonExcluded)
		case none:
			c.Unhealthy = cmp.Or(c.Unhealthy, reasonAllExcluded)
		default:
			continue
		}
		out = append(out, c)
	}
	return out
}

// reasonAllExcluded is the reason of the cards of a node that shares none.
const reasonAllExcluded = "the node's configuration excludes all cards"

// isExcluded reports whether a card takes no new pods for no other reason than the configuration.
func isExcluded(c gpu.Card) bool {
	return c.Unhealthy == reasonExcluded || c.Unhealthy == reasonAllExcluded
}

// report returns the cards that the node reports: those that are not excluded, in the isolation mode in force. The caller holds mu.
func (s *cardState) report() []gpu.Card {
	cards := withoutExcluded(s.view.All, s.excluded, s.held)
	for i := range cards {
		card := &cards[i]
		card.Unhealthy = cmp.Or(card.Unhealthy, s.isolated[card.Index].notReady)
		card.MaxContainers = s.isolated[card.Index].maxContainers
		if s.view.Mode.Rules().Limits {
			*card = card.Unreserved()
		}
	}
	return cards
}

// update computes what the node reports, and closes changed. The caller holds mu.
func (s *cardState) update() {
	v, cards := &s.view, s.report()
	v.Cards, v.Problem = cards, nil
	switch size := messageSize(cards); {
	case len(cards) == 0 && v.Driver != "":
		v.Problem = errors.New(v.Driver)
	case len(cards) == 0:
		v.Problem = errors.New("the node has no GPU card")
	case !slices.ContainsFunc(cards, func(c gpu.Card) bool { return c.Memory > 0 }):
		v.Problem = fmt.Errorf("no GPU card has memory that can be shared: card %d: %s", cards[0].Index, cmp.Or(cards[0].Unhealthy, "it has none"))
	case size > maxMessage:
		v.Problem = fmt.Errorf("the cards can't be reported in units of %s: the list of devices would come to %d bytes, "+
			"and the kubelet takes %d; the smallest unit that fits is %s (--memory-unit)",
			v.Unit, size, maxMessage, smallestUnit(protocol.Inventory{Unit: v.Unit, Cards: cards}))
	}
	close(s.changed)
	s.changed = make(chan struct{})
	v.Changed = s.changed
}

// Get returns what is known of the cards now.
func (s *cardState) Get() cardView {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.view
}

// SetSent sets the cards of the last message to the kubelet.
func (s *cardState) SetSent(cards []gpu.Card) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = cards
}

// reasonNotSent is the reason of a healthy card in the inventory until the kubelet has its devices.
const reasonNotSent = "the kubelet doesn't have its devices yet"

// Inventory returns the inventory for the node's annotation. It lists no card as healthy of which not all devices were sent to the kubelet
// as healthy ones: the extender would bind pods to the card, and the kubelet would reject them for good.
func (s *cardState) Inventory() protocol.Inventory {
	s.mu.Lock()
	defer s.mu.Unlock()
	inventory := protocol.Inventory{
		Unit: s.view.Unit, Cards: slices.Clone(s.view.Cards), BootID: s.bootID, Simulated: s.simulated, Adapters: s.view.Adapters,
		Features: []string{protocol.FeatureCards, protocol.FeatureCores, protocol.FeatureLimits, protocol.FeatureRDMA},
	}
	for i := range inventory.Cards {
		card := &inventory.Cards[i]
		if !slices.ContainsFunc(s.sent, func(c gpu.Card) bool { return c.Index == card.Index && c.Healthy() && c.Memory >= card.Memory }) {
			card.Unhealthy = cmp.Or(card.Unhealthy, reasonNotSent)
		}
	}
	if s.view.Mode.Rules().Limits {
		inventory.Isolation = string(s.view.Mode)
	}
	return inventory
}
