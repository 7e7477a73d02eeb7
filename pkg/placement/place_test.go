package placement

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

// free returns cards of 16276 MiB each, as in the figures of the gpushare design, with these amounts free.
func free(amounts ...gpu.Memory) []Card {
	cards := make([]Card, len(amounts))
	for i, amount := range amounts {
		cards[i] = Card{Index: i, Memory: 16276, Used: 16276 - amount}
	}
	return cards
}

// unhealthy returns the cards with the one at the position unhealthy.
func unhealthy(position int, cards []Card) []Card {
	cards = slices.Clone(cards)
	cards[position].Unhealthy = true
	return cards
}

func TestPlace(t *testing.T) {
	figure := free(12207, 8138, 4069, 16276)
	sizes := []Card{{Index: 0, Memory: 8192}, {Index: 1, Memory: 40960, Used: 30000}, {Index: 2, Memory: 16384}}
	sick := []Card{{Index: 0, Memory: 40960, Unhealthy: true}, {Index: 1, Memory: 8192}}
	for name, tc := range map[string]struct {
		policy  Policy
		cards   []Card
		request gpu.Memory
		want    gpu.Placement
		reason  reasons.Reason
	}{
		"bind figure, binpack: the fitting card with the least free memory": {Binpack, figure, 8138, gpu.On(1, 8138), reasons.Fits},
		"bind figure, spread: the card with the most free memory":           {Spread, figure, 8138, gpu.On(3, 8138), reasons.Fits},
		"filter figure: enough in total, but not on one card":               {Binpack, free(4069, 4069), 8138, nil, reasons.Fragmented},
		"filter figure: the same total on one card":                         {Binpack, free(8138, 0), 8138, gpu.On(0, 8138), reasons.Fits},
		"a placement has the card's index, not its position":                {Binpack, []Card{{Index: 7, Memory: 10}}, 10, gpu.On(7, 10), reasons.Fits},
		"of equal cards the lower index":                                    {Spread, []Card{{Index: 5, Memory: 10}, {Index: 2, Memory: 10}}, 1, gpu.On(2, 1), reasons.Fits},
		"a whole card's memory: the empty card":                             {Binpack, free(16275, 16276), 16276, gpu.On(1, 16276), reasons.Fits},
		"more than a whole card":                                            {Binpack, free(16276, 16276), 16277, nil, reasons.TooLarge},
		"the largest possible request":                                      {Binpack, free(16276, 16276), math.MaxInt64, nil, reasons.TooLarge},
		"cards of different sizes":                                          {Binpack, sizes, 10000, gpu.On(1, 10000), reasons.Fits},
		"a large request skips the small card":                              {Binpack, sizes, 12000, gpu.On(2, 12000), reasons.Fits},
		"a request that only the largest card can serve":                    {Binpack, sizes, 20000, nil, reasons.Fragmented},
		"an unhealthy card is skipped":                                      {Binpack, unhealthy(1, figure), 8138, gpu.On(0, 8138), reasons.Fits},
		"an unhealthy card has room, a healthy one only the size":           {Binpack, unhealthy(0, free(16276, 4069)), 8138, nil, reasons.Full},
		"the order of the cards doesn't change the reason":                  {Binpack, unhealthy(1, free(4069, 16276)), 8138, nil, reasons.Full},
		"all cards are unhealthy":                                           {Binpack, unhealthy(0, unhealthy(1, free(16276, 16276))), 8138, nil, reasons.Unhealthy},
		"the only card is unhealthy and full":                               {Binpack, unhealthy(0, free(0)), 8138, nil, reasons.Unhealthy},
		"an unhealthy card that is too small":                               {Binpack, unhealthy(0, free(16276)), 20000, nil, reasons.TooLarge},
		"the only card that is large enough is unhealthy":                   {Binpack, sick, 16384, nil, reasons.Unhealthy},
		"an overcommitted card has no room":                                 {Binpack, []Card{{Memory: 16, Used: 24}}, 1, nil, reasons.Full},
		"no cards":                                                          {Binpack, nil, 1, nil, reasons.NotShared},
	} {
		t.Run(name, func(t *testing.T) {
			got, reason := Place(tc.policy, tc.cards, units(tc.request))
			check.Equal(t, "placement", tc.want, got)
			_, suited := suit(tc.policy, Spread, tc.cards, units(tc.request))
			if fit := Fit(tc.cards, units(tc.request)); reason != tc.reason || fit != tc.reason || suited != tc.reason {
				t.Errorf("Place returns %q, Fit %q, RateNode %q; want %q", reason, fit, suited, tc.reason)
			}
		})
	}
}

// TestPolicies checks for all policies what Policy promises: better is a strict weak order, the choice doesn't depend on the
// order of the cards, and scores are between 0 and MaxScore.
func TestPolicies(t *testing.T) {
	var all []Card
	for memory := range gpu.Memory(9) {
		for used := range memory + 2 {
			all = append(all, Card{Index: len(all), Memory: memory, Used: used, UsedCores: gpu.Cores(used) * 17 % 130, Links: Links{NUMANode: uint8(used % 3)}})
		}
	}
	random := rand.New(rand.NewPCG(1, 2))
	cardsAndDemand := func() ([]Card, gpu.Demand) {
		return []Card{all[random.IntN(len(all))], all[random.IntN(len(all))], all[random.IntN(len(all))]},
			gpu.Demand{Cards: 1 + random.IntN(2), Memory: gpu.Memory(1 + random.Int64N(9)), Cores: gpu.Cores(10 * random.IntN(6))}
	}
	for _, p := range NodePolicies() {
		parsed, err := ParsePolicy(p.String(), NodePolicies())
		if err != nil || parsed.String() != p.String() {
			t.Errorf("ParsePolicy(%q) = %v, %v", p, parsed, err)
		}
		for range 20_000 {
			c, demand := cardsAndDemand()
			for _, card := range Policies() {
				if suits, _ := suit(card, p, c, demand); suits < 0 || suits > MaxScore {
					t.Fatalf("%s scores %v with %v for %v", p, c, suits, demand)
				}
			}
		}
	}
	for _, p := range Policies() {
		for range 20_000 {
			c, demand := cardsAndDemand()
			if p.better(c[0].Room(), c[1].Room()) && (p.better(c[1].Room(), c[0].Room()) || !p.better(c[0].Room(), c[2].Room()) && !p.better(c[2].Room(), c[1].Room())) {
				t.Fatalf("%s is no strict order of %v", p, c)
			}
			want, _ := Place(p, c, demand)
			random.Shuffle(len(c), func(i, j int) { c[i], c[j] = c[j], c[i] })
			if got, _ := Place(p, c, demand); !got.Equal(want) {
				t.Fatalf("%s chooses %v or %v of %v for %v, depending on their order", p, want, got, c, demand)
			}
		}
	}
	if got, want := Choices(Policies()), "binpack (least free memory) or spread (most free memory)"; got != want {
		t.Errorf("choices %q, want %q", got, want)
	}
	_, err := ParsePolicy("random", Policies())
	check.Equal(t, "error", `unknown policy "random": want binpack or spread`, fmt.Sprint(err))
}

// TestChartPolicies checks that the chart accepts exactly the policies of the code.
func TestChartPolicies(t *testing.T) {
	text, err := os.ReadFile("../../deploy/helm/gpushare/values.schema.json")
	check.Must(t, err)
	for flag, policies := range map[string][]Policy{"cardPolicy": Policies(), "nodePolicy": NodePolicies()} {
		var want []string
		for _, p := range policies {
			want = append(want, p.String())
		}
		enum := regexp.MustCompile(`"` + flag + `": \{\s*"enum": \[([^]]*)\]`).FindSubmatch(text)
		if enum == nil {
			t.Fatalf("values.schema.json has no %s", flag)
		}
		got := regexp.MustCompile(`[\w-]+`).FindAllString(string(enum[1]), -1)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-code +chart):\n%s", flag, diff)
		}
	}
}

func score(cardPolicy, nodePolicy Policy, cards []Card, request gpu.Memory) int {
	suits, _ := suit(cardPolicy, nodePolicy, cards, units(request))
	return suits.Score()
}

func TestScore(t *testing.T) {
	for name, tc := range map[string]struct {
		card, node Policy
		cards      []Card
		request    gpu.Memory
		want       int
	}{
		"binpack: the request fills the node":                {Binpack, Binpack, free(8138, 0), 8138, 10},
		"binpack: the request fills a card of an empty node": {Binpack, Binpack, free(16276, 16276), 16276, 9},
		"binpack: half of an empty card of two":              {Binpack, Binpack, free(16276, 16276), 8138, 4},
		"binpack: a quarter of the card is left":             {Binpack, Binpack, free(12207, 16276), 8138, 6},
		"spread: a small request on an empty node":           {Spread, Spread, free(16276, 16276), 1, 9},
		"spread: the request fills the node":                 {Spread, Spread, free(8138, 0), 8138, 0},
		"spread: half of an empty card of two":               {Spread, Spread, free(16276, 16276), 8138, 5},
		"binpack for cards, spread for nodes":                {Binpack, Spread, free(8138, 16276), 8138, 1},
		"spread for cards, binpack for nodes":                {Spread, Binpack, free(8138, 16276), 8138, 5},
		"full":                                               {Binpack, Binpack, free(4069, 4069), 8138, 0},
		"no cards":                                           {Binpack, Binpack, nil, 1, 0},
		"too large":                                          {Spread, Spread, free(16276), 20000, 0},
	} {
		t.Run(name, func(t *testing.T) {
			check.Equal(t, "the result", tc.want, score(tc.card, tc.node, tc.cards, tc.request))
		})
	}
}

// TestBinpackScore checks that binpack never scores a fuller card lower.
func TestBinpackScore(t *testing.T) {
	for used := range gpu.Memory(16) {
		for request := range 16 - used {
			card, fuller := []Card{{Memory: 16, Used: used}}, []Card{{Memory: 16, Used: used + 1}}
			if Fit(fuller, units(request)) == reasons.Fits && score(Binpack, Binpack, fuller, request) < score(Binpack, Binpack, card, request) {
				t.Errorf("used %d, request %d: the fuller card has a lower score", used, request)
			}
		}
	}
}

func suit(cardPolicy, nodePolicy Policy, cards []Card, demand gpu.Demand) (Suitability, reasons.Reason) {
	return RateNode(&cardPolicy, &nodePolicy, cards, &demand)
}

// units returns the demand of a pod that asks for memory of one card.
func units(memory gpu.Memory) gpu.Demand { return gpu.Demand{Cards: 1, Memory: memory, Containers: 1} }

func TestBest(t *testing.T) {
	for name, tc := range map[string]struct {
		suits []Suitability
		k     int
		want  []int
	}{
		"none fits":      {nil, 2, nil},
		"one best score": {[]Suitability{3, 9, 5}, 3, []int{1}},
		"equal scores":   {[]Suitability{9.1, 8.9, 9.9, 9}, 3, []int{2, 0, 3}},
		"more than k equal scores: the most suitable": {[]Suitability{9.1, 8.9, 9.9, 9, 9.5}, 2, []int{2, 4}},
		"equal suitability: the first":                {[]Suitability{4, 4, 4}, 2, []int{0, 1}},
		"k is one":                                    {[]Suitability{9.1, 9.2}, 1, []int{1}},
		"the lowest score":                            {[]Suitability{0, 0.5}, 9, []int{1, 0}},
	} {
		var candidates []Candidate
		for i, s := range tc.suits {
			candidates = append(candidates, Candidate{i, s})
		}
		var got []int
		for _, c := range Best(candidates, tc.k) {
			got = append(got, c.Node)
		}
		check.Equal(t, name, tc.want, got)
	}
}

// full returns eight cards of which about 90% is used, unevenly.
func full() []Card {
	cards := make([]Card, 8)
	for i := range cards {
		cards[i] = Card{Index: i, Memory: 16276, Used: gpu.Memory(14000 + 200*i)}
	}
	return cards
}

func TestFitAllocations(t *testing.T) {
	cards := full()
	for _, demand := range []gpu.Demand{units(1024), {Cards: 3, Memory: 700, Cores: 20}} {
		if allocations := testing.AllocsPerRun(100, func() { Fit(cards, demand) }); allocations != 0 {
			t.Errorf("Fit makes %v allocations for %v", allocations, demand)
		}
		if allocations := testing.AllocsPerRun(100, func() { RateNode(&Binpack, &Binpack, cards, &demand) }); allocations != 0 {
			t.Errorf("RateNode makes %v allocations for %v", allocations, demand)
		}
	}
}

func BenchmarkFit(b *testing.B) {
	cards := full()
	b.ReportAllocs()
	for b.Loop() {
		if Fit(cards, units(2000)) != reasons.Fits {
			b.Fatal("no room")
		}
	}
}

func BenchmarkPlace(b *testing.B) {
	cards := full()
	b.ReportAllocs()
	for b.Loop() {
		if _, reason := Place(Binpack, cards, units(2000)); reason != reasons.Fits {
			b.Fatal(reason)
		}
	}
}

func BenchmarkSuit(b *testing.B) {
	cards := full()
	demand := units(2000)
	b.ReportAllocs()
	for b.Loop() {
		RateNode(&Binpack, &Binpack, cards, &demand)
	}
}
