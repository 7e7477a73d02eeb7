package browser

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/performance"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

const (
	// RequireEnv makes a missing browser a failure. Otherwise the tests that need one are skipped.
	RequireEnv = "GPUSHARE_REQUIRE_BROWSER"
	// ScreenshotsEnv names the folder for screenshots. If it is empty, none are written.
	ScreenshotsEnv = "GPUSHARE_SCREENSHOTS"
	// patience bounds every wait. It is not a performance target.
	patience = time.Minute
)

// Tab is a tab of a browser, with the errors and warnings of its page.
type Tab struct {
	t   testing.TB
	ctx context.Context
	// url is the page's address, of visit.
	url string

	mu         sync.Mutex
	complaints []string
}

// browser runs for all tests of the package, because a start takes seconds.
var browser struct {
	ctx  context.Context
	stop func()
}

// startBrowser starts the browser, unless it runs.
func startBrowser(path string) error {
	if browser.ctx != nil {
		return nil
	}
	dir, err := os.MkdirTemp("", "gpushare-browser-")
	if err != nil {
		return err
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.WSURLReadTimeout(patience), chromedp.UserDataDir(dir))
	allocator, stop := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, cancel := chromedp.NewContext(allocator)
	browser.ctx = ctx
	browser.stop = func() {
		if err := chromedp.Cancel(ctx); err != nil && !errors.Is(err, context.Canceled) {
			fmt.Fprintln(os.Stderr, "closing the browser:", err)
		}
		cancel()
		stop()
		_ = os.RemoveAll(dir)
	}
	// The browser ends with the context of the first call. So that context has no deadline.
	return chromedp.Do(ctx)
}

// stopBrowser stops the browser, if it runs.
func stopBrowser() {
	if browser.ctx != nil {
		browser.stop()
	}
}

// Start opens a tab that shares no state with others until the test ends. Without a browser it skips the test, or fails it
// if RequireEnv is set.
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
	if err := startBrowser(path); err != nil {
		t.Fatalf("starting the browser: %v", err)
	}
	ctx, cancel := chromedp.NewContext(browser.ctx, chromedp.WithNewBrowserContext())
	t.Cleanup(cancel)
	tab := &Tab{t: t, ctx: ctx}
	tab.begin(width, height)
	return tab
}

func (b *Tab) begin(width, height int64) {
	b.t.Helper()
	if err := chromedp.Listen(b.ctx, b.heard); err != nil {
		b.t.Fatalf("opening a tab: %v", err)
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
	return "", errors.New("no Chromium was found: Debian's package chromium has it")
}

// heard records errors and warnings.
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

// WantNoComplaints fails the test if, since the last call, the page has thrown, written errors or warnings to the console,
// broken its own policy, or requested something that doesn't exist.
func (b *Tab) WantNoComplaints() {
	b.t.Helper()
	for _, complaint := range b.TakeComplaints() {
		b.t.Errorf("the browser complained: %s", complaint)
	}
}

// TakeComplaints returns the errors and warnings since the last call.
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
	must(b.t, chromedp.Do(ctx, actions...))
}

// Await waits until the JavaScript expression is true.
func (b *Tab) Await(what, expression string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, 2*patience)
	defer cancel()
	var err error
	for {
		_, err = chromedp.Run(ctx, chromedp.Poll[bool]("Boolean("+expression+")", chromedp.WithPollingInterval(10*time.Millisecond), chromedp.WithPollingTimeout(patience)))
		// Chromium reports late that a navigation replaced the page's context. Then the poll can't go on in the earlier one.
		if err == nil || !strings.Contains(err.Error(), "Cannot find context") {
			break
		}
	}
	if err != nil {
		b.Screenshot("failed")
		b.t.Fatalf("waiting for %s: %v; the page shows:\n%.4000s", what, err, b.Text("body"))
	}
}

// Click clicks on the middle of an element, like a mouse.
func (b *Tab) Click(selector string) {
	b.t.Helper()
	b.Do(chromedp.Click(chromedp.CSS(selector)))
}

// Type sends keys to the element with the focus.
func (b *Tab) Type(keys string) {
	b.t.Helper()
	b.Do(chromedp.KeyEvent(keys))
}

// Press presses a key that writes a character, as one event: if the page prevents its default, nothing is written. Type sends
// the character as an event of its own, which the page can't prevent.
func (b *Tab) Press(key string) {
	b.t.Helper()
	if _, err := chromedp.Call(b.ctx, input.DispatchKeyEvent, input.DispatchKeyEventParams{Type: input.DispatchKeyEventTypeKeyDown, Key: key, Text: key}); err != nil {
		b.t.Fatal(err)
	}
}

// Run runs a JavaScript statement in the page.
func (b *Tab) Run(statement string) {
	b.t.Helper()
	b.Do(chromedp.Evaluate[chromedp.Void](statement))
}

// Eval returns the value of the JavaScript expression.
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

// Text returns the visible text of an element.
func (b *Tab) Text(selector string) string {
	b.t.Helper()
	return Eval[string](b, fmt.Sprintf("document.querySelector(%q)?.innerText ?? ''", selector))
}

// Screenshot writes a picture of the page into the folder for screenshots, if there is one.
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
