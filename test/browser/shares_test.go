package browser

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/google/go-cmp/cmp"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/webui"
)

// TestShares: where tenants share the cluster, the page has a list of them and what they had over the last hour. Without fair sharing
// it has neither.
func TestShares(t *testing.T) {
	s := newSource()
	cards := make([]gpu.Card, 8)
	for i := range cards {
		cards[i] = gpu.Card{Index: i, Memory: 8, NUMANode: gpu.NoNUMANode}
	}
	s.book.SetNode("n0", ledger.NodeSpec{Unit: gpu.GiB, Cards: cards})
	clock := clocktesting.NewFakeClock(time.Date(2026, 11, 20, 9, 0, 0, 0, time.Local))
	board := webui.NewBoard(webui.Options{Source: s, Version: "v0.1.0", Clock: clock})
	url, _ := show(t, board)
	tab := Start(t, 1280, 800)
	tab.Do(chromedp.Navigate(url + "#groups"))
	tab.Await("the page", `document.getElementById("empty").innerText.includes("No groups")`)
	if !Eval[bool](tab, `document.getElementById("tab-shares").hidden`) {
		t.Error("without fair sharing there is a tab for it")
	}
	tab.Do(chromedp.Navigate("about:blank"), chromedp.Navigate(url+"#shares"))
	tab.Await("the explanation", `document.getElementById("empty").innerText.includes("Tenants don't share the cluster")`)

	// Bob has the whole cluster. Alice comes after twenty minutes, gets what becomes free, and later other tenants some.
	for i := range 360 {
		clock.Step(10 * time.Second)
		alice := gpu.Memory(min(max(i-120, 0)/4, 31))
		bob := dispatch.Tenant{Name: "bob", Terms: fairshare.DefaultTerms, Share: 64, Allocated: 63 - alice}
		tenants := []dispatch.Tenant{bob}
		if i >= 120 {
			tenants[0].Share = 32
			tenants = append(tenants, dispatch.Tenant{
				Name: "alice", Terms: fairshare.Terms{Weight: 1, Guaranteed: 8}, Share: 32, Allocated: alice, Waiting: 3, WaitingMemory: 12,
				Next: gpu.Pod{Namespace: "alice", Name: "train-3"}, Obstacle: reasons.ObstacleNoRoom,
			})
		}
		for j := range max(i-350, 0) {
			tenants[0].Allocated--
			tenants = append(tenants, dispatch.Tenant{Name: fmt.Sprintf("team-%d", j), Terms: fairshare.DefaultTerms, Share: 1, Allocated: 1})
		}
		s.change(func() { s.tenants = tenants })
		awaitSample(t, board, clock)
	}
	tab.Await("the tenants", `document.querySelectorAll("#view-shares tbody tr").length === 11`)
	cells := Eval[[]string](tab, `[...document.querySelectorAll("#view-shares tbody tr:first-child td")].map((td) => td.innerText)`)
	if diff := cmp.Diff([]string{"alice", "1", "8 GiB", "32 GiB", "31 GiB", "12 GiB", "3", "alice/train-3: no card has room for it now"}, cells); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	label := `document.querySelector("#view-shares svg").getAttribute("aria-label")`
	if got, want := Eval[string](tab, label), "Now alice 31 GiB of its share of 32, bob 23 GiB of its share of 32, team-0 1 GiB of its share of 1"; !strings.Contains(got, want) || !strings.Contains(got, "others 4 GiB") {
		t.Errorf("the chart is %q, want %q and others", got, want)
	}
	if got := Eval[int](tab, `document.querySelectorAll("#view-shares svg path[d]:not(.line-of-shares)").length`); got != 8 {
		t.Errorf("%d areas, want those of 7 tenants and of the others", got)
	}
	tab.Run(`document.querySelector("#view-shares svg").focus()`)
	tab.Type(kb.Home)
	if got := tab.Text("#view-shares .reading"); !strings.HasSuffix(got, "bob 63 GiB of its share of 64") {
		t.Errorf("the oldest sample reads %q", got)
	}
	tab.Run(`document.getElementById("tab-shares").focus()`)
	tab.Type(kb.ArrowRight)
	tab.Await("the first list after the last one", `!document.getElementById("view-cards").hidden`)
	tab.Type(kb.ArrowLeft)
	tab.Press("/")
	tab.Type("train-3")
	tab.Await("the tenant of the pod", `document.getElementById("shown").innerText === "1 of 11 tenants"`)
	tab.Type(strings.Repeat(kb.Backspace, len("train-3")))
	for _, theme := range []string{"light", "dark"} {
		tab.Run(`document.documentElement.dataset.theme = "` + theme + `"`)
		tab.Screenshot("shares-" + theme)
	}
	tab.Do(chromedp.EmulateViewport(420, 860))
	tab.Screenshot("narrow-shares")
	if Eval[bool](tab, `document.documentElement.scrollWidth > innerWidth`) {
		t.Error("the narrow page is wider than the window")
	}
	tab.WantNoComplaints()
}
