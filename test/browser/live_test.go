package browser

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/framework"
)

// live is shared by all tests of the page with a real control plane.
var live = &framework.Shared{Options: framework.Options{MemoryUnit: "GiB"}}

var must = check.Must

func TestMain(m *testing.M) {
	code := framework.RunShared(m, live)
	stopBrowser()
	os.Exit(code)
}

func node(name string, cards int, memory int64) *framework.NodeWrapper {
	return framework.MakeNode(name).Unit(gpu.GiB).Cards(cards, memory)
}

// TestPage uses the page like a person.
func TestPage(t *testing.T) {
	tab := Start(t, 1280, 800)
	c := live.Start(t)
	ns := c.DefaultNamespace(t)
	ns.AddNodes(node("big", 8, 80), node("sick", 2, 16).Unhealthy(1, "Xid 79"), node("small", 2, 16))
	ns.Create(ns.Pod("first", 40), ns.Pod("too-large", 81))
	tab.Do(chromedp.Navigate(c.PageURL + "/ui/"))
	tab.Await("three nodes", `document.querySelectorAll(".line").length === 3`)
	tab.Await("the stream", `document.getElementById("connection").className === "live"`)
	tab.Await("the first pod", `document.getElementById("count-pods").innerText === "1"`)
	tab.Await("an unhealthy card", `document.querySelector('[data-node="sick"] [data-card="1"]').getAttribute("aria-label").includes("unhealthy: Xid 79")`)

	t.Run("a pod is bound and deleted", func(t *testing.T) {
		// The page's own clock records when it shows the pod, because a query from here takes time.
		tab.Run(`window.seen = {}; new MutationObserver(() => { for (const card of document.querySelectorAll(".card")) {
			const there = card.getAttribute("aria-label").includes("big GPU 0: 60 of");
			if (card.getAttribute("aria-label").startsWith("big GPU 0")) { if (there) seen.come ??= Date.now(); else if (seen.come) seen.gone ??= Date.now(); }
		} }).observe(document.getElementById("view-cards"), {childList: true, subtree: true})`)
		ns.Place(ns.Pod("seen", 20))
		bound := time.Now()
		tab.Await("the pod on its card", `seen.come`)
		t.Logf("shown %d ms after it was found bound", Eval[int64](tab, `seen.come`)-bound.UnixMilli())
		ns.Delete("seen")
		deleted := time.Now()
		tab.Await("the pod to be gone", `seen.gone`)
		t.Logf("gone %d ms after it was deleted", Eval[int64](tab, `seen.gone`)-deleted.UnixMilli())
	})

	t.Run("pending pods with reasons", func(t *testing.T) {
		tab.Click("#tab-pending")
		// The list is made by the diagnosis, so it can still have the pod that is bound.
		tab.Await("the reason", `document.querySelectorAll("#view-pending tbody tr").length === 1 && document.querySelector("#view-pending tbody").innerText.includes("nodes are available") && document.querySelector("#view-pending tbody").innerText.includes("no card is large enough for 81 GiB: the largest has 80 GiB, on big")`)
		if got := Eval[string](tab, "location.hash"); got != "#pending" {
			t.Errorf("the address has %q", got)
		}
		if got := Eval[string](tab, `document.querySelector("#view-pending tbody td:nth-child(4)").innerText`); got != "81 GiB" {
			t.Errorf("it requests %q", got)
		}
		// A selection stays when other rows change.
		tab.Run(`getSelection().selectAllChildren(document.querySelector("#view-pending tbody td.wide"))`)
		for _, want := range []string{"2", "1"} {
			if want == "2" {
				ns.Create(ns.Pod("passing", 2))
			} else {
				ns.Delete("passing")
			}
			tab.Await("the page to follow", `document.getElementById("count-pods").innerText === "`+want+`" && document.querySelectorAll("#view-pending tbody tr").length === 1`)
		}
		if got := Eval[string](tab, "String(getSelection())"); !strings.Contains(got, "no card is large enough") {
			t.Errorf("the selection is %q", got)
		}
	})

	t.Run("a group that misses a member, and a misspelled resource", func(t *testing.T) {
		ns.Create(ns.Pod("member-0", 2).Group("train", 2), ns.Pod("typo", 0).Limit("aliyun.com/gpumem", 2))
		tab.Await("the cause, and the problem", `document.querySelector("#view-pending table").innerText.includes("waits for its group") && document.querySelector("#view-pending section").innerText.includes("write aliyun.com/gpu-mem")`)
		tab.Click("#tab-groups")
		tab.Await("the group", `document.querySelector("#view-groups tbody")?.innerText.includes("1 of 2 members exist")`)
		tab.Click(`[data-view="pending"]`)
		tab.Await("its member alone", `document.getElementById("shown").innerText === "1 of 2 pending pods"`)
		tab.Click("#group")
		ns.Delete("member-0", "typo")
		tab.Await("both to be gone", `document.querySelectorAll("#view-pending tbody tr").length === 1 && document.getElementById("count-groups").innerText === "0"`)
	})

	t.Run("a cordoned node", func(t *testing.T) {
		largest := func(where string) string {
			return fmt.Sprintf(`document.getElementById("largest-where").innerText.startsWith(%q)`, "on "+where)
		}
		cordon := func(how string) {
			_, err := c.Client.CoreV1().Nodes().Patch(t.Context(), "big", types.StrategicMergePatchType, []byte(`{"spec":{"unschedulable":`+how+`}}`), metav1.PatchOptions{})
			must(t, err)
		}
		tab.Await("the largest piece", largest("big"))
		cordon("true")
		tab.Await("another largest piece", largest("s"))
		tab.Click("#tab-cards")
		tab.Await("the reason on the node", `document.querySelector('[data-node="big"] .node').innerText.includes("the node is cordoned")`)
		cordon("false")
		tab.Await("the largest piece again", largest("big"))
	})

	t.Run("search and sort", func(t *testing.T) {
		for i := range 6 {
			ns.Place(ns.Pod(fmt.Sprintf("sorted-%d", i), int64(2+i)).ControlledBy("sorted"))
		}
		tab.Click("#tab-pods")
		tab.Await("seven pods", `document.querySelectorAll("#view-pods tbody tr:not([aria-hidden])").length === 7`)
		column := func(n int) []string {
			return Eval[[]string](tab, fmt.Sprintf(`[...document.querySelectorAll("#view-pods tbody tr:not([aria-hidden]) td:nth-child(%d)")].map((td) => td.innerText)`, n))
		}
		tab.Click(`#view-pods [data-column="memory"]`)
		check.Equal(t, "by memory", []string{"40 GiB", "7 GiB", "6 GiB", "5 GiB", "4 GiB", "3 GiB", "2 GiB"}, column(4))
		tab.Click(`#view-pods [data-column="memory"]`)
		if got := column(4); got[0] != "2 GiB" || Eval[string](tab, `document.querySelector("#view-pods th[aria-sort]").getAttribute("aria-sort")`) != "ascending" {
			t.Errorf("in the other order: %v", got)
		}
		tab.Press("/")
		tab.Type("SORTED-3 default")
		tab.Await("one pod", `document.querySelectorAll("#view-pods tbody tr:not([aria-hidden])").length === 1`)
		if got := column(2); len(got) != 1 || got[0] != "sorted-3" {
			t.Errorf("found %v", got)
		}
		if got := column(3); len(got) != 1 || got[0] != "Job/sorted" {
			t.Errorf("its owner is %v", got)
		}
		if got := tab.Text("#shown"); got != "1 of 7 pods" {
			t.Errorf("it shows %q", got)
		}
		tab.Click("#view-pods tbody .link")
		tab.Await("the card's details", `document.getElementById("details").innerText.includes("sorted-3")`)
		tab.Type(kb.Escape)
		tab.Await("the details to close", `document.getElementById("details").hidden`)
		tab.Run(`document.getElementById("search").value = ""; document.getElementById("search").dispatchEvent(new Event("input"))`)
	})

	t.Run("keyboard only", func(t *testing.T) {
		tab.Run(`document.getElementById("tab-pods").focus()`)
		tab.Type(kb.ArrowLeft)
		tab.Await("the cards", `!document.getElementById("view-cards").hidden`)
		tab.Run(`document.querySelector('.card[tabindex="0"]').focus()`)
		focused := func() string {
			return Eval[string](tab, `(document.activeElement.getAttribute("aria-label") ?? "").split(":")[0]`)
		}
		for i, step := range []struct{ key, want string }{
			{"", "big GPU 0"}, {kb.ArrowRight, "big GPU 1"}, {kb.End, "big GPU 7"}, {kb.ArrowDown, "sick GPU 1"},
			{kb.ArrowDown, "small GPU 1"}, {kb.ArrowDown, "small GPU 1"}, {kb.Home, "small GPU 0"}, {kb.PageUp, "big GPU 0"},
		} {
			if step.key != "" {
				tab.Type(step.key)
			}
			if got := focused(); got != step.want {
				t.Errorf("step %d: the focus is on %q, want %q", i, got, step.want)
			}
		}
		tab.Await("the card's pods", `!document.getElementById("tip").hidden && document.getElementById("tip").innerText.includes("default/first")`)
		tab.Type(kb.Enter)
		tab.Await("the details", `document.querySelector("#details h2")?.innerText === "big · GPU 0" && document.activeElement.className === "close"`)
		tab.Type(kb.Escape)
		tab.Await("the focus to be back", `document.activeElement.getAttribute("aria-label")?.startsWith("big GPU 0")`)
	})

	t.Run("dark and light", func(t *testing.T) {
		ground := func() string { return Eval[string](tab, `getComputedStyle(document.body).backgroundColor`) }
		colours := map[string]bool{}
		for _, want := range []string{"light", "dark"} {
			tab.Click("#theme")
			tab.Await(want, `document.documentElement.dataset.theme === "`+want+`"`)
			colours[ground()] = true
		}
		if len(colours) != 2 {
			t.Errorf("the grounds are %v", colours)
		}
		tab.Do(chromedp.Reload())
		tab.Await("the choice to be kept", `document.documentElement.dataset.theme === "dark" && document.querySelectorAll(".line").length === 3`)
		tab.Click("#theme")
	})
	tab.WantNoComplaints()

	t.Run("the extender restarts", func(t *testing.T) {
		start := time.Now()
		must(t, c.Extender.Terminate(t.Context()))
		t.Logf("SIGTERM with a page open took %v", time.Since(start).Round(time.Millisecond))
		tab.Await("the time of the disconnection", `document.getElementById("connection-state").innerText.startsWith("disconnected since")`)
		must(t, c.Extender.Start(t.Context()))
		tab.Await("the page to reconnect", `document.getElementById("connection").className === "live" && document.getElementById("count-pods").innerText === "7"`)
		for _, complaint := range tab.TakeComplaints() {
			if !strings.Contains(complaint, "net::ERR_") {
				t.Errorf("the browser complained: %s", complaint)
			}
		}
	})
}

// TestAgree compares the page with the API server's pods while pods are created and deleted. test/e2e compares the data that it receives.
func TestAgree(t *testing.T) {
	tab := Start(t, 1280, 1800) // Tall enough for all rows.
	c := live.Start(t)
	ns := c.DefaultNamespace(t)
	for i := range 5 {
		ns.AddNodes(node(fmt.Sprintf("n%d", i), 4, 16))
	}
	tab.Do(chromedp.Navigate(c.PageURL + "/ui/"))
	tab.Await("five nodes", `document.querySelectorAll(".line").length === 5`)
	random := rand.New(rand.NewPCG(3, 4))
	var names []string
	for round := range 4 {
		for i := range 25 {
			if len(names) > 30 || (len(names) > 0 && random.IntN(3) == 0) {
				k := random.IntN(len(names))
				ns.Delete(names[k])
				names = slices.Delete(names, k, k+1)
				continue
			}
			name := fmt.Sprintf("p-%d-%d", round, i)
			ns.Create(ns.Pod(name, int64(1+random.IntN(17)))) // 17 fits on no card.
			names = append(names, name)
		}
		ns.Eventually("the page agrees with the API server", func(ctx context.Context) error {
			want, err := wantShown(ctx, ns)
			if err != nil {
				return err
			}
			if diff := cmp.Diff(want, shown(tab)); diff != "" {
				return fmt.Errorf("the page (-want +got):\n%s", diff)
			}
			return nil
		})
	}
	tab.WantNoComplaints()
}

// wantShown returns what the page must show, by the API server: a line for each card and each pending pod.
func wantShown(ctx context.Context, ns *framework.Namespace) ([]string, error) {
	allocations, err := ns.Cluster.Allocations(ctx)
	if err != nil {
		return nil, err
	}
	var lines []string
	for name, cards := range allocations {
		for index, card := range cards {
			line := fmt.Sprintf("%s %d: %d of %d:", name, index, card.Used, card.Total)
			for _, pod := range card.Pods {
				line += " " + strings.TrimPrefix(pod, ns.ID+"/")
			}
			lines = append(lines, line)
		}
	}
	pods, err := ns.List(ctx)
	for i := range pods {
		if pod := &pods[i]; pod.Spec.NodeName == "" {
			reason := framework.SchedulerMessage(pod)
			if reason == "none" {
				reason = fmt.Sprintf("scheduler %q has not tried it yet", pod.Spec.SchedulerName)
			}
			lines = append(lines, "pending "+pod.Name+": "+reason)
		}
	}
	slices.Sort(lines)
	return lines, err
}

// shown reads the page: cards from their labels, pods from the tables.
func shown(tab *Tab) []string {
	lines := Eval[[]string](tab, `(() => {
		const show = (view) => document.getElementById("tab-" + view).click();
		const rows = (view) => [...document.querySelectorAll("#view-" + view + " tbody tr:not([aria-hidden])")];
		const cell = (row, n) => row.children[n].textContent;
		show("pods");
		const pods = {};
		for (const row of rows("pods")) (pods[cell(row, 4) + " " + cell(row, 5)] ??= []).push(cell(row, 1) + " " + parseInt(cell(row, 3)));
		show("pending");
		const pending = rows("pending").map((row) => "pending " + cell(row, 1) + ": " + row.querySelector("small").textContent);
		show("cards");
		const cards = [...document.querySelectorAll(".card")].map((card) => {
			const [, node, id, used, total] = card.getAttribute("aria-label").match(/^(\S+) GPU (\d+): (\d+) of (\d+) GiB allocated/);
			return node + " " + id + ": " + used + " of " + total + ":" + (pods[node + " GPU" + id] ?? []).sort().map((pod) => " " + pod).join("");
		});
		return cards.concat(pending);
	})()`)
	slices.Sort(lines)
	return lines
}
