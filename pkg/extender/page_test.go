package extender

import (
	"fmt"
	"net/http"
	"testing"
)

func TestThePageLiesBelowUI(t *testing.T) {
	f := start(t)
	if w := f.call(http.MethodGet, "/ui/", ""); w.Code != http.StatusNotFound {
		t.Errorf("without a page: %d", w.Code)
	}
	options := f.options(f.cluster)
	options.Page = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.URL.Path) })
	f.handler = NewServer(options).Handler()
	for _, path := range []string{"/ui", "/ui/", "/ui/app.js", "/ui/data.json"} {
		if w := f.call(http.MethodGet, path, ""); w.Code != http.StatusOK || w.Body.String() != path {
			t.Errorf("%s: %d %s", path, w.Code, w.Body)
		}
	}
	// Not on the address for probes, which asks nobody for a certificate.
	f.handler = NewServer(options).HealthHandler()
	if w := f.call(http.MethodGet, "/ui/data.json", ""); w.Code != http.StatusNotFound {
		t.Errorf("beside the probes: %d %s", w.Code, w.Body)
	}
	f.handler = NewServer(options).Handler()
	if w := f.call(http.MethodPost, "/ui/", ""); w.Code != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", w.Code)
	}
}
