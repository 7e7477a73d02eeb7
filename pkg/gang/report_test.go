package gang

import (
	stdcmp "cmp"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// TestReports: what the web page shows of each run.
func TestReports(t *testing.T) {
	named := func(group string, edits ...memberEdit) []memberEdit {
		return append(edits, func(m *Member) { m.Gang = Key{Namespace: "ns", Name: group}; m.UID = gpu.PodUID(group + m.Name) })
	}
	cardless := func(m *Member) { m.Cardless = true }
	invalidSize := func(m *Member) { m.Problem, m.Size = "its size is no number", 0 }
	mgr := newManager(t)
	mgr.Ledger.SetNode("n", ledger.NodeSpec{Cards: []gpu.Card{{Memory: 16}}})
	for _, m := range []Member{
		newMember("b", 1, named("broken", sized(2), inRun("1", 9))...), newMember("a", 2, named("broken", sized(2))...),
		newMember("a", 0, named("cardless", cardless)...), newMember("b", 0, named("cardless", cardless)...),
		newMember("a", 0, named("disagrees", sized(2), inRun("1", 9))...), newMember("b", 9, named("disagrees", sized(2))...), newMember("c", 0, named("disagrees", sized(3), inRun("1", 9))...),
		newMember("a", 0, named("ended", inRun("1", 9), done)...),
		newMember("a", 0, named("incomplete")...), newMember("b", 0, named("incomplete", leaving)...),
		newMember("a", 0, named("invalid")...), newMember("b", 1, named("invalid", invalidSize)...),
		newMember("a", 0, named("planned", sized(2))...), newMember("b", 0, named("planned", sized(2))...),
		newMember("a", 0, named("running", sized(1), inRun("1", 9), marked)...), newMember("b", 0, named("running", sized(2), ofNextJob)...),
	} {
		mgr.SetMember(m, begin)
	}
	if reports, leads := mgr.Reports(); leads || len(reports) > 0 {
		t.Errorf("before it leads: %v, %v", reports, leads)
	}
	mgr.StartLeading(begin)
	later := begin.Add(time.Minute)
	mgr.filterAll("planneda", []string{"n"}, later)
	mgr.filterAll("plannedb", []string{"n"}, later)
	report := func(group string, r Report) Report {
		r.Group, r.Since = Key{Namespace: "ns", Name: group}, stdcmp.Or(r.Since, r.WaitsSince)
		return r
	}
	want := []Report{
		report("broken", Report{Phase: PhaseBroken, Size: 2, Counted: 2, Bound: []string{"b"}, ID: "1", Pending: []string{"a"}, Memory: 16, Reason: reasons.GroupBroken(1, 2), WaitsSince: begin.Add(2 * time.Second)}),
		report("cardless", Report{Cardless: 2, Reason: reasons.GroupCardless(2)}),
		report("disagrees", Report{ID: "1", Phase: PhaseBroken, Counted: 3, Bound: []string{"a", "c"}, Pending: []string{"b"}, Memory: 24,
			Reason: reasons.GroupDisagrees.Says([]string{"a", "c"}, []int{2, 3}), Since: begin}),
		report("ended", Report{ID: "1", Phase: PhaseRunning, Since: begin}),
		report("incomplete", Report{Size: 4, Counted: 1, Pending: []string{"a"}, Memory: 8, Reason: reasons.GroupIncomplete(1, 4), WaitsSince: begin}),
		report("invalid", Report{Size: 4, Counted: 1, Pending: []string{"a", "b"}, Memory: 16, Reason: reasons.GroupIncomplete(1, 4).Ineligible(1, "b"), Problem: "b: its size is no number", WaitsSince: begin}),
		report("planned", Report{Phase: PhasePlanned, Size: 2, Counted: 2, Pending: []string{"a", "b"}, Memory: 16, Reason: reasons.GroupArriving(0, 2), WaitsSince: begin}),
		report("running", Report{ID: "1", Phase: PhaseRunning, Size: 1, Counted: 1, Bound: []string{"a"}, Memory: 8, Since: begin}),
		report("running", Report{Size: 2, Counted: 1, Pending: []string{"b"}, Memory: 8, Reason: reasons.GroupIncomplete(1, 2), WaitsSince: begin}),
	}
	got, leads := mgr.Reports()
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" || !leads {
		t.Errorf("leads %v (-want +got):\n%s", leads, diff)
	}
}
