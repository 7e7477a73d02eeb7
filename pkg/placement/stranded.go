package placement

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Shortage is what a node lacks so that pods can't use its free GPU memory.
type Shortage int

// What a node can lack.
const (
	ShortOfCPU Shortage = iota
	ShortOfNodeMemory
	// ShortOfBoth is for memory for which each kind of pods lacks both.
	ShortOfBoth
	shortages
)

var shortageNames = [shortages]string{"cpu", "memory", "cpu_and_memory"}

// shortageWords are for users.
var shortageWords = [shortages]string{"CPU", "node memory", "CPU and node memory"}

// String returns the name, as in metrics.
func (s Shortage) String() string { return shortageNames[s] }

// Stranded is free memory of cards by what their nodes lack.
type Stranded [shortages]gpu.Memory

// Text says for users how much of a node's memory is of no use, and why; empty if nothing is stranded. unit is the node's.
func (s *Stranded) Text(unit gpu.Unit) string {
	var parts []string
	for shortage, memory := range s {
		if memory > 0 {
			parts = append(parts, fmt.Sprintf("%s free, of no use: the node lacks %s", unit.Format(memory), shortageWords[shortage]))
		}
	}
	return strings.Join(parts, "; ")
}

// MarshalJSON writes an object with the amounts that aren't zero, by the names of the shortages.
func (s Stranded) MarshalJSON() ([]byte, error) {
	amounts := map[string]gpu.Memory{}
	for shortage, memory := range s {
		if memory > 0 {
			amounts[Shortage(shortage).String()] = memory
		}
	}
	return json.Marshal(amounts)
}

// Stranded returns the node's free memory on cards that pods of some expected kind could use, if the node had more CPU or memory free, but that
// none can use now. What no kind could use in any case isn't counted: that is fragmentation.
func (o *Outlook) Stranded(n *NodeRoom) (stranded Stranded) {
	plenty := NodeRoom{Cards: n.Cards, NodeResources: NodeResources{CPU: 1 << 40, NodeMemory: 1 << 50}, Excluded: n.Excluded}
	const nothing = ShortOfCPU - 1
	lacks := slices.Repeat([]Shortage{shortages}, len(n.Cards)) // By card: the least of what its kinds lack; shortages if no kind could use it.
	for i := range o.kinds {
		kind := &o.kinds[i]
		if plenty.roomFor(i, kind, make([]float64, len(plenty.Cards))).pods == 0 {
			continue
		}
		lack := ShortOfBoth
		switch enoughCPU, enoughMemory := n.CPU >= kind.CPU, n.NodeMemory >= kind.NodeMemory; {
		case enoughCPU && enoughMemory:
			lack = nothing
		case enoughMemory:
			lack = ShortOfCPU
		case enoughCPU:
			lack = ShortOfNodeMemory
		}
		for position := range n.Cards {
			if card := &n.Cards[position]; kind.sharesOf(card, float64(card.Free())) > 0 {
				lacks[position] = min(lacks[position], lack)
			}
		}
	}
	for position, lack := range lacks {
		if lack != nothing && lack != shortages {
			stranded[lack] = stranded[lack].Add(n.Cards[position].Free())
		}
	}
	return stranded
}
