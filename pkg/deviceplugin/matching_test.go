package deviceplugin

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
)

func TestCandidates(t *testing.T) {
	lost := given(0, "00", "01")
	lost.Lost = true
	for name, test := range map[string]struct {
		pods    []*corev1.Pod
		served  served
		refused map[gpu.PodUID]bool
		request gpu.Memory
		want    []string
	}{
		"the earliest assumed first": {
			pods:    []*corev1.Pod{newPod("b", main(2), assumed(0, 2)), newPod("c", main(2), assumed(0, 3)), newPod("a", main(2), assumed(1, 1), created(9))},
			request: 2, want: []string{"a/main", "b/main", "c/main"},
		},
		"equal requests only": {
			pods:    []*corev1.Pod{newPod("a", main(2), assumed(0, 1)), newPod("b", main(3), assumed(0, 2))},
			request: 3, want: []string{"b/main"},
		},
		"a container's request, not the pod's": {
			pods:    []*corev1.Pod{newPod("a", container("x", 2), container("y", 3), assumed(0, 1)), newPod("b", main(5), assumed(0, 2))},
			request: 5, want: []string{"b/main"},
		},
		"a forged request in the annotations counts for nothing": {
			pods:    []*corev1.Pod{newPod("a", main(2), assumed(0, 1), annotation("ALIYUN_COM_GPU_MEM_POD", "5"))},
			request: 5, want: nil,
		},
		"pods that ended and pods without GPU are none": {
			pods: []*corev1.Pod{
				newPod("a", main(2), phase(corev1.PodFailed)), newPod("b", main(2), phase(corev1.PodSucceeded)), newPod("c", main(0)),
			},
			request: 2, want: nil,
		},
		"served ones are none": {
			pods:   []*corev1.Pod{newPod("a", main(2), assumed(0, 1)), newPod("b", main(2), assumed(0, 2))},
			served: served{"uid-a": {"main": given(0, "00", "01")}}, request: 2, want: []string{"b/main"},
		},
		"init containers before containers, each in the order of the spec": {
			pods: []*corev1.Pod{newPod("a", container("x", 2), container("none", 0), container("y", 2), initStep(2), sidecar("s", 2))},
			// All containers are candidates, not only the first, because the record can have gaps.
			request: 2, want: []string{"a/i", "a/s", "a/x", "a/y"},
		},
		"the pod that was begun is next": {
			pods:   []*corev1.Pod{newPod("a", main(2), assumed(0, 1)), newPod("b", initStep(3), container("x", 2), assumed(0, 9))},
			served: served{"uid-b": {"i": given(0, "00", "01", "02")}}, request: 2, want: []string{"b/x", "a/main"},
		},
		"a container that isn't next in its pod comes after those that are": {
			pods:    []*corev1.Pod{newPod("a", container("x", 3), container("y", 2), assumed(0, 1)), newPod("b", main(2), assumed(0, 2))},
			request: 2, want: []string{"b/main", "a/y"},
		},
		"assumed before unassumed before already assigned": {
			pods: []*corev1.Pod{
				newPod("a", main(2), assumed(0, 1), assigned), newPod("b", main(2)), newPod("c", main(2), assumed(0, 3)),
			},
			request: 2, want: []string{"c/main", "a/main", "b/main"},
		},
		"a pod that is being deleted comes late": {
			pods:    []*corev1.Pod{newPod("a", main(2), assumed(0, 1), deleting), newPod("b", main(2), assumed(0, 2))},
			request: 2, want: []string{"b/main", "a/main"},
		},
		"a pod that was told no comes last but for repeats": {
			pods: []*corev1.Pod{
				newPod("a", main(2), assumed(0, 1)), newPod("b", main(2), assumed(0, 2)), newPod("c", main(2), assumed(0, 0), ran(false)),
			},
			refused: map[gpu.PodUID]bool{"uid-a": true}, request: 2, want: []string{"b/main", "a/main", "c/main"},
		},
		"running containers are none, whatever the record says": {
			pods:    []*corev1.Pod{newPod("a", main(2), assumed(0, 1), ran(true))},
			request: 2, want: nil,
		},
		"a container of which the kubelet lost the books is one while it doesn't run": {
			pods:   []*corev1.Pod{newPod("a", main(2), assumed(0, 1)), newPod("b", main(2), assumed(0, 2), ran(true))},
			served: served{"uid-a": {"main": lost}, "uid-b": {"main": lost}}, request: 2, want: []string{"a/main"},
		},
		"the mirrors of static pods are none": {
			pods: []*corev1.Pod{newPod("a", main(2), mirrors("static"))}, request: 2, want: nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := &snapshot{Pods: views(test.pods...), Served: test.served, Refused: test.refused}
			var got []string
			for _, c := range s.Candidates(test.request) {
				got = append(got, c.Pod.Name+"/"+c.Container.Name)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

func TestResolve(t *testing.T) {
	batch := []*corev1.Pod{
		newPod("a", main(2), assumed(0, 1), created(3)),
		newPod("b", main(2), assumed(0, 2), created(2)),
		newPod("c", main(2), assumed(0, 3), created(1)),
	}
	again := newPod("z", main(2), assumed(0, 0), created(0), ran(false))
	for name, test := range map[string]struct {
		pods       []*corev1.Pod
		standing   map[string]standing
		refused    map[gpu.PodUID]bool
		served     served
		silent     bool // the kubelet has never answered
		lastResort bool
		want       string
		by         match
		asked      []string
	}{
		"the kubelet's word, asked in the order in which it admits": {
			pods: batch, standing: map[string]standing{"c": holding, "b": waiting, "a": absent},
			want: "b", by: byKubelet, asked: []string{"c", "b", "a"},
		},
		"of several that wait the one bound last: kubelet 1.34 shows those that it has rejected": {
			pods: []*corev1.Pod{
				newPod("a", main(2), assumed(0, 1), revision("7"), created(1)), newPod("b", main(2), assumed(0, 2), revision("8"), created(4)),
				newPod("c", main(2), assumed(0, 3), revision("9"), created(3)), newPod("d", main(2), assumed(0, 4), revision("10"), created(2)),
			},
			standing: map[string]standing{"a": waiting, "b": waiting, "c": waiting, "d": absent},
			want:     "c", by: byKubelet, asked: []string{"a", "b", "c", "d"},
		},
		"or the one made last: what a kubelet finds when it starts it admits in this order": {
			pods: []*corev1.Pod{
				newPod("a", main(2), assumed(0, 1), revision("9"), created(1)), newPod("b", main(2), assumed(0, 2), revision("8"), created(2)),
				newPod("c", main(2), assumed(0, 3), revision("7"), created(3)),
			},
			standing: map[string]standing{"a": waiting, "b": waiting, "c": absent},
			want:     "b", by: byKubelet, asked: []string{"c", "a", "b"},
		},
		"one that has been begun is no surer": {
			pods: []*corev1.Pod{
				newPod("a", initStep(1), main(2), assumed(0, 1), revision("7")), newPod("b", main(2), assumed(0, 2), revision("8")),
			},
			served:   served{"uid-a": {"i": given(0, "00")}},
			standing: map[string]standing{"a": waiting, "b": waiting}, want: "b", by: byKubelet, asked: []string{"a", "b"},
		},
		"a pod that was refused isn't even asked about while others may be unknown": {
			pods: batch[:1], refused: map[gpu.PodUID]bool{"uid-a": true}, standing: map[string]standing{"a": waiting}, by: byNobody,
		},
		"but believed last when all are known": {
			pods: batch[:2], refused: map[gpu.PodUID]bool{"uid-b": true}, standing: map[string]standing{"a": absent, "b": waiting},
			lastResort: true, want: "b", by: byKubelet, asked: []string{"a", "b"},
		},
		"the order in which they were bound comes before that in which they were made": {
			pods: []*corev1.Pod{
				newPod("a", main(2), assumed(0, 1), created(1), revision("9")), newPod("b", main(2), assumed(0, 2), created(2), revision("10")),
				newPod("c", main(2), assumed(0, 3), created(3), revision("8")),
			},
			standing: map[string]standing{"c": waiting}, want: "c", by: byKubelet, asked: []string{"c", "a"},
		},
		"no word: the earliest assumed": {
			pods: batch, want: "a", by: byOrder, asked: []string{"c", "b", "a"},
		},
		"absent ones are ruled out": {
			pods: batch, standing: map[string]standing{"a": absent, "c": absent}, want: "b", by: byOrder, asked: []string{"c", "b", "a"},
		},
		"unless the kubelet says so of every pod": {
			pods: batch, standing: map[string]standing{"a": absent, "b": absent, "c": absent}, silent: true,
			want: "a", by: byOrder, asked: []string{"c", "b", "a"},
		},
		"all ruled out: none of them": {
			pods: batch, standing: map[string]standing{"a": absent, "b": absent, "c": holding}, by: byNobody, asked: []string{"c", "b", "a"},
		},
		"a single one is asked about as well": {
			pods: batch[:1], standing: map[string]standing{"a": absent}, by: byNobody, asked: []string{"a"},
		},
		"a repeat isn't even asked about while others may be unknown": {
			pods: []*corev1.Pod{again}, standing: map[string]standing{"z": waiting}, by: byNobody,
		},
		"but believed when all are known": {
			pods: []*corev1.Pod{again}, standing: map[string]standing{"z": waiting}, lastResort: true,
			want: "z", by: byKubelet, asked: []string{"z"},
		},
		"and guessed when nothing else is left": {
			pods: []*corev1.Pod{again}, lastResort: true, want: "z", by: byOrder, asked: []string{"z"},
		},
		"a repeat comes after the others": {
			pods: []*corev1.Pod{again, batch[0]}, lastResort: true, want: "a", by: byOrder, asked: []string{"a", "z"},
		},
		"no candidates": {by: byNobody},
	} {
		t.Run(name, func(t *testing.T) {
			s := &snapshot{Pods: views(test.pods...), Refused: test.refused, Served: test.served}
			var asked []string
			got, by, found := resolve(s.Candidates(2), func(c candidate) standing {
				if !slices.Contains(asked, c.Pod.Name) {
					asked = append(asked, c.Pod.Name)
				}
				return test.standing[c.Pod.Name]
			}, func() bool { return !test.silent }, test.lastResort)
			if found != (test.want != "") || by != test.by || found && got.Pod.Name != test.want {
				t.Errorf("got %+v by %q, want %q by %q", got.Pod, by, test.want, test.by)
			}
			if diff := cmp.Diff(test.asked, asked); diff != "" {
				t.Errorf("asked (-want +got)\n%s", diff)
			}
		})
	}
}

// TestInterrupted: after a restart of the machine the API server still reports containers as running that have ended.
func TestInterrupted(t *testing.T) {
	alsoRuns := func(pod *corev1.Pod) {
		status := *pod.Status.ContainerStatuses[0].DeepCopy()
		status.Name = "y"
		pod.Status.ContainerStatuses = append(pod.Status.ContainerStatuses, status)
	}
	pods := []*corev1.Pod{
		newPod("a", main(2), container("y", 2), assumed(0, 1), ran(true), alsoRuns),
		newPod("b", main(2), assumed(1, 2), ran(true)),
		newPod("c", main(3), assumed(1, 3), ran(true)),
		newPod("d", main(2), assumed(1, 4), ran(false)),
		newPod("e", initStep(2), main(9), assumed(1, 5), ran(true)),
		newPod("f", initStep(2), main(9), assumed(1, 6), ran(true)),
		newPod("g", main(2), assumed(1, 7), ran(true)),
	}
	for name, test := range map[string]struct {
		standing map[string]standing
		want     string // empty: none
	}{
		"the one that the kubelet waits for":             {map[string]standing{"a/main": absent, "a/y": absent, "b/main": waiting}, "b/main"},
		"the first of its containers":                    {map[string]standing{"a/main": waiting, "a/y": waiting, "b/main": absent}, "a/main"},
		"then the second":                                {map[string]standing{"a/main": holding, "a/y": waiting, "b/main": absent}, "a/y"},
		"none if several wait: those really are running": {map[string]standing{"a/main": waiting, "a/y": waiting, "b/main": waiting}, ""},
		"none without a word":                            {nil, ""},
		"an init container that has ended: what really runs isn't asked for": {
			map[string]standing{"a/main": waiting, "a/y": waiting, "b/main": waiting, "e/i": waiting, "f/i": absent}, "e/i"},
		"none if several of them wait":                {map[string]standing{"e/i": waiting, "f/i": waiting}, ""},
		"one that was refused comes last":             {map[string]standing{"a/main": absent, "b/main": waiting, "g/main": waiting}, "b/main"},
		"none of another size, or that isn't running": {map[string]standing{"c/main": waiting, "d/main": waiting}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := &snapshot{Pods: views(pods...), Refused: map[gpu.PodUID]bool{"uid-g": true}}
			got, ok := sole(s.Interrupted(2), func(c candidate) standing { return test.standing[c.Pod.Name+"/"+c.Container.Name] })
			if ok != (test.want != "") || ok && got.Pod.Name+"/"+got.Container.Name != test.want {
				t.Errorf("got %+v, %t; want %q", got, ok, test.want)
			}
		})
	}
}

func TestResolveAsksFew(t *testing.T) {
	var pods []*corev1.Pod
	for i := range maxAsked + 9 {
		pods = append(pods, newPod(string(rune('A'+i)), main(2), assumed(0, i), created(i)))
	}
	s := &snapshot{Pods: views(pods...)}
	asked := 0
	got, by, _ := resolve(s.Candidates(2), func(candidate) standing { asked++; return absent }, func() bool { return true }, false)
	if asked != maxAsked {
		t.Errorf("asked %d times, want %d", asked, maxAsked)
	}
	if by != byOrder || got.Pod.Name != string(rune('A'+maxAsked)) {
		t.Errorf("got %s by %s, want the first that wasn't ruled out", got.Pod.Name, by)
	}
}
