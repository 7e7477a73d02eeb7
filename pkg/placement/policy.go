package placement

import (
	"fmt"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Policy orders the cards (or nodes) that have room. Policies are values over one loop: adding one adds no branch.
type Policy struct {
	name string
	// better says whether to prefer having a left over to having b left over, once the request is in: always the lesser of
	// the two, or always the greater.
	better func(a, b gpu.Memory) bool
}

var (
	// Binpack takes the card with the least memory left, and so keeps whole cards free for large pods. It is the default.
	Binpack = Policy{"binpack", func(a, b gpu.Memory) bool { return a < b }}
	// Spread takes the card with the most memory left.
	Spread = Policy{"spread", func(a, b gpu.Memory) bool { return a > b }}
)

// Policies lists every policy, the default first.
func Policies() []Policy { return []Policy{Binpack, Spread} }

// ParsePolicy finds a policy by its name.
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

// String returns the policy's name, as flags take it.
func (p Policy) String() string { return p.name }
