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
	"github.com/gpushare/gpushare/pkg/protocol"
)

// cardState holds the latest known state of the node's cards. mu guards it; what its methods return is a copy.
type cardState struct {
	unit gpu.Unit
	// bootID is the kernel's ID of the machine's boot, for the inventory. It doesn't change.
	bootID string

	mu sync.Mutex
	// found are the cards as the driver reports them, cards the same in the isolation mode in force: mode, notReady.
	found, cards []gpu.Card
	moved        map[int]int
	mode         isolation.Mode
	// notReady maps the index of a card to the reason why it isn't ready for the mode.
	notReady map[int]string
	// driver is why no card can be used; empty otherwise. The known cards are still reported to the kubelet, as unhealthy ones.
	driver string
	// problem is why the cards can't be reported to the kubelet at all.
	problem error
	changed chan struct{}
}

var errNoCardsYet = errors.New("the node's cards aren't known yet")

func newCardState(unit gpu.Unit) *cardState {
	return &cardState{unit: unit, problem: errNoCardsYet, mode: isolation.None, changed: make(chan struct{})}
}

// Set replaces the list of cards. If they can't be read, for example while the driver restarts, problem is why, and the known
// cards stay and become unhealthy: pods may run on them. moved maps indices to the driver's, where they differ.
func (s *cardState) Set(cards []gpu.Card, moved map[int]int, problem string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	cards = slices.Clone(cards)
	if len(cards) == 0 && problem != "" {
		cards = slices.Clone(s.found)
		for i := range cards {
			cards[i].Unhealthy = problem
		}
	}
	s.found, s.moved, s.driver, s.problem = cards, maps.Clone(moved), problem, nil
	s.update()
}

// Isolate sets the isolation mode, and why cards are not ready for it, by index. In a mode that limits memory, cards have only the
// memory that can be allocated.
func (s *cardState) Isolate(mode isolation.Mode, notReady map[int]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mode == mode && maps.Equal(s.notReady, notReady) {
		return
	}
	s.mode, s.notReady = mode, notReady
	if !errors.Is(s.problem, errNoCardsYet) {
		s.update()
	}
}

// update computes what depends on the cards and the mode. The caller holds mu.
func (s *cardState) update() {
	cards, problem := slices.Clone(s.found), s.driver
	for i := range cards {
		card := &cards[i]
		card.Unhealthy = cmp.Or(card.Unhealthy, s.notReady[card.Index])
		if s.mode.Limits() {
			card.Memory = card.Memory.Sub(card.Reserved)
		}
	}
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

// All returns the cards, offered or not.
func (s *cardState) All() []gpu.Card {
	cards, _, _ := s.Get()
	return cards
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

// Position returns the driver's current index of a card.
func (s *cardState) Position(card int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if position, ok := s.moved[card]; ok {
		return position
	}
	return card
}

// Inventory returns the inventory for the node's annotation.
func (s *cardState) Inventory() protocol.Inventory {
	s.mu.Lock()
	defer s.mu.Unlock()
	inventory := protocol.Inventory{Unit: s.unit, Cards: slices.Clone(s.cards), BootID: s.bootID}
	if s.mode.Limits() {
		inventory.Isolation = string(s.mode)
	}
	return inventory
}
