package extender

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

// Bad input is answered with a clear error and doesn't reach the Scheduler.
func TestBadInput(t *testing.T) {
	always := map[string]struct{ body, want string }{
		"nothing":                    {"", "body is empty"},
		"spaces":                     {" \n", "body is empty"},
		"no JSON":                    {"hello", "can't be read"},
		"another type":               {`[1,2]`, "can't be read"},
		"another type within":        {`{"Pod":"p","PodName":7}`, "can't be read"},
		"deep nesting":               {strings.Repeat("[", 20_000), "can't be read"},
		"a body above the limit":     {`{"PodName":"` + strings.Repeat("x", maxBody) + `"}`, "over 16777216 bytes"},
		"whole nodes over the limit": {`{"Nodes":{"items":[{"metadata":{"name":"` + strings.Repeat("x", maxBody) + `"}}]}}`, "set nodeCacheCapable: true"},
	}
	withPod := maps.Clone(always)
	maps.Copy(withPod, map[string]struct{ body, want string }{
		"no pod":            {`{"NodeNames":["n1"]}`, "names no pod"},
		"null":              {`null`, "names no pod"},
		"a pod without UID": {`{"Pod":{"metadata":{"name":"p","namespace":"default"}},"NodeNames":["n1"]}`, "lacks its name, namespace or UID"},
		"a long name": {
			`{"Pod":{"metadata":{"name":"` + strings.Repeat("p", 1000) + `","namespace":"default","uid":"u"}},"NodeNames":["n1"]}`,
			"name, namespace or UID of more than 253 bytes",
		},
	})
	scheduler := &fakeScheduler{}
	server := newServer(scheduler)
	h := server.Handler()
	for verb, good := range validBodies(t) {
		inputs := withPod
		if verb == "bind" { // Bind checks its arguments itself.
			inputs = always
		}
		inputs = maps.Clone(inputs)
		inputs["half of it"] = struct{ body, want string }{good[:len(good)/2], "can't be read"}
		inputs["more after it"] = struct{ body, want string }{good + "{}", "after top-level value"}
		for name, in := range inputs {
			if got := errorOf(t, verb, post(h, verb, in.body), 400); !strings.Contains(got, in.want) || len(got) > 300 {
				t.Errorf("%s, %s: error %.400q, want %q in it", verb, name, got, in.want)
			}
		}
		if n := server.Observer.(*fakeObserver).count(verb + " error"); n != len(inputs) {
			t.Errorf("%s: %d errors counted, want %d", verb, n, len(inputs))
		}
		for _, method := range []string{http.MethodGet, http.MethodPut, http.MethodDelete} {
			w := serveOne(h, newRequest(method, Prefix+"/"+verb, good))
			if w.Code != http.StatusMethodNotAllowed || !strings.Contains(w.Header().Get("Allow"), http.MethodPost) {
				t.Errorf("%s %s: %d, Allow %q", method, verb, w.Code, w.Header().Get("Allow"))
			}
		}
	}
	if w := serveOne(h, newRequest(http.MethodPost, "/elsewhere", "")); w.Code != 404 || w.Body.String() != "no such path: \"/elsewhere\"\n" {
		t.Errorf("another path: %d %s", w.Code, w.Body)
	}
	if scheduler.calls != 0 {
		t.Errorf("%d calls reached the Scheduler", scheduler.calls)
	}
}

// The answer to a body above the limit also arrives over a real connection.
func TestLargeBodyOverTheWire(t *testing.T) {
	server := httptest.NewServer(newServer(&fakeScheduler{}).Handler())
	defer server.Close()
	body := strings.NewReader(`{"PodName":"` + strings.Repeat("x", maxBody) + `"}`)
	response, err := http.Post(server.URL+Prefix+"/bind", "application/json", body)
	check.Must(t, err)
	defer response.Body.Close()
	var got bindResult
	if err := json.NewDecoder(response.Body).Decode(&got); err != nil || !strings.Contains(got.Error, "over 16777216 bytes") {
		t.Errorf("%d %q (%v)", response.StatusCode, got.Error, err)
	}
}
