package diagnosis

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/reasons"
)

// Whether a rejection has other reasons than memory decides between "about to be tried again" and "rejected for something else".
func TestRejectionIn(t *testing.T) {
	const preemption = " preemption: 0/3 nodes are available: 1 Insufficient cpu, 2 No preemption victims found for incoming pod."
	for message, want := range map[string][2]string{
		"0/3 nodes are available: 3 no GPU card has enough free memory.":                                        {"3 no GPU card has enough free memory", ""},
		"0/3 nodes are available: 3 no GPU card has enough free memory." + preemption:                           {"3 no GPU card has enough free memory", ""},
		"0/3 nodes are available: 3 Insufficient aliyun.com/gpu-mem. no new claims to deallocate," + preemption: {"3 Insufficient aliyun.com/gpu-mem", ""},
		// Two nodes lack CPU as well, but each of the three lacks GPU memory.
		"0/3 nodes are available: 2 Insufficient cpu, 3 Insufficient aliyun.com/gpu-mem.": {"2 Insufficient cpu, 3 Insufficient aliyun.com/gpu-mem", ""},
		"0/3 nodes are available: 1 Insufficient cpu, 2 Insufficient aliyun.com/gpu-mem.": {"1 Insufficient cpu, 2 Insufficient aliyun.com/gpu-mem", "1 Insufficient cpu"},
		// A node can lack memory and cores.
		"0/2 nodes are available: 1 Insufficient cpu, 1 Insufficient aliyun.com/gpu-core.percentage, 1 Insufficient aliyun.com/gpu-mem.": {
			"1 Insufficient cpu, 1 Insufficient aliyun.com/gpu-core.percentage, 1 Insufficient aliyun.com/gpu-mem", "1 Insufficient cpu"},
		"0/2 nodes are available: 1 Insufficient aliyun.com/gpu-core.percentage, 2 Insufficient aliyun.com/gpu-mem.": {
			"1 Insufficient aliyun.com/gpu-core.percentage, 2 Insufficient aliyun.com/gpu-mem", ""},
		"0/2 nodes are available: 1 Insufficient aliyun.com/gpu-core.percentage, 1 Insufficient aliyun.com/gpu-mem.": {
			"1 Insufficient aliyun.com/gpu-core.percentage, 1 Insufficient aliyun.com/gpu-mem", ""},
		"0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 free GPU memory is kept for group default/a.b.": {
			"1 node(s) had untolerated taint(s), 2 free GPU memory is kept for group default/a.b", ""},
		"0/3 nodes are available: 1 node(s) were unschedulable, 1 node(s) didn't match Pod's node affinity/selector, 1 gang: 1 of 2 members exist.": {
			"1 node(s) were unschedulable, 1 node(s) didn't match Pod's node affinity/selector, 1 gang: 1 of 2 members exist", ""},
		"0/3 nodes are available: 1 node(s) had untolerated taint {team: a}, 2 Too many pods.": {"1 node(s) had untolerated taint {team: a}, 2 Too many pods", "2 Too many pods"},
		"0/3 nodes are available: 3 node(s) didn't satisfy plugin(s) [NodeAffinity].":          {"3 node(s) didn't satisfy plugin(s) [NodeAffinity]", ""},
		`0/3 nodes are available: persistentvolumeclaim "data" not found.` + preemption:        {`persistentvolumeclaim "data" not found`, `persistentvolumeclaim "data" not found`},
	} {
		got, ok := rejectionIn(message)
		if diff := cmp.Diff(want, [2]string{got.Text, got.others}); !ok || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", message, ok, diff)
		}
		if got, want := reasons.WithoutPreemption(message), message[:len("0/3 nodes are available: ")]+want[0]+"."; got != want {
			t.Errorf("without preemption %q, want %q", got, want)
		}
	}
	for _, message := range []string{"", "no nodes available to schedule pods", `Post "https://x/gpushare-scheduler/filter": EOF`} {
		if got, ok := rejectionIn(message); ok || reasons.WithoutPreemption(message) != message {
			t.Errorf("%q is the rejection %+v", message, got)
		}
	}
}

func TestExcerpt(t *testing.T) {
	if got := Excerpt(" a\n b "); got != "a b" {
		t.Errorf("%q", got)
	}
	if got := Excerpt(strings.Repeat("ä", 400)); got != strings.Repeat("ä", 299)+"…" {
		t.Errorf("%q", got)
	}
}
