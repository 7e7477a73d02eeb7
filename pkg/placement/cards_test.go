package placement

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

// shared returns cards of 16 units each, with these amounts of memory and cores free.
func shared(amounts ...[2]int) []Card {
	cards := make([]Card, len(amounts))
	for i, amount := range amounts {
		cards[i] = Card{Index: i, Memory: 16, Used: gpu.Memory(16 - amount[0]), UsedCores: gpu.Cores(100 - amount[1])}
	}
	return cards
}

// linked returns the cards with these NVLink groups.
func linked(cards []Card, groups ...uint8) []Card {
	for i, group := range groups {
		cards[i].Links.NVLink = group
	}
	return cards
}

// limited returns the cards with room for these numbers of further containers each, of 4.
func limited(cards []Card, free ...int32) []Card {
	for i, n := range free {
		cards[i].Containers, cards[i].MaxContainers = 4-n, 4
	}
	return cards
}

// near returns the cards, of which these are near an adapter.
func near(cards []Card, positions ...int) []Card {
	for _, i := range positions {
		cards[i].NearAdapter = true
	}
	return cards
}

func TestPlaceSeveral(t *testing.T) {
	preferred := func(cards int) gpu.Demand { return gpu.Demand{Cards: cards, Memory: 4, RDMA: gpu.RDMAPreferred} }
	required := func(cards int) gpu.Demand { return gpu.Demand{Cards: cards, Memory: 4, RDMA: gpu.RDMARequired} }
	memory := func(free ...int) (cards []Card) {
		for _, amount := range free {
			cards = append(cards, shared([2]int{amount, 100})...)
			cards[len(cards)-1].Index = len(cards) - 1
		}
		return cards
	}
	for name, tc := range map[string]struct {
		policy Policy
		cards  []Card
		demand gpu.Demand
		want   []int
		reason reasons.Reason
	}{
		"binpack: the two fullest that fit":         {Binpack, memory(16, 4, 8, 3, 10), gpu.Demand{Cards: 2, Memory: 4}, []int{1, 2}, reasons.Fits},
		"spread: the two emptiest":                  {Spread, memory(16, 4, 8, 3, 10), gpu.Demand{Cards: 2, Memory: 4}, []int{0, 4}, reasons.Fits},
		"all cards":                                 {Binpack, memory(16, 4, 8), gpu.Demand{Cards: 3, Memory: 4}, []int{0, 1, 2}, reasons.Fits},
		"one card has room, the sum has":            {Binpack, memory(16, 4, 4), gpu.Demand{Cards: 2, Memory: 8}, nil, reasons.Fragmented},
		"one card has room, and there is no more":   {Binpack, memory(10, 0, 0), gpu.Demand{Cards: 2, Memory: 8}, nil, reasons.Full},
		"too few cards":                             {Binpack, memory(16, 16), gpu.Demand{Cards: 3, Memory: 1}, nil, reasons.TooLarge},
		"too few healthy cards":                     {Binpack, unhealthy(1, memory(16, 16)), gpu.Demand{Cards: 2, Memory: 1}, nil, reasons.Unhealthy},
		"an unhealthy card is skipped":              {Binpack, unhealthy(1, memory(16, 4, 16)), gpu.Demand{Cards: 2, Memory: 1}, []int{0, 2}, reasons.Fits},
		"cores: the card that has them":             {Binpack, shared([2]int{4, 20}, [2]int{16, 60}), gpu.Demand{Cards: 1, Memory: 4, Cores: 30}, []int{1}, reasons.Fits},
		"cores: none has them, the sum has":         {Binpack, shared([2]int{16, 20}, [2]int{16, 20}), gpu.Demand{Cards: 1, Memory: 4, Cores: 30}, nil, reasons.Fragmented},
		"cores: memory here, cores there":           {Binpack, shared([2]int{16, 20}, [2]int{2, 100}), gpu.Demand{Cards: 1, Memory: 4, Cores: 30}, nil, reasons.Fragmented},
		"cores: used up":                            {Binpack, shared([2]int{16, 10}, [2]int{16, 10}), gpu.Demand{Cards: 1, Memory: 4, Cores: 30}, nil, reasons.Full},
		"more cores than a card has":                {Binpack, shared([2]int{16, 100}, [2]int{16, 100}), gpu.Demand{Cards: 1, Memory: 4, Cores: 101}, nil, reasons.TooLarge},
		"binpack: a card whose cores are scarcer":   {Binpack, shared([2]int{8, 100}, [2]int{16, 25}), gpu.Demand{Cards: 1, Memory: 4}, []int{1}, reasons.Fits},
		"spread: the other one":                     {Spread, shared([2]int{8, 100}, [2]int{16, 25}), gpu.Demand{Cards: 1, Memory: 4}, []int{0}, reasons.Fits},
		"over-full cores":                           {Binpack, []Card{{Memory: 16, UsedCores: 130}}, gpu.Demand{Cards: 1, Memory: 4, Cores: 1}, nil, reasons.Full},
		"over-full cores don't matter without":      {Binpack, []Card{{Memory: 16, UsedCores: 130}}, gpu.Demand{Cards: 1, Memory: 4}, []int{0}, reasons.Fits},
		"equally packed cards: the connected ones":  {Binpack, linked(memory(16, 16, 16, 16), 0, 1, 2, 1), gpu.Demand{Cards: 2, Memory: 4}, []int{1, 3}, reasons.Fits},
		"connections don't outweigh the policy":     {Binpack, linked(memory(16, 16, 16, 8), 1, 1, 2, 2), gpu.Demand{Cards: 2, Memory: 4}, []int{2, 3}, reasons.Fits},
		"no connections: the lowest indexes":        {Spread, memory(16, 16, 16, 16), gpu.Demand{Cards: 2, Memory: 4}, []int{0, 1}, reasons.Fits},
		"equal connections: the lowest indexes":     {Spread, linked(memory(16, 16, 16, 16), 1, 2, 2, 1), gpu.Demand{Cards: 2, Memory: 4}, []int{0, 3}, reasons.Fits},
		"containers: the card that takes them":      {Binpack, limited(memory(4, 8, 16), 0, 2, 4), gpu.Demand{Cards: 1, Memory: 4, Containers: 2}, []int{1}, reasons.Fits},
		"containers: with cores":                    {Binpack, limited(memory(4, 8, 16), 1, 1, 4), gpu.Demand{Cards: 1, Memory: 4, Cores: 1, Containers: 2}, []int{2}, reasons.Fits},
		"containers: a card without a limit":        {Binpack, limited(memory(4, 8), 0), gpu.Demand{Cards: 1, Memory: 4, Containers: 9}, []int{1}, reasons.Fits},
		"containers: only they are missing":         {Binpack, limited(memory(16, 2), 1, 4), gpu.Demand{Cards: 1, Memory: 4, Containers: 2}, nil, reasons.Crowded},
		"containers: too many already":              {Binpack, limited(memory(16), -1), gpu.Demand{Cards: 1, Memory: 4, Containers: 1}, nil, reasons.Crowded},
		"containers: memory is missing too":         {Binpack, limited(memory(2, 2), 0, 0), gpu.Demand{Cards: 1, Memory: 4, Containers: 1}, nil, reasons.Fragmented},
		"containers: memory without a limit":        {Binpack, limited(memory(2, 1), 4), gpu.Demand{Cards: 1, Memory: 4, Containers: 1}, nil, reasons.Full},
		"containers: more than any card takes":      {Binpack, limited(memory(16, 17), 2, 4), gpu.Demand{Cards: 1, Memory: 4, Containers: 5}, nil, reasons.TooLarge},
		"containers: the card that could take them": {Binpack, limited(memory(16, 2), 2, 4)[:1:1], gpu.Demand{Cards: 1, Memory: 4, Containers: 4}, nil, reasons.Crowded},
		"containers: the card is unhealthy":         {Binpack, unhealthy(0, limited(memory(16), 0)), gpu.Demand{Cards: 1, Memory: 4, Containers: 1}, nil, reasons.Unhealthy},
		"containers: the card is too small":         {Binpack, limited(memory(16), 4), gpu.Demand{Cards: 1, Memory: 17, Containers: 1}, nil, reasons.TooLarge},
		"containers: a connected card without room": {Binpack, limited(linked(memory(16, 16, 16), 1, 2, 1), 1, 1, 0), gpu.Demand{Cards: 2, Memory: 4, Containers: 1}, []int{0, 1}, reasons.Fits},
		"adapter preferred: among equal cards":      {Binpack, near(memory(16, 8, 8), 0, 2), preferred(1), []int{2}, reasons.Fits},
		"adapter preferred: the policy comes first": {Spread, near(memory(8, 16, 4), 0), preferred(1), []int{1}, reasons.Fits},
		"adapter preferred: no such card":           {Binpack, memory(16, 8), preferred(1), []int{1}, reasons.Fits},
		"adapter preferred: two of equal cards":     {Binpack, near(memory(8, 8, 8, 8), 1, 3), preferred(2), []int{1, 3}, reasons.Fits},
		"adapter preferred: before connections":     {Binpack, near(linked(memory(8, 8, 8, 8), 1, 2, 1, 1), 1, 3), preferred(2), []int{1, 3}, reasons.Fits},
		"adapter preferred: one, and the connected": {Binpack, near(linked(memory(8, 8, 8), 1, 2, 2), 2), preferred(2), []int{1, 2}, reasons.Fits},
		"adapter not asked for":                     {Binpack, near(memory(8, 8), 1), gpu.Demand{Cards: 1, Memory: 4}, []int{0}, reasons.Fits},
		"adapter required: the only such card":      {Binpack, near(memory(16, 8, 4), 0), required(1), []int{0}, reasons.Fits},
		"adapter required: two cards":               {Binpack, near(memory(4, 8, 8, 16), 1, 3), required(2), []int{1, 3}, reasons.Fits},
		"adapter required: others have room":        {Binpack, near(memory(16, 2), 1), required(1), nil, reasons.Fragmented},
		"adapter required: no room at all":          {Binpack, near(memory(1, 2), 1), required(1), nil, reasons.Full},
		"adapter required: the card is unhealthy":   {Binpack, unhealthy(1, near(memory(16, 16), 1)), required(1), nil, reasons.Unhealthy},
		"adapter required: too few such cards":      {Binpack, near(memory(16, 16, 16), 1), required(2), nil, reasons.TooLarge},
		"adapter required: no such card":            {Binpack, memory(16, 16), required(1), nil, reasons.TooLarge},
		"memory that a multiplication would exceed": {Binpack, []Card{{Memory: 1 << 62, UsedCores: 50}, {Index: 1, Memory: 1 << 60}}, gpu.Demand{Cards: 1, Memory: 1}, []int{1}, reasons.Fits},
	} {
		got, reason := Place(tc.policy, tc.cards, tc.demand)
		var want gpu.Placement
		if tc.want != nil {
			want = tc.demand.On(tc.want...)
		}
		if diff := cmp.Diff(want, got); diff != "" || reason != tc.reason {
			t.Errorf("%s: %q, want %q (-want +got):\n%s", name, reason, tc.reason, diff)
		}
		if _, suited := suit(tc.policy, Spread, tc.cards, tc.demand); suited != tc.reason || Fit(tc.cards, tc.demand) != tc.reason {
			t.Errorf("%s: RateNode returns %q, Fit %q, want %q", name, suited, Fit(tc.cards, tc.demand), tc.reason)
		}
	}
}

// TestPlaceBruteForce compares Place with a search of all sets of cards: the policy's order counts first, then the index, except
// that of equally packed cards the connections decide.
func TestPlaceBruteForce(t *testing.T) {
	random, ties := rand.New(rand.NewPCG(3, 4)), 0
	for range 3000 {
		cards := make([]Card, 1+random.IntN(8))
		byNVLink := random.IntN(2) == 0
		for i := range cards {
			pciSwitch := uint8(random.IntN(4))
			cards[i] = Card{
				Index: i, Memory: 8, Used: gpu.Memory(random.IntN(3)), UsedCores: gpu.Cores(40 * random.IntN(2)), Unhealthy: random.IntN(9) == 0,
				Containers: random.Int32N(4), MaxContainers: 3 * random.Int32N(2),
				Links: Links{PCIeSwitch: 1 + pciSwitch, NUMANode: 1 + pciSwitch/2},
			}
			if byNVLink {
				cards[i].Links.NVLink = pciSwitch / 2
			}
		}
		random.Shuffle(len(cards), func(i, j int) { cards[i], cards[j] = cards[j], cards[i] })
		demand := gpu.Demand{Cards: 1 + random.IntN(4), Memory: gpu.Memory(1 + random.IntN(8)), Cores: gpu.Cores(30 * random.IntN(3)), Containers: 1 + random.Int32N(2)}
		policy := Policies()[random.IntN(2)]
		got, reason := Place(policy, cards, demand)
		sets := equallyPacked(policy, cards, demand)
		if (reason == reasons.Fits) != (len(sets) > 0) {
			t.Fatalf("%v in %+v: %s, the search finds %v", demand, cards, reason, sets)
		}
		if len(sets) == 0 {
			continue
		}
		if len(sets) > 1 {
			ties++
		}
		values := map[string]int{} // By the cards.
		for _, set := range sets {
			var indexes []int
			value := 0
			for i, c := range set {
				indexes = append(indexes, c.Index)
				for _, other := range set[:i] {
					value += c.Links.strength(other.Links)
				}
			}
			slices.Sort(indexes)
			values[demand.On(indexes...).String()] = value
		}
		value, known := values[got.String()]
		if best := slices.Max(slices.Collect(maps.Values(values))); !known || value != best || !slices.IsSortedFunc(got, func(a, b gpu.Share) int { return a.Card - b.Card }) {
			t.Fatalf("%s places %v in %+v on %v, the search on one of %v", policy, demand, cards, got, values)
		}
	}
	if ties < 100 {
		t.Errorf("connections decided only %d times", ties)
	}
}

// TestPlaceManyCards: all sets of 8 out of 32 cards are too many to try.
func TestPlaceManyCards(t *testing.T) {
	for name, tc := range map[string]struct {
		links func(i int) Links
		want  []int
	}{
		"nothing known":        {func(int) Links { return Links{} }, []int{0, 1, 2, 3, 4, 5, 6, 7}},
		"two NUMA nodes":       {func(i int) Links { return Links{NUMANode: uint8(1 + i%2)} }, []int{0, 2, 4, 6, 8, 10, 12, 14}},
		"switches of four":     {func(i int) Links { return Links{PCIeSwitch: uint8(1 + i%8)} }, []int{0, 1, 8, 9, 16, 17, 24, 25}},
		"one group by NVLink":  {func(i int) Links { return Links{NVLink: uint8(i / 24)} }, []int{24, 25, 26, 27, 28, 29, 30, 31}},
		"both kinds of groups": {func(i int) Links { return Links{PCIeSwitch: uint8(1 + i%4), NUMANode: uint8(1 + i%2)} }, []int{0, 4, 8, 12, 16, 20, 24, 28}},
	} {
		cards := make([]Card, 32)
		for i := range cards {
			cards[i] = Card{Index: i, Memory: 16, Links: tc.links(i)}
		}
		demand := gpu.Demand{Cards: 8, Memory: 16}
		got, _ := Place(Binpack, cards, demand)
		check.Equal(t, name, tc.want, got.Cards())
	}
}

// TestFitsEverywhere checks that Fit and choose agree with Fits.
func TestFitsEverywhere(t *testing.T) {
	random, fitting, empty := rand.New(rand.NewPCG(5, 6)), 0, 0
	for range 20_000 {
		cards := make([]Card, 1+random.IntN(4))
		for i := range cards {
			cards[i] = Card{
				Index: i, Memory: gpu.Memory(4 + random.IntN(5)), Used: gpu.Memory(random.IntN(9)), UsedCores: gpu.Cores(40 * random.IntN(4)),
				Containers: random.Int32N(4), MaxContainers: random.Int32N(4), Unhealthy: random.IntN(9) == 0, NearAdapter: random.IntN(2) == 0,
			}
		}
		demand := gpu.Demand{Cards: 1 + random.IntN(3), Memory: gpu.Memory(1 + random.IntN(8)), Containers: random.Int32N(4)}
		if random.IntN(2) == 0 {
			demand.Cores, demand.RDMA = gpu.Cores(60*random.IntN(3)), gpu.RDMA(random.IntN(3))
		}
		var want []int
		for i := range cards {
			if cards[i].Fits(&demand) {
				want = append(want, i)
			}
			emptied := cards[i].Empty()
			emptied.Unhealthy = false
			if emptied.Fits(&demand) != cards[i].fitsEmpty(&demand) {
				t.Fatalf("%+v for %v: fitsEmpty is %v", cards[i], demand, cards[i].fitsEmpty(&demand))
			}
			if cards[i].fitsEmpty(&demand) {
				empty++
			}
		}
		fits := len(want) >= demand.Cards
		if reason := Fit(cards, demand); (reason == reasons.Fits) != fits {
			t.Fatalf("%+v for %v: Fit returns %s, %v fit", cards, demand, reason, want)
		}
		var got []int
		for _, p := range Binpack.choose(cards, &demand, nil) {
			got = append(got, p.position)
			if !slices.Contains(want, p.position) {
				t.Fatalf("%+v for %v: choose returns card %d, %v fit", cards, demand, p.position, want)
			}
		}
		if len(got) != min(len(want), demand.Cards) {
			t.Fatalf("%+v for %v: choose returns %v, %v fit", cards, demand, got, want)
		}
		fitting += len(want)
	}
	if fitting < 5000 || empty < 5000 {
		t.Errorf("only %d cards fit, and %d if they are empty", fitting, empty)
	}
}

// equallyPacked returns the set of cards that the policy prefers, and those that differ from it only by cards that are packed like
// the last one in the policy's order.
func equallyPacked(policy Policy, cards []Card, demand gpu.Demand) (sets [][]*Card) {
	var fitting []*Card
	for i := range cards {
		if c := &cards[i]; !c.Unhealthy && c.Memory-c.Used >= demand.Memory && 100-c.UsedCores >= demand.Cores && (c.MaxContainers == 0 || c.Containers+demand.Containers <= c.MaxContainers) {
			fitting = append(fitting, c)
		}
	}
	if len(fitting) < demand.Cards {
		return nil
	}
	slices.SortFunc(fitting, func(a, b *Card) int {
		if policy.better(a.Room(), b.Room()) || !policy.better(b.Room(), a.Room()) && a.Index < b.Index {
			return -1
		}
		return 1
	})
	last := fitting[demand.Cards-1]
	asLast := func(c *Card) bool {
		return c.Memory == last.Memory && c.Used == last.Used && c.UsedCores == last.UsedCores
	}
	for bits := range 1 << len(fitting) {
		var set []*Card
		for i, c := range fitting {
			if chosen := bits>>i&1 == 1; chosen {
				set = append(set, c)
			}
			if chosen := bits>>i&1 == 1; !asLast(c) && chosen != (i < demand.Cards) {
				set = nil
				break
			}
		}
		if len(set) == demand.Cards {
			sets = append(sets, set)
		}
	}
	return sets
}

func TestLinks(t *testing.T) {
	card := func(nvlink, pciSwitch, numa int) Links {
		return NewCard(gpu.Card{NVLink: nvlink, PCIeSwitch: pciSwitch, NUMANode: numa}, 0).Links
	}
	for name, tc := range map[string]struct {
		a, b Links
		want int
	}{
		"NVLink":                        {card(1, 1, 0), card(1, 2, 1), sameNVLink},
		"a PCIe switch":                 {card(1, 1, 0), card(2, 1, 0), samePCIeSwitch},
		"NUMA node 0":                   {card(0, 0, 0), card(0, 0, 0), sameNUMANode},
		"nothing known":                 {card(0, 0, gpu.NoNUMANode), card(0, 0, gpu.NoNUMANode), 0},
		"different everything":          {card(1, 1, 0), card(2, 2, 1), 0},
		"numbers that no machine has":   {card(256, 512, 255), card(256, 512, 255), 0},
		"numbers that are equal by 256": {card(1, 1, 0), card(257, 257, 256), 0},
	} {
		if got := tc.a.strength(tc.b); got != tc.want || tc.b.strength(tc.a) != tc.want {
			t.Errorf("%s: %d, want %d", name, got, tc.want)
		}
	}
}

func BenchmarkSuitSeveral(b *testing.B) {
	cards := linked(full(), 1, 1, 1, 1, 2, 2, 2, 2)
	demand := gpu.Demand{Cards: 4, Memory: 900}
	b.ReportAllocs()
	for b.Loop() {
		RateNode(&Binpack, &Binpack, cards, &demand)
	}
}
