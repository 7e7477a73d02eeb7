package metrics

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/mistakes"
)

func TestPending(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	ready := errors.New("not yet")
	now := PendingPods{At: time.Unix(1_000_000, 0)}
	NewPending(registry, func() error { return ready }, 2*time.Hour, func() PendingPods { return now })
	if n, err := testutil.GatherAndCount(registry); n != 0 || err != nil {
		t.Errorf("%d series before the caches are synced (%v)", n, err)
	}

	ready = nil
	expect := func(want, longest map[reasons.Reason]int, ratio float64) {
		t.Helper()
		var text strings.Builder
		fmt.Fprintf(&text, "# HELP gpushare_extender_longest_wait_bound_ratio Largest part of its bound for which a queued pod or group has waited: four times --reservation-max-age for itself and for each one ahead of it.\n"+
			"# TYPE gpushare_extender_longest_wait_bound_ratio gauge\ngpushare_extender_longest_wait_bound_ratio %v\n", ratio)
		text.WriteString("# HELP gpushare_extender_longest_wait_seconds How long the one of these pods that waits longest has waited, by the same reason; 0 if there is none.\n" +
			"# TYPE gpushare_extender_longest_wait_seconds gauge\n")
		for _, reason := range reasons.OfPods() {
			fmt.Fprintf(&text, "gpushare_extender_longest_wait_seconds{reason=%q} %d\n", reason, longest[reason])
		}
		text.WriteString("# HELP gpushare_extender_pending_pods Number of pods that ask for GPU memory and have no node, by the reason of their diagnosis.\n" +
			"# TYPE gpushare_extender_pending_pods gauge\n")
		for _, reason := range reasons.OfPods() {
			fmt.Fprintf(&text, "gpushare_extender_pending_pods{reason=%q} %d\n", reason, want[reason])
		}
		text.WriteString("# HELP gpushare_extender_request_problems Number of pods that get no GPU memory although they seem to ask for some, because of a mistake in their request.\n" +
			"# TYPE gpushare_extender_request_problems gauge\n")
		fmt.Fprintf(&text, "gpushare_extender_request_problems %d\n", now.RequestProblems)
		check.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(text.String())))
	}
	expect(nil, nil, 0)
	waits := func(reason reasons.Reason, waited time.Duration, queued bool, ahead int) diagnosis.Diagnosis {
		return diagnosis.Diagnosis{Reason: reason, Position: diagnosis.Position{Since: now.At.Add(-waited), Queued: queued, Ahead: ahead}}
	}
	now.Diagnoses = []diagnosis.Diagnosis{
		waits(reasons.Full, time.Minute, true, 0), waits(reasons.Gated, 24*time.Hour, false, 0), waits(reasons.Full, 3*time.Hour, true, 1), waits(reasons.Full, time.Second, true, 2),
		{Reason: reasons.WaitsForGroup, Position: diagnosis.Position{Queued: true}}, // A standby doesn't know since when.
	}
	now.RequestProblems = 3
	expect(map[reasons.Reason]int{reasons.Full: 3, reasons.Gated: 1, reasons.WaitsForGroup: 1}, map[reasons.Reason]int{reasons.Full: 3 * 3600, reasons.Gated: 24 * 3600}, 0.75)
}

// Each mistake counts under its cause, or as a request problem.
func TestPendingMistakes(t *testing.T) {
	causes, want, requestProblems := []diagnosis.Diagnosis{}, map[reasons.Reason]int{reasons.WaitsForTurn: 0}, 0 // That is no mistake.
	for _, m := range mistakes.All() {
		if m.NotPending {
			requestProblems++
			continue
		}
		want[m.Cause]++
		causes = append(causes, m.Diagnose())
	}
	registry := prometheus.NewPedanticRegistry()
	NewPending(registry, func() error { return nil }, 0, func() PendingPods { return PendingPods{Diagnoses: causes, RequestProblems: requestProblems} })
	families, err := registry.Gather()
	check.Must(t, err)
	got := map[reasons.Reason]int{}
	for _, family := range families {
		if strings.HasPrefix(family.GetName(), "gpushare_extender_longest_wait") {
			continue
		}
		for _, metric := range family.GetMetric() {
			if labels := metric.GetLabel(); len(labels) > 0 {
				var reason reasons.Reason
				check.NoError(t, reason.UnmarshalText([]byte(labels[0].GetValue())))
				got[reason] = int(metric.GetGauge().GetValue())
			} else if n := int(metric.GetGauge().GetValue()); n != requestProblems || n == 0 {
				t.Errorf("%d request problems, want %d", n, requestProblems)
			}
		}
	}
	check.Equal(t, "pending pods", want, got)
}
