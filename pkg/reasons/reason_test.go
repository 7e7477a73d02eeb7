package reasons

import (
	"cmp"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

// one is the demand of a pod that asks for memory of one card.
var one = gpu.Demand{Cards: 1, Memory: 1}

func TestReasons(t *testing.T) {
	type words struct {
		Label, Text  string
		Unresolvable bool
	}
	want := map[Reason]words{
		Fits:              {"fits", "fits", false},
		Reserved:          {"reserved", "free GPU memory is reserved for a group or pod that came first", false},
		ResourcesReserved: {"resources_reserved", "free CPU, memory or pods of the node are reserved for a group or pod that came first", false},

		Fragmented: {"fragmented", "no GPU card has enough free memory, though the node's cards together have", false},
		Full:       {"full", "no GPU card has enough free memory", false},
		Crowded:    {"crowded", "no GPU card with enough free memory takes more containers by MPS", false},
		Unhealthy:  {"unhealthy", "the GPU cards that are large enough are unhealthy", true},
		Elsewhere:  {"elsewhere", "the pod is bound to another node, or an earlier bind to one is unconfirmed", true},
		TooLarge:   {"too_large", "the pod asks for more GPU memory than any card of the node has", true},
		WholeCards: {"whole_cards", "the node also offers its cards by nvidia.com/gpu or DRA, which excludes sharing them", true},
		NotShared:  {"not_shared", "the node shares no GPU memory", true},

		OldForCards:  {"old_for_cards", "the node's GPU device plugin is too old for pods with several cards", true},
		OldForCores:  {"old_for_cores", "the node's GPU device plugin is too old for aliyun.com/gpu-core.percentage", true},
		OldForLimits: {"old_for_limits", "the node's GPU device plugin is too old for limits above requests", true},
		OneCardOnly:  {"one_card_only", "the node enforces GPU memory by MPS, which allows one card for each pod", true},

		NoOwnSharedMemory: {"no_own_shared_memory", "the node enforces GPU memory by MPS, which allows no volume of the pod at /dev/shm", true},
		LimitBelowRequest: {"limit_below_request", "the annotated limit of GPU memory of a container is less than its request: raise the limit", true},
		LimitTooLarge:     {"limit_too_large", "the annotated limit of GPU memory of a container is more than any card of the node has: lower the limit", true},
		OldForRDMA:        {"old_for_rdma", "the node's GPU device plugin is too old for the label gpushare.aliyun.com/rdma", true},
		NoAdapter:         {"no_adapter", "no GPU card of the node is near an RDMA adapter with an active port", true},

		NoLimitAboveRequest: {"no_limit_above_request", "the node enforces GPU memory by MPS, which allows no limit above the request: remove the annotation", true},

		255: {"unknown", "unknown reason", true},
		99:  {"unknown", "unknown reason", true},
	}
	got := map[Reason]words{}
	for _, r := range append(OfNodes(), Fits, 99, 255) {
		got[r] = words{r.String(), r.Text(), r.Unresolvable()}
	}
	check.Equal(t, "the result", want, got)
}

func TestTextFor(t *testing.T) {
	cores, cards := gpu.Demand{Cards: 1, Memory: 1, Cores: 5}, gpu.Demand{Cards: 2, Memory: 1}
	both, containers := gpu.Demand{Cards: 2, Memory: 1, Cores: 5}, gpu.Demand{Cards: 1, Memory: 1, Containers: 2}
	near := []gpu.Demand{one, cores, cards, both, containers}
	for i := range near {
		near[i].RDMA = gpu.RDMARequired
	}
	for text, demands := range map[string]map[Reason][]gpu.Demand{
		"no GPU card of the node is near an RDMA adapter with an active port":                        {NoAdapter: near},
		"no GPU card has enough free memory":                                                         {Full: {one, containers}},
		"too few GPU cards have enough free memory and cores":                                        {Full: append(near, cores, cards, both)},
		"too few GPU cards have enough free memory and cores, though the node's cards together have": {Fragmented: append(near, cores, cards, both)},
		"too few of the GPU cards that are large enough are healthy":                                 {Unhealthy: append(near, cores, cards, both)},
		"the pod asks for more GPU memory than any card of the node has":                             {TooLarge: {one}},
		"too few GPU cards of the node are large enough for the pod, or take as many containers":     {TooLarge: append(near, cores, cards, both, containers)},
		"the node shares no GPU memory":                                                              {NotShared: {one, cores, cards, both}},
	} {
		for reason, demands := range demands {
			for _, demand := range demands {
				if got := reason.TextFor(demand, "default/train"); got != text || byText[text] != reason {
					t.Errorf("%v: got %q, want %q", demand, got, text)
				}
			}
		}
	}
}

// Labels are unique, and the form of a reason in JSON. Each reason is one of nodes, of pods, or of both.
func TestLabels(t *testing.T) {
	labels := map[string]bool{}
	for r := range Reason(len(table)) {
		label, err := r.MarshalText()
		var parsed Reason
		if err := cmp.Or(err, parsed.UnmarshalText(label)); err != nil || parsed != r {
			t.Errorf("%s: parsed %s, %v", label, parsed, err)
		}
		if labels[r.String()] = true; len(labels) != int(r)+1 || r.Text() == "" && r.Words() == "" {
			t.Errorf("%s: label, text or words", r)
		}
	}
	if err := new(Reason).UnmarshalText([]byte("nothing")); err == nil {
		t.Error("an unknown label is accepted")
	}
}
