package placement

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// free returns cards of 16276 MiB each, as in the figures of the gpushare design, with these amounts free.
func free(amounts ...gpu.Memory) []Card {
	cards := make([]Card, len(amounts))
	for i, amount := range amounts {
		cards[i] = Card{Index: i, Memory: 16276, Used: 16276 - amount}
	}
	return cards
}

// unhealthy marks the card at the position unhealthy.
func unhealthy(position int, cards []Card) []Card {
	cards[position].Unhealthy = true
	return cards
}

func TestPlace(t *testing.T) {
	sizes := []Card{
		{Index: 0, Memory: 8192},
		{Index: 1, Memory: 40960, Used: 30000},
		{Index: 2, Memory: 16384},
	}
	for name, tc := range map[string]struct {
		policy  Policy
		cards   []Card
		request gpu.Memory
		want    gpu.Placement
		reason  Reason
	}{
		"bind figure, binpack: the fitting card with the least free memory": {
			policy: Binpack, cards: free(12207, 8138, 4069, 16276), request: 8138, want: gpu.On(1, 8138),
		},
		"bind figure, spread: the card with the most free memory": {
			policy: Spread, cards: free(12207, 8138, 4069, 16276), request: 8138, want: gpu.On(3, 8138),
		},
		"filter figure: enough in total, but not on one card": {
			policy: Binpack, cards: free(4069, 4069), request: 8138, reason: Fragmented,
		},
		"filter figure: the same total on one card": {
			policy: Binpack, cards: free(8138, 0), request: 8138, want: gpu.On(0, 8138),
		},
		"binpack: of equal cards the lower index": {
			policy: Binpack, cards: free(0, 8138, 8138), request: 4069, want: gpu.On(1, 4069),
		},
		"spread: of equal cards the lower index": {
			policy: Spread, cards: free(0, 8138, 8138), request: 4069, want: gpu.On(1, 4069),
		},
		"the lower index in any order of cards": {
			policy:  Binpack,
			cards:   []Card{{Index: 5, Memory: 10}, {Index: 2, Memory: 10}},
			request: 1, want: gpu.On(2, 1),
		},
		"a placement has the card's index, not its position": {
			policy: Binpack, cards: []Card{{Index: 7, Memory: 10}}, request: 10, want: gpu.On(7, 10),
		},
		"a whole card": {
			policy: Binpack, cards: free(16275, 16276), request: 16276, want: gpu.On(1, 16276),
		},
		"more than a whole card": {
			policy: Binpack, cards: free(16276, 16276), request: 16277, reason: TooLarge,
		},
		"the largest possible request": {
			policy: Binpack, cards: free(16276, 16276), request: math.MaxInt64, reason: TooLarge,
		},
		"cards of different sizes": {
			policy: Binpack, cards: sizes, request: 10000, want: gpu.On(1, 10000),
		},
		"a large request skips the small card": {
			policy: Binpack, cards: sizes, request: 12000, want: gpu.On(2, 12000),
		},
		"a request that only the largest card can serve": {
			policy: Binpack, cards: sizes, request: 20000, reason: Fragmented,
		},
		"an unhealthy card is skipped": {
			policy: Binpack, cards: unhealthy(1, free(12207, 8138, 4069, 16276)), request: 8138, want: gpu.On(0, 8138),
		},
		"only an unhealthy card has room, but a healthy one is large enough": {
			policy: Binpack, cards: unhealthy(0, free(16276, 4069)), request: 8138, reason: Full,
		},
		"the order of the cards doesn't change the reason": {
			policy: Binpack, cards: unhealthy(1, free(4069, 16276)), request: 8138, reason: Full,
		},
		"all cards are unhealthy": {
			policy: Binpack, cards: unhealthy(0, unhealthy(1, free(16276, 16276))), request: 8138, reason: Unhealthy,
		},
		"the only card is unhealthy and full": {
			policy: Binpack, cards: unhealthy(0, free(0)), request: 8138, reason: Unhealthy,
		},
		"an unhealthy card that is too small": {
			policy: Binpack, cards: unhealthy(0, free(16276)), request: 20000, reason: TooLarge,
		},
		"the only card that is large enough is unhealthy": {
			policy: Binpack, cards: []Card{
				{Index: 0, Memory: 40960, Unhealthy: true}, {Index: 1, Memory: 8192},
			}, request: 16384, reason: Unhealthy,
		},
		"an overcommitted card has no room": {
			policy: Binpack, cards: []Card{{Memory: 16, Used: 24}}, request: 1, reason: Full,
		},
		"no cards": {
			policy: Binpack, request: 1, reason: NotShared,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, reason := Place(tc.policy, tc.cards, tc.request)
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("placement (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.reason, reason); diff != "" {
				t.Errorf("reason (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.reason, Fit(tc.cards, tc.request)); diff != "" {
				t.Errorf("Fit (-want +got):\n%s", diff)
			}
		})
	}
}

func TestReasons(t *testing.T) {
	type words struct {
		Label, Text  string
		Unresolvable bool
	}
	want := map[Reason]words{
		Fits:       {"fits", "fits", false},
		Fragmented: {"fragmented", "no GPU card has enough free memory, though the node's cards together have", false},
		Full:       {"full", "no GPU card has enough free memory", false},
		Unhealthy:  {"unhealthy", "the GPU cards that are large enough are unhealthy", true},
		Elsewhere:  {"elsewhere", "an earlier bind of this pod to another node is unconfirmed", true},
		TooLarge:   {"too_large", "the pod asks for more GPU memory than any card of the node has", true},
		WholeCards: {"whole_cards", "the node offers nvidia.com/gpu and aliyun.com/gpu-mem at once, which exclude each other", true},
		NotShared:  {"not_shared", "the node shares no GPU memory", true},
		255:        {"unknown", "unknown reason", true},
		99:         {"unknown", "unknown reason", true},
	}
	got := map[Reason]words{}
	for _, r := range append(Reasons(), Fits, 99, 255) {
		got[r] = words{r.Label(), r.String(), r.Unresolvable()}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestParsePolicy(t *testing.T) {
	for _, want := range Policies() {
		got, err := ParsePolicy(want.String())
		if err != nil || got.String() != want.String() {
			t.Errorf("ParsePolicy(%q) = %v, %v", want, got, err)
		}
	}
	_, err := ParsePolicy("random")
	if err == nil {
		t.Fatal("an unknown policy was accepted")
	}
	if diff := cmp.Diff(`unknown policy "random": want binpack or spread`, err.Error()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := Policies()[0].String(); got != "binpack" {
		t.Errorf("the default policy is %s, want binpack", got)
	}
}

func score(cardPolicy, nodePolicy Policy, cards []Card, request gpu.Memory) int {
	suits, _ := suit(cardPolicy, nodePolicy, cards, request)
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
			if diff := cmp.Diff(tc.want, score(tc.card, tc.node, tc.cards, tc.request)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// Scores are between 0 and MaxScore, and binpack never scores a fuller node lower.
func TestScoreBounds(t *testing.T) {
	for first := range gpu.Memory(17) {
		for second := range gpu.Memory(17) {
			cards := []Card{{Index: 0, Memory: 16, Used: first}, {Index: 1, Memory: 16, Used: second}}
			for request := range gpu.Memory(18) {
				binpack, spread := score(Binpack, Binpack, cards, request), score(Spread, Spread, cards, request)
				if min(binpack, spread) < 0 || max(binpack, spread) > MaxScore {
					t.Fatalf("used %d and %d, request %d: scores %d and %d", first, second, request, binpack, spread)
				}
				fuller := []Card{cards[0], cards[1]}
				fuller[0].Used++
				if Fit(cards[:1], request) == Fits && Fit(fuller[:1], request) == Fits &&
					score(Binpack, Binpack, fuller[:1], request) < score(Binpack, Binpack, cards[:1], request) {
					t.Fatalf("used %d, request %d: binpack scores the fuller card lower", first, request)
				}
			}
		}
	}
}

// Suit returns the same reasons as Place.
func TestSuitAgreesWithPlace(t *testing.T) {
	for _, cards := range [][]Card{nil, free(8), free(0, 4, 8), {{Memory: 8, Unhealthy: true}}} {
		for request := gpu.Memory(1); request < 20000; request += 3 {
			_, want := Place(Spread, cards, request)
			if _, got := suit(Spread, Binpack, cards, request); got != want {
				t.Errorf("%d on %v: %v, want %v", request, cards, got, want)
			}
		}
	}
}

// suit calls Suit with the totals of the cards.
func suit(cardPolicy, nodePolicy Policy, cards []Card, request gpu.Memory) (Suitability, Reason) {
	totals := Sum(cards)
	return Suit(cardPolicy, nodePolicy, cards, &totals, request)
}

func best(candidates []Candidate, k int) []Candidate {
	best := Best{K: k}
	for _, c := range candidates {
		best.Add(c)
	}
	return best.Candidates()
}

func TestBest(t *testing.T) {
	for name, tc := range map[string]struct {
		suits []Suitability
		k     int
		want  []int
	}{
		"none fits":      {nil, 2, nil},
		"one best score": {[]Suitability{3, 9, 5}, 3, []int{1}},
		"equal scores":   {[]Suitability{9.1, 8.9, 9.9, 9}, 3, []int{0, 2, 3}},
		"more than k equal scores: the most suitable": {[]Suitability{9.1, 8.9, 9.9, 9, 9.5}, 2, []int{2, 4}},
		"equal suitability: the first":                {[]Suitability{4, 4, 4}, 2, []int{0, 1}},
		"k is one":                                    {[]Suitability{9.1, 9.2}, 1, []int{1}},
		"the lowest score":                            {[]Suitability{0, 0.5}, 9, []int{0, 1}},
	} {
		var candidates []Candidate
		for i, s := range tc.suits {
			candidates = append(candidates, Candidate{i, s})
		}
		var got []int
		for _, c := range best(candidates, tc.k) {
			got = append(got, c.Node)
		}
		slices.Sort(got)
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// Best returns the first k candidates of those with the best score in sorted order.
func TestBestRandom(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		candidates := make([]Candidate, 1+random.IntN(60))
		for i := range candidates {
			candidates[i] = Candidate{i, Suitability(8 + float64(random.IntN(20))/10)}
		}
		k := 1 + random.IntN(20)
		sorted := slices.SortedFunc(slices.Values(candidates), bySuitability)
		want := slices.DeleteFunc(slices.Clone(sorted), func(c Candidate) bool { return c.Suits.Score() < sorted[0].Suits.Score() })
		want = want[:min(k, len(want))]
		if diff := cmp.Diff(want, best(candidates, k)); diff != "" {
			t.Fatalf("the best %d (-want +got):\n%s", k, diff)
		}
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
	if allocations := testing.AllocsPerRun(100, func() { Fit(cards, 1024) }); allocations != 0 {
		t.Errorf("Fit makes %v allocations", allocations)
	}
}

func BenchmarkFit(b *testing.B) {
	cards := full()
	b.ReportAllocs()
	for b.Loop() {
		if Fit(cards, 2000) != Fits {
			b.Fatal("no room")
		}
	}
}

func BenchmarkPlace(b *testing.B) {
	cards := full()
	b.ReportAllocs()
	for b.Loop() {
		if _, reason := Place(Binpack, cards, 2000); reason != Fits {
			b.Fatal(reason)
		}
	}
}

func BenchmarkSuit(b *testing.B) {
	cards := full()
	totals := Sum(cards)
	b.ReportAllocs()
	for b.Loop() {
		Suit(Binpack, Binpack, cards, &totals, 2000)
	}
}
