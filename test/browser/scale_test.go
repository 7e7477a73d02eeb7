package browser

import (
	"testing"
	"time"

	"github.com/chromedp/chromedp"
)

// TestThousandNodes: of a thousand nodes of eight cards only visible rows are in the document, and each pod can be found. It logs how long the page
// takes.
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

	tab.Click("#tab-pods")
	tab.Do(chromedp.SendKeys(chromedp.CSS("#search"), "inference-900-3-1"))
	tab.Await("the pod to be found among 24,000", `document.querySelectorAll("#view-pods tbody tr:not([aria-hidden])").length === 1`)
	tab.Run(`document.getElementById("search").value = ""; document.getElementById("search").dispatchEvent(new Event("input")); document.getElementById("view-pods").scrollTop = 1e9`)
	tab.Await("the end of the table", `[...document.querySelectorAll("#view-pods tbody tr td:nth-child(5)")].some((td) => td.innerText === "gpu-node-0999")`)
	tab.WantNoComplaints()
}
