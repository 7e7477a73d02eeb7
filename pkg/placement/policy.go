package placement

import (
	"fmt"
	"strings"
)

// Policy is a preference among the cards of a node, or among nodes, that have room for a demand.
//
// To add a policy, add a value below and list it in policies: the command line and its help take it from there.
// Users find the names in deploy/helm/gpushare (values.yaml, values.schema.json), docs/install.md and docs/glossary.md. Add
// a case to TestPlace (place_test.go), change the texts that cmd/gpushare-extender/main_test.go expects, and add a line to
// CHANGELOG.md. TestPolicies (place_test.go) checks for each policy what other code relies on:
//
//   - better is a strict order, so that the choice depends neither on the order of the cards nor on which function asks:
//     Suit rates the cards that Place then chooses, or others that are packed equally. Equal cards are ordered by index.
//   - rate stays within 0 to 1, so that scores stay within MaxScore.
type Policy struct {
	name, help string
	// better reports whether card a is preferred to card b.
	better func(a, b *Card) bool
	// rate rates cards or a node by the fraction that is used after the placement, in the scarcer dimension, 0 to 1. The highest
	// rate is best.
	rate func(used float64) float64
}

var (
	// Binpack prefers the card with the least free memory, which keeps whole cards free for large pods.
	Binpack = Policy{
		name: "binpack", help: "least free memory",
		better: func(a, b *Card) bool { return a.Room() < b.Room() },
		rate:   func(used float64) float64 { return used },
	}
	// Spread prefers the card with the most free memory.
	Spread = Policy{
		name: "spread", help: "most free memory",
		better: func(a, b *Card) bool { return a.Room() > b.Room() },
		rate:   func(used float64) float64 { return 1 - used },
	}
)

// policies are all policies, the default first.
var policies = []Policy{Binpack, Spread}

// Expected is the policy for choices that the extender only predicts: where the node puts a pod whose annotations name no
// card, and which card a nominated pod gets. It doesn't depend on --card-policy. The device plugin must choose by it too. For
// nominated pods it also holds back less memory than any other policy.
var Expected = Binpack

// Policies returns all policies, the default first.
func Policies() []Policy { return append([]Policy(nil), policies...) }

// Choices lists all policies for a flag's help, such as "binpack (least free memory) or spread (most free memory)".
func Choices() string { return list(func(p Policy) string { return p.name + " (" + p.help + ")" }) }

// ParsePolicy returns the policy with the given name.
func ParsePolicy(name string) (Policy, error) {
	for _, p := range policies {
		if p.name == name {
			return p, nil
		}
	}
	return Policy{}, fmt.Errorf("unknown policy %q: want %s", name, list(Policy.String))
}

func list(describe func(Policy) string) string {
	var out []string
	for _, p := range policies {
		out = append(out, describe(p))
	}
	return strings.Join(out, " or ")
}

// String returns the policy's name, as in flags.
func (p Policy) String() string { return p.name }
