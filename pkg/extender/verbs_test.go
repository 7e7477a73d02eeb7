package extender

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/scheduling"
	"github.com/gpushare/gpushare/pkg/version"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// The answer has the form of the request: names or whole nodes. Reasons that preemption can change are in FailedNodes.
func TestFilter(t *testing.T) {
	none := extenderv1.FailedNodesMap{}
	odd := []string{"n1", "", `quoted "n2"`, `n\3`, "n\n4", "<&>", "nü5", "\u2028", "n\x7f6", "n7", "n8", "n9", "n10", "n11", "n12", "n13", "n14", "n15", "n16", "n17", "n18", "n19"}
	oddReasons := slices.Concat([]reasons.Reason{reasons.Fits}, reasons.OfNodes(), []reasons.Reason{reasons.Full})
	failed, unresolvable := extenderv1.FailedNodesMap{}, extenderv1.FailedNodesMap{}
	for i, reason := range oddReasons {
		switch reason {
		case reasons.Fits:
		case reasons.Reserved:
			failed[odd[i]] = "free GPU memory is kept for group default/train"
		case reasons.ResourcesReserved:
			failed[odd[i]] = "free CPU, memory or pods of the node are kept for group default/train"
		case reasons.Fragmented, reasons.Full, reasons.Crowded:
			failed[odd[i]] = reason.Text()
		default:
			unresolvable[odd[i]] = reason.Text()
		}
	}
	tests := map[string]struct {
		nodes []string
		// result has all but Nodes.
		result               scheduling.FilterResult
		passed               []string
		failed, unresolvable extenderv1.FailedNodesMap
	}{
		"no candidate nodes": {},
		"every node passes":  {nodes: odd, result: scheduling.FilterResult{Passed: candidates(len(odd))}, passed: odd},
		"the best nodes in their order": {
			nodes: odd, result: scheduling.FilterResult{Passed: []placement.Candidate{{Node: 2}, {Node: 0}}}, passed: []string{odd[2], odd[0]},
		},
		"every reason": {
			nodes: odd, result: scheduling.FilterResult{Passed: candidates(1), Reasons: oddReasons, ReservedFor: "group default/train"},
			passed: odd[:1], failed: failed, unresolvable: unresolvable,
		},
		"empty maps, not null": {
			nodes: odd[:1], result: scheduling.FilterResult{Passed: candidates(1), Reasons: oddReasons[:1]},
			passed: odd[:1], failed: none, unresolvable: none,
		},
		"a member of a gang passes": {nodes: odd, result: scheduling.FilterResult{Passed: []placement.Candidate{{Node: 1}}}, passed: odd[1:2]},
		"a member of a gang passes nowhere: the reason is given once": {
			nodes: odd, result: scheduling.FilterResult{Message: `gang: "so"`}, unresolvable: extenderv1.FailedNodesMap{"n1": `gang: "so"`},
		},
		"a member of a gang without candidate nodes": {result: scheduling.FilterResult{Message: "gang: so"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			h := newServer(&fakeScheduler{filter: func(nodes []string) scheduling.FilterResult {
				test.result.Nodes = nodes
				return test.result
			}}).Handler()
			args := nodesRequest(fake.Pod("p", 1), test.nodes...)
			if test.nodes == nil {
				args.NodeNames = &[]string{}
			}
			passed := append([]string{}, test.passed...)
			want := filterResult{NodeNames: &passed, FailedNodes: test.failed, FailedAndUnresolvableNodes: test.unresolvable}
			check.Equal(t, "names", want, answer[filterResult](t, post(h, "filter", text(t, args)), 200))
			want.NodeNames, want.Nodes = nil, wholeNodes(nodesRequest(nil, passed...)).Nodes
			got := answer[filterResult](t, post(h, "filter", text(t, wholeNodes(args))), 200)
			if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" || (got.FailedNodes == nil) != (test.failed == nil) {
				t.Errorf("whole nodes (-want +got):\n%s", diff)
			}
		})
	}
}

func TestPrioritize(t *testing.T) {
	h := newServer(&fakeScheduler{prioritize: func(nodes []string) []int64 {
		return []int64{4, 9, 0}[:len(nodes)]
	}}).Handler()
	args := nodesRequest(fake.Pod("p", 1), "n1", "n2", "n3")
	want := extenderv1.HostPriorityList{{Host: "n1", Score: 4}, {Host: "n2", Score: 9}, {Host: "n3"}}
	for _, form := range []extenderv1.ExtenderArgs{args, wholeNodes(args)} {
		if got := post(h, "prioritize", text(t, form)).Body.String(); got != text(t, want)+"\n" {
			t.Errorf("got %s, want %s", got, text(t, want))
		}
	}
	if got := post(h, "prioritize", text(t, extenderv1.ExtenderArgs{Pod: fake.Pod("p", 1)})).Body.String(); got != "[]\n" {
		t.Errorf("no candidate nodes: %s", got)
	}
}

func TestBind(t *testing.T) {
	var got scheduling.BindRequest
	var err error
	h := newServer(&fakeScheduler{bind: func(_ context.Context, request scheduling.BindRequest) error {
		got = request
		return err
	}}).Handler()
	body := text(t, bindArgs(fake.Pod("p", 1), "n1"))
	if w := post(h, "bind", body); w.Body.String() != `{"Error":""}`+"\n" {
		t.Errorf("answer %s", w.Body)
	}
	if want := (scheduling.BindRequest{Namespace: "default", Name: "p", UID: "uid-p", Node: "n1"}); got != want {
		t.Errorf("request %+v, want %+v", got, want)
	}
	err = errors.New("no card")
	if got := answer[bindResult](t, post(h, "bind", body), 200).Error; got != "no card" {
		t.Errorf("error %q", got)
	}
}

// meta returns a node's victims by their UIDs.
func meta(node string, violations int64, uids ...string) map[string]*extenderv1.MetaVictims {
	victims := &extenderv1.MetaVictims{NumPDBViolations: violations}
	for _, uid := range uids {
		victims.Pods = append(victims.Pods, &extenderv1.MetaPod{UID: uid})
	}
	return map[string]*extenderv1.MetaVictims{node: victims}
}

func TestPreemptProposal(t *testing.T) {
	type args = extenderv1.ExtenderPreemptionArgs
	a, b := fake.Pod("a", 1), fake.Pod("b", 1)
	two := map[string]preemption.Victims{"n1": {Pods: []gpu.PodUID{"uid-a", "uid-b"}}}
	empty := map[string]preemption.Victims{"n1": {}}
	for name, test := range map[string]struct {
		args args
		want map[string]preemption.Victims
	}{
		"UIDs":                        {args{NodeNameToMetaVictims: meta("n1", 0, "uid-a", "uid-b")}, two},
		"whole pods":                  {args{NodeNameToVictims: map[string]*extenderv1.Victims{"n1": {Pods: []*corev1.Pod{a, b}}}}, two},
		"no victims":                  {args{NodeNameToMetaVictims: meta("n1", 0)}, empty},
		"null for UIDs":               {args{NodeNameToMetaVictims: map[string]*extenderv1.MetaVictims{"n1": nil}}, empty},
		"null for whole pods":         {args{NodeNameToVictims: map[string]*extenderv1.Victims{"n1": nil}}, empty},
		"null for a pod, and no UIDs": {args{NodeNameToVictims: map[string]*extenderv1.Victims{"n1": {Pods: []*corev1.Pod{nil, a, {}, b}}}}, two},
		"a number of violations":      {args{NodeNameToMetaVictims: meta("n1", 3)}, map[string]preemption.Victims{"n1": {Violations: 3}}},
		"a negative number":           {args{NodeNameToMetaVictims: meta("n1", -7)}, empty},
		"no nodes":                    {args{}, map[string]preemption.Victims{}},
	} {
		t.Run(name, func(t *testing.T) {
			var got map[string]preemption.Victims
			h := newServer(&fakeScheduler{preempt: func(proposed map[string]preemption.Victims) map[string]preemption.Victims {
				got = proposed
				return nil
			}}).Handler()
			test.args.Pod = fake.Pod("p", 1)
			// A map, though empty: kube-scheduler reads null and {} alike, other clients may not.
			if w := post(h, "preempt", text(t, test.args)); w.Code != 200 || w.Body.String() != `{"NodeNameToMetaVictims":{}}`+"\n" {
				t.Errorf("answer %d %s", w.Code, w.Body)
			}
			check.Equal(t, "the result", test.want, got)
		})
	}
}

// The answer names victims by UID in both forms of the request, and leaves out a node without victims.
func TestPreemptAnswer(t *testing.T) {
	h := newServer(&fakeScheduler{preempt: func(map[string]preemption.Victims) map[string]preemption.Victims {
		return map[string]preemption.Victims{"n1": {Pods: []gpu.PodUID{"uid-a", "uid-b"}, Violations: 1}, "n2": {}}
	}}).Handler()
	pod := fake.Pod("p", 1)
	for _, args := range []extenderv1.ExtenderPreemptionArgs{
		{Pod: pod, NodeNameToMetaVictims: meta("n1", 0, "x")},
		{Pod: pod, NodeNameToVictims: map[string]*extenderv1.Victims{"n1": {Pods: []*corev1.Pod{pod}}}},
	} {
		got := answer[extenderv1.ExtenderPreemptionResult](t, post(h, "preempt", text(t, args)), 200)
		check.Equal(t, "the result", meta("n1", 1, "uid-a", "uid-b"), got.NodeNameToMetaVictims)
	}
}

// The test compares the exact text, because scripts of existing users read it. A card that no longer exists is shown as
// long as a pod holds memory on it, and so is a deleted node; a node that has only a nomination is not. A pod with several cards is on
// each of them with its part, and cores aren't shown.
func TestInspect(t *testing.T) {
	allocation := func(name string, card int, memory gpu.Memory) ledger.Allocation {
		return ledger.Allocation{Pod: gpu.Pod{Namespace: "default", Name: name, Request: memory}, Placement: gpu.On(card, memory)}
	}
	pair := allocation("pair", 0, 8)
	pair.Placement = gpu.Placement{{Card: 0, Memory: 4, Cores: 50}, {Card: 7, Memory: 4, Cores: 50}}
	cards := func(memory gpu.Memory) ledger.NodeSpec { return ledger.NodeSpec{Cards: []gpu.Card{{Memory: memory}}} }
	h := newServer(&fakeScheduler{nodes: []ledger.Node{
		{Name: "deleted", Allocations: []ledger.Allocation{allocation("left", 1, 60)}},
		{Name: "n1", NodeSpec: cards(100), Allocations: []ledger.Allocation{allocation("a", 0, 60), allocation("b", 7, 10), pair}},
		{Name: "n2", NodeSpec: cards(50)},
		{Name: "nominated"},
		{Name: "whole", NodeSpec: ledger.NodeSpec{WholeCards: true}},
	}}).Handler()
	const (
		deleted = `{"name":"deleted","totalGPU":0,"usedGPU":60,"devs":[{"id":1,"totalGPU":0,"usedGPU":60,"pods":[{"name":"left","namespace":"default","usedGPU":60}]}]}`
		n1      = `{"name":"n1","totalGPU":100,"usedGPU":78,"devs":[` +
			`{"id":0,"totalGPU":100,"usedGPU":64,"pods":[{"name":"a","namespace":"default","usedGPU":60},{"name":"pair","namespace":"default","usedGPU":4}]},` +
			`{"id":7,"totalGPU":0,"usedGPU":14,"pods":[{"name":"b","namespace":"default","usedGPU":10},{"name":"pair","namespace":"default","usedGPU":4}]}]}`
		n2    = `{"name":"n2","totalGPU":50,"usedGPU":0,"devs":[{"id":0,"totalGPU":50,"usedGPU":0,"pods":[]}]}`
		whole = `{"name":"whole","totalGPU":0,"usedGPU":0,"devs":[]}`
	)
	for path, want := range map[string]string{
		"":           `{"nodes":[` + deleted + "," + n1 + "," + n2 + "," + whole + `]}`,
		"/n1":        `{"nodes":[` + n1 + `]}`,
		"/deleted":   `{"nodes":[` + deleted + `]}`,
		"/nowhere":   `{"nodes":[],"error":"node \"nowhere\" shares no GPU memory, or doesn't exist"}`,
		"/nominated": `{"nodes":[],"error":"node \"nominated\" shares no GPU memory, or doesn't exist"}`,
	} {
		w := get(h, Prefix+"/inspect"+path)
		if got := w.Body.String(); got != want+"\n" {
			t.Errorf("%s:\ngot  %swant %s", path, got, want)
		}
		if missing := path == "/nowhere" || path == "/nominated"; (w.Code == 404) != missing || !missing && w.Code != 200 {
			t.Errorf("%s: status %d", path, w.Code)
		}
	}
}

func TestNotSynced(t *testing.T) {
	h := newServer(&fakeScheduler{err: clustercache.ErrNotSynced}).Handler()
	why := clustercache.ErrNotSynced.Error()
	wantErrors(t, h, why, http.StatusServiceUnavailable)
	if got := answer[inspection](t, get(h, Prefix+"/inspect"), 503); got.Error != why {
		t.Errorf("inspect: %+v", got)
	}
	if w := get(h, "/readyz"); w.Code != 503 || w.Body.String() != why+"\n" {
		t.Errorf("readyz: %d %s", w.Code, w.Body)
	}
	if w := get(h, "/livez"); w.Code != 200 {
		t.Errorf("livez: %d, though killing the process can't help", w.Code)
	}
}

// A standby closes the connection, so that the client's next one may reach the leader. It is ready itself.
func TestStandby(t *testing.T) {
	standby := errors.New("this replica is a standby")
	scheduler := &fakeScheduler{}
	h := newServer(scheduler, func(o *Options) { o.Answer = func() error { return standby } }).Handler()
	wantErrors(t, h, standby.Error(), http.StatusServiceUnavailable)
	for verb, body := range validBodies(t) {
		if got := post(h, verb, body).Header().Get("Connection"); got != "close" {
			t.Errorf("%s: Connection %q, want close", verb, got)
		}
	}
	if w := get(h, "/readyz"); w.Code != http.StatusOK {
		t.Errorf("readyz: %d %s", w.Code, w.Body)
	}
	if scheduler.calls != 0 {
		t.Errorf("%d calls", scheduler.calls)
	}
	standby = nil
	if got := answer[bindResult](t, post(h, "bind", validBodies(t)["bind"]), 200).Error; got != "" {
		t.Errorf("bind as leader: %s", got)
	}
}

// A panic fails one request only, is counted, and doesn't reveal its cause to the client.
func TestPanic(t *testing.T) {
	broken := &fakeScheduler{
		filter:     func([]string) scheduling.FilterResult { panic("a secret") },
		prioritize: func([]string) []int64 { panic("a secret") },
		bind:       func(context.Context, scheduling.BindRequest) error { return errors.New(*(*string)(nil)) },
		preempt:    func(map[string]preemption.Victims) map[string]preemption.Victims { panic("a secret") },
	}
	server := newServer(broken)
	wantErrors(t, server.Handler(), "internal error, see the extender's log", http.StatusInternalServerError)
	for _, verb := range verbs {
		if n := server.Observer.(*fakeObserver).count(verb + " panic"); n != 1 {
			t.Errorf("%s: %d panics counted, want 1", verb, n)
		}
	}
	broken.filter = nil
	if got := answer[filterResult](t, post(server.Handler(), "filter", validBodies(t)["filter"]), 200); got.Error != "" || len(*got.NodeNames) != 1 {
		t.Errorf("the next request: %+v", got)
	}
}

func TestHealthVersionAndMetrics(t *testing.T) {
	server := newServer(&fakeScheduler{})
	h := server.Handler()
	for path, want := range map[string]string{"/livez": "ok\n", "/readyz": "ok\n", "/metrics": "a metric\n"} {
		if w := get(h, path); w.Code != 200 || w.Body.String() != want {
			t.Errorf("%s: %d %q", path, w.Code, w.Body)
		}
	}
	if got := answer[version.Info](t, get(h, "/version"), 200); got != version.Get() || got.Version == "" {
		t.Errorf("version %+v", got)
	}
	post(h, "filter", validBodies(t)["filter"])
	post(h, "bind", "")
	check.Equal(t, "counted calls", map[string]int{"filter ok": 1, "bind error": 1}, server.Observer.(*fakeObserver).answered)
}
