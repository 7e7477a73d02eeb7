package webui

import (
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

// reply is a response with its complete body.
type reply struct {
	status int
	header http.Header
	body   string
}

// ask sends a request without following redirects or decompressing.
func (s *fixture) ask(method, path string, header ...string) reply {
	s.t.Helper()
	request, err := http.NewRequestWithContext(s.t.Context(), method, strings.TrimSuffix(s.url, Path+"/")+path, nil)
	check.Must(s.t, err)
	request.Header.Set("Accept-Encoding", "identity")
	for i := 0; i < len(header); i += 2 {
		request.Header.Set(header[i], header[i+1])
	}
	response, err := http.DefaultTransport.RoundTrip(request)
	check.Must(s.t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	check.Must(s.t, err)
	return reply{response.StatusCode, response.Header, string(body)}
}

func TestPaths(t *testing.T) {
	s := start(t, nil)
	for path, want := range map[string]struct {
		status int
		kind   string
	}{
		"/ui/":               {200, "text/html; charset=utf-8"},
		"/ui/app.js":         {200, "text/javascript; charset=utf-8"},
		"/ui/style.css":      {200, "text/css; charset=utf-8"},
		"/ui/icon.svg":       {200, "image/svg+xml"},
		"/ui/data.json":      {200, "application/json"},
		"/ui":                {302, ""},
		"/":                  {302, ""},
		"/ui/index.html":     {301, ""},
		"/ui/nothing":        {404, "text/plain; charset=utf-8"},
		"/ui/../doc.go":      {404, "text/plain; charset=utf-8"},
		"/uiapp.js":          {404, "text/plain; charset=utf-8"},
		"/ui/<script>":       {404, "text/plain; charset=utf-8"},
		"/gpushare/ui/inner": {404, "text/plain; charset=utf-8"},
	} {
		response := s.ask(http.MethodGet, path)
		if response.status != want.status || response.header.Get("Content-Type") != want.kind {
			t.Errorf("%s: %d %q, want %d %q", path, response.status, response.header.Get("Content-Type"), want.status, want.kind)
		}
		// Relative, so that it works behind any path prefix.
		if location := response.header.Get("Location"); want.status == 302 && location != "ui/" {
			t.Errorf("%s redirects to %q", path, location)
		}
		for header, part := range map[string]string{
			"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'",
			"X-Content-Type-Options":  "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
		} {
			if got := response.header.Get(header); !strings.Contains(got, part) {
				t.Errorf("%s: %s is %q", path, header, got)
			}
		}
	}
	for path, want := range map[string]int{"/": 302, "/ui/": 200, "/ui/data.json": 200} {
		if response := s.ask(http.MethodHead, path); response.status != want || response.body != "" {
			t.Errorf("HEAD %s: %d %q, want %d", path, response.status, response.body, want)
		}
	}
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete} {
		if response := s.ask(method, "/ui/"); response.status != http.StatusMethodNotAllowed {
			t.Errorf("%s: %d", method, response.status)
		}
	}
}

// An update never mixes old and new files.
func TestStaticFiles(t *testing.T) {
	reply := start(t, nil).ask(http.MethodGet, "/ui/app.js")
	if cache := reply.header.Get("Cache-Control"); reply.body == "" || cache != "no-cache" {
		t.Errorf("%d bytes, Cache-Control %q", len(reply.body), cache)
	}
}

// The page loads only its own files: no other host, no inline script or style, no interpretation of text as HTML.
func TestPageSelfContained(t *testing.T) {
	entries, err := assets.ReadDir("assets")
	check.Must(t, err)
	all := map[string]string{}
	for _, entry := range entries {
		text, err := assets.ReadFile("assets/" + entry.Name())
		check.Must(t, err)
		all[entry.Name()] = string(text)
	}
	forbidden := regexp.MustCompile(`(?i)https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|<script>|<style|\sstyle=|\son[a-z]+=`)
	namespace := "http://www.w3.org/2000/svg" // Only a name, never loaded.
	for name, text := range all {
		if found := forbidden.FindString(strings.ReplaceAll(text, namespace, "")); found != "" {
			t.Errorf("%q has %q", name, found)
		}
	}
	for _, match := range regexp.MustCompile(`(?:src|href)="([^"#]+)"`).FindAllStringSubmatch(all["index.html"], -1) {
		if _, ok := all[match[1]]; !ok && match[1] != "data.json" {
			t.Errorf("the page refers to the unknown file %q", match[1])
		}
	}
}

// Each cause and phase that the page can show has an explanation. Only a group that runs is as it should be.
func TestExplanations(t *testing.T) {
	script, err := assets.ReadFile("assets/causes.js")
	check.Must(t, err)
	if want := fmt.Sprintf("No scheduler has tried the pod for %.0f s.", diagnosis.UntriedAfter.Seconds()); !strings.Contains(string(script), want) {
		t.Errorf("causes.js doesn't say %q", want)
	}
	explained := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^  (\w+): \["(\w+)", "`).FindAllStringSubmatch(string(script), -1) {
		explained[m[1]] = m[2]
	}
	kinds := func(name string) []string {
		if name == gang.PhaseRunning.String() {
			return []string{"good"}
		}
		return []string{"wait", "lack", "wrong"}
	}
	var names []string
	for _, reason := range reasons.OfPods() {
		names = append(names, reason.String())
	}
	for phase := range gang.New(gang.Options{}).Phases() {
		names = append(names, phase.String())
	}
	for _, name := range names {
		if kind := explained[name]; !slices.Contains(kinds(name), kind) {
			t.Errorf("%s is explained as %q, want one of %q", name, kind, kinds(name))
		}
		delete(explained, name)
	}
	if len(explained) > 0 {
		t.Errorf("explanations of what is no cause or phase: %q", explained)
	}
}

func TestNamesEscaped(t *testing.T) {
	s := start(t, nil)
	const node, name = "</script><script>alert(1)</script>", "a\n\u2028"
	s.ledger.SetNode(node, spec(16))
	s.ledger.SetBound(node, pod(name, 4), gpu.On(0, 4), time.Time{})
	s.refresh()
	if got := s.data().Nodes[0]; got.Name != node || got.Cards[0].Pods[0].Name != name {
		t.Errorf("got %+v", got)
	}
}

// The data is compressed for browsers.
func TestCompressed(t *testing.T) {
	s := start(t, nil)
	packed := s.ask(http.MethodGet, "/ui/data.json", "Accept-Encoding", "br;q=1, gzip")
	reader, err := gzip.NewReader(strings.NewReader(packed.body))
	check.Must(t, err)
	text, err := io.ReadAll(reader)
	check.Must(t, err)
	if packed.header.Get("Content-Encoding") != "gzip" || !strings.Contains(string(text), `"complete":true`) {
		t.Errorf("%v %.300s", packed.header, text)
	}
}
