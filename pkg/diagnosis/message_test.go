package diagnosis

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Whether a rejection has other reasons than memory decides between "about to be tried again" and "rejected for something else".
func TestRejectionIn(t *testing.T) {
	const preemption = " preemption: 0/3 nodes are available: 1 Insufficient cpu, 2 No preemption victims found for incoming pod."
	for message, want := range map[string]rejection{
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
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(rejection{})); !ok || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", message, ok, diff)
		}
		if got, want := WithoutPreemption(message), message[:len("0/3 nodes are available: ")]+want.text+"."; got != want {
			t.Errorf("without preemption %q, want %q", got, want)
		}
	}
	for _, message := range []string{"", "no nodes available to schedule pods", `Post "https://x/gpushare-scheduler/filter": EOF`} {
		if got, ok := rejectionIn(message); ok || WithoutPreemption(message) != message {
			t.Errorf("%q is the rejection %+v", message, got)
		}
	}
}

// kube-scheduler's message contains the extender's reasons unchanged.
func TestReasonsAreAboutMemory(t *testing.T) {
	for _, reason := range reasons.OfNodes() {
		for _, text := range append(reason.AllTexts(), reason.TextFor(gpu.Demand{Cards: 1}, "default/train")) {
			message := "0/5 nodes are available: 1 " + text + ", 3 Insufficient aliyun.com/gpu-mem, 1 Insufficient aliyun.com/gpu-core.percentage."
			if got, ok := rejectionIn(message); !ok || got.others != "" {
				t.Errorf("%s: %+v", message, got)
			}
		}
	}
}

func TestFailedCall(t *testing.T) {
	for message, want := range map[string]string{
		`Post "https://10.96.0.5:12345/gpushare-scheduler/filter": dial tcp 10.96.0.5:12345: connect: connection refused`: "filter: dial tcp 10.96.0.5:12345: connect: connection refused",
		`Post "http://127.0.0.1:12345/gpushare-scheduler/bind": EOF`:                                                      "bind: EOF",
		"failed filter with extender at URL https://10.96.0.5:12345/gpushare-scheduler/filter, code 403":                  "filter: HTTP status 403",
		`Post "https://10.0.0.1:6443/api/v1/namespaces/default/pods/p/binding": EOF`:                                      "",
		"binding the pod: admission webhook denied the request":                                                           "",
	} {
		verb, why, failed := failedCall(message)
		if got := strings.TrimPrefix(verb+": "+why, ": "); got != want || failed != (want != "") {
			t.Errorf("%s: %q, %v", message, got, failed)
		}
	}
}

func TestShorten(t *testing.T) {
	if got := shorten(" a\n b "); got != "a b" {
		t.Errorf("%q", got)
	}
	if got := shorten(strings.Repeat("ä", 400)); got != strings.Repeat("ä", 299)+"…" {
		t.Errorf("%q", got)
	}
}

// Of a long message, such as one about the taints of thousands of nodes, whole reasons are kept.
func TestBounded(t *testing.T) {
	const short = "0/3 nodes are available: 3 Insufficient cpu."
	if got := bounded(short); got != short {
		t.Errorf("%q", got)
	}
	long := "0/5000 nodes are available: " + strings.Repeat("1 node(s) had untolerated taint {a: b}, ", 1000) + "1 Insufficient cpu. preemption: none."
	got := bounded(long)
	if _, rejected := rejectionIn(got); !rejected || len(got) > maxMessage+1 || !strings.HasSuffix(got, "{a: b}.") {
		t.Errorf("%d bytes, ends with %q", len(got), got[len(got)-20:])
	}
}
