package browser

import (
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// TestNames shows names that contain HTML, behind a path prefix. They are text, not HTML.
func TestNames(t *testing.T) {
	const hostile = `<img src=x onerror="window.broken=1"><script>window.broken=1</script>`
	s := newSource()
	s.book.SetNode(hostile, ledger.NodeSpec{Unit: gpu.GiB, Pool: hostile, Cards: []gpu.Card{
		{Index: 0, Memory: 16, Model: hostile, UUID: hostile, Unhealthy: hostile},
	}})
	s.owners[hostile+"/"+hostile] = hostile
	s.book.SetBound(hostile, gpu.Pod{UID: "1", Namespace: hostile, Name: hostile, Request: 4}, gpu.On(0, 4), time.Time{})
	s.wait(pendingPod(gpu.Pod{UID: "2", Namespace: hostile, Name: hostile, Request: 4}, hostile, time.Time{}))
	board := newBoard(s)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	const prefix = "/tools/gpushare"
	serve(t, board, listener, http.StripPrefix(prefix, board.Handler()))

	tab := Start(t, 1200, 700)
	tab.Do(chromedp.Navigate("http://" + listener.Addr().String() + prefix + "/ui"))
	tab.Await("the node", `document.querySelector(".line .node b")?.innerText === `+"`"+hostile+"`")
	tab.Click(".card")
	tab.Await("the details", `document.getElementById("details").innerText.includes("onerror")`)
	tab.Type("\x1b")
	for _, view := range []string{"pods", "pending"} {
		tab.Click("#tab-" + view)
		tab.Await(view, `document.getElementById("view-`+view+`").innerText.includes("onerror")`)
	}
	if Eval[bool](tab, `Boolean(window.broken || document.querySelector("main img, main script, aside img, aside script"))`) {
		t.Error("a name was interpreted as HTML")
	}
	tab.WantNoComplaints()
}
