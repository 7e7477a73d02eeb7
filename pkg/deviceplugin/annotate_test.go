package deviceplugin

import (
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
)

func TestDue(t *testing.T) {
	nanoseconds := func(after time.Duration) string { return strconv.FormatInt(start.Add(after).UnixNano(), 10) }
	late := given(1)
	late.At = start.Add(time.Minute)
	for name, test := range map[string]struct {
		pod    *corev1.Pod
		given  servings
		want   map[string]any
		repair bool
	}{
		"nothing served": {pod: newPod("a", main(2), assumed(1, 5))},
		"all served": {
			pod: newPod("a", container("x", 2), container("none", 0), container("y", 3), assumed(1, 5)), given: servings{"x": given(1), "y": late},
			want: map[string]any{"ALIYUN_COM_GPU_MEM_ASSIGNED": "true", "ALIYUN_COM_GPU_MEM_ASSIGN_TIME": nanoseconds(time.Minute)},
		},
		"one container is still to come": {
			pod: newPod("a", container("x", 2), container("y", 3), assumed(1, 5)), given: servings{"x": given(1)},
		},
		"an init container is still to come": {
			pod: newPod("a", initStep(2), main(2), assumed(1, 5)), given: servings{"main": given(1)},
		},
		"done already": {pod: newPod("a", main(2), assumed(1, 5), assigned), given: servings{"main": given(1)}},
		"ended": {
			pod: newPod("a", main(2), assumed(1, 5), phase(corev1.PodFailed)), given: servings{"main": given(1)},
		},
		"not assumed: everything is written": {
			pod: newPod("a", main(2)), given: servings{"main": given(1)},
			want: map[string]any{
				"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "2", "ALIYUN_COM_GPU_MEM_DEV": "16",
				"ALIYUN_COM_GPU_MEM_ASSUME_TIME": nanoseconds(0), "ALIYUN_COM_GPU_MEM_ASSIGNED": "true",
				"ALIYUN_COM_GPU_MEM_ASSIGN_TIME": nanoseconds(0),
			},
		},
		"not assumed, and one container is still to come": {
			pod: newPod("a", container("x", 2), container("y", 3)), given: servings{"x": given(1)},
			want: map[string]any{
				"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "5", "ALIYUN_COM_GPU_MEM_DEV": "16",
				"ALIYUN_COM_GPU_MEM_ASSUME_TIME": nanoseconds(0), "ALIYUN_COM_GPU_MEM_ASSIGNED": "false",
			},
		},
		"another card than it says: the card is mended, the time of assumption stays": {
			pod: newPod("a", main(2), assumed(0, 5)), given: servings{"main": given(1)}, repair: true,
			want: map[string]any{
				"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "2", "ALIYUN_COM_GPU_MEM_DEV": "16",
				"ALIYUN_COM_GPU_MEM_ASSIGNED": "true", "ALIYUN_COM_GPU_MEM_ASSIGN_TIME": nanoseconds(0),
			},
		},
		"another card than it says, long after": {
			pod: newPod("a", main(2), assumed(0, 5), assigned), given: servings{"main": given(1)}, repair: true,
			want: map[string]any{
				"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "2", "ALIYUN_COM_GPU_MEM_DEV": "16",
			},
		},
		"assigned, but it was another pod that was served: taken back": {
			pod:  newPod("a", main(2), assumed(1, 5), assigned),
			want: map[string]any{"ALIYUN_COM_GPU_MEM_ASSIGNED": "false", "ALIYUN_COM_GPU_MEM_ASSIGN_TIME": nil},
		},
		"the same of one container": {
			pod: newPod("a", container("x", 2), container("y", 2), assumed(1, 5), assigned), given: servings{"x": given(1)},
			want: map[string]any{"ALIYUN_COM_GPU_MEM_ASSIGNED": "false", "ALIYUN_COM_GPU_MEM_ASSIGN_TIME": nil},
		},
		"not of a pod that has run: there the record has a gap": {
			pod: newPod("a", main(2), assumed(1, 5), assigned, ran(false)),
		},
		"a time of assumption beside an index that can't be read stays": {
			pod: newPod("a", main(2), assumed(0, 5), annotation("ALIYUN_COM_GPU_MEM_IDX", "x")), given: servings{"main": given(1)},
			want: map[string]any{
				"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "2", "ALIYUN_COM_GPU_MEM_DEV": "16",
				"ALIYUN_COM_GPU_MEM_ASSIGNED": "true", "ALIYUN_COM_GPU_MEM_ASSIGN_TIME": nanoseconds(0),
			},
		},
		"and one beside no index, be it legible or not": {
			pod: newPod("a", main(2), annotation("ALIYUN_COM_GPU_MEM_ASSUME_TIME", "yesterday")), given: servings{"main": given(1)},
			want: map[string]any{
				"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "2", "ALIYUN_COM_GPU_MEM_DEV": "16",
				"ALIYUN_COM_GPU_MEM_ASSIGNED": "true", "ALIYUN_COM_GPU_MEM_ASSIGN_TIME": nanoseconds(0),
			},
		},
		"an init container that has ended has no say beside a container that runs": {
			pod: newPod("a", initStep(2), main(2), assumed(0, 5), assigned, ran(true)), given: servings{"i": given(1), "main": given(0)},
		},
		"nor where the record knows of it alone, and the pod has run": {
			pod: newPod("a", initStep(2), main(2), assumed(0, 5), assigned, ran(false)), given: servings{"i": given(1)},
		},
		"it has while the pod is being admitted": {
			pod: newPod("a", initStep(2), main(2), assumed(0, 5)), given: servings{"i": given(1)}, repair: true,
			want: map[string]any{
				"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "2", "ALIYUN_COM_GPU_MEM_DEV": "16", "ALIYUN_COM_GPU_MEM_ASSIGNED": "false",
			},
		},
		"and for good where no other container asks for memory": {
			pod: newPod("a", initStep(2), container("main", 0), assumed(0, 5), assigned, ran(true)), given: servings{"i": given(1)}, repair: true,
			want: map[string]any{
				"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "2", "ALIYUN_COM_GPU_MEM_DEV": "16",
			},
		},
		"an environment without a card mends nothing": {
			pod: newPod("a", main(2), assumed(0, 5)), given: servings{"main": {Card: noCard}},
		},
		"nor does an answer that isn't ours": {
			pod: newPod("a", main(2), assumed(0, 5)), given: servings{"main": {Card: unknownCard}},
		},
		"one container with a card and one without: not assigned": {
			pod: newPod("a", container("x", 2), container("y", 2), assumed(0, 5)), given: servings{"x": given(noCard), "y": given(0)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			pod := views(test.pod)[0]
			got, repair := due(&pod, test.given)
			if diff := cmp.Diff(test.want, got); diff != "" || repair != test.repair {
				t.Errorf("repair %v, want %v; (-want +got)\n%s", repair, test.repair, diff)
			}
			// A pod with the written annotations needs no further write.
			written := test.pod.DeepCopy()
			for key, value := range got {
				if text, ok := value.(string); ok {
					annotate(written, map[string]string{key: text})
				} else {
					delete(written.Annotations, key)
				}
			}
			pod = views(written)[0]
			if more, _ := due(&pod, test.given); more != nil {
				t.Errorf("once written, %v is due", more)
			}
		})
	}
}
