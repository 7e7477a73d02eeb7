package allocation

import (
	"errors"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

func names(candidates []Candidate) []string {
	var out []string
	for _, c := range candidates {
		out = append(out, c.Pod.Name+"/"+c.Container.Name)
	}
	return out
}

func TestCandidates(t *testing.T) {
	lost := onCard(0, "00", "01").lose()
	for name, test := range map[string]struct {
		pods     []Pod
		given    Allocations
		rejected map[gpu.PodUID]bool
		want     []string
	}{
		"the earliest assumed pod comes first": {
			pods: []Pod{newPod("b", main(2), assumed(0, 2)), newPod("c", main(2), assumed(0, 3)), newPod("a", main(2), assumed(1, 1), created(9))},
			want: []string{"a/main", "b/main", "c/main"},
		},
		"the request is that of a container, not of the pod": {
			pods: []Pod{newPod("a", container("x", 1), container("y", 1)), newPod("b", main(3)), newPod("c", container("x", 2), container("y", 3))},
			want: []string{"c/x"},
		},
		"pods that ended and mirrors of static pods are none": {
			pods: []Pod{newPod("a", main(2), ended), newPod("b", main(2), mirror)},
		},
		"served containers are none": {
			pods:  []Pod{newPod("a", main(2), assumed(0, 1)), newPod("b", main(2), assumed(0, 2))},
			given: Allocations{"uid-a": {"main": onCard(0, "00", "01")}}, want: []string{"b/main"},
		},
		// All containers are candidates, not only the first, because the record can have gaps.
		"containers of a pod are in the order of admission": {
			pods: []Pod{newPod("a", initStep(2), container("x", 2), container("y", 2))}, want: []string{"a/i", "a/x", "a/y"},
		},
		"a pod that was begun is next": {
			pods:  []Pod{newPod("a", main(2), assumed(0, 1)), newPod("b", initStep(3), container("x", 2), assumed(0, 9))},
			given: Allocations{"uid-b": {"i": onCard(0, "00", "01", "02")}}, want: []string{"b/x", "a/main"},
		},
		"a container that isn't next in its pod comes late": {
			pods: []Pod{newPod("a", container("x", 3), container("y", 2), assumed(0, 1)), newPod("b", main(2), assumed(0, 2))},
			want: []string{"b/main", "a/y"},
		},
		"assumed pods, then assigned ones, then others": {
			pods: []Pod{newPod("a", main(2), assumed(0, 1), assigned), newPod("b", main(2)), newPod("c", main(2), assumed(0, 3))},
			want: []string{"c/main", "a/main", "b/main"},
		},
		"a terminating pod comes late": {
			pods: []Pod{newPod("a", main(2), assumed(0, 1), leaving), newPod("b", main(2), assumed(0, 2))}, want: []string{"b/main", "a/main"},
		},
		"a rejected pod comes late, a pod that has run last": {
			pods:     []Pod{newPod("a", main(2), assumed(0, 1)), newPod("b", main(2), assumed(0, 2)), newPod("c", main(2), assumed(0, 0), ran)},
			rejected: map[gpu.PodUID]bool{"uid-a": true}, want: []string{"b/main", "a/main", "c/main"},
		},
		"running containers are none, whatever the record has": {pods: []Pod{newPod("a", main(2), assumed(0, 1), running)}},
		"a container that the kubelet has lost is one unless it runs": {
			pods:  []Pod{newPod("a", main(2), assumed(0, 1)), newPod("b", main(2), assumed(0, 2), running)},
			given: Allocations{"uid-a": {"main": lost}, "uid-b": {"main": lost}}, want: []string{"a/main"},
		},
		// The kubelet was killed before its checkpoint had the init container.
		"a lost init container comes before the others": {
			pods:  []Pod{newPod("a", initStep(2), main(2), assumed(1, 1))},
			given: Allocations{"uid-a": {"i": lost}}, want: []string{"a/i", "a/main"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := matching{Snapshot: &Snapshot{Pods: test.pods, Given: test.given, Rejected: test.rejected}, request: 2}
			check.Equal(t, "the result", test.want, names(m.candidates()))
		})
	}
}

var errAway = errors.New("away")

// kubelet is a kubelet's answers by pod, or by pod and container. asked collects the questions.
type kubelet struct {
	states      map[string]KubeletState
	unreachable bool // It can't be asked.
	asked       []string
}

func (k *kubelet) State(c Candidate) KubeletState {
	if k.unreachable {
		return StateUnknown
	}
	pod := c.Pod.Name
	state, ok := k.states[pod+"/"+c.Container.Name]
	if !ok {
		state = k.states[pod]
	}
	if !slices.Contains(k.asked, pod) {
		k.asked = append(k.asked, pod)
	}
	return state
}

// decide decides, and answers the questions of the decision.
func (k *kubelet) decide(s Snapshot, request gpu.Memory) Decision {
	s.Kubelet = k
	return Decide(s, request)
}

func TestMatch(t *testing.T) {
	batch := []Pod{
		newPod("a", main(2), assumed(0, 1), created(3)),
		newPod("b", main(2), assumed(0, 2), created(2)),
		newPod("c", main(2), assumed(0, 3), created(1)),
	}
	old := newPod("z", main(2), assumed(0, 0), created(0), ran)
	const absent, allocated, waiting = StateAbsent, StateAllocated, StateWaiting
	for name, test := range map[string]struct {
		pods      []Pod
		states    map[string]KubeletState
		rejected  map[gpu.PodUID]bool
		given     Allocations
		preferred Preference
		look      Freshness
		want      string // Empty if there is no match.
		by        Match
		asked     []string
	}{
		"the kubelet is asked in the order in which it admits": {
			pods: batch, states: map[string]KubeletState{"c": allocated, "b": waiting, "a": absent},
			want: "b", by: ByKubelet, asked: []string{"c", "b", "a"},
		},
		"pods were bound in another order than they were created": {
			pods: []Pod{
				newPod("a", main(2), assumed(0, 1), created(1), version(9)), newPod("b", main(2), assumed(0, 2), created(2), version(10)),
				newPod("c", main(2), assumed(0, 3), created(3), version(8)),
			},
			states: map[string]KubeletState{"c": waiting}, want: "c", by: ByKubelet, asked: []string{"c", "a"},
		},
		"several wait: the one bound last (kubelet 1.34 shows pods that it has rejected)": {
			pods: []Pod{
				newPod("a", main(2), assumed(0, 1), version(7), created(1)), newPod("b", main(2), assumed(0, 2), version(8), created(4)),
				newPod("c", main(2), assumed(0, 3), version(9), created(3)), newPod("d", main(2), assumed(0, 4), version(10), created(2)),
			},
			states: map[string]KubeletState{"a": waiting, "b": waiting, "c": waiting, "d": absent},
			want:   "c", by: ByKubelet, asked: []string{"a", "b", "c", "d"},
		},
		"several wait in a batch: the one created last": {
			pods: []Pod{
				newPod("a", main(2), assumed(0, 1), version(9), created(1)), newPod("b", main(2), assumed(0, 2), version(8), created(2)),
				newPod("c", main(2), assumed(0, 3), version(7), created(3)),
			},
			states: map[string]KubeletState{"a": waiting, "b": waiting, "c": absent},
			want:   "b", by: ByKubelet, asked: []string{"c", "a", "b"},
		},
		"several wait: a pod that was begun has no precedence": {
			pods:   []Pod{newPod("a", initStep(1), main(2), assumed(0, 1), version(7)), newPod("b", main(2), assumed(0, 2), version(8))},
			given:  Allocations{"uid-a": {"i": onCard(0, "00")}},
			states: map[string]KubeletState{"a": waiting, "b": waiting}, want: "b", by: ByKubelet, asked: []string{"a", "b"},
		},
		"no answer: the earliest assumed": {pods: batch, want: "a", by: ByOrder, asked: []string{"c", "b", "a"}},
		"absent pods are ruled out": {
			pods: batch, states: map[string]KubeletState{"a": absent, "c": absent}, want: "b", by: ByOrder, asked: []string{"c", "b", "a"},
		},
		"all are ruled out": {
			pods: batch, states: map[string]KubeletState{"a": absent, "b": absent, "c": allocated}, asked: []string{"c", "b", "a"},
		},
		"the kubelet is asked about a single candidate too": {
			pods: batch[:1], states: map[string]KubeletState{"a": absent}, asked: []string{"a"},
		},
		"a rejected pod isn't considered while others may be unknown": {
			pods: batch[:1], rejected: map[gpu.PodUID]bool{"uid-a": true}, states: map[string]KubeletState{"a": waiting},
		},
		"it is when all pods are known": {
			pods: batch[:2], rejected: map[gpu.PodUID]bool{"uid-b": true}, states: map[string]KubeletState{"a": absent, "b": waiting},
			look: Live, want: "b", by: ByKubelet, asked: []string{"a", "b"},
		},
		"a pod that has run isn't considered while others may be unknown": {
			pods: []Pod{old}, states: map[string]KubeletState{"z": waiting},
		},
		"it is when all are known": {
			pods: []Pod{old}, states: map[string]KubeletState{"z": waiting}, look: Live, want: "z", by: ByKubelet, asked: []string{"z"},
		},
		"also without an answer": {pods: []Pod{old}, look: Live, want: "z", by: ByOrder, asked: []string{"z"}},
		"after the others":       {pods: []Pod{old, batch[0]}, look: Live, want: "a", by: ByOrder, asked: []string{"a", "z"}},
		"a container that was served isn't considered while others may be unknown: its pod may have ended": {
			pods: batch[:1], given: Allocations{"uid-a": {"main": onCard(0, "00", "01").lose()}},
		},
		"it is when the API server still has it": {
			pods: batch[:1], given: Allocations{"uid-a": {"main": onCard(0, "00", "01").lose()}}, look: Live, want: "a", by: ByOrder, asked: []string{"a"},
		},
		"no candidates":                    {},
		"the preferred container":          {pods: batch, preferred: Preference{mainOf("b"), ByKubelet}, want: "b", by: ByKubelet},
		"the preferred one by order":       {pods: batch, preferred: Preference{mainOf("b"), ByOrder}, want: "b", by: ByOrder, asked: []string{"b"}},
		"no guess if it isn't a candidate": {pods: batch, preferred: Preference{mainOf("x"), ByKubelet}, asked: []string{"c", "b", "a"}},
		"the preferred one by order is wrong": {
			pods: batch, preferred: Preference{mainOf("b"), ByOrder}, states: map[string]KubeletState{"b": absent, "c": waiting},
			want: "c", by: ByKubelet, asked: []string{"b", "c"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			k := kubelet{states: test.states}
			got := k.decide(Snapshot{
				Cards: newCards(16), Pods: test.pods, Rejected: test.rejected, Given: test.given, Preferred: test.preferred,
				Freshness: test.look, KubeletAge: time.Hour,
			}, 2)
			var pod string
			if got.Pod != nil {
				pod = got.Pod.Name
			}
			if pod != test.want || test.want != "" && got.Match != test.by || test.want == "" && got.NeedsFreshRead == (test.look != Cached) {
				t.Errorf("got %q by %q, outdated %t, want %q by %q", pod, got.Match, got.NeedsFreshRead, test.want, test.by)
			}
			check.Equal(t, "asked", test.asked, k.asked)
		})
	}
}

// The kubelet can't be asked: the decision is made without further answers.
func TestMatchUnreachableKubelet(t *testing.T) {
	s := Snapshot{Cards: newCards(16), Pods: []Pod{newPod("a", main(2), assumed(0, 1)), newPod("b", main(2), assumed(0, 2))}}
	k := &kubelet{unreachable: true}
	if d := k.decide(s, 2); d.Pod.Name != "a" || d.Match != ByOrder {
		t.Errorf("got %+v, want a by order", d)
	}
}

// A container is rejected, or gets other cards than the annotated ones, only by the API server's pods: the watch can be behind.
func TestOutdated(t *testing.T) {
	next := newPod("next", main(8), assumed(0, 1))
	ended := Allocations{"uid-ended": {"main": holding(0, 16)}} // The API server doesn't have this pod any more.
	for name, test := range map[string]struct {
		cards []gpu.Card
		err   error
		want  Result // Of the refreshed snapshot.
		text  string
	}{
		"it would be rejected": {newCards(16), nil, ResultAssumed, ""},
		"it would be moved":    {newCards(16, 16), nil, ResultAssumed, ""},
		"it is rejected, and the API server can't be asked": {newCards(16), errAway, RefusedFull,
			"pod default/next: no card for 8 units of GPU memory: no GPU card has enough free memory; " +
				"pods may have ended since, and the API server can't be asked: away"},
		"it is moved, and the API server can't be asked": {newCards(16, 16), errAway, ResultMoved, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := Snapshot{Cards: test.cards, Pods: []Pod{next}, Given: ended}
			k := kubelet{states: map[string]KubeletState{"next": StateWaiting}}
			if d := k.decide(s, 8); !d.NeedsFreshRead {
				t.Errorf("got %+v, want a decision by newer pods", d)
			}
			d := k.decide(s.MarkedRead(test.err), 8)
			if d.Result != test.want || test.text != "" && d.Rejection.Text != test.text {
				t.Errorf("got %+v, want %q %s", d, test.want, test.text)
			}
		})
	}
}

// A kubelet that starts without its checkpoint admits its pods one by one, and calls Allocate for the first one that was stopped.
// A new pod, which it doesn't know yet, is not meant.
func TestMatchAsksStartingKubelet(t *testing.T) {
	s := Snapshot{Cards: newCards(16), Given: Allocations{}}
	k := kubelet{states: map[string]KubeletState{"new": StateAbsent}}
	for i := range 9 {
		pod := newPod("p"+strconv.Itoa(i), main(2), assumed(0, i), running)
		s.Pods, s.Given[pod.UID], k.states[pod.Name] = append(s.Pods, pod), PodAllocations{"main": onCard(0, "00").lose()}, StateAbsent
	}
	s.Pods = append(s.Pods, newPod("new", main(2), assumed(0, 99)))
	k.states["p8"] = StateWaiting
	if d := k.decide(s, 2); !d.NeedsFreshRead {
		t.Fatalf("got %+v, want no match before the pods are read again", d)
	}
	if d := k.decide(s.MarkedRead(nil), 2); d.Pod == nil || d.Pod.Name != "p8" || d.Match != ByKubelet {
		t.Errorf("got %+v, want the pod that the kubelet knows", d)
	}
}

func TestMatchAsksFew(t *testing.T) {
	s := Snapshot{Cards: newCards(16)}
	k := kubelet{states: map[string]KubeletState{}}
	for i := range MaxQuestions + 9 {
		name := "p" + strconv.Itoa(i)
		s.Pods = append(s.Pods, newPod(name, main(2), assumed(0, i), created(i)))
		k.states[name] = StateAbsent
	}
	got := k.decide(s, 2)
	if len(k.asked) != MaxQuestions {
		t.Errorf("asked %d times, want %d", len(k.asked), MaxQuestions)
	}
	if want := "p" + strconv.Itoa(MaxQuestions); got.Match != ByOrder || got.Pod.Name != want {
		t.Errorf("got %s by %s, want %s, the first that wasn't ruled out", got.Pod.Name, got.Match, want)
	}
}

func TestNoMatch(t *testing.T) {
	for name, test := range map[string]struct {
		snapshot Snapshot
		result   Result
		want     string
	}{
		"no pod": {
			Snapshot{}, RefusedUnknownPod, "no pod that the API server has on this node waits for 2 units of GPU memory, and static pods are not supported",
		},
		"the kubelet may ask for a container that runs": {
			Snapshot{Pods: []Pod{newPod("a", main(2), running)}}, RefusedUnknownPod,
			"no pod that the API server has on this node waits for 2 units of GPU memory, and static pods are not supported" +
				"; the kubelet has lost its record of containers that run, and it is not known whether it asks for one of them",
		},
		"the pods can't be read": {
			Snapshot{ReadError: errAway}, RefusedUnavailable, "no pod known here waits for 2 units of GPU memory, and the API server can't be asked: away",
		},
	} {
		t.Run(name, func(t *testing.T) {
			test.snapshot.KubeletAge = time.Hour
			got := (&kubelet{}).decide(test.snapshot.MarkedRead(test.snapshot.ReadError), 2)
			if got.Result != test.result || got.Rejection == nil || got.Rejection.Text != test.want || got.Pod != nil || len(got.Cards) > 0 {
				t.Errorf("got %+v, want %q: %s", got, test.result, test.want)
			}
		})
	}
}
