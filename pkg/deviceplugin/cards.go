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

// cardState holds the latest known state of the node's cards. mu guards it; what its methods return is a copy.
type cardState struct {
	// bootID is the kernel's ID of the machine's boot, for the inventory. It doesn't change.
	bootID string
	// simulated is true if the cards don't exist. It doesn't change.
	simulated bool

	mu sync.Mutex
	// unit is the unit in which the cards' memory is counted.
	unit gpu.Unit
	// all are all cards of the node as the driver reports them, and cards those that the node reports (report).
	all, cards  []gpu.Card
	driverIndex map[int]int
	// adapters are the node's RDMA adapters.
	adapters []gpu.Adapter
	// excluded selects the cards that the configuration excludes. held is the memory that pods hold on each card; it is nil if it is
	// not known.
	excluded nodeconfig.Cards
	held     map[int]gpu.Memory
	// mode is the isolation mode in force, and isolated what it means for each card, by index.
	mode     isolation.Mode
	isolated map[int]cardIsolation
	// sent are the cards of the last message to the kubelet; nil before the first.
	sent []gpu.Card
	// driver is why no card can be used; empty otherwise. The known cards are still reported to the kubelet, as unhealthy ones.
	driver string
	// problem is why the cards can't be reported to the kubelet at all.
	problem error
	changed chan struct{}
}

var errNoCardsYet = errors.New("the node's cards aren't known yet")

func newCardState() *cardState {
	return &cardState{problem: errNoCardsYet, mode: isolation.None, changed: make(chan struct{})}
}

// Set replaces the list of cards, whose memory is counted in the unit. If they can't be read, for example while the driver
// restarts, problem is why, and the known cards stay and become unhealthy: pods may run on them. driverIndex maps indices to the
// driver's, where they differ. adapters are the node's RDMA adapters, which must not be changed later.
func (s *cardState) Set(unit gpu.Unit, cards []gpu.Card, adapters []gpu.Adapter, driverIndex map[int]int, problem string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	cards = slices.Clone(cards)
	if len(cards) == 0 && problem != "" {
		unit, cards = s.unit, slices.Clone(s.all)
		for i := range cards {
			cards[i].Unhealthy = problem
		}
	}
	s.unit, s.all, s.adapters = unit, cards, adapters
	s.driverIndex = maps.Clone(driverIndex)
	s.driver = problem
	s.update()
}

// WithAdapters returns the cards and the node's RDMA adapters, as one call of Set gave them. The caller must not change the adapters.
func (s *cardState) WithAdapters() (cards []gpu.Card, adapters []gpu.Adapter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.cards), s.adapters
}

// Isolate sets the isolation mode, and what it means for each card, by index. In a mode that limits memory, cards have only the
// memory that can be allocated.
func (s *cardState) Isolate(mode isolation.Mode, cards map[int]cardIsolation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mode == mode && maps.Equal(s.isolated, cards) {
		return
	}
	s.mode, s.isolated = mode, cards
	if !errors.Is(s.problem, errNoCardsYet) {
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
	if s.all != nil {
		s.update()
	}
}

// SetHeld sets the memory that pods hold on each card. Excluded cards without such memory are reported no longer.
func (s *cardState) SetHeld(held map[int]gpu.Memory) {
	s.mu.Lock()
	defer s.mu.Unlock()
	known := s.held != nil
	s.held = held
	if s.all != nil && (!known || !slices.Equal(s.cards, s.report())) {
		s.update()
	}
}

// Shared returns the UUIDs of the cards that are not excluded or that pods still use. ok is false as long as that is not known.
func (s *cardState) Shared() (uuids []string, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, card := range s.all {
		excluded := s.excluded.Has(card)
		if excluded && s.held == nil {
			return nil, false
		}
		if card.UUID != "" && (!excluded || s.held[card.Index] > 0) {
			uuids = append(uuids, card.UUID)
		}
	}
	return uuids, s.all != nil
}

// Excludes reports whether any card of the node is excluded, reported or not.
func (s *cardState) Excludes() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.all, s.excluded.Has)
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
	cards := withoutExcluded(s.all, s.excluded, s.held)
	for i := range cards {
		card := &cards[i]
		card.Unhealthy = cmp.Or(card.Unhealthy, s.isolated[card.Index].notReady)
		card.MaxContainers = s.isolated[card.Index].maxContainers
		if s.mode.Rules().Limits {
			*card = card.Unreserved()
		}
	}
	return cards
}

// update computes what the node reports, and closes changed. The caller holds mu.
func (s *cardState) update() {
	cards, problem := s.report(), s.driver
	s.cards, s.problem = cards, nil
	switch size := messageSize(cards); {
	case len(cards) == 0 && problem != "":
		s.problem = errors.New(problem)
	case len(cards) == 0:
		s.problem = errors.New("the node has no GPU card")
	case !slices.ContainsFunc(cards, func(c gpu.Card) bool { return c.Memory > 0 }):
		s.problem = fmt.Errorf("no GPU card has memory that can be shared: card %d: %s", cards[0].Index, cmp.Or(cards[0].Unhealthy, "it has none"))
	case size > maxMessage:
		s.problem = fmt.Errorf("the cards can't be reported in units of %s: the list of devices would come to %d bytes, "+
			"and the kubelet takes %d; the smallest unit that fits is %s (--memory-unit)",
			s.unit, size, maxMessage, smallestUnit(protocol.Inventory{Unit: s.unit, Cards: cards}))
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

// Get returns the cards and a channel that is closed at the next change. problem is why the cards can't be reported to the
// kubelet; Get returns the cards in this case too.
func (s *cardState) Get() (cards []gpu.Card, changed <-chan struct{}, problem error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.cards), s.changed, s.problem
}

// Reported returns the cards that the node reports, healthy or not.
func (s *cardState) Reported() []gpu.Card {
	cards, _, _ := s.Get()
	return cards
}

// All returns all cards of the node as the driver reports them, also those that the configuration excludes.
func (s *cardState) All() []gpu.Card {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.all)
}

// Mode returns the isolation mode in force.
func (s *cardState) Mode() isolation.Mode {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mode
}

// Missing returns why no card can be used, whether the cards are reported to the kubelet or not; empty if a card can be used.
func (s *cardState) Missing() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.problem != nil {
		return s.problem.Error()
	}
	return s.driver
}

// Unit returns the unit in which the cards' memory is counted.
func (s *cardState) Unit() gpu.Unit {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.unit
}

// Position returns the driver's current index of a card.
func (s *cardState) Position(card int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if position, ok := s.driverIndex[card]; ok {
		return position
	}
	return card
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
		Unit: s.unit, Cards: slices.Clone(s.cards), BootID: s.bootID, Simulated: s.simulated, Adapters: s.adapters,
		Features: []string{protocol.FeatureCards, protocol.FeatureCores, protocol.FeatureLimits, protocol.FeatureRDMA},
	}
	for i := range inventory.Cards {
		card := &inventory.Cards[i]
		if !slices.ContainsFunc(s.sent, func(c gpu.Card) bool { return c.Index == card.Index && c.Healthy() && c.Memory >= card.Memory }) {
			card.Unhealthy = cmp.Or(card.Unhealthy, reasonNotSent)
		}
	}
	if s.mode.Rules().Limits {
		inventory.Isolation = string(s.mode)
	}
	return inventory
}
