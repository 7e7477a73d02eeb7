package placement

import (
	"fmt"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Policy is a preference among the cards of a node, or among nodes, that have room for a demand. A policy for cards has better, and each policy has
// rate, which rates nodes.
//
// To add a policy that sees no more of a card than its Room:
//
//  1. Add a value below, and list it in Policies and NodePolicies, or only in the latter if it is for nodes only. The command line and its help take it from there.
//  2. Add its name to the chart (values.yaml and values.schema.json in deploy/helm/gpushare; TestChartPolicies checks the latter), and describe it in
//     docs/glossary.md, docs/design.md (Prioritize), docs/operations.md and CHANGELOG.md.
//  3. Add a case to TestPlace in place_test.go, change the texts that TestPolicies there and cmd/gpushare-extender/main_test.go expect, and
//     extend the models of pkg/ledger's tests.
//
// A policy for cards that sees more of them needs a change of choose in place.go. One for nodes that sees more, as LeastWaste does, sets
// needsOutlook. It is a cost: how it is computed is in costs.go and outlook.go, for which pods in pkg/ledger (kindOf in outlook.go) and
// pkg/scheduling (expectations.go), and how it becomes a score in score.go (SuitsByCost, Scale). What it leaves of no use on a node is computed in
// stranded.go, here and in pkg/inspect; docs/metrics.md, docs/web.md and docs/inspect.md say with which policy that is shown.
//
// Code that names a policy stays as it is, because it doesn't depend on the user's choice: Expected, feasible.go in pkg/ledger, and room.go in
// pkg/diagnosis.
//
// TestPolicies checks for each policy what other code relies on:
//
//   - better is a strict weak order. So the choice doesn't depend on the order of the cards, and RateNode rates the cards that
//     Place then chooses, or others with as much room. Equal cards are ordered by index.
//   - rate stays within 0 to 1, so that scores stay within MaxScore.
type Policy struct {
	name, help string
	// better reports whether a card with room a is preferred to one with room b, see Card.Room. It is nil if the policy is for nodes only.
	better func(a, b gpu.Memory) bool
	// rate rates cards or a node by the fraction that is used after the placement, in the scarcer dimension, 0 to 1. The highest
	// rate is best.
	rate func(used float64) float64
	// needsOutlook is true if nodes are ranked by an Outlook, where there is one, instead of rate.
	needsOutlook bool
}

var (
	// Binpack prefers the card with the least free memory, which keeps whole cards free for large pods.
	Binpack = Policy{
		name: "binpack", help: "least free memory",
		better: func(a, b gpu.Memory) bool { return a < b },
		rate:   func(used float64) float64 { return used },
	}
	// Spread prefers the card with the most free memory.
	Spread = Policy{
		name: "spread", help: "most free memory",
		better: func(a, b gpu.Memory) bool { return a > b },
		rate:   func(used float64) float64 { return 1 - used },
	}
	// LeastWaste prefers the node on which the pod takes least from the pods that usually come, see Outlook: a node with CPU left for further pods
	// keeps its memory usable. Where no outlook is known, it is Binpack.
	LeastWaste = Policy{
		name: "least-waste", help: "the least of what the pods that usually come could use",
		rate:         Binpack.rate,
		needsOutlook: true,
	}
)

// Expected is the policy for choices that the extender only predicts: where the node puts a pod whose annotations name no
// card, and which card a nominated pod gets. It doesn't depend on --card-policy. The device plugin must choose by it too. For a
// nominated pod it predicts the fullest card that fits, which leaves the emptier cards to others.
var Expected = Binpack

// Policies returns the policies for cards, the default first.
func Policies() []Policy { return []Policy{Binpack, Spread} }

// NodePolicies returns the policies for nodes, the default first.
func NodePolicies() []Policy { return []Policy{LeastWaste, Binpack, Spread} }

// Choices lists policies for a flag's help, such as "binpack (least free memory) or spread (most free memory)".
func Choices(of []Policy) string {
	return list(of, func(p Policy) string { return p.name + " (" + p.help + ")" })
}

// ParsePolicy returns the policy with the given name.
func ParsePolicy(name string, of []Policy) (Policy, error) {
	for _, p := range of {
		if p.name == name {
			return p, nil
		}
	}
	return Policy{}, fmt.Errorf("unknown policy %q: want %s", name, list(of, Policy.String))
}

func list(of []Policy, describe func(Policy) string) string {
	var out []string
	for _, p := range of {
		out = append(out, describe(p))
	}
	return strings.Join(out, " or ")
}

// NeedsOutlook reports whether the policy needs an Outlook.
func (p *Policy) NeedsOutlook() bool { return p.needsOutlook }

// String returns the policy's name, as in flags.
func (p Policy) String() string { return p.name }
