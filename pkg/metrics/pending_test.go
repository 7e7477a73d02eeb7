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
	NewPending(registry, func() error { return ready }, func() ([]diagnosis.Diagnosis, int) { return pods, 0 })
	if n, err := testutil.GatherAndCount(registry); n != 0 || err != nil {
		t.Errorf("%d series before the caches are synced (%v)", n, err)
	}

	ready = nil
	expect := func(want map[diagnosis.Reason]int) {
		t.Helper()
		var text strings.Builder
		text.WriteString("# HELP gpushare_extender_pending_pods Number of pods that ask for GPU memory and have no node, by the reason of their diagnosis.\n" +
			"# TYPE gpushare_extender_pending_pods gauge\n")
		for _, reason := range []diagnosis.Reason{"gated", "nominated", "waits_for_group", "fits", "fragmented", "full", "unhealthy", "too_large", "no_node"} {
			fmt.Fprintf(&text, "gpushare_extender_pending_pods{reason=%q} %d\n", reason, want[reason])
		}
		if err := testutil.GatherAndCompare(registry, strings.NewReader(text.String())); err != nil {
			t.Error(err)
		}
	}
	expect(nil)
	pods = []diagnosis.Diagnosis{{Reason: diagnosis.Full}, {Reason: diagnosis.Gated}, {Reason: diagnosis.Full}}
	expect(map[diagnosis.Reason]int{"full": 2, "gated": 1})
}
