package allocation

import (
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// The kubelet has lost its checkpoint.
func TestRecover(t *testing.T) {
	const allocated, waiting = StateAllocated, StateWaiting
	pods := []Pod{
		newPod("a", main(2), container("y", 2), assumed(0, 1), running),
		newPod("b", main(2), assumed(1, 2), running),
		newPod("c", main(3), assumed(1, 3), running),
		newPod("e", initStep(2), main(9), assumed(1, 5), running),
		newPod("f", initStep(2), main(9), assumed(1, 6), running),
		newPod("g", main(2), assumed(1, 7), running),
	}
	for name, test := range map[string]struct {
		pods   []Pod // The default is pods.
		states map[string]KubeletState
		later  bool   // The kubelet started more than statusLag ago.
		want   string // Empty if there is no match.
	}{
		"the container that waits":         {states: map[string]KubeletState{"b": waiting}, want: "b/main"},
		"the first of the pod's":           {states: map[string]KubeletState{"a/main": waiting, "a/y": waiting}, want: "a/main"},
		"then the second":                  {states: map[string]KubeletState{"a/main": allocated, "a/y": waiting}, want: "a/y"},
		"several wait, because they run":   {states: map[string]KubeletState{"a": waiting, "b": waiting}},
		"no answer":                        {},
		"an init container has precedence": {states: map[string]KubeletState{"a": waiting, "b": waiting, "e/i": waiting}, want: "e/i"},
		"several init containers wait":     {states: map[string]KubeletState{"e/i": waiting, "f/i": waiting}},
		"a rejected pod comes last":        {states: map[string]KubeletState{"b": waiting, "g": waiting}, want: "b/main"},
		"another size":                     {states: map[string]KubeletState{"c": waiting}},
		"long after the kubelet's start, as if the pod is resized": {states: map[string]KubeletState{"b": waiting}, later: true},
		"a container that has ended": {
			pods:   []Pod{newPod("one", main(2), ran), newPod("two", main(2), running)},
			states: map[string]KubeletState{"one": waiting, "two": waiting}, later: true, want: "one/main",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := Snapshot{Cards: newCards(64, 64), Pods: test.pods, Rejected: map[gpu.PodUID]bool{"uid-g": true}, Freshness: Live}
			if s.Pods == nil {
				s.Pods = pods
			}
			if test.later {
				s.KubeletAge = time.Hour
			}
			got := (&kubelet{states: test.states}).decide(s, 2)
			var found string
			if got.Pod != nil {
				found = got.Pod.Name + "/" + got.Container.Name
			}
			if found != test.want || got.Match != map[bool]Match{true: ByKubelet, false: ByNone}[test.want != ""] {
				t.Errorf("got %q by %q, want %q", found, got.Match, test.want)
			}
		})
	}
}
