package isolation

import (
	"fmt"
	"slices"
	"strings"
)

// Mode is how a node enforces the shares of its cards.
type Mode string

const (
	// None enforces nothing: containers read their share from the environment.
	None Mode = "none"
	// Driver has NVIDIA's driver limit the memory of each container's cgroup (R615 and later).
	Driver Mode = "driver"
)

// Modes returns all modes.
func Modes() []Mode { return []Mode{None, Driver} }

// ParseMode returns the mode with this name.
func ParseMode(name string) (Mode, error) {
	if mode := Mode(name); slices.Contains(Modes(), mode) {
		return mode, nil
	}
	var names []string
	for _, mode := range Modes() {
		names = append(names, string(mode))
	}
	return "", fmt.Errorf("isolation mode %.32q: want %s", name, strings.Join(names, " or "))
}

// mps is the mode in which all containers of a card share one server, so that a container can have one card only.
const mps Mode = "mps"

// SeveralCards reports whether a container can have several cards in this mode.
func (m Mode) SeveralCards() bool { return m != mps }

// Limits reports whether the mode limits memory. A node's cards then have only the memory that can be allocated.
func (m Mode) Limits() bool { return m != None }

// Card is what a backend knows of a card.
type Card struct {
	// UUID identifies the card. Device is its name in the CDI specifications of NVIDIA's toolkit: its UUID or its index.
	UUID, Device string
	// Unlimitable is why the driver can't limit memory of this card; nil if it can.
	Unlimitable error
}

// Node is what a backend knows of the node from its Node object.
type Node struct{ KubeletVersion, Runtime string }

// Backend implements a mode.
type Backend interface {
	// Ready returns why a container on this card would not be limited; nil if it would be.
	Ready(node Node, card Card) error
	// Apply returns the CDI devices that a container gets in addition to its environment. limit is the container's share of the
	// card in bytes.
	Apply(card Card, limit uint64) (devices []string, err error)
}

// Backends returns the backends by mode.
func Backends(o Options) map[Mode]Backend {
	return map[Mode]Backend{None: none{}, Driver: newDriver(o)}
}

type none struct{}

func (none) Ready(Node, Card) error               { return nil }
func (none) Apply(Card, uint64) ([]string, error) { return nil, nil }
