package extender

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"
)

// TestBadInput sends invalid input to every verb. The answer is a clear error, and the ledger does not change.
func TestBadInput(t *testing.T) {
	pod, elsewhere := newPod("p", 10), boundPod("b", 10, "n1", 0)
	f := start(t, newNode(t, "n1", 100), newNode(t, "n2", 100), pod, elsewhere)
	goodArgs := text(t, extenderv1.ExtenderArgs{Pod: pod, NodeNames: names("n1")})
	goodBind := text(t, bindArgs(pod, "n1"))
	goodPreempt := text(t, extenderv1.ExtenderPreemptionArgs{Pod: pod, NodeNameToMetaVictims: meta("n1", 0, "uid-b")})
	good := map[string]string{"filter": goodArgs, "prioritize": goodArgs, "bind": goodBind, "preempt": goodPreempt}

	type input struct{ name, body, want string }
	inputs := map[string][]input{
		"filter": {
			{"no pod", `{"NodeNames":["n1"]}`, "names no pod"},
			{"null", `null`, "names no pod"},
			{"a pod without UID", `{"Pod":{"metadata":{"name":"p","namespace":"default"}},"NodeNames":["n1"]}`, "lacks its name, namespace or UID"},
			{"a name without end", `{"Pod":{"metadata":{"name":"` + strings.Repeat("p", 1000) + `","namespace":"default","uid":"u"}},"NodeNames":["n1"]}`, "name, namespace or UID of more than 253 bytes"},
			{"too many whole nodes", `{"Nodes":{"items":[{"metadata":{"name":"` + strings.Repeat("x", maxBody) + `"}}]}}`, "set nodeCacheCapable: true"},
		},
		"bind": {
			{"no pod", `{"Node":"n1"}`, "PodNamespace, PodName, PodUID and Node are all needed"},
			{"null", `null`, "are all needed"},
			{"an unknown pod", strings.Replace(goodBind, `"PodName":"p"`, `"PodName":"nobody"`, 1), `"nobody" not found`},
			{"a path for a name", strings.Replace(goodBind, `"PodName":"p"`, `"PodName":"../../nodes/n1"`, 1), "not found"},
			{"a wrong UID", strings.Replace(goodBind, "uid-p", "other", 1), "pod default/p has UID uid-p, not other"},
			{"an unknown node", strings.Replace(goodBind, `"n1"`, `"nowhere"`, 1), "node nowhere: the node shares no GPU memory"},
			{"a pod that is bound elsewhere", text(t, bindArgs(elsewhere, "n2")), "bound to node n1 already"},
		},
	}
	inputs["prioritize"], inputs["preempt"] = inputs["filter"], inputs["filter"]

	before := f.cluster.Ledger().Nodes()
	for verb, body := range good {
		all := append([]input{
			{"nothing", "", "body is empty"},
			{"spaces", " \n", "body is empty"},
			{"no JSON", "hello", "can't be read"},
			{"half of it", body[:len(body)/2], "can't be read"},
			{"another shape", `[1,2]`, "can't be read"},
			{"another type within", `{"Pod":"p","PodName":7}`, "can't be read"},
			{"more after it", body + "{}", "after top-level value"},
			{"rubbish after it", body + "x", "after top-level value"},
			{"deep nesting", strings.Repeat("[", 20_000), "can't be read"},
			{"too much", `{"PodName":"` + strings.Repeat("x", maxBody) + `"}`, "over 16777216 bytes"},
		}, inputs[verb]...)
		for _, in := range all {
			t.Run(verb+" "+in.name, func(t *testing.T) {
				w := f.call(http.MethodPost, Prefix+"/"+verb, in.body)
				if got := errorOf(t, verb, w); !strings.Contains(got, in.want) || len(got) > 300 {
					t.Errorf("error %.400q, want %q in it", got, in.want)
				}
			})
		}
		t.Run(verb+" wrong method", func(t *testing.T) {
			for _, method := range []string{http.MethodGet, http.MethodPut, http.MethodDelete} {
				w := f.call(method, Prefix+"/"+verb, body)
				if w.Code != http.StatusMethodNotAllowed || !strings.Contains(w.Header().Get("Allow"), http.MethodPost) {
					t.Errorf("%s: %d, Allow %q", method, w.Code, w.Header().Get("Allow"))
				}
			}
		})
	}
	if w := f.call(http.MethodPost, "/elsewhere", ""); w.Code != 404 || w.Body.String() != "no such path: \"/elsewhere\"\n" {
		t.Errorf("another path: %d %s", w.Code, w.Body)
	}
	if diff := cmp.Diff(before, f.cluster.Ledger().Nodes()); diff != "" {
		t.Errorf("the ledger changed (-before +after):\n%s", diff)
	}
	if f.observer.panics != 0 {
		t.Errorf("%d panics", f.observer.panics)
	}
}

// The answer to a body that is too large also arrives over a real connection.
func TestATooLargeBodyOverTheWire(t *testing.T) {
	f := start(t, newNode(t, "n1", 100))
	server := httptest.NewServer(f.handler)
	defer server.Close()
	body := strings.NewReader(`{"PodName":"` + strings.Repeat("x", maxBody) + `"}`)
	response, err := http.Post(server.URL+Prefix+"/bind", "application/json", body)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var got extenderv1.ExtenderBindingResult
	if err := json.NewDecoder(response.Body).Decode(&got); err != nil || !strings.Contains(got.Error, "over 16777216 bytes") {
		t.Errorf("%d %q (%v)", response.StatusCode, got.Error, err)
	}
}

// errorOf returns the error of a verb's answer, from the field or status that kube-scheduler reads.
func errorOf(t *testing.T, verb string, w *httptest.ResponseRecorder) string {
	t.Helper()
	switch verb {
	case "filter":
		return answer[filterResult](t, w, 200).Error
	case "bind":
		return answer[extenderv1.ExtenderBindingResult](t, w, 200).Error
	}
	if w.Code != http.StatusBadRequest {
		t.Errorf("status %d, want 400", w.Code)
	}
	return w.Body.String()
}

func text(t testing.TB, value any) string {
	t.Helper()
	data, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
