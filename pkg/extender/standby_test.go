package extender

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	extenderv1 "k8s.io/kube-scheduler/extender/v1"
)

func TestAStandbyAnswersWithAnErrorAndClosesTheConnection(t *testing.T) {
	pod := newPod("p", 10)
	f := start(t, newNode(t, "n1", 100), pod)
	var standby error
	options := f.options(f.cluster)
	options.Answer = func() error { return standby }
	f.handler = NewServer(options).Handler()
	names := []string{"n1"}
	arguments := map[string]any{
		"filter":     extenderv1.ExtenderArgs{Pod: pod, NodeNames: &names},
		"prioritize": extenderv1.ExtenderArgs{Pod: pod, NodeNames: &names},
		"bind":       extenderv1.ExtenderBindingArgs{PodName: pod.Name, PodNamespace: pod.Namespace, PodUID: pod.UID, Node: "n1"},
	}

	standby = errors.New("this replica stands by")
	for verb, args := range arguments {
		w := f.post(verb, args)
		if got := w.Header().Get("Connection"); got != "close" {
			t.Errorf("%s: Connection %q, want close", verb, got)
		}
		want := http.StatusOK // With Error set: kube-scheduler shows the text on the pod.
		if verb == "prioritize" {
			want = http.StatusServiceUnavailable
		}
		if w.Code != want || !strings.Contains(w.Body.String(), standby.Error()) {
			t.Errorf("%s: status %d, %s", verb, w.Code, w.Body)
		}
	}
	if w := f.call(http.MethodGet, "/readyz", ""); w.Code != http.StatusOK {
		t.Errorf("a standby with a whole ledger isn't ready: %d %s", w.Code, w.Body)
	}

	standby = nil
	if got := answer[extenderv1.ExtenderBindingResult](t, f.post("bind", arguments["bind"]), http.StatusOK); got.Error != "" {
		t.Errorf("bind once it leads: %s", got.Error)
	}
}
