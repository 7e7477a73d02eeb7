package metrics

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/gpushare/gpushare/pkg/diagnosis"
)

func TestPending(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	ready := errors.New("not yet")
	var pods []diagnosis.Diagnosis
	problems := 0
	NewPending(registry, func() error { return ready }, func() ([]diagnosis.Diagnosis, int) { return pods, problems })
	if n, err := testutil.GatherAndCount(registry); n != 0 || err != nil {
		t.Errorf("%d series before the caches are synced (%v)", n, err)
	}

	ready = nil
	expect := func(want map[diagnosis.Reason]int) {
		t.Helper()
		var text strings.Builder
		text.WriteString("# HELP gpushare_extender_pending_pods Number of pods that ask for GPU memory and have no node, by the reason of their diagnosis.\n" +
			"# TYPE gpushare_extender_pending_pods gauge\n")
		for _, reason := range diagnosis.Reasons() {
			fmt.Fprintf(&text, "gpushare_extender_pending_pods{reason=%q} %d\n", reason, want[reason])
		}
		text.WriteString("# HELP gpushare_extender_request_problems Number of pods that get no GPU memory although they seem to ask for some, because of a mistake in their request.\n" +
			"# TYPE gpushare_extender_request_problems gauge\n")
		fmt.Fprintf(&text, "gpushare_extender_request_problems %d\n", problems)
		if err := testutil.GatherAndCompare(registry, strings.NewReader(text.String())); err != nil {
			t.Error(err)
		}
	}
	expect(nil)
	pods = []diagnosis.Diagnosis{{Reason: diagnosis.Full}, {Reason: diagnosis.Gated}, {Reason: diagnosis.Full}}
	problems = 3
	expect(map[diagnosis.Reason]int{"full": 2, "gated": 1})
}
