package browser

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

// rows are the names of what the page lists.
func rows(tab *Tab) []string {
	return Eval[[]string](tab, `[...document.querySelectorAll(".view:not([hidden]) .line, .view:not([hidden]) tbody tr:not([aria-hidden])")].map((row) => row.dataset.node ?? row.children[1].innerText)`)
}

func wantRows(t *testing.T, tab *Tab, when string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, rows(tab), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("%s, at %s (-want +got):\n%s", when, Eval[string](tab, "location.hash"), diff)
	}
}

// somePods makes three nodes of one card, with a unit in which amounts are large, and a group of which one member is bound.
func somePods() *source {
	s := newSource()
	for i, memory := range []gpu.Memory{16276, 24564, 81559} {
		name := fmt.Sprintf("n%d", i)
		s.book.SetNode(name, ledger.NodeSpec{Unit: gpu.MiB, Cards: []gpu.Card{{Memory: memory, Model: fmt.Sprintf("model-%d", i)}}})
		s.book.SetBound(name, gpu.Pod{UID: gpu.PodUID(name), Namespace: "ns", Name: "bound-" + name, Request: 16000}, gpu.On(0, 16000), time.Time{})
	}
	const tried = "0/3 nodes are available: 3 Insufficient aliyun.com/gpu-mem."
	created := time.Now().Add(-26 * time.Minute)
	s.change(func() {
		s.pending = []*clustercache.PodInfo{
			pendingPod(gpu.Pod{Namespace: "ns", Name: "large", Request: 90000}, tried, created),
			pendingPod(gpu.Pod{Namespace: "ns", Name: "member", Request: 70000}, tried, created),
		}
		s.problems = []*clustercache.PodInfo{{PodUse: eligibility.PodUse{Pod: gpu.Pod{Namespace: "ns", Name: "typo"}}, RequestProblem: "is aliyun.com/gpu-mem meant?"}}
		s.groups = []gang.Report{{
			Group: gang.Key{Namespace: "ns", Name: "train"}, Phase: gang.PhaseBroken, Size: 2, Counted: 2, Memory: 86000,
			Bound: []string{"bound-n1"}, Pending: []string{"member"}, Reason: reasons.GroupBroken(1, 2), Since: created,
		}}
	})
	return s
}

// TestAddress: the page's address has everything that decides what is shown.
func TestAddress(t *testing.T) {
	url, _ := show(t, newBoard(somePods()))
	tab := Start(t, 1280, 800)
	open := func(address string) {
		t.Helper()
		tab.Do(chromedp.Navigate("about:blank"), chromedp.Navigate(url+address))
		tab.Await("the page", `document.getElementById("shown").innerText`)
	}
	for address, want := range map[string][]string{
		"":                        {"n0", "n1", "n2"},
		"#nonsense?no=1":          {"n0", "n1", "n2"},
		"#cards?q=model-1":        {"n1"},
		"#cards?room=8000":        {"n1", "n2"},
		"#cards?order=free":       {"n2", "n1", "n0"},
		"#pods?sort=-node":        {"bound-n2", "bound-n1", "bound-n0"},
		"#pods?sort=nonsense":     {"bound-n0", "bound-n1", "bound-n2"},
		"#pods?group=ns/train":    {"bound-n1"},
		"#pending?group=ns/train": {"member"},
		"#pending?q=too_large":    {"large"},
		"#pending?sort=-name":     {"member", "large", "typo"},
		"#groups?q=train":         {"train"},
	} {
		open(address)
		wantRows(t, tab, "opened", want...)
	}
	open("#cards?card=n1/0")
	tab.Await("the card's details", `document.querySelector("#details h2")?.innerText === "n1 · GPU 0"`)
	open("#groups?help=broken")
	tab.Await("the explanation", `document.querySelector("#details h2")?.innerText === "broken"`)
	open("#pending?help=constructor")
	tab.Await("the advice for an unknown name", `document.querySelector("#details h2")?.innerText === "constructor"`)

	// Each step can be undone with the browser's button, typing in one step.
	open("")
	steps := []struct {
		do   func()
		want []string
	}{
		{func() {}, []string{"n0", "n1", "n2"}},
		{func() { tab.Press("/"); tab.Type("n1") }, []string{"n1"}},
		{func() { tab.Click("#problems") }, nil},
		{func() { tab.Click("#problems") }, []string{"n1"}},
		{func() { tab.Click("#tab-pods") }, []string{"bound-n1"}},
		{func() { tab.Run(`document.getElementById("search").select()`); tab.Type("bound") }, []string{"bound-n0", "bound-n1", "bound-n2"}},
		{func() { tab.Click(`#view-pods [data-column="name"]`); tab.Click(`#view-pods [data-column="name"]`) }, []string{"bound-n2", "bound-n1", "bound-n0"}},
		{func() { tab.Click("#view-pods tbody .link") }, []string{"bound-n2", "bound-n1", "bound-n0"}},
	}
	for i, step := range steps {
		step.do()
		wantRows(t, tab, fmt.Sprintf("step %d", i), step.want...)
	}
	if got := tab.Text("#details h2"); got != "n2 · GPU 0" {
		t.Errorf("the details of %q", got)
	}
	back := func() {
		was := Eval[string](tab, "location.hash")
		tab.Run("history.back()")
		tab.Await("the step back", fmt.Sprintf("location.hash !== %q", was))
	}
	back()
	if !Eval[bool](tab, `document.getElementById("details").hidden && document.activeElement.id === "panel"`) {
		t.Error("the details are still open, or have lost the focus")
	}
	back() // The second click on the column.
	for i := len(steps) - 3; i >= 0; i-- {
		back()
		wantRows(t, tab, fmt.Sprintf("back at step %d", i), steps[i].want...)
	}
	if got := Eval[string](tab, `document.getElementById("search").value`); got != "" {
		t.Errorf("the field for the search has %q", got)
	}
	tab.WantNoComplaints()
}

// TestNothingFound: a search without a result says what was searched for, and can be cleared.
func TestNothingFound(t *testing.T) {
	url, _ := show(t, newBoard(somePods()))
	tab := Start(t, 1280, 800)
	for view, want := range map[string]string{
		"#cards?q=zzz&room=99999&problems=only": "No node found\nNothing matches the search “zzz” and room for 99999 on one card and problems only.\nShow all",
		"#pods?q=zzz":                           "No pod found\nNothing matches the search “zzz”.\nShow all",
		"#pending?q=zzz&group=ns/train":         "No pending pod found\nNothing matches the search “zzz” and the group ns/train.\nShow all",
		"#groups?q=zzz":                         "No group found\nNothing matches the search “zzz”.\nShow all",
	} {
		tab.Do(chromedp.Navigate("about:blank"), chromedp.Navigate(url+view))
		tab.Await("the text", `document.getElementById("empty").innerText.includes("zzz")`)
		if got := strings.ReplaceAll(tab.Text("#empty"), "\n\n", "\n"); got != want {
			t.Errorf("%s: %q, want %q", view, got, want)
		}
		if got := tab.Text("#shown"); !strings.HasPrefix(got, "0 of ") {
			t.Errorf("%s: it shows %q", view, got)
		}
		tab.Click("#empty button")
		tab.Await("the list", `document.getElementById("empty").hidden && document.activeElement.id === "search"`)
		if len(rows(tab)) == 0 {
			t.Errorf("%s: still no rows", view)
		}
	}
	tab.WantNoComplaints()
}

// TestReports: what device plugins report of a pod is shown with the pod, its card and its node, until it is reported no longer.
func TestReports(t *testing.T) {
	s := somePods()
	tab := visit(t, s, "#cards?problems=only", 1280, 800)
	tab.Await("the page", `document.getElementById("shown").innerText`)
	wantRows(t, tab, "nothing is reported")
	since := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	s.change(func() {
		s.reported = []*clustercache.PodInfo{
			{PodUse: eligibility.PodUse{Pod: gpu.Pod{Namespace: "ns", Name: "bound-n0"}, Node: "n0"}, Overuse: &protocol.Overuse{Used: 17000, Requested: 16000, Since: since, At: time.Now()}},
			{PodUse: eligibility.PodUse{Pod: gpu.Pod{Namespace: "ns", Name: "bound-n2"}, Node: "n2"}, LimitProblem: "container <b>: its cgroup has no limit"},
		}
	})
	tab.Await("both nodes", `document.querySelectorAll("#view-cards .line").length === 2`)
	wantRows(t, tab, "two pods are reported", "n0", "n2")
	if got, want := tab.Text("#cards-problems"), "1 pod above its request · 1 pod without its limit"; got != want {
		t.Errorf("the sums have %q, want %q", got, want)
	}
	tab.Do(chromedp.Navigate(tab.url + "#pods?q=in+force&card=n0/0"))
	tab.Await("the pod", `document.querySelectorAll("#view-pods tbody tr:not([aria-hidden])").length === 1`)
	if got, want := Eval[string](tab, `document.querySelector("#view-pods tbody tr:not([aria-hidden]) td:last-child").title`), "limit not in force: container <b>: its cgroup has no limit"; got != want {
		t.Errorf("the pod without its limit has %q, want %q", got, want)
	}
	for _, want := range []string{"⚠ 1 pod above its request", "uses 17000 MiB, requests 16000 MiB, since 2026-07-01T12:00:00Z"} {
		if got := tab.Text("#details"); !strings.Contains(got, want) {
			t.Errorf("the card's details don't have %q:\n%s", want, got)
		}
	}
	s.change(func() { s.reported = nil })
	tab.Await("the card without a problem", `!document.querySelector("#details .warn") && document.getElementById("cards-problems").innerText === ""`)
}

// TestCauses: a cause is shown in words, and its explanation opens and closes by keyboard.
func TestCauses(t *testing.T) {
	tab := visit(t, somePods(), "#pending?q=large", 1280, 800)
	tab.Await("the cause", `document.activeElement && document.querySelector("#view-pending .chip")?.innerText === "no card is large enough"`)
	tab.Run(`document.querySelector("#view-pending .chip").focus()`)
	tab.Type(kb.Enter)
	tab.Await("the explanation", `document.querySelector("#details h2")?.innerText === "no card is large enough" && document.activeElement.className === "close"`)
	for _, want := range []string{"their sum counts", "Request less", "too_large"} {
		if got := tab.Text("#details"); !strings.Contains(got, want) {
			t.Errorf("the explanation %q doesn't have %q", got, want)
		}
	}
	tab.Type(kb.Escape)
	tab.Await("the focus back on the cause", `document.getElementById("details").hidden && document.activeElement.className.startsWith("chip")`)
}

// TestGroups lists groups, with links to their pods; a replica that doesn't know them says why.
func TestGroups(t *testing.T) {
	s := somePods()
	tab := visit(t, s, "", 1280, 800)
	tab.Click("#tab-groups")
	tab.Await("the group", `document.querySelectorAll("#view-groups tbody tr").length === 1`)
	cells := Eval[[]string](tab, `[...document.querySelectorAll("#view-groups tbody td")].map((td) => td.innerText)`)
	check.Equal(t, "the result", []string{"ns", "train", "broken", "2", "2", "1", "1", "86000 MiB", "26m", "only 1 of 2 members are bound"}, cells)
	tab.Click(`[data-view="pending"]`)
	tab.Await("the pending member", `!document.getElementById("view-pending").hidden`)
	wantRows(t, tab, "pending members", "member")
	tab.Run("history.back()")
	tab.Await("the group again", `!document.getElementById("view-groups").hidden`)
	tab.Click(`[data-view="pods"]`)
	tab.Await("the bound member", `!document.getElementById("view-pods").hidden`)
	wantRows(t, tab, "bound members", "bound-n1")
	tab.Click("#group")
	tab.Await("all pods", `document.querySelectorAll("#view-pods tbody tr:not([aria-hidden])").length === 3`)

	s.change(func() { s.groups, s.noGroups = nil, errors.New("this replica doesn't lead") })
	tab.Click("#tab-groups")
	tab.Await("the reason", `document.getElementById("empty").innerText.includes("this replica doesn't lead")`)
}

// TestNumbers: amounts, counts and ages look like those in messages and in kubectl: no separators in numbers.
func TestNumbers(t *testing.T) {
	s := somePods()
	tab := visit(t, s, "", 1280, 800)
	tab.Await("the nodes", `document.querySelectorAll(".line").length === 3`)
	for _, test := range []struct{ view, selector, want string }{
		{"cards", "#memory-amount", "48000 of 122399 MiB"},
		{"cards", "#memory-percent", "39%"},
		{"cards", "#largest", "65559 MiB"},
		{"cards", ".line .node small", "16000/16276 MiB · model-0"},
		{"cards", ".line .caption span:last-child", "16000/16276"},
		{"pods", "#view-pods tbody tr:not([aria-hidden]) td:nth-child(4)", "16000 MiB"},
		{"pending", "#view-pending tbody td:nth-child(4)", "90000 MiB"},
		{"pending", "#view-pending tbody td:nth-child(5)", "26m"},
		{"groups", "#view-groups tbody td:nth-child(8)", "86000 MiB"},
	} {
		tab.Click("#tab-" + test.view)
		if got := tab.Text(test.selector); got != test.want {
			t.Errorf("%s: %s is %q, want %q", test.view, test.selector, got, test.want)
		}
		if got := Eval[[]string](tab, `document.body.innerText.match(/\d[,\u202f\u00a0’ ]\d{3}\b.*/g) ?? []`); len(got) > 0 {
			t.Errorf("%s: numbers with separators: %q", test.view, got)
		}
	}
}

// TestSeveralCards: a pod with several cards counts once and is on each of them with its part; a card's cores have a line in its bar.
func TestSeveralCards(t *testing.T) {
	s := newSource()
	cards := make([]gpu.Card, 3)
	for i := range cards {
		cards[i] = gpu.Card{Index: i, Memory: 16, NUMANode: gpu.NoNUMANode}
	}
	s.book.SetNode("n0", ledger.NodeSpec{Unit: gpu.GiB, Cards: cards})
	tensor := gpu.Pod{UID: "t", Namespace: "ml", Name: "tensor", Request: 16, Cards: 2, Cores: 100}
	s.book.SetBound("n0", tensor, tensor.Demand().On(0, 2), time.Time{})
	wide := gpu.Pod{UID: "w", Namespace: "ml", Name: "wide", Request: 24, Cards: 2, Cores: 150}
	s.wait(pendingPod(wide, "none has room", time.Now()))
	tab := visit(t, s, "", 1280, 800)
	tab.Await("the node", `document.querySelectorAll(".line").length === 1`)
	if got := Eval[string](tab, `[...document.querySelectorAll(".card")].map((card) => card.querySelector(".cores")?.style.width ?? "none").join()`); got != "50%,none,50%" {
		t.Errorf("lines for cores: %s", got)
	}
	tab.Click(`.card[data-card="2"]`)
	for _, test := range []struct{ selector, want string }{
		{"#count-pods", "1"},
		{"#details dl", "50% of its cores allocated, not enforced"},
		{"#details ul", "ml/tensor (one of 2 cards)8 GiB, 50%"},
		{"#view-pods tbody", "mltensor–8 GiB, 50%n0GPU0 of 2–boundmltensor–8 GiB, 50%n0GPU2 of 2–bound"},
		{"#view-pending tbody td:nth-child(4)", "2 cards: 12 GiB, 75%"},
	} {
		if strings.Contains(test.selector, "view-") {
			tab.Click("#tab-" + strings.Split(strings.TrimPrefix(test.selector, "#view-"), " ")[0])
		}
		if got := tab.Text(test.selector); !strings.HasSuffix(strings.NewReplacer("\n", "", "\t", "").Replace(got), test.want) {
			t.Errorf("%s is %q, want %q at the end", test.selector, got, test.want)
		}
	}
}
