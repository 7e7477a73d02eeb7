package browser

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"
	"unique"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/webui"
	"github.com/gpushare/gpushare/test/await"
)

// fleet makes a cluster as there might be one, with something of everything that can be seen.
func fleet(s *source) (step func(i int)) {
	random := rand.New(rand.NewPCG(7, 7))
	for _, kind := range []struct {
		name, model  string
		nodes, cards int
		memory       gpu.Memory
	}{
		{"a100", "NVIDIA A100-SXM4-80GB", 5, 8, 80},
		{"h200", "NVIDIA H200", 3, 8, 141},
		{"l40s", "NVIDIA L40S", 4, 4, 48},
		{"t4", "Tesla T4", 4, 2, 16},
	} {
		for n := range kind.nodes {
			spec := ledger.NodeSpec{Unit: gpu.GiB, Pool: map[int]string{0: "spot", 1: "reserved"}[n%2]}
			for c := range kind.cards {
				card := gpu.Card{Index: c, UUID: fmt.Sprintf("GPU-5c0ffee%d-%04x-4000-8000-00000000%04x", n, c, n*16+c), Model: kind.model, Memory: kind.memory, NUMANode: c / 4}
				if kind.name == "l40s" && n == 1 && c == 2 {
					card.Unhealthy = "Xid 79: the GPU has fallen off the bus"
				}
				spec.Cards = append(spec.Cards, card)
			}
			name := fmt.Sprintf("gpu-%s-%02d", kind.name, n+1)
			s.book.SetNode(name, spec)
			for c := range kind.cards {
				if kind.name != "h200" {
					break
				}
				s.owners[fmt.Sprintf("search/gateway-%d", n*kind.cards+c)] = "StatefulSet/gateway"
				// So that 130 GiB are free of each of these nodes, but of none of its cards.
				s.book.SetBound(name, gpu.Pod{
					UID: gpu.PodUID(fmt.Sprintf("gateway-%d-%d", n, c)), Namespace: "search", Name: fmt.Sprintf("gateway-%d", n*kind.cards+c), Request: 20,
				}, gpu.On(c, 20), s.clock.Now())
			}
		}
	}
	teams := []string{"search", "ads", "speech", "research", "notebooks", "vision"}
	apps := []string{"embedder", "reranker", "chat-small", "transcribe", "notebook-amelie", "notebook-jonas", "detector", "batch-score"}
	var pods []gpu.PodUID
	return func(i int) {
		nodes := s.book.Nodes()
		for range 3 {
			if len(pods) > 140+i/4 {
				k := random.IntN(len(pods))
				s.book.Remove(pods[k])
				pods = append(pods[:k], pods[k+1:]...)
				continue
			}
			uid := gpu.PodUID(fmt.Sprintf("pod-%d-%d", i, random.Uint64()))
			team, app := teams[random.IntN(len(teams))], apps[random.IntN(len(apps))]
			pod := gpu.Pod{
				UID: uid, Namespace: team, Name: fmt.Sprintf("%s-%05x", app, random.IntN(1<<20)),
				Request: gpu.Memory([]int{2, 4, 8, 10, 16, 24, 40}[random.IntN(7)]),
			}
			node := nodes[random.IntN(len(nodes))].Name
			// Like the extender: first a card is assumed, then the pod is bound to it.
			reserved, err := s.book.Reserve(node, pod, placement.Binpack, time.Time{})
			if err != nil {
				continue // No room there.
			}
			s.change(func() { s.owners[pod.String()] = "Deployment/" + app })
			pod.Leaving = random.IntN(60) == 0
			s.book.SetBound(node, pod, reserved.Placement, s.clock.Now())
			pods = append(pods, uid)
		}
	}
}

// widths are those of the pictures: a telephone, half a screen, a screen.
var widths = []int64{400, 900, 1600}

// pictures takes a picture at each width in each theme.
func pictures(tab *Tab, name string) {
	tab.t.Helper()
	if os.Getenv(ScreenshotsEnv) == "" {
		return
	}
	for _, width := range widths {
		tab.Do(chromedp.EmulateViewport(width, 900))
		for _, theme := range []string{"light", "dark"} {
			tab.Run(`document.documentElement.dataset.theme = "` + theme + `"`)
			tab.Screenshot(fmt.Sprintf("%s-%d-%s", name, width, theme))
		}
	}
}

// TestLook takes the pictures of the documentation.
func TestLook(t *testing.T) {
	s := newSource()
	clock := clocktesting.NewFakeClock(time.Date(2026, 11, 20, 9, 0, 0, 0, time.Local))
	s.clock = clock
	step := fleet(s)
	for i := range 100 {
		step(i)
	}
	board := webui.NewBoard(webui.Options{Source: s, Version: "v0.1.0", Clock: clock})
	url, _ := show(t, board)
	waits := func(name, namespace string, request gpu.Memory, ago time.Duration, reason string) *clustercache.PodInfo {
		pod := pendingPod(gpu.Pod{UID: gpu.PodUID(name), Namespace: namespace, Name: name, Request: request}, reason, clock.Now().Add(-ago))
		pod.Owner = unique.Make(clustercache.Owner{Kind: "Job", Name: name[:strings.LastIndex(name, "-")]})
		return pod
	}
	// An hour passes, for the history.
	for i := range 360 {
		step(100 + i)
		clock.Step(10 * time.Second)
		awaitSample(t, board, clock)
	}
	// In kube-scheduler's words: 4 l40s and 4 t4 don't have the sum, the extender rejects the other 8.
	says := func(ours string, helpless int) string {
		preemption := fmt.Sprintf("%d Preemption is not helpful for scheduling", helpless)
		if helpless < 16 {
			preemption = fmt.Sprintf("%d No preemption victims found for incoming pod, %s", 16-helpless, preemption)
		}
		return fmt.Sprintf("0/16 nodes are available: %s, 8 Insufficient aliyun.com/gpu-mem. no new claims to deallocate, preemption: 0/16 nodes are available: %s.", ours, preemption)
	}
	s.wait(
		waits("train-7b-0", "research", 130, 26*time.Minute, says(fmt.Sprintf("3 %s, 5 %s", reasons.Full.Text(), reasons.TooLarge.Text()), 13)),
		waits("train-13b-0", "research", 131, 25*time.Minute, says(fmt.Sprintf("3 %s, 5 %s", reasons.Full.Text(), reasons.TooLarge.Text()), 13)),
		waits("batch-score-9f2c1", "ads", 160, 4*time.Hour, says(fmt.Sprintf("8 %s", reasons.TooLarge.Text()), 16)),
		waits("notebook-ines-0", "notebooks", 16, time.Second, ""),
	)
	s.change(func() {
		s.problems = []*clustercache.PodInfo{
			{PodUse: eligibility.PodUse{Pod: gpu.Pod{Namespace: "ads", Name: "ranker-0"}}, RequestProblem: "container main asks for aliyun.com/gpumem, which gpushare doesn't know: write aliyun.com/gpu-mem"},
		}
		s.groups = []gang.Report{
			{
				Group: gang.Key{Namespace: "research", Name: "train-7b"}, Phase: gang.PhasePending, Size: 4, Counted: 4, Memory: 520, Since: clock.Now().Add(-26 * time.Minute),
				Pending: []string{"train-7b-0", "train-7b-1", "train-7b-2", "train-7b-3"}, Reason: reasons.GroupNoRoom,
			},
			{Group: gang.Key{Namespace: "search", Name: "gateway"}, Phase: gang.PhaseRunning, Size: 2, Counted: 2, Memory: 40, Bound: []string{"gateway-0", "gateway-1"}, Since: clock.Now().Add(-time.Hour)},
			{Group: gang.Key{Namespace: "vision", Name: "sweep"}, Size: 3, Counted: 2, Memory: 20, Pending: []string{"sweep-0", "sweep-1"}, Since: clock.Now().Add(-5 * time.Minute), Reason: reasons.GroupIncomplete(2, 3)},
		}
	})
	if _, err := s.book.Reserve("gpu-a100-04", gpu.Pod{UID: "r", Namespace: "vision", Name: "detector-3b1e0", Request: 24}, placement.Binpack, clock.Now()); err != nil {
		t.Fatal(err)
	}
	s.book.SetBound("gpu-l40s-03", gpu.Pod{UID: "over", Namespace: "speech", Name: "transcribe-old", Request: 50}, gpu.On(1, 50), clock.Now())
	clock.Step(time.Second)

	tab := Start(t, 1440, 900)
	tab.Do(chromedp.Navigate(url))
	tab.Await("the nodes", `document.querySelectorAll(".line").length >= 14`)
	if got := tab.Text("#count-pending"); got != "4 ⚠" {
		t.Errorf("%q pods are pending", got)
	}
	ill := Eval[string](tab, `document.querySelector(".card.ill").getAttribute("aria-label")`)
	if !strings.Contains(ill, "unhealthy: Xid 79") || !strings.Contains(ill, "gpu-l40s-02 GPU 2") {
		t.Errorf("the unhealthy card is %q", ill)
	}
	if !strings.Contains(Eval[string](tab, `document.querySelector(".card.over").getAttribute("aria-label")`), "more is allocated than the card has") {
		t.Error("the card that is over its memory isn't marked")
	}
	if got := Eval[int](tab, `document.querySelectorAll(".segment.assumed").length`); got != 1 {
		t.Errorf("%d segments are shown as binds in flight", got)
	}
	themes := func(name string) {
		t.Helper()
		for _, theme := range []string{"light", "dark"} {
			tab.Run(`document.documentElement.dataset.theme = "` + theme + `"`)
			tab.Screenshot(name + "-" + theme)
		}
		tab.Run(`document.documentElement.dataset.theme = "light"`)
	}
	tab.Run(`document.querySelector('[data-node="gpu-a100-02"] [data-card="1"]').dispatchEvent(new MouseEvent("mouseover", {bubbles: true}))`)
	tab.Await("the tip", `!document.getElementById("tip").hidden`)
	themes("cards")
	tab.Click(`[data-node="gpu-l40s-02"] [data-card="2"]`)
	tab.Await("the details", `document.querySelector("#details h2")?.innerText === "gpu-l40s-02 · GPU 2"`)
	tab.Screenshot("details")
	tab.Type("\x1b")
	tab.Click("#tab-pods")
	tab.Await("the table", `document.querySelectorAll("#view-pods tbody tr").length > 10`)
	tab.Click(`#view-pods [data-column="memory"]`)
	themes("pods")
	tab.Click("#tab-pending")
	tab.Await("the pending pods", `document.querySelectorAll("#view-pending tbody tr").length === 5`)
	const want = "– no card is large enough,0 free memory is in pieces,1 free memory is in pieces,– about to be tried"
	if got := Eval[string](tab, `[...document.querySelectorAll("#view-pending tbody td.ahead")].map((td) => td.innerText + " " + td.nextSibling.innerText).join()`); got != want {
		t.Errorf("what is ahead, and the causes, are %s", got)
	}
	tab.Do(chromedp.EmulateViewport(1440, 720)) // Five rows need no more.
	themes("pending")
	tab.Click(`[data-help="fragmented"]`)
	themes("cause")
	tab.Type(kb.Escape)
	tab.Click("#tab-groups")
	themes("groups")
	for _, view := range []string{"cards", "pods", "pending", "groups"} {
		tab.Click("#tab-" + view)
		pictures(tab, "fleet-"+view)
		tab.Do(chromedp.EmulateViewport(900, 900))
		if got := Eval[[]string](tab, cut); view == "cards" && len(got) > 0 {
			t.Errorf("on half a screen these are cut: %q", got)
		}
	}
	tab.WantNoComplaints()
}

// awaitSample waits until the history has a sample of the clock's time.
func awaitSample(t *testing.T, board *webui.Board, clock *clocktesting.FakeClock) {
	t.Helper()
	want := fmt.Sprintf(`{"time":%d,"total"`, clock.Now().Unix())
	await.True(t, "a sample of the clock's time", func() bool { return strings.Contains(string(board.State("")), want) })
}

// TestLastHour: as long as there is no hour of samples, the chart of the free memory shows what there is, over its whole width, and says how
// much its height is and since when it is kept.
func TestLastHour(t *testing.T) {
	s := newSource()
	fill(s, 1, 2, 1)
	clock := clocktesting.NewFakeClock(time.Date(2026, 11, 20, 9, 0, 0, 0, time.Local))
	s.clock = clock
	board := webui.NewBoard(webui.Options{Source: s, Version: "v0.1.0", Clock: clock})
	url, _ := show(t, board)
	tab := Start(t, 1200, 700)
	tab.Do(chromedp.Navigate(url))
	for i, since := range []string{"last 20s, up to 160 GiB", "last 20s, up to 160 GiB", "last 30s, up to 160 GiB"} {
		if i > 0 { // The first sample is taken when the board starts.
			clock.Step(10 * time.Second)
		}
		awaitSample(t, board, clock)
		tab.Await("the sample", fmt.Sprintf(`document.querySelector("#chart path.whole")?.getAttribute("d").split(",").length === 1 + %d`, 2*max(i+1, 2)))
		path := Eval[string](tab, `document.querySelector("#chart path.whole").getAttribute("d")`)
		if !strings.HasPrefix(path, "M0,") || !strings.Contains(path, "L3600,") {
			t.Errorf("%d samples: the area is %s, want one from 0 to 3600", i+1, path)
		}
		if got := tab.Text("#chart-since"); got != since {
			t.Errorf("%d samples: the text is %q, want %q", i+1, got, since)
		}
	}
	if got := Eval[string](tab, `document.getElementById("chart-since").title`); got != "kept since 09:00:00, lost when the extender restarts" {
		t.Errorf("the title is %q", got)
	}
	for _, width := range widths {
		tab.Do(chromedp.EmulateViewport(width, 900))
		if Eval[bool](tab, `(() => { const text = document.getElementById("chart-since").getBoundingClientRect(), tile = document.getElementById("tile-chart").getBoundingClientRect();
			return text.bottom > tile.bottom || text.right > tile.right || document.getElementById("chart").getBoundingClientRect().height < 30 })()`) {
			t.Errorf("at %d px the text is cut, or the chart is too low", width)
		}
	}
	tab.WantNoComplaints()
}
