package reasons

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// fitError returns the text of kube-scheduler's FitError, on whose nodes the texts are the reasons, the first on one node, the next on two.
func fitError(texts ...string) string {
	var list []string
	for i, text := range texts {
		list = append(list, fmt.Sprint(i+1, " ", text))
	}
	return "0/9 nodes are available: " + strings.Join(list, ", ") + ". preemption: 0/9 nodes are available: 1 Insufficient cpu, 8 No preemption victims found."
}

// The texts on the wire are found again in kube-scheduler's message.
func TestTextsRoundTrip(t *testing.T) {
	texts := map[string]Reason{
		insufficientMemory: Full, insufficientCores: Full, AwaitsTurn: WaitsForTurn, Reserved.TextFor(one, "default/train.v1"): Reserved,
		"node(s) had untolerated taint {a: b}": NoNode, GroupNoRoom.Text(): WaitsForGroup,
	}
	maps.Copy(texts, byText)
	for text, reason := range texts {
		want := Rejection{"1 Insufficient cpu, 2 " + text, []Part{{1, "Insufficient cpu", OtherConstraint}, {2, text, reason}}, "1 Insufficient cpu"}
		if reason == WaitsForTurn {
			want.Others += ", 2 " + text
		}
		got, ok := ParseRejection(fitError("Insufficient cpu", text))
		if diff := cmp.Diff(want, got); !ok || diff != "" || !got.Has(reason) || got.Has(Gated) || len(text) > protocol.MaxText {
			t.Errorf("%s: %t (-want +got):\n%s", text, ok, diff)
		}
	}
}

func TestKept(t *testing.T) {
	for text, want := range map[string]string{
		Reserved.TextFor(one, "group default/train.v1"):     "free GPU memory is kept for group default/train.v1, which came first",
		ResourcesReserved.TextFor(one, "pod default/large"): "free CPU, memory or pods of the node are kept for pod default/large, which came first",
		ResourcesReserved.TextFor(one, ""):                  "free CPU, memory or pods of the node are reserved for a group or pod that came first",
		Full.TextFor(one, "group default/train"):            "",
	} {
		for _, message := range []string{fitError(text), fitError("x", text), fitError(text, "x")} {
			if got, ok := ParseRejection(message); !ok || got.ReservedText() != want {
				t.Errorf("%q has %q, %t", message, got.ReservedText(), ok)
			}
		}
	}
}

// The reasons of groups are found again in the message of a filter call and of a bind.
func TestGroupsRoundTrip(t *testing.T) {
	groups := append(Groups(),
		GroupIncomplete(3, 4), GroupIncomplete(1, 9).Ineligible(2, "b").Cardless(1), GroupArriving(2, 4),
		GroupIncomplete(1, 4).Stalled("StatefulSet"), GroupIncomplete(1, 4).Stalled("LeaderWorkerSet"), GroupIncomplete(1, 4).Stalled("Job"),
		GroupIncomplete(1, 4).Stalled("ReplicaSet"), GroupIncomplete(1, 4).Stalled(""),
		GroupBroken(3, 4), GroupBroken(3, 4).Because(GroupNoRoom), GroupBroken(3, 4).Because(Group{}), GroupInvalid("the pod has a group size and no group name"),
		GroupInvalid(`annotation x is "a. b, 3 c: \\\""`), GroupDisagrees.Says([]string{"a", "b"}, []int{2, 3}),
		GroupAwaitsOthers.OfSchedulers([]string{"2nd", "default-scheduler", "my.scheduler", "volcano"}),
	)
	for _, want := range groups {
		for _, message := range []string{fitError(want.Text()), fitError("x", want.Text(), "x"), "running Bind plugin: " + want.Error()} {
			if got, ok := ParseGroup(message); got != want || !ok {
				t.Errorf("%s: %+v, %t", message, got, ok)
			}
		}
	}
	if got, ok := ParseGroup("0/1 nodes are available: 1 gang: words of another version."); got != (Group{"words of another version"}) || !ok {
		t.Errorf("%+v, %t", got, ok)
	}
	if got := GroupInvalid(strings.Repeat("ä", 999)).Text(); len(got) > protocol.MaxText || !strings.HasSuffix(got, "ä…") {
		t.Errorf("%d bytes: %s", len(got), got)
	}
	if text := (Group{}).Text(); text != "" {
		t.Errorf("no reason has the text %q", text)
	}
}

// FuzzMessages parses any message, and finds a reason with any value of a pod's annotation again.
func FuzzMessages(f *testing.F) {
	f.Add(fitError(Full.Text(), GroupNoRoom.Text()), "two")
	f.Add(`0/3 nodes are available: 1 gang: invalid group: x is "a. b, 3 c`, `a. b, 3 c"`)
	f.Fuzz(func(t *testing.T, message, value string) {
		if r, ok := ParseRejection(message); ok && !strings.Contains(message, " nodes are available: "+r.Text+".") {
			t.Errorf("%q: %+v", message, r)
		}
		if group, ok := ParseGroup(message); ok && !strings.Contains(message, groupPrefix+group.Words) {
			t.Errorf("%q: %+v", message, group)
		}
		FailedCall(Bounded(message))
		want := GroupInvalid(fmt.Sprintf("annotation x is %.70q", value))
		whole := fitError(Full.Text(), want.Text(), Unhealthy.Text())
		r, _ := ParseRejection(whole)
		if group, ok := ParseGroup(whole); !ok || group != want || len(r.Parts) != 3 || r.Parts[1].Text != want.Text() {
			t.Errorf("%q: %+v, %+v", whole, group, r)
		}
	})
}

// Whether a rejection has other reasons than memory decides between "about to be tried again" and "rejected for something else".
func TestParseRejection(t *testing.T) {
	const preemption = " preemption: 0/3 nodes are available: 1 Insufficient cpu, 2 No preemption victims found for incoming pod."
	for message, want := range map[string][2]string{
		"0/3 nodes are available: 3 no GPU card has enough free memory.":                                        {"3 no GPU card has enough free memory", ""},
		"0/3 nodes are available: 3 no GPU card has enough free memory." + preemption:                           {"3 no GPU card has enough free memory", ""},
		"0/3 nodes are available: 3 Insufficient aliyun.com/gpu-mem. no new claims to deallocate," + preemption: {"3 Insufficient aliyun.com/gpu-mem", ""},
		// Each of the three lacks GPU memory, and two of them CPU as well.
		"0/3 nodes are available: 2 Insufficient cpu, 3 Insufficient aliyun.com/gpu-mem.": {"2 Insufficient cpu, 3 Insufficient aliyun.com/gpu-mem", "2 Insufficient cpu"},
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
		got, ok := ParseRejection(message)
		if diff := cmp.Diff(want, [2]string{got.Text, got.Others}); !ok || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", message, ok, diff)
		}
		if got, want := WithoutPreemption(message), message[:len("0/3 nodes are available: ")]+want[0]+"."; got != want {
			t.Errorf("without preemption %q, want %q", got, want)
		}
	}
	for _, message := range []string{"", "no nodes available to schedule pods", `Post "https://x/gpushare-scheduler/filter": EOF`} {
		if got, ok := ParseRejection(message); ok || WithoutPreemption(message) != message {
			t.Errorf("%q is the rejection %+v", message, got)
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
		verb, why, failed := FailedCall(message)
		if got := strings.TrimPrefix(verb+": "+why, ": "); got != want || failed != (want != "") {
			t.Errorf("%s: %q, %v", message, got, failed)
		}
	}
}

// Of a long message, such as one about the taints of thousands of nodes, whole reasons are kept.
func TestBounded(t *testing.T) {
	const short = "0/3 nodes are available: 3 Insufficient cpu."
	if got := Bounded(short); got != short {
		t.Errorf("%q", got)
	}
	long := "0/5000 nodes are available: " + strings.Repeat("1 node(s) had untolerated taint {a: b}, ", 1000) + "1 Insufficient cpu. preemption: none."
	got := Bounded(long)
	if _, rejected := ParseRejection(got); !rejected || len(got) > maxMessage+1 || !strings.HasSuffix(got, "{a: b}.") {
		t.Errorf("%d bytes, ends with %q", len(got), got[len(got)-20:])
	}
}
