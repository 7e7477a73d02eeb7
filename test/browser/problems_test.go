package browser

import (
	"strings"
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/test/mistakes"
)

// TestNodeProblems: the page says of each node what kubectl inspect says of it.
func TestNodeProblems(t *testing.T) {
	for _, m := range mistakes.OfNodes() {
		s := newSource()
		s.book = diagnosis.NewLedger(m.Nodes, m.Pods)
		node, _ := s.book.Node("n1")
		if len(m.Problems) == 0 || node.Gone && len(m.Nodes) > 0 { // Only the scheduler knows that such a node exists.
			continue
		}
		url, _ := show(t, newBoard(s))
		tab := Start(t, 1200, 700)
		tab.Do(chromedp.Navigate(url + "#cards?problems=only"))
		tab.Await("the node of "+m.Name, `document.querySelector('[data-node="n1"]')`)
		if got := Eval[string](tab, `document.querySelector('[data-node="n1"] small').title`); got != strings.Join(m.Problems, "\n") {
			t.Errorf("%s: problems %q, want %q", m.Name, got, m.Problems)
		}
		if got := tab.Text("#cards-problems"); !strings.Contains(got, "1 node has a problem") {
			t.Errorf("%s: the tile says %q", m.Name, got)
		}
		tab.WantNoComplaints()
	}
}
