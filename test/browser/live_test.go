package browser

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// TestThePage uses the page as a person would, on the real extender beside a real control plane.
func TestThePage(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB"})
	sick := controlplane.EqualCards(2, 16)
	sick[1].Unhealthy = "Xid 79"
	must(t, bed.CreateNodes(t.Context(),
		controlplane.Node{Name: "big", Unit: gpu.GiB, Cards: controlplane.EqualCards(8, 80)},
		controlplane.Node{Name: "sick", Unit: gpu.GiB, Cards: sick},
		controlplane.Node{Name: "small", Unit: gpu.GiB, Cards: controlplane.EqualCards(2, 16)}))
	createPod(t, bed, "first", 40)
	createPod(t, bed, "too-large", 81)
	tab := Start(t, 1280, 800)
	tab.Do(chromedp.Navigate(bed.PageURL + "/ui/"))
	tab.Await("three nodes", `document.querySelectorAll(".line").length === 3`)
	tab.Await("the stream", `document.getElementById("connection").className === "live"`)
	tab.Await("the first pod", `document.getElementById("count-pods").innerText === "1"`)
	tab.Await("an unhealthy card", `document.querySelector('[data-node="sick"] [data-card="1"]').getAttribute("aria-label").includes("unhealthy: Xid 79")`)

	t.Run("a pod is seen within a moment of its binding, and of its end", func(t *testing.T) {
		// The page's own clock notes when the pod comes and goes: questions from here would take time themselves.
		tab.Run(`window.seen = {}; new MutationObserver(() => { for (const card of document.querySelectorAll(".card")) {
			const there = card.getAttribute("aria-label").includes("big GPU 0: 60 of");
			if (card.getAttribute("aria-label").startsWith("big GPU 0")) { if (there) seen.come ??= Date.now(); else if (seen.come) seen.gone ??= Date.now(); }
		} }).observe(document.getElementById("view-cards"), {childList: true, subtree: true})`)
		pod := createPod(t, bed, "seen", 20)
		bound := awaitBound(t, bed, pod.Name)
		tab.Await("the pod on its card", `seen.come`)
		t.Logf("seen %d ms after it was found bound", Eval[int64](tab, `seen.come`)-bound.UnixMilli())
		deletePod(t, bed, pod.Name)
		asked := time.Now()
		tab.Await("the pod to be gone", `seen.gone`)
		t.Logf("gone %d ms after it was deleted", Eval[int64](tab, `seen.gone`)-asked.UnixMilli())
	})

	t.Run("who waits, and why", func(t *testing.T) {
		tab.Click("#tab-pending")
		tab.Await("the reason", `document.querySelector("#view-pending tbody")?.innerText.includes("too-large") && document.querySelector("#view-pending tbody").innerText.includes("nodes are available") && document.querySelector("#view-pending tbody").innerText.includes("no card is large enough: the largest has 80 GiB, on big")`)
		if got := Eval[string](tab, "location.hash"); got != "#pending" {
			t.Errorf("the address says %q", got)
		}
		if got := Eval[string](tab, `document.querySelector("#view-pending tbody td:nth-child(3)").innerText`); got != "81 GiB" {
			t.Errorf("it asks for %q", got)
		}
		// What somebody is about to copy stays where it is while others come and go.
		tab.Run(`getSelection().selectAllChildren(document.querySelector("#view-pending tbody td.wide"))`)
		for _, want := range []string{"2", "1"} {
			if want == "2" {
				createPod(t, bed, "passing", 2)
			} else {
				deletePod(t, bed, "passing")
			}
			tab.Await("the page to follow", `document.getElementById("count-pods").innerText === "`+want+`" && document.querySelectorAll("#view-pending tbody tr").length === 1`)
		}
		if got := Eval[string](tab, "String(getSelection())"); !strings.Contains(got, "no card is large enough") {
			t.Errorf("of the selection is left %q", got)
		}
	})

	t.Run("a cordoned node is no room", func(t *testing.T) {
		largest := func(where string) string {
			return fmt.Sprintf(`document.getElementById("largest-where").innerText.startsWith(%q)`, "on "+where)
		}
		cordon := func(how string) {
			_, err := bed.Client.CoreV1().Nodes().Patch(t.Context(), "big", types.StrategicMergePatchType, []byte(`{"spec":{"unschedulable":`+how+`}}`), metav1.PatchOptions{})
			must(t, err)
		}
		tab.Await("the largest piece", largest("big"))
		cordon("true")
		tab.Await("another largest piece", largest("s"))
		tab.Click("#tab-cards")
		tab.Await("the node to say so", `document.querySelector('[data-node="big"] .node').innerText.includes("the node is cordoned")`)
		cordon("false")
		tab.Await("the largest piece again", largest("big"))
	})

	t.Run("search and sort", func(t *testing.T) {
		for i := range 6 {
			createPod(t, bed, fmt.Sprintf("sorted-%d", i), int64(2+i))
		}
		for i := range 6 {
			awaitBound(t, bed, fmt.Sprintf("sorted-%d", i))
		}
		tab.Click("#tab-pods")
		tab.Await("seven pods", `document.querySelectorAll("#view-pods tbody tr:not([aria-hidden])").length === 7`)
		column := func(n int) []string {
			return Eval[[]string](tab, fmt.Sprintf(`[...document.querySelectorAll("#view-pods tbody tr:not([aria-hidden]) td:nth-child(%d)")].map((td) => td.innerText)`, n))
		}
		tab.Click(`#view-pods [data-column="memory"]`)
		if diff := cmp.Diff([]string{"40 GiB", "7 GiB", "6 GiB", "5 GiB", "4 GiB", "3 GiB", "2 GiB"}, column(3)); diff != "" {
			t.Errorf("by memory (-want +got):\n%s", diff)
		}
		tab.Click(`#view-pods [data-column="memory"]`)
		if got := column(3); got[0] != "2 GiB" || Eval[string](tab, `document.querySelector("#view-pods th[aria-sort]").getAttribute("aria-sort")`) != "ascending" {
			t.Errorf("the other way round: %v", got)
		}
		tab.Type("/")
		tab.Type("SORTED-3 default")
		tab.Await("one pod", `document.querySelectorAll("#view-pods tbody tr:not([aria-hidden])").length === 1`)
		if got := column(2); len(got) != 1 || got[0] != "sorted-3" {
			t.Errorf("found %v", got)
		}
		if got := tab.Text("#shown"); got != "1 of 7 pods" {
			t.Errorf("it says %q", got)
		}
		tab.Click("#view-pods tbody .link")
		tab.Await("the card's details", `document.getElementById("details").innerText.includes("sorted-3")`)
		tab.Type(kb.Escape)
		tab.Await("the details to close", `document.getElementById("details").hidden`)
		tab.Run(`document.getElementById("search").value = ""; document.getElementById("search").dispatchEvent(new Event("input"))`)
	})

	t.Run("with the keyboard alone", func(t *testing.T) {
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
		tab.Await("what the card holds", `!document.getElementById("tip").hidden && document.getElementById("tip").innerText.includes("default/first")`)
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

	t.Run("the extender goes and comes", func(t *testing.T) {
		asked := time.Now()
		must(t, bed.Extender.Terminate(t.Context()))
		t.Logf("SIGTERM with a page open took %v", time.Since(asked).Round(time.Millisecond))
		tab.Await("the page to say so", `document.getElementById("connection-state").innerText.startsWith("disconnected since")`)
		must(t, bed.Extender.Start(t.Context()))
		tab.Await("the page to come back", `document.getElementById("connection").className === "live" && document.getElementById("count-pods").innerText === "7"`)
		for _, complaint := range tab.TakeComplaints() {
			if !strings.Contains(complaint, "net::ERR_") {
				t.Errorf("the browser complained: %s", complaint)
			}
		}
	})
}

// TestTheyAgree compares the page, what it is told, the extender's inspect, and the tables and the JSON of kubectl with what the
// pods' own objects say, while pods come and go.
func TestTheyAgree(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB"})
	tab := Start(t, 1280, 1800) // Tall enough for all rows.
	var nodes []controlplane.Node
	for i := range 5 {
		nodes = append(nodes, controlplane.Node{Name: fmt.Sprintf("n%d", i), Unit: gpu.GiB, Cards: controlplane.EqualCards(4, 16)})
	}
	must(t, bed.CreateNodes(t.Context(), nodes...))
	tab.Do(chromedp.Navigate(bed.PageURL + "/ui/"))
	tab.Await("five nodes", `document.querySelectorAll(".line").length === 5`)
	random := rand.New(rand.NewPCG(3, 4))
	var there []string
	for round := range 4 {
		for i := range 25 {
			if len(there) > 30 || (len(there) > 0 && random.IntN(3) == 0) {
				k := random.IntN(len(there))
				deletePod(t, bed, there[k])
				there = append(there[:k], there[k+1:]...)
				continue
			}
			name := fmt.Sprintf("p-%d-%d", round, i)
			createPod(t, bed, name, int64(1+random.IntN(17))) // 17 fits nowhere.
			there = append(there, name)
		}
		if round == 2 { // A node without room from here on, whatever is free there.
			_, err := bed.Client.CoreV1().Nodes().Patch(t.Context(), "n4", types.StrategicMergePatchType, []byte(`{"spec":{"unschedulable":true}}`), metav1.PatchOptions{})
			must(t, err)
		}
		var truth, why string
		for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
			data := ask(t, bed.PageURL+"/ui/data.json")
			report := askKubectl(t, bed)
			truth, why = asAPIServer(t, bed), data.why()
			cards, _, _ := strings.Cut(truth, "pending:")
			var differences []string
			for _, say := range []struct{ who, want, got string }{
				{"what the page is told", truth, data.asPage()},
				{"what the page shows", truth, asShown(tab)},
				{"inspect", cards, ask(t, bed.ExtenderURL+"/gpushare-scheduler/inspect").lines()},
				{"kubectl's JSON", truth, report.asKubectl()},
				{"kubectl's table", truth, asTable(t, bed)},
				{"kubectl, on why pods wait", why, report.why()},
				{"the metric", data.causes(), scrape(t, bed)},
			} {
				if say.want != say.got {
					differences = append(differences, say.who+":\n"+cmp.Diff(strings.Split(say.want, "\n"), strings.Split(say.got, "\n")))
				}
			}
			if differences == nil {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("round %d: they don't come to agree (-want +got):\n%s", round, strings.Join(differences, "\n"))
			}
		}
		t.Logf("round %d: page, API server, kubectl and metrics agree on %d lines and on why %d pods wait", round, strings.Count(truth, "\n"), strings.Count(why, "\n"))
		if round >= 2 && !strings.Contains(why, "n4: the node is cordoned") {
			t.Errorf("nobody waits for the cordoned node:\n%s", why)
		}
	}
	tab.WantNoComplaints()
}

// TestWhatThreeViewersCost tells how much of a core the extender takes, without viewers and with three, on cards that are full
// to nine tenths, while some pods wait that fit nowhere: why they do is found out again and again.
func TestWhatThreeViewersCost(t *testing.T) {
	size, seconds := 100, 4
	if os.Getenv("GPUSHARE_TEST_LONG") != "" {
		size, seconds = 1000, 30
	}
	bed := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB"})
	var nodes []controlplane.Node
	for i := range size {
		nodes = append(nodes, controlplane.Node{Name: fmt.Sprintf("n%04d", i), Unit: gpu.GiB, Cards: controlplane.EqualCards(8, 80)})
	}
	must(t, bed.CreateNodes(t.Context(), nodes...))
	g, ctx := errgroup.WithContext(t.Context())
	g.SetLimit(32)
	const held, onCard = 3, 24
	for i := range size * 8 * held {
		g.Go(func() error {
			pod := podOf(fmt.Sprintf("held-%05d", i), onCard)
			pod.Spec.NodeName = nodes[i%size].Name
			pod.Annotations = protocol.Assignment{Card: i / size % 8, Request: onCard, CardMemory: 80, AssumeTime: time.Unix(1_700_000_000, int64(i))}.Annotations()
			_, err := bed.Client.CoreV1().Pods(metav1.NamespaceDefault).Create(ctx, pod, metav1.CreateOptions{})
			return err
		})
	}
	must(t, g.Wait())
	for i := range 10 {
		createPod(t, bed, fmt.Sprintf("too-large-%d", i), 81)
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Second) { // A scrape of so many cards is work.
		pods := series(t, bed, `gpushare_extender_holders{state="bound"}`)
		waiting := series(t, bed, pendingSeries+`"too_large"}`)
		if strings.HasSuffix(pods, fmt.Sprint(" ", size*8*held)) && strings.HasSuffix(waiting, " 10") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the extender knows of %q and %q", pods, waiting)
		}
	}
	measure := func(prefix string) time.Duration {
		before, begun := cpuTime(t, bed.Extender.Pid()), time.Now()
		ticker := time.NewTicker(200 * time.Millisecond) // Five pods a second come, and five go: a rate, not a wait.
		defer ticker.Stop()
		for i := range seconds * 5 {
			<-ticker.C
			createPod(t, bed, fmt.Sprintf("%s-%d", prefix, i), 3)
			if i >= 10 {
				deletePod(t, bed, fmt.Sprintf("%s-%d", prefix, i-10))
			}
		}
		return (cpuTime(t, bed.Extender.Pid()) - before) * time.Second / time.Since(begun)
	}
	without := measure("without")
	watching, cancel := context.WithCancel(t.Context())
	defer cancel()
	counts := make(chan int64, 3)
	for range 3 {
		go func() { counts <- watch(watching, bed.PageURL+"/ui/events") }()
	}
	with := measure("with")
	cancel()
	got := <-counts
	if got == 0 {
		t.Error("a viewer was told nothing")
	}
	t.Logf("%d nodes of 8 cards, 90%% full, ten pods wait, five a second come and go: %.1f%% of a core without viewers, %.1f%% with three; a viewer got %d KiB in %d s",
		size, 100*without.Seconds(), 100*with.Seconds(), got>>10, seconds)
}

// watch reads a stream until ctx ends, and returns how many bytes came.
func watch(ctx context.Context, url string) int64 {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0
	}
	request.Header.Set("Accept-Encoding", "gzip")
	response, err := http.DefaultTransport.RoundTrip(request)
	if err != nil {
		return 0
	}
	defer response.Body.Close()
	n, _ := io.Copy(io.Discard, response.Body) // Ends by being cancelled.
	return n
}

// cpuTime is what the process has used so far, as Linux counts it: in hundredths of a second.
func cpuTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	must(t, err)
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	var ticks time.Duration
	for _, field := range fields[11:13] {
		n, err := strconv.Atoi(field)
		must(t, err)
		ticks += time.Duration(n)
	}
	return ticks * 10 * time.Millisecond
}

type nodesJSON struct {
	Nodes []struct {
		Name  string
		Cards []cardJSON
		Devs  []cardJSON
	}
	Pending []pendingJSON
}

type pendingJSON struct{ Name, Reason, Cause, Explanation string }

type cardJSON struct {
	ID       int
	Used     int64
	UsedGPU  int64
	Total    int64
	TotalGPU int64
	Pods     []struct {
		Name    string
		Memory  int64
		UsedGPU int64
	}
}

func ask(t *testing.T, url string) (out nodesJSON) {
	t.Helper()
	response, err := http.Get(url)
	must(t, err)
	defer response.Body.Close()
	must(t, json.NewDecoder(response.Body).Decode(&out))
	return out
}

func (n nodesJSON) lines() string {
	var out strings.Builder
	for _, node := range n.Nodes {
		for _, card := range append(node.Cards, node.Devs...) {
			fmt.Fprintf(&out, "%s %d: %d of %d:", node.Name, card.ID, card.Used+card.UsedGPU, card.Total+card.TotalGPU)
			for _, pod := range card.Pods {
				fmt.Fprintf(&out, " %s %d", pod.Name, pod.Memory+pod.UsedGPU)
			}
			out.WriteByte('\n')
		}
	}
	return out.String()
}

// why lists why pods wait.
func (n nodesJSON) why() string {
	var out strings.Builder
	for _, pod := range n.Pending {
		fmt.Fprintf(&out, "%s: %s: %s\n", pod.Name, pod.Cause, pod.Explanation)
	}
	return out.String()
}

// causes counts the pending pods by cause, in the metric's words.
func (n nodesJSON) causes() string {
	count := map[string]int{}
	for _, pod := range n.Pending {
		count[pod.Cause]++
	}
	var out []string
	for cause, pods := range count {
		out = append(out, fmt.Sprintf("%s%q} %d", pendingSeries, cause, pods))
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}

const pendingSeries = "gpushare_extender_pending_pods{cause="

// scrape returns the lines of the pending pods' metric that aren't zero.
func scrape(t *testing.T, bed *framework.Cluster) string {
	t.Helper()
	lines := strings.Split(series(t, bed, pendingSeries), "\n")
	return strings.Join(slices.DeleteFunc(lines, func(line string) bool { return strings.HasSuffix(line, " 0") }), "\n")
}

// series returns the lines of the extender's metrics that begin so, in order.
func series(t *testing.T, bed *framework.Cluster, prefix string) string {
	t.Helper()
	response, err := http.Get(bed.ExtenderURL + "/metrics")
	must(t, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	must(t, err)
	var out []string
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, prefix) {
			out = append(out, strings.TrimSpace(line))
		}
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}

func (n nodesJSON) asPage() string {
	out := n.lines() + "pending:"
	for _, pod := range n.Pending {
		out += fmt.Sprintf("\n%s: %s", pod.Name, pod.Reason)
	}
	return out
}

// asShown is what stands on the page: cards by their labels, pods and who waits by the tables.
func asShown(tab *Tab) string {
	return Eval[string](tab, `(() => {
		const show = (view) => document.getElementById("tab-" + view).click();
		const rows = (view) => [...document.querySelectorAll("#view-" + view + " tbody tr:not([aria-hidden])")];
		const cell = (row, n) => row.children[n].textContent;
		show("pods");
		const pods = {};
		for (const row of rows("pods")) (pods[cell(row, 3) + " " + cell(row, 4)] ??= []).push(cell(row, 1) + " " + parseInt(cell(row, 2)));
		show("pending");
		const waits = rows("pending").map((row) => [cell(row, 1), row.querySelector("small").textContent])
			.sort(([a], [b]) => a < b ? -1 : 1).map((parts) => parts.join(": "));
		show("cards");
		const cards = [...document.querySelectorAll(".card")].map((card) => {
			const [, node, id, used, total] = card.getAttribute("aria-label").match(/^(\S+) GPU (\d+): (\d+) of (\d+) GiB allocated/);
			return node + " " + id + ": " + used + " of " + total + ":" + (pods[node + " GPU" + id] ?? []).sort().map((pod) => " " + pod).join("") + "\n";
		});
		return cards.join("") + ["pending:", ...waits].join("\n");
	})()`)
}

func kubectl(t *testing.T, bed *framework.Cluster, args ...string) []byte {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), bed.Binary("kubectl-inspect-gpushare"), append(args, "--kubeconfig", bed.KubeconfigPath)...).Output()
	must(t, err)
	return out
}

func askKubectl(t *testing.T, bed *framework.Cluster) (out reportJSON) {
	t.Helper()
	must(t, json.Unmarshal(kubectl(t, bed, "-o", "json"), &out))
	return out
}

// reportJSON is what a script reads of -o json, see docs/inspect.md.
type reportJSON struct {
	Nodes []struct {
		Name  string
		Cards []struct{ Index, Allocated, Total int64 }
		Pods  []struct {
			Name   string
			Shares []struct{ Card, Memory int64 }
		}
	}
	PendingPods []pendingJSON
}

func (r reportJSON) asKubectl() string {
	var out strings.Builder
	for _, node := range r.Nodes {
		for _, card := range node.Cards {
			fmt.Fprintf(&out, "%s %d: %d of %d:", node.Name, card.Index, card.Allocated, card.Total)
			for _, pod := range node.Pods {
				for _, share := range pod.Shares {
					if share.Card == card.Index {
						fmt.Fprintf(&out, " %s %d", pod.Name, share.Memory)
					}
				}
			}
			out.WriteByte('\n')
		}
	}
	out.WriteString("pending:")
	for _, pod := range r.PendingPods {
		fmt.Fprintf(&out, "\n%s: %s", pod.Name, pod.Reason)
	}
	return out.String()
}

func (r reportJSON) why() string { return nodesJSON{Pending: r.PendingPods}.why() }

// asTable puts the table of nodes, the pods on each card and the table of pending pods together, cut into columns as
// scripts do it.
func asTable(t *testing.T, bed *framework.Cluster) string {
	t.Helper()
	pods := map[string]string{} // By node and card.
	node := ""
	for line := range strings.Lines(string(kubectl(t, bed, "-d"))) {
		columns := strings.Fields(line)
		switch {
		case len(columns) == 2 && columns[0] == "NAME:":
			node = columns[1]
		case len(columns) >= 6 && columns[1] == metav1.NamespaceDefault:
			for card, memory := range columns[2:6] {
				if memory != "0" {
					pods[fmt.Sprintf("%s %d", node, card)] += " " + columns[0] + " " + memory
				}
			}
		}
		if strings.HasPrefix(line, "Pending Pods:") {
			break
		}
	}
	var out strings.Builder
	for line := range strings.Lines(string(kubectl(t, bed, "--no-headers"))) {
		columns := strings.Fields(line)
		for card, sum := range columns[2:6] {
			allocated, total, _ := strings.Cut(sum, "/")
			at := fmt.Sprintf("%s %d", columns[0], card)
			fmt.Fprintf(&out, "%s: %s of %s:%s\n", at, allocated, total, pods[at])
		}
	}
	out.WriteString("pending:")
	says := regexp.MustCompile(`^default +(\S+) .* default-scheduler +(.*)$`)
	for line := range strings.Lines(string(kubectl(t, bed, "--pending", "-o", "wide", "--no-headers"))) {
		if parts := says.FindStringSubmatch(strings.TrimSpace(line)); parts != nil {
			fmt.Fprintf(&out, "\n%s: %s", parts[1], parts[2])
		}
	}
	return out.String()
}

// asAPIServer adds up what the pods' own objects say. The nodes are those of TestTheyAgree.
func asAPIServer(t *testing.T, bed *framework.Cluster) string {
	t.Helper()
	pods, err := bed.Client.CoreV1().Pods(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{})
	must(t, err)
	used, names, pending := map[string]int64{}, map[string]string{}, "pending:"
	for _, pod := range pods.Items { // In order of their names.
		memory := int64(protocol.PodRequest(&pod))
		if pod.Spec.NodeName == "" {
			reason := fmt.Sprintf("scheduler %q has not tried it yet", pod.Spec.SchedulerName)
			for _, c := range pod.Status.Conditions {
				if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
					reason = c.Message
				}
			}
			pending += fmt.Sprintf("\n%s: %s", pod.Name, reason)
			continue
		}
		card := pod.Spec.NodeName + " " + pod.Annotations[protocol.AnnotationIndex]
		used[card] += memory
		names[card] += fmt.Sprintf(" %s %d", pod.Name, memory)
	}
	var out strings.Builder
	for n := range 5 {
		for c := range 4 {
			card := fmt.Sprintf("n%d %d", n, c)
			fmt.Fprintf(&out, "%s: %d of 16:%s\n", card, used[card], names[card])
		}
	}
	return out.String() + pending
}

func podOf(name string, memory int64) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "main", Image: "nothing", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{
				protocol.ResourceMemory: *resource.NewQuantity(memory, resource.DecimalSI),
			}},
		}}},
	}
}

func createPod(t *testing.T, bed *framework.Cluster, name string, memory int64) *corev1.Pod {
	t.Helper()
	pod, err := bed.Client.CoreV1().Pods(metav1.NamespaceDefault).Create(t.Context(), podOf(name, memory), metav1.CreateOptions{})
	must(t, err)
	return pod
}

// deletePod deletes at once, as no kubelet runs here that could end the pod.
func deletePod(t *testing.T, bed *framework.Cluster, name string) {
	t.Helper()
	must(t, bed.Client.CoreV1().Pods(metav1.NamespaceDefault).Delete(t.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
}

func awaitBound(t *testing.T, bed *framework.Cluster, name string) time.Time {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) {
		pod, err := bed.Client.CoreV1().Pods(metav1.NamespaceDefault).Get(t.Context(), name, metav1.GetOptions{})
		must(t, err)
		if pod.Spec.NodeName != "" {
			return time.Now()
		}
		if time.Now().After(deadline) {
			t.Fatalf("pod %s isn't bound: %+v", name, pod.Status.Conditions)
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
