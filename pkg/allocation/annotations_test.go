package allocation

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
)

func TestDueAnnotations(t *testing.T) {
	nanoseconds := func(after time.Duration) string { return strconv.FormatInt(start.Add(after).UnixNano(), 10) }
	late := onCard(1)
	late.At = start.Add(time.Minute)
	onlyAssumeTime := func(pod *Pod) { pod.HasAssumeTime = true }
	for name, test := range map[string]struct {
		pod    Pod
		given  PodAllocations
		want   map[string]any // The names are without their prefix.
		repair bool
	}{
		"no container was served": {pod: newPod("a", main(2), assumed(1, 5))},
		"all containers were served": {
			pod: newPod("a", container("x", 2), container("y", 3), assumed(1, 5)), given: PodAllocations{"x": onCard(1), "y": late},
			want: map[string]any{"ASSIGNED": "true", "ASSIGN_TIME": nanoseconds(time.Minute)},
		},
		"the node chose the card for the first container, and all were served": {
			pod:   newPod("a", container("x", 2), container("y", 3), assumed(1, 5), func(pod *Pod) { pod.Assignment.AssumeTime = onCard(1).At }),
			given: PodAllocations{"x": onCard(1), "y": late},
			want:  map[string]any{"ASSIGNED": "true", "ASSIGN_TIME": nanoseconds(0)},
		},
		"one container was not served yet": {
			pod: newPod("a", container("x", 2), container("y", 3), assumed(1, 5)), given: PodAllocations{"x": onCard(1)},
		},
		"an init container was not served yet": {
			pod: newPod("a", initStep(2), main(2), assumed(1, 5)), given: PodAllocations{"main": onCard(1)},
		},
		"the annotations are complete": {pod: newPod("a", main(2), assumed(1, 5), assigned), given: PodAllocations{"main": onCard(1)}},
		"the pod has ended": {
			pod: newPod("a", main(2), assumed(1, 5), ended), given: PodAllocations{"main": onCard(1)},
		},
		"no annotations: all are written": {
			pod: newPod("a", main(2)), given: PodAllocations{"main": onCard(1)},
			want: map[string]any{
				"IDX": "1", "POD": "2", "DEV": "16",
				"ASSUME_TIME": nanoseconds(0), "ASSIGNED": "true",
				"ASSIGN_TIME": nanoseconds(0),
			},
		},
		"no annotations, and containers were served at different times: the pod counts as one whose card the node chose": {
			pod: newPod("a", container("x", 2), container("y", 3)), given: PodAllocations{"x": onCard(1), "y": late},
			want: map[string]any{
				"IDX": "1", "POD": "5", "DEV": "16",
				"ASSUME_TIME": nanoseconds(time.Minute), "ASSIGNED": "true", "ASSIGN_TIME": nanoseconds(time.Minute),
			},
		},
		"another card than that of a scheduler that writes no assume time": {
			pod: newPod("a", main(2), assumed(0, 5), func(pod *Pod) { pod.HasAssumeTime = false }), given: PodAllocations{"main": onCard(1)}, repair: true,
			want: map[string]any{
				"IDX": "1", "POD": "2", "DEV": "16", "ASSIGNED": "true", "ASSIGN_TIME": nanoseconds(0),
			},
		},
		"no annotations, and one container was not served yet": {
			pod: newPod("a", container("x", 2), container("y", 3)), given: PodAllocations{"x": onCard(1)},
			want: map[string]any{
				"IDX": "1", "POD": "5", "DEV": "16",
				"ASSUME_TIME": nanoseconds(0), "ASSIGNED": "false",
			},
		},
		"another card: the assume time stays": {
			pod: newPod("a", main(2), assumed(0, 5)), given: PodAllocations{"main": onCard(1)}, repair: true,
			want: map[string]any{
				"IDX": "1", "POD": "2", "DEV": "16", "ASSIGNED": "true", "ASSIGN_TIME": nanoseconds(0),
			},
		},
		"another card, and the pod is assigned": {
			pod: newPod("a", main(2), assumed(0, 5), assigned), given: PodAllocations{"main": onCard(1)}, repair: true,
			want: map[string]any{
				"IDX": "1", "POD": "2", "DEV": "16",
			},
		},
		"assigned, but another pod was served": {
			pod:  newPod("a", main(2), assumed(1, 5), assigned),
			want: map[string]any{"ASSIGNED": "false", "ASSIGN_TIME": nil},
		},
		"assigned, but one container was not served": {
			pod: newPod("a", container("x", 2), container("y", 2), assumed(1, 5), assigned), given: PodAllocations{"x": onCard(1)},
			want: map[string]any{"ASSIGNED": "false", "ASSIGN_TIME": nil},
		},
		"the record has a gap, because the pod has run": {
			pod: newPod("a", main(2), assumed(1, 5), assigned, ran),
		},
		"an invalid card index beside an assume time": {
			pod: newPod("a", main(2), onlyAssumeTime), given: PodAllocations{"main": onCard(1)},
			want: map[string]any{
				"IDX": "1", "POD": "2", "DEV": "16", "ASSIGNED": "true", "ASSIGN_TIME": nanoseconds(0),
			},
		},
		"another card of an init container, and the pod runs": {
			pod: newPod("a", initStep(2), main(2), assumed(0, 5), assigned, running), given: PodAllocations{"i": onCard(1), "main": onCard(0)},
		},
		"another card of an init container alone, and the pod has run": {
			pod: newPod("a", initStep(2), main(2), assumed(0, 5), assigned, ran), given: PodAllocations{"i": onCard(1)},
		},
		"another card of an init container during admission": {
			pod: newPod("a", initStep(2), main(2), assumed(0, 5)), given: PodAllocations{"i": onCard(1)}, repair: true,
			want: map[string]any{
				"IDX": "1", "POD": "2", "DEV": "16", "ASSIGNED": "false",
			},
		},
		"another card of an init container, and no other container asks for memory": {
			pod: newPod("a", initStep(2), assumed(0, 5), assigned, running), given: PodAllocations{"i": onCard(1)}, repair: true,
			want: map[string]any{
				"IDX": "1", "POD": "2", "DEV": "16",
			},
		},
		"several cards: the annotation of the allocation lists all app containers": {
			pod: newPod("a", initStep(6), container("x", 4), container("y", 2)), given: PodAllocations{"x": onCards([]int{0, 2})},
			want: map[string]any{
				"IDX": "0,2", "POD": "6", "DEV": "16,16", "ASSUME_TIME": nanoseconds(0), "ASSIGNED": "false",
				protocol.AnnotationAllocation: `{"0":{"0":2,"2":2},"1":{"0":1,"2":1}}`,
			},
		},
		"one of several cards is another": {
			pod: newPod("a", main(4), assumedOn(0, 1)), given: PodAllocations{"main": onCards([]int{0, 2})}, repair: true,
			want: map[string]any{
				"IDX": "0,2", "POD": "4", "DEV": "16,16", "ASSIGNED": "true", "ASSIGN_TIME": nanoseconds(0),
				protocol.AnnotationAllocation: `{"0":{"0":2,"2":2}}`,
			},
		},
		"one card in place of several": {
			pod: newPod("a", main(4), assumedOn(0, 1), assigned), given: PodAllocations{"main": onCard(0)}, repair: true,
			want: map[string]any{"IDX": "0", "POD": "4", "DEV": "16", protocol.AnnotationAllocation: nil},
		},
		"the annotated cards, of which the pod has several": {
			pod: newPod("a", main(4), assumedOn(0, 1), assigned), given: PodAllocations{"main": onCards([]int{0, 1})},
		},
		"a container without a card": {
			pod: newPod("a", main(2), assumed(0, 5)), given: PodAllocations{"main": noCard},
		},
		"a response of another plugin": {
			pod: newPod("a", main(2), assumed(0, 5)), given: PodAllocations{"main": unknownCard},
		},
		"one container with a card and one without": {
			pod: newPod("a", container("x", 2), container("y", 2), assumed(0, 5)), given: PodAllocations{"x": noCard, "y": onCard(0)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			annotations, repair := DueAnnotations(&test.pod, test.given)
			var got map[string]any
			for key, value := range annotations {
				if got == nil {
					got = map[string]any{}
				}
				got[strings.TrimPrefix(key, "ALIYUN_COM_GPU_MEM_")] = value
			}
			if diff := cmp.Diff(test.want, got); diff != "" || repair != test.repair {
				t.Errorf("repair %v, want %v; (-want +got)\n%s", repair, test.repair, diff)
			}
			// A pod with the written annotations needs no further write.
			written := test.pod
			if value, ok := got["ASSIGNED"]; ok {
				written.Assigned = value == "true"
			}
			if value, ok := got["IDX"]; ok {
				assignment, err := protocol.ParseAssignment(map[string]string{protocol.AnnotationIndex: value.(string)})
				check.Must(t, err)
				written.Assumed, written.HasAssumeTime, written.Assignment = true, true, assignment
			}
			if more, _ := DueAnnotations(&written, test.given); more != nil {
				t.Errorf("%v is due after the write", more)
			}
		})
	}
}
