package inspect

import (
	"slices"
	"testing"

	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

// TestPendingPodDiagnosis checks what the diagnosis gets of nodes and pods. Package diagnosis tests the texts.
func TestPendingPodDiagnosis(t *testing.T) {
	tests := map[string]struct {
		objects Objects
		cause   reasons.Reason
		text    string
	}{
		"a member that waits for its group, with the extender's reason": {
			split(t, newPod("p", 7).member("train", 2).created(3).refused("0/2 nodes are available: 2 gang: there is no room for all members at once."),
				newPod("q", 7).member("train", 2)), reasons.WaitsForGroup,
			"group default/train waits since 2026-07-01T11:03:00Z: there is no room for all members at once",
		},
		"a member that has not been tried, with the reason of another one": {
			split(t, newPod("p", 7).member("train", 2), newPod("q", 7).member("train", 2).refused("1 gang: there is no room for all members at once.")),
			reasons.WaitsForGroup, "group default/train waits: there is no room for all members at once",
		},
		"a member of a group about which the extender has reported nothing": {
			split(t, newPod("p", 7).member("train", 2), newPod("q", 7).member("train", 2)), reasons.WaitsForGroup,
			"group default/train waits: kube-scheduler hasn't tried all other members yet",
		},
		"a member of a group that runs": {
			split(t, newPod("p", 6).member("train", 2), newPod("q", 1).member("train", 2).on("n1", 0).last()), reasons.Fits,
			"n1 has room for it, 6 GiB on one card: kube-scheduler has not tried it yet",
		},
		"different units are compared by their size": {
			mixed(t).plus(newPod("p", 20000)), reasons.TooLarge, "no card is large enough for 20000 GiB: the largest has 16 GiB, on in-gib",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			pods := Build(test.objects).PendingPods
			got := pods[slices.IndexFunc(pods, func(p PendingPod) bool { return p.Name == "p" })]
			if got.Cause != test.cause {
				t.Errorf("reason %s, want %s", got.Cause, test.cause)
			}
			check.Equal(t, "message", test.text, got.Explanation)
		})
	}
}
