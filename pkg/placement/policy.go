package placement

import (
	"fmt"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Policy orders the cards (or nodes) that a request fits.
type Policy struct {
	name string
	// better reports whether a card with a free after the placement is preferred to one with b free. It must be monotone:
	// always the smaller or always the larger amount wins, because Totals keeps only the fullest and the emptiest card.
	better func(a, b gpu.Memory) bool
}

var (
	// Binpack prefers the card with the least free memory, which keeps whole cards free for large pods. It is the default.
	Binpack = Policy{"binpack", func(a, b gpu.Memory) bool { return a < b }}
	// Spread prefers the card with the most free memory.
	Spread = Policy{"spread", func(a, b gpu.Memory) bool { return a > b }}
)

// Policies returns all policies, the default first.
func Policies() []Policy { return []Policy{Binpack, Spread} }

// ParsePolicy returns the policy with the given name.
func ParsePolicy(name string) (Policy, error) {
	var names []string
	for _, p := range Policies() {
		if p.name == name {
			return p, nil
		}
		names = append(names, p.name)
	}
	return Policy{}, fmt.Errorf("unknown policy %q: want %s", name, strings.Join(names, " or "))
}

// String returns the policy's name, as in flags.
func (p Policy) String() string { return p.name }
