package browser

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/performance"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

const (
	// RequireEnv makes a missing browser a failure. Otherwise the tests that need one are skipped.
	RequireEnv = "GPUSHARE_REQUIRE_BROWSER"
	// ScreenshotsEnv names the folder that screenshots are written to; none are where it is empty.
	ScreenshotsEnv = "GPUSHARE_SCREENSHOTS"
	// patience bounds every wait. It is no promise.
	patience = time.Minute
)

// Tab is a tab of a browser, and a memory of what the page complained about.
type Tab struct {
	t   testing.TB
	ctx context.Context

	mu         sync.Mutex
	complaints []string
}

// Start opens a browser with one tab, for as long as the test runs. The test is skipped, or fails where RequireEnv is set, if
// there is no browser.
func Start(t testing.TB, width, height int64) *Tab {
	t.Helper()
	path, err := findBrowser()
	if err != nil {
		if os.Getenv(RequireEnv) != "" {
			t.Fatal(err)
		}
		fmt.Fprintf(os.Stderr, "SKIPPED %s: %v\n", t.Name(), err)
		t.Skip(err)
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.WindowSize(int(width), int(height)),
		chromedp.WSURLReadTimeout(patience), chromedp.UserDataDir(t.TempDir()))
	allocator, stop := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(stop)
	ctx, cancel := chromedp.NewContext(allocator)
	t.Cleanup(func() {
		if err := chromedp.Cancel(ctx); err != nil && !errors.Is(err, context.Canceled) {
			t.Logf("closing the browser: %v", err)
		}
		cancel()
	})
	tab := &Tab{t: t, ctx: ctx}
	tab.begin(width, height)
	return tab
}

// NewTab opens another tab in the same browser.
func (b *Tab) NewTab(width, height int64) *Tab {
	b.t.Helper()
	ctx, cancel := chromedp.NewContext(b.ctx)
	b.t.Cleanup(cancel)
	tab := &Tab{t: b.t, ctx: ctx}
	tab.begin(width, height)
	return tab
}

func (b *Tab) begin(width, height int64) {
	b.t.Helper()
	// This starts the browser, which lives as long as the context of its first call: that one has no deadline.
	if err := chromedp.Listen(b.ctx, b.heard); err != nil {
		b.t.Fatalf("starting the browser: %v", err)
	}
	if _, err := chromedp.Call(b.ctx, performance.Enable, performance.EnableParams{}); err != nil {
		b.t.Fatal(err)
	}
	b.Do(chromedp.EmulateViewport(width, height))
}

func findBrowser() (string, error) {
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errors.New("there is no Chromium: Debian's package chromium has it")
}

// heard remembers what the browser has to complain about.
func (b *Tab) heard(event any) {
	var complaint string
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		complaint = "exception: " + e.ExceptionDetails.Text
		if e.ExceptionDetails.Exception != nil {
			complaint += " " + e.ExceptionDetails.Exception.Description
		}
	case *runtime.EventConsoleAPICalled:
		if e.Type != runtime.ConsoleAPICalledTypeError && e.Type != runtime.ConsoleAPICalledTypeWarning {
			return
		}
		complaint = "console:"
		for _, arg := range e.Args {
			complaint += fmt.Sprintf(" %s%s", arg.Value, arg.Description)
		}
	case *log.EventEntryAdded:
		if e.Entry.Level != log.EntryLevelError && e.Entry.Level != log.EntryLevelWarning {
			return
		}
		complaint = fmt.Sprintf("log: %s (%s)", e.Entry.Text, e.Entry.URL)
	default:
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.complaints = append(b.complaints, complaint)
}

// WantNoComplaints fails the test if the page threw, wrote errors or warnings to the console, broke its own policy, or asked
// for what can't be had, since the last call.
func (b *Tab) WantNoComplaints() {
	b.t.Helper()
	for _, complaint := range b.TakeComplaints() {
		b.t.Errorf("the browser complained: %s", complaint)
	}
}

// TakeComplaints returns what WantNoComplaints would fail for, and forgets it.
func (b *Tab) TakeComplaints() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	complaints := b.complaints
	b.complaints = nil
	return complaints
}

// Do runs actions.
func (b *Tab) Do(actions ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	if err := chromedp.Do(ctx, actions...); err != nil {
		b.t.Fatal(err)
	}
}

// Await waits until the JavaScript expression is true.
func (b *Tab) Await(what, expression string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, 2*patience)
	defer cancel()
	_, err := chromedp.Run(ctx, chromedp.Poll[bool]("Boolean("+expression+")", chromedp.WithPollingInterval(10*time.Millisecond), chromedp.WithPollingTimeout(patience)))
	if err != nil {
		b.Screenshot("failed")
		b.t.Fatalf("waiting for %s: %v; the page shows:\n%.4000s", what, err, b.Text("body"))
	}
}

// Click clicks on the middle of an element, as a mouse would.
func (b *Tab) Click(selector string) {
	b.t.Helper()
	b.Do(chromedp.Click(chromedp.CSS(selector)))
}

// Type gives the page keys, whatever has the focus.
func (b *Tab) Type(keys string) {
	b.t.Helper()
	b.Do(chromedp.KeyEvent(keys))
}

// Run lets the page run a JavaScript statement.
func (b *Tab) Run(statement string) {
	b.t.Helper()
	b.Do(chromedp.Evaluate[chromedp.Void](statement))
}

// Eval returns what the JavaScript expression comes to.
func Eval[T any](b *Tab, expression string) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	out, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		b.t.Fatalf("%s: %v", expression, err)
	}
	return out
}

// Text is what a reader sees of an element.
func (b *Tab) Text(selector string) string {
	b.t.Helper()
	return Eval[string](b, fmt.Sprintf("document.querySelector(%q)?.innerText ?? ''", selector))
}

// Screenshot writes what is to be seen into the folder for screenshots, if there is one.
func (b *Tab) Screenshot(name string) {
	b.t.Helper()
	dir := os.Getenv(ScreenshotsEnv)
	if dir == "" {
		return
	}
	png, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
	if err == nil {
		err = os.MkdirAll(dir, 0o755)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, name+".png"), png, 0o644)
	}
	if err != nil {
		b.t.Fatalf("screenshot %s: %v", name, err)
	}
}

// Busy is how long the page's main thread was busy so far.
func (b *Tab) Busy() time.Duration {
	b.t.Helper()
	result, err := chromedp.Call(b.ctx, performance.GetMetrics, cdp.Empty{})
	if err != nil {
		b.t.Fatal(err)
	}
	for _, metric := range result.Metrics {
		if metric.Name == "TaskDuration" {
			return time.Duration(metric.Value * float64(time.Second))
		}
	}
	b.t.Fatal("the browser doesn't tell how busy the page was")
	return 0
}
