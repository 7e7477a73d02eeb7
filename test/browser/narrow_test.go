package browser

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// cut is a script for the texts that are cut, or off the screen.
const cut = `[...document.querySelectorAll(".figure, .tile .note, .caption span:last-child, .line b, .view:not([hidden]) td *, .view:not([hidden]) td")].filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0 || e.getBoundingClientRect().right > innerWidth).map((e) => e.innerText)`

// wantNothingCut looks at each view at each width, and takes pictures.
func wantNothingCut(tab *Tab, name string) {
	tab.t.Helper()
	for view, from := range map[string]int{"cards": 0, "pending": 0, "namespaces": 0, "pods": 2} { // The table of pods scrolls on narrow screens.
		tab.Click("#tab-" + view)
		for _, width := range widths[from:] {
			tab.Do(chromedp.EmulateViewport(width, 900))
			tab.Await("the rows", `document.querySelector(".view:not([hidden]) :is(.line, tbody tr)")`)
			if got := Eval[[]string](tab, cut); len(got) > 0 {
				tab.t.Errorf("at %d px these are cut in %s: %q", width, view, got)
			}
			if got := Eval[int64](tab, `document.documentElement.scrollWidth`); got > width {
				tab.t.Errorf("at %d px the page of %s is %d px wide", width, view, got)
			}
		}
		pictures(tab, name+"-"+view)
	}
}

// TestConnecting: before the extender has answered, the page claims nothing about the cluster.
func TestConnecting(t *testing.T) {
	board := newBoard(somePods())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	answer := make(chan struct{})
	serve(t, board, listener, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/data.json") {
			select {
			case <-answer:
			case <-r.Context().Done():
				return
			}
		}
		board.Handler().ServeHTTP(w, r)
	}))
	tab := Start(t, 1200, 700)
	tab.Do(chromedp.Navigate("http://" + listener.Addr().String() + "/ui/"))
	tab.Await("the page", `document.getElementById("empty").innerText.includes("Waiting for the extender")`)
	for id, want := range map[string]string{"largest": "–", "largest-where": "", "cards-count": "–", "cards-note": "", "count-pods": "", "count-pending": ""} {
		if got := tab.Text("#" + id); got != want {
			t.Errorf("%s is %q, want %q", id, got, want)
		}
	}
	close(answer)
	tab.Await("the nodes", `document.querySelectorAll(".line").length === 3`)
}

// TestMixedNodes: 200 nodes of two models have their model in their row, can be filtered by it, and sums have no long numbers. Pods beside each
// other on a card have different colours.
func TestMixedNodes(t *testing.T) {
	s := newSource()
	for n := range 200 {
		model, memory := "NVIDIA A100-SXM4-80GB", gpu.Memory(81559)
		if n%4 == 0 {
			model, memory = "Tesla T4", 16276
		}
		name := fmt.Sprintf("gpu-pool-europe-west4-node-%03d", n)
		spec := ledger.NodeSpec{Unit: gpu.MiB, Pool: fmt.Sprintf("pool-%d", n%3)}
		for c := range 4 {
			spec.Cards = append(spec.Cards, gpu.Card{Index: c, Model: model, Memory: memory, NUMANode: gpu.NoNUMANode})
		}
		s.book.SetNode(name, spec)
		for c := range 4 {
			for p := range 5 {
				id := fmt.Sprintf("%d-%d-%d", n, c, p)
				s.owners[fmt.Sprintf("team-%d/serve-%s", p, id)] = fmt.Sprintf("Deployment/serve-%d", c)
				s.book.SetBound(name, gpu.Pod{UID: gpu.PodUID(id), Namespace: fmt.Sprintf("team-%d", p), Name: "serve-" + id, Request: 3000}, gpu.On(c, 3000), time.Now())
			}
		}
	}
	s.change(func() {
		s.pending = []*clustercache.PodInfo{pendingPod(gpu.Pod{Namespace: "team-9", Name: "late", Request: 90000}, "", time.Now())}
	})
	tab := visit(t, s, "", 1600, 900)
	tab.Await("the nodes", `document.getElementById("shown").innerText === "200 nodes"`)
	if got := tab.Text("#memory-amount"); got != "11719 of 50967 GiB" {
		t.Errorf("the sum is %q", got)
	}
	if got := tab.Text(`[data-node="gpu-pool-europe-west4-node-001"] small`); !strings.Contains(got, "A100-SXM4-80GB") {
		t.Errorf("the row says %q", got)
	}
	if got := Eval[bool](tab, `(() => { const b = document.querySelector('[data-node="gpu-pool-europe-west4-node-001"] b'); return b.scrollWidth > b.clientWidth })()`); got {
		t.Error("the name of a node is cut")
	}
	if got := Eval[int](tab, `[...document.querySelectorAll(".segment + .segment")].filter((e) => e.className === e.previousSibling.className).length`); got != 0 {
		t.Errorf("%d pods have the colour of the pod beside them", got)
	}
	wantNothingCut(tab, "mixed")
	tab.Click("#tab-cards")
	choose := func(id, value string) {
		tab.Run(`(() => { const select = document.getElementById("` + id + `"); select.value = "` + value + `"; select.dispatchEvent(new Event("input", {bubbles: true})) })()`)
	}
	choose("model", "Tesla T4")
	tab.Await("the nodes of a model", `document.getElementById("shown").innerText === "50 of 200 nodes" && location.hash.includes("model=Tesla")`)
	choose("pool", "pool-1")
	tab.Await("those of a pool", `document.getElementById("shown").innerText === "17 of 200 nodes" && location.hash.includes("pool=pool-1")`)
	tab.Click("#tab-namespaces")
	tab.Await("the namespaces", `document.querySelectorAll("#view-namespaces tbody tr").length === 6`)
	if got := Eval[string](tab, `[...document.querySelectorAll("#view-namespaces tbody tr:last-child td")].map((td) => td.innerText).join()`); got != "team-9,0,0 MiB,1,90000 MiB,90000 MiB" {
		t.Errorf("the namespace with a pending pod: %s", got)
	}
	tab.Click(`#view-namespaces [data-search="team-0/"]`)
	tab.Await("its pods", `document.getElementById("shown").innerText === "800 of 4000 pods"`)
	if got := Eval[string](tab, `document.querySelector("#view-pods tbody tr:not([aria-hidden]) .age").innerText`); !strings.HasSuffix(got, "s") {
		t.Errorf("the age of a pod is %q", got)
	}
	tab.Run(`(() => { const search = document.getElementById("search"); search.value = "deployment/serve-3 team-1/"; search.dispatchEvent(new Event("input")) })()`)
	tab.Await("the pods of an owner", `document.getElementById("shown").innerText === "200 of 4000 pods"`)
	if got := Eval[string](tab, `document.querySelector("#view-pods tbody tr:not([aria-hidden]) td:nth-child(3)").innerText`); got != "Deployment/serve-3" {
		t.Errorf("the owner of a pod is %q", got)
	}
}
