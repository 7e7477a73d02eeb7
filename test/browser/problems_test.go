package browser

import (
	"strconv"
	"strings"
	"testing"
	"time"
	"unique"

	"github.com/chromedp/chromedp"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/test/mistakes"
)

// TestNodeProblems: the page says of each node what kubectl inspect says of it. The number of cards has no card of a node that is gone, and the lists
// of cards and of pods agree about which cards the node's pods use.
func TestNodeProblems(t *testing.T) {
	counts := map[string]string{"a deleted node": "0", "a plugin that is down": "1"}
	used := map[string]string{"a deleted node": "GPU0 1", "a plugin that is down": "GPU0 1"}
	tab := Start(t, 1200, 700)
	for _, m := range mistakes.OfNodes() {
		s := newSource()
		s.book = diagnosis.NewLedger(m.Nodes, m.Pods)
		node, _ := s.book.Node("n1")
		if len(m.Problems) == 0 || node.Gone && len(m.Nodes) > 0 { // Only the scheduler knows that such a node exists.
			continue
		}
		url, _ := show(t, newBoard(s))
		tab.Do(chromedp.Navigate(url + "#cards?problems=only"))
		tab.Await("the node of "+m.Name, `document.querySelector('[data-node="n1"]')`)
		if got := Eval[string](tab, `document.querySelector('[data-node="n1"] small').title`); got != strings.Join(m.Problems, "\n") {
			t.Errorf("%s: problems %q, want %q", m.Name, got, m.Problems)
		}
		if got := tab.Text("#cards-problems"); !strings.Contains(got, "1 node has a problem") {
			t.Errorf("%s: the tile says %q", m.Name, got)
		}
		if want, ok := counts[m.Name]; ok {
			delete(counts, m.Name)
			if got := tab.Text("#cards-count"); got != want {
				t.Errorf("%s: the tile counts %q cards, want %q", m.Name, got, want)
			}
		}
		inCards := Eval[string](tab, `[...document.querySelectorAll('[data-node="n1"] .card')].map((card) => ["GPU" + card.dataset.card, card.querySelectorAll(".segment").length]).filter(([, n]) => n).map(([card, n]) => card + " " + n).sort().join()`)
		tab.Click("#tab-pods")
		tab.Await("the pods of "+m.Name, `document.querySelectorAll("#view-pods tbody tr:not([aria-hidden])").length === `+strconv.Itoa(len(node.Allocations)))
		inPods := Eval[string](tab, `(() => { const counts = {};
			for (const button of document.querySelectorAll('#view-pods [data-card^="n1/"]')) counts[button.innerText] = (counts[button.innerText] ?? 0) + 1;
			return Object.entries(counts).map(([card, n]) => card + " " + n).sort().join() })()`)
		if inCards != inPods {
			t.Errorf("%s: pods by card are %q in the list of cards, %q in that of pods", m.Name, inCards, inPods)
		}
		if want, ok := used[m.Name]; ok && inCards != want {
			t.Errorf("%s: pods by card are %q, want %q", m.Name, inCards, want)
		}
		tab.WantNoComplaints()
	}
	if len(counts) > 0 {
		t.Errorf("these mistakes are missing: %v", counts)
	}
}

// TestStranded: the page says how much memory is of no use and why, in the node's row, in the sum and beside a card, also when that changes. At no
// width is the sum cut.
func TestStranded(t *testing.T) {
	s := newSource()
	card := func(index int) gpu.Card {
		return gpu.Card{Index: index, Memory: 16, Model: "Tesla T4", NUMANode: gpu.NoNUMANode}
	}
	for _, name := range []string{"n1", "n2"} {
		s.book.SetNode(name, ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{card(0), card(1)}})
	}
	s.book.SetBound("n1", gpu.Pod{UID: "p", Namespace: "default", Name: "p", Request: 4}, gpu.On(0, 4), time.Now())
	kind := placement.Kind{Frequency: 1, Shape: placement.Shape{Demand: gpu.Demand{Cards: 1, Memory: 1}, NodeResources: placement.NodeResources{CPU: 1000}}}
	s.book.Expect([]placement.Kind{kind}, 0, placement.Binpack, func(unique.Handle[string]) []string { return []string{"n1", "n2"} })
	tab := visit(t, s, "#cards?card=n1/0", 1600, 900)
	tab.Await("the nodes", `document.querySelector('[data-node="n2"]')`)
	if got := tab.Text("#stranded") + tab.Text("#details dl"); strings.Contains(got, "of no use") {
		t.Errorf("nothing is stranded, the page says %q", got)
	}
	s.book.SetNodeResources("n1", placement.NodeResources{CPU: 500}, placement.NodeResources{})
	tab.Await("the sum", `document.getElementById("stranded").innerText`)
	for selector, want := range map[string]string{
		"#stranded":              "28 GiB free (44% of all), of no use: nodes lack CPU or node memory",
		`[data-node="n1"] small`: "4/32 GiB · 28 GiB free, of no use: the node lacks CPU · Tesla T4",
		`[data-node="n2"] small`: "0/32 GiB · Tesla T4",
	} {
		if got := tab.Text(selector); got != want {
			t.Errorf("%s: %q, want %q", selector, got, want)
		}
	}
	if got := tab.Text("#details dl"); !strings.Contains(got, "28 GiB free, of no use: the node lacks CPU") {
		t.Errorf("the details of a card: %q", got)
	}
	pictures(tab, "stranded")
	tab.Run(`location.hash = "#cards"`)
	tab.Await("the list alone", `document.getElementById("details").hidden`)
	pictures(tab, "stranded-list")
	for _, width := range widths {
		tab.Do(chromedp.EmulateViewport(width, 900))
		if got := Eval[bool](tab, `(() => { const note = document.getElementById("stranded"), tile = note.parentElement; return note.scrollHeight > note.clientHeight + 1 || tile.scrollHeight > tile.clientHeight + 1 })()`); got {
			t.Errorf("at %d px the sum is cut", width)
		}
		if got := Eval[[]string](tab, cut); len(got) > 0 {
			t.Errorf("at %d px these are cut: %q", width, got)
		}
	}
}
