package protocol

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

func TestInventoryRoundTrip(t *testing.T) {
	for name, tc := range map[string]struct {
		inventory Inventory
		want      string
	}{
		"no cards": {
			Inventory{Unit: gpu.GiB},
			`{"version":1,"unit":"GiB","cards":[]}`,
		},
		"a card with the required fields only": {
			Inventory{Unit: gpu.MiB, Cards: []gpu.Card{plain(0, 16276)}},
			`{"version":1,"unit":"MiB","cards":[{"index":0,"memory":16276,"healthy":true}]}`,
		},
		"a card with all fields, on NUMA node 0": {
			Inventory{Unit: 256 * gpu.MiB, Cards: []gpu.Card{{Index: 3, UUID: "GPU-3", Model: "Tesla V100", Memory: 64, NUMANode: 0}}},
			`{"version":1,"unit":"256MiB","cards":[{"index":3,"uuid":"GPU-3","model":"Tesla V100","memory":64,"numaNode":0,"healthy":true}]}`,
		},
		"an unhealthy card beside one of another size, in the order given": {
			Inventory{Unit: gpu.GiB, Cards: []gpu.Card{
				{Index: 1, Memory: 40, NUMANode: 1, Unhealthy: "Xid 79"}, plain(0, 8),
			}},
			`{"version":1,"unit":"GiB","cards":[{"index":1,"memory":40,"numaNode":1,"healthy":false,"reason":"Xid 79"},{"index":0,"memory":8,"healthy":true}]}`,
		},
		"an isolation mode": {
			Inventory{Unit: gpu.GiB, Isolation: "driver"},
			`{"version":1,"unit":"GiB","isolation":"driver","cards":[]}`,
		},
		"a DRA driver": {
			Inventory{Unit: gpu.GiB, DRADriver: DRADriver},
			`{"version":1,"unit":"GiB","draDriver":"gpu.nvidia.com","cards":[]}`,
		},
		"simulated cards": {
			Inventory{Unit: gpu.GiB, Simulated: true},
			`{"version":1,"unit":"GiB","simulated":true,"cards":[]}`,
		},
		"features, and cards that are connected": {
			Inventory{Unit: gpu.GiB, Features: []string{FeatureCards, FeatureCores}, Cards: []gpu.Card{
				{Index: 0, Memory: 8, NUMANode: 0, NVLink: 1, PCIeSwitch: 2}, {Index: 1, Memory: 8, NUMANode: 0, NVLink: 1},
			}},
			`{"version":1,"unit":"GiB","features":["cards","cores"],"cards":[` +
				`{"index":0,"memory":8,"nvlink":1,"pcieSwitch":2,"numaNode":0,"healthy":true},{"index":1,"memory":8,"nvlink":1,"numaNode":0,"healthy":true}]}`,
		},
		"RDMA adapters, one near a card": {
			Inventory{
				Unit: gpu.GiB, Cards: []gpu.Card{{Memory: 8, NUMANode: 0, RDMAPorts: "mlx5_0:1"}, plain(1, 8)},
				Adapters: []gpu.Adapter{
					{Name: "mlx5_0", Device: "uverbs0", ActivePorts: []int{1}, LinkLayer: "InfiniBand", PCIAddress: "0000:3b:00.0"},
					{Name: "mlx5_1", Device: "uverbs1", LinkLayer: "Ethernet", PCIAddress: "0000:af:00.0", NUMANode: gpu.NoNUMANode},
				},
			},
			`{"version":1,"unit":"GiB","adapters":[` +
				`{"name":"mlx5_0","device":"uverbs0","activePorts":[1],"linkLayer":"InfiniBand","pciAddress":"0000:3b:00.0","numaNode":0},` +
				`{"name":"mlx5_1","device":"uverbs1","linkLayer":"Ethernet","pciAddress":"0000:af:00.0","numaNode":-1}],` +
				`"cards":[{"index":0,"memory":8,"rdmaPorts":"mlx5_0:1","numaNode":0,"healthy":true},{"index":1,"memory":8,"healthy":true}]}`,
		},
		"a model that JSON has to escape": {
			Inventory{Unit: gpu.GiB, Cards: []gpu.Card{{Model: "<\"A100\" & \u00e9>", Memory: 1, NUMANode: gpu.NoNUMANode}}},
			`{"version":1,"unit":"GiB","cards":[{"index":0,"model":"\u003c\"A100\" \u0026 é\u003e","memory":1,"healthy":true}]}`,
		},
	} {
		text, err := tc.inventory.Annotation()
		expect(t, name+": written", []string{tc.want, ""}, []string{text, message(err)})
		again, err := ParseInventory(map[string]string{AnnotationInventory: tc.want})
		expect(t, name+": read back", tc.inventory, again)
		expect(t, name+": error", "", message(err))
	}
}

// TestInventoryMarshalInvalid checks that an inventory that a reader would reject is not written.
func TestInventoryMarshalInvalid(t *testing.T) {
	for name, inventory := range map[string]Inventory{
		"no unit":            {},
		"an odd unit":        {Unit: 1000},
		"a card twice":       {Unit: gpu.GiB, Cards: []gpu.Card{plain(0, 1), plain(0, 1)}},
		"a negative card":    {Unit: gpu.GiB, Cards: []gpu.Card{plain(-1, 1)}},
		"a negative memory":  {Unit: gpu.GiB, Cards: []gpu.Card{plain(0, -1)}},
		"an index too large": {Unit: gpu.GiB, Cards: []gpu.Card{plain(maxCard+1, 1)}},
		"too many cards":     {Unit: gpu.GiB, Cards: make([]gpu.Card, gpu.MaxNodeCards+1)},
	} {
		if text, err := inventory.Annotation(); text != "" || !strings.HasPrefix(message(err), "writing the inventory: ") {
			t.Errorf("%s: got %q and the error %v, want an error alone", name, text, err)
		}
	}
}

func TestParseInventory(t *testing.T) {
	const card = `{"index":0,"memory":16,"healthy":true}`
	cards := func(cards string) string { return `{"version":1,"unit":"GiB","cards":[` + cards + `]}` }
	one := Inventory{Unit: gpu.GiB, Cards: []gpu.Card{plain(0, 16)}}
	unhealthy := Inventory{Unit: gpu.GiB, Cards: []gpu.Card{{Memory: 16, NUMANode: gpu.NoNUMANode, Unhealthy: "reported unhealthy"}}}
	for name, tc := range map[string]struct {
		text string
		want Inventory
		err  string // A part of the error.
	}{
		"fields of a later version":             {text: `{"version":1,"unit":"GiB","cards":[{"index":0,"memory":16,"healthy":true,"cores":108}],"driver":"570"}`, want: one},
		"no cards":                              {text: `{"version":1,"unit":"GiB"}`, want: Inventory{Unit: gpu.GiB}},
		"a card without its health":             {text: cards(`{"index":0,"memory":16}`), want: unhealthy},
		"a reason on a healthy card is ignored": {text: cards(`{"index":0,"memory":16,"healthy":true,"reason":"Xid 79"}`), want: one},
		"negative connections are none":         {text: cards(`{"index":0,"memory":16,"healthy":true,"nvlink":-1,"pcieSwitch":-2}`), want: one},
		"a negative NUMA node is none":          {text: cards(`{"index":0,"memory":16,"healthy":true,"numaNode":-7}`), want: one},
		"a later version":                       {text: `{"version":2,"unit":"GiB","cards":[` + card + `]}`, err: "inventory version 2: this program reads versions 1 to 1"},
		"no version":                            {text: `{"unit":"GiB","cards":[` + card + `]}`, err: "inventory version 0"},
		"no unit":                               {text: `{"version":1,"cards":[` + card + `]}`, err: `memory unit ""`},
		"an unknown unit":                       {text: `{"version":1,"unit":"bananas","cards":[` + card + `]}`, err: `memory unit "bananas"`},
		"a card twice":                          {text: cards(card + `,` + card), err: "duplicate card index 0"},
		"a negative card":                       {text: cards(`{"index":-1,"memory":16}`), err: "card index -1 is not within 0 to 65536"},
		"a card index too large":                {text: cards(`{"index":65537,"memory":16}`), err: "card index 65537 is not within"},
		"negative memory":                       {text: cards(`{"index":0,"memory":-1}`), err: "card 0 has negative memory"},
		"memory of more than 64 bits":           {text: cards(`{"index":0,"memory":9223372036854775808}`), err: "cannot unmarshal number"},
		"half a unit of memory":                 {text: cards(`{"index":0,"memory":0.5}`), err: "cannot unmarshal number"},
		"null":                                  {text: `null`, err: "inventory version 0"},
		"empty":                                 {text: ``, err: "unexpected end of JSON input"},
		"cut off":                               {text: `{"version":1,"unit":"GiB","cards":[`, err: "unexpected end of JSON input"},
		"a list":                                {text: `[]`, err: "cannot unmarshal array"},
		"two":                                   {text: `{"version":1,"unit":"GiB"}{}`, err: "invalid character"},
	} {
		got, err := ParseInventory(map[string]string{AnnotationInventory: tc.text})
		expect(t, name, tc.want, got)
		if ours := strings.HasPrefix(message(err), "annotation "+AnnotationInventory+": "); ours != (tc.err != "") || !strings.Contains(message(err), tc.err) {
			t.Errorf("%s: got the error %v, want one of the annotation that contains %q", name, err, tc.err)
		}
		if kept := one; tc.err != "" && json.Unmarshal([]byte(tc.text), &kept) != nil {
			expect(t, name+": the receiver of a failed UnmarshalJSON", one, kept)
		}
	}
	if _, err := ParseInventory(nil); !errors.Is(err, ErrNoInventory) {
		t.Errorf("no annotation: got %v, want ErrNoInventory", err)
	}
}

// TestInventoryTexts: what a node writes is bounded in every text that is shown. A node can write 256 KiB of annotations.
func TestInventoryTexts(t *testing.T) {
	long := strings.Repeat("x", 10000)
	card := gpu.Card{UUID: long, Model: long, NUMANode: gpu.NoNUMANode, Unhealthy: long, RDMAPorts: long}
	adapter := gpu.Adapter{Name: long, Device: long, LinkLayer: long, PCIAddress: long, NUMANode: -7, ActivePorts: make([]int, 1000)}
	text, err := Inventory{Unit: gpu.GiB, Cards: []gpu.Card{card}, Adapters: slices.Repeat([]gpu.Adapter{adapter}, 300), BootID: long, Isolation: long, DRADriver: long, Features: slices.Repeat([]string{long}, 100)}.Annotation()
	expect(t, "written", "", message(err))
	got, err := ParseInventory(map[string]string{AnnotationInventory: text})
	expect(t, "error", "", message(err))
	short := Shorten(long)
	expect(t, "read", Inventory{
		Unit: gpu.GiB, Cards: []gpu.Card{{UUID: short, Model: short, NUMANode: gpu.NoNUMANode, Unhealthy: short, RDMAPorts: short}},
		Adapters: slices.Repeat([]gpu.Adapter{
			{Name: short, Device: short, LinkLayer: short, PCIAddress: short, NUMANode: gpu.NoNUMANode, ActivePorts: make([]int, 256)},
		}, 256),
		BootID: short, Isolation: short, DRADriver: short, Features: slices.Repeat([]string{short}, 64),
	}, got)
	_, err = ParseInventory(map[string]string{AnnotationInventory: `{"version":` + strings.Repeat("1", 10000) + `}`})
	if size := len(message(err)); size == 0 || size > 2*MaxText {
		t.Errorf("the error has %d bytes", size)
	}
}

func TestParseNode(t *testing.T) {
	const two = `{"version":1,"unit":"MiB","cards":[{"index":0,"memory":16276,"healthy":true},{"index":1,"memory":8138,"healthy":false,"reason":"Xid 79"}]}`
	cards := []gpu.Card{plain(0, 16276), {Index: 1, Memory: 8138, NUMANode: gpu.NoNUMANode, Unhealthy: "Xid 79"}}
	many := func(n int) string {
		var list []string
		for i := range n {
			list = append(list, fmt.Sprintf(`{"index":%d,"memory":1,"healthy":true}`, i))
		}
		return `{"version":1,"unit":"MiB","cards":[` + strings.Join(list, ",") + `]}`
	}
	manyCards := Node{Unit: gpu.MiB}
	for i := range 256 {
		manyCards.Cards = append(manyCards.Cards, plain(i, 1))
	}
	for name, tc := range map[string]struct {
		inventory            string // "" leaves the annotation out.
		memory, count, whole string // "" leaves the resource out.
		want                 Node
		problem              string // A part of it.
	}{
		"an inventory that agrees with the capacity": {
			inventory: two, memory: "24414", count: "2", want: Node{Unit: gpu.MiB, Cards: cards},
		},
		"an inventory before the kubelet counts": {
			inventory: two, want: Node{Unit: gpu.MiB, Cards: cards},
		},
		"an inventory while the plugin isn't running": {
			inventory: two, memory: "0", count: "2", want: Node{Unit: gpu.MiB, Cards: cards},
		},
		"an inventory that is ahead of the kubelet's sum": {
			inventory: two, memory: "32552", count: "2", want: Node{Unit: gpu.MiB, Cards: cards},
			problem: "the inventory's cards add up to 24414, the node's aliyun.com/gpu-mem is 32552; the inventory counts",
		},
		"an inventory that is ahead of the kubelet's sum, before gpu-count is written": {
			inventory: two, memory: "32552", want: Node{Unit: gpu.MiB, Cards: cards}, problem: "the inventory counts",
		},
		"an inventory that is ahead of gpu-count": {
			inventory: two, memory: "24414", count: "1", want: Node{Unit: gpu.MiB, Cards: cards},
		},
		"an inventory left behind, with the original plugin running": {
			inventory: two, memory: "30", count: "3",
			want:    Node{Cards: []gpu.Card{plain(0, 10), plain(1, 10), plain(2, 10)}},
			problem: "the inventory lists 2 cards, aliyun.com/gpu-count is 3: the node is read as 3 equal cards",
		},
		"an invalid inventory": {
			inventory: `{"version":9}`, memory: "32552", count: "2",
			want:    Node{Cards: []gpu.Card{plain(0, 16276), plain(1, 16276)}},
			problem: "the inventory can't be read: annotation gpushare.aliyun.com/inventory: inventory version 9",
		},
		"an invalid inventory without capacity": {
			inventory: `{`, want: Node{}, problem: "unexpected end of JSON input",
		},
		"the original plugin's node": {
			memory: "32552", count: "2", want: Node{Cards: []gpu.Card{plain(0, 16276), plain(1, 16276)}},
		},
		"a remainder belongs to no card": {
			memory: "33", count: "2", want: Node{Cards: []gpu.Card{plain(0, 16), plain(1, 16)}},
		},
		"memory without a count":         {memory: "32552", want: Node{}},
		"memory with a count of nothing": {memory: "32552", count: "0", want: Node{}},
		"a count without memory":         {count: "2", want: Node{}},
		"a count too large": {
			memory: "65536", count: "257", want: Node{}, problem: "aliyun.com/gpu-count is 257, which is ignored: a node has 256 cards at most",
		},
		"a count too large, beside an inventory that disagrees with the sum": {
			inventory: two, memory: "65536", count: "65536", want: Node{Unit: gpu.MiB, Cards: cards}, problem: "the inventory counts",
		},
		"an inventory with too many cards": {
			inventory: many(257), memory: "1", count: "257", want: Node{}, problem: "257 cards, want 256 at most",
		},
		"as many cards as a node can have": {inventory: many(256), memory: "256", count: "256", want: manyCards},
		"negative amounts":                 {memory: "-1", count: "-1", whole: "-1", want: Node{}},
		"no GPU":                           {want: Node{}},
		"whole cards beside memory": {
			inventory: two, memory: "24414", count: "2", whole: "2", want: Node{Unit: gpu.MiB, Cards: cards, WholeCards: true},
		},
		"whole cards beside the original plugin's memory": {
			memory: "32", count: "1", whole: "1", want: Node{Cards: []gpu.Card{plain(0, 32)}, WholeCards: true},
		},
		"a DRA driver beside memory": {
			inventory: strings.Replace(two, `"cards"`, `"draDriver":"gpu.nvidia.com","cards"`, 1), memory: "24414", count: "2",
			want: Node{Unit: gpu.MiB, Cards: cards, WholeCards: true},
		},
		"whole cards alone":                             {whole: "8", want: Node{}},
		"whole cards that are registered, none of them": {memory: "32", count: "1", whole: "0", want: Node{Cards: []gpu.Card{plain(0, 32)}}},
	} {
		t.Run(name, func(t *testing.T) {
			node := &corev1.Node{}
			if tc.inventory != "" {
				node.Annotations = map[string]string{AnnotationInventory: tc.inventory}
			}
			node.Status.Capacity = corev1.ResourceList{}
			maps.Copy(node.Status.Capacity, list(ResourceMemory, tc.memory))
			maps.Copy(node.Status.Capacity, list(ResourceCount, tc.count))
			maps.Copy(node.Status.Capacity, list(ResourceWholeCard, tc.whole))
			got := ParseNode(node)
			if (tc.problem == "") != (got.Problem == nil) || !strings.Contains(message(got.Problem), tc.problem) {
				t.Errorf("the problem is %v, want one that contains %q", got.Problem, tc.problem)
			}
			check.Equal(t, "the result", tc.want, got, cmpopts.IgnoreFields(Node{}, "Problem"))
		})
	}
}

// FuzzParseInventory checks that a valid inventory is within bounds and survives a round trip, and that ParseNode of a node
// with that annotation returns the same cards.
func FuzzParseInventory(f *testing.F) {
	f.Fuzz(func(t *testing.T, text string) {
		annotations := map[string]string{AnnotationInventory: text}
		got, err := ParseInventory(annotations)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "annotation "+AnnotationInventory+": ") || errors.Is(err, ErrNoInventory) {
				t.Errorf("the error doesn't say which annotation is wrong: %v", err)
			}
			expect(t, "beside an error", Inventory{}, got)
			return
		}
		if got.Unit <= 0 || len(got.Cards) > gpu.MaxNodeCards {
			t.Errorf("a unit of %d bytes, %d cards", got.Unit, len(got.Cards))
		}
		seen := map[int]bool{}
		for _, c := range got.Cards {
			if c.Index < 0 || c.Index > maxCard || seen[c.Index] || c.Memory < 0 || c.NUMANode < gpu.NoNUMANode {
				t.Errorf("out of bounds: %+v", got)
			}
			seen[c.Index] = true
		}
		written, err := got.Annotation()
		if err != nil {
			t.Fatalf("what was read can't be written: %v", err)
		}
		again, err := ParseInventory(map[string]string{AnnotationInventory: written})
		if err != nil {
			t.Fatalf("%s can't be read back: %v", written, err)
		}
		expect(t, "read back", got, again)
		node := ParseNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Annotations: annotations}})
		expect(t, "on a node without capacity", Node{Unit: got.Unit, Cards: got.Cards, Adapters: got.Adapters}, node)
		if sum := got.memory(); sum < 0 {
			t.Errorf("the cards add up to %d", sum)
		}
	})
}

func TestWholeCardResources(t *testing.T) {
	all := corev1.ResourceList{}
	for name, amount := range map[corev1.ResourceName]string{
		"nvidia.com/gpu": "2", "nvidia.com/gpu.shared": "8", "nvidia.com/mig-1g.10gb": "7", "nvidia.com/mig-2g.20gb": "0",
		"nvidia.com/gpumem": "3", "example.com/nvidia.com": "1", ResourceMemory: "16",
	} {
		maps.Copy(all, list(name, amount))
		node := &corev1.Node{Status: corev1.NodeStatus{Capacity: list(name, amount)}}
		maps.Copy(node.Status.Capacity, list(ResourceMemory, "16"))
		whole := name == "nvidia.com/gpu" || name == "nvidia.com/gpu.shared" || name == "nvidia.com/mig-1g.10gb"
		expect(t, string(name)+" beside memory", whole, ParseNode(node).WholeCards)
	}
	expect(t, "resources", []string{"nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"}, WholeCardResources(all))
}
