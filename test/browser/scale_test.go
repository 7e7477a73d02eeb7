package browser

import (
	"fmt"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/controlplane"
)

// TestThousandNodes logs how long the page takes with a thousand nodes of eight cards.
func TestThousandNodes(t *testing.T) {
	s := newSource()
	fill(s, 1000, 8, 3)
	url, _ := show(t, newBoard(s))
	tab := Start(t, 1440, 900)

	start := time.Now()
	tab.Do(chromedp.Navigate(url))
	tab.Await("the nodes", `document.querySelectorAll(".line").length > 5`)
	t.Logf("nodes were shown %v after the navigation", time.Since(start).Round(time.Millisecond))
	t.Logf("by the browser's own clock: first paint %.0f ms, nodes drawn %.0f ms, whole board read in one go",
		Eval[float64](tab, `performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? -1`),
		Eval[float64](tab, `performance.getEntriesByName("gpushare:first-data")[0].startTime`))
	if rows := Eval[int](tab, `document.querySelectorAll(".line").length`); rows > 60 {
		t.Errorf("%d of 1,000 rows are in the document: more than are visible", rows)
	}
	tab.Screenshot("scale")

	updates := controlplane.Times(2, 10)
	for _, view := range []string{"cards", "pods"} {
		tab.Click("#tab-" + view)
		tab.Run(`window.spent = {apply: [], draw: [], long: []};
			new PerformanceObserver((list) => { for (const e of list.getEntries()) {
				if (e.name === "gpushare:apply") spent.apply.push(e.duration);
				if (e.name === "gpushare:draw") spent.draw.push(e.duration);
				if (e.entryType === "longtask") spent.long.push(e.duration);
			} }).observe({entryTypes: ["measure", "longtask"]})`)
		before := tab.Busy()
		for i := range updates {
			// Three nodes change, one of them visible.
			for _, node := range []int{3, 400, 900} {
				s.book.SetBound(fmt.Sprintf("gpu-node-%04d", node), gpu.Pod{
					UID: gpu.PodUID(fmt.Sprintf("new-%s-%d-%d", view, node, i)), Namespace: "fresh", Name: fmt.Sprintf("%s-%d-%d", view, node, i), Request: 1,
				}, gpu.On(i%8, 1), time.Time{})
			}
			tab.Await("the update to be drawn", fmt.Sprintf(`spent.draw.length > %d`, i))
		}
		after := tab.Busy()
		t.Logf("%s: %d updates, %.1f ms of the main thread for each, with all of the browser's work and the test's own queries; the page's script alone: at most %.1f ms to apply, %.1f ms to draw; tasks over 50 ms: %s",
			view, updates, float64((after-before).Microseconds())/1000/float64(updates),
			Eval[float64](tab, `Math.max(...spent.apply)`), Eval[float64](tab, `Math.max(...spent.draw)`), Eval[string](tab, `JSON.stringify(spent.long)`))
	}

	tab.Do(chromedp.SendKeys(chromedp.CSS("#search"), fmt.Sprintf("fresh/pods-900-%d", updates-1)))
	tab.Await("the pod to be found among 24,000", `document.querySelectorAll("#view-pods tbody tr:not([aria-hidden])").length === 1`)
	tab.Run(`document.getElementById("search").value = ""; document.getElementById("search").dispatchEvent(new Event("input")); document.getElementById("view-pods").scrollTop = 1e9`)
	tab.Await("the end of the table", `[...document.querySelectorAll("#view-pods tbody tr td:nth-child(5)")].some((td) => td.innerText === "gpu-node-0999")`)
	tab.WantNoComplaints()
}
