package protocol

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

func TestGroupOf(t *testing.T) {
	type marks = map[string]string
	byAnnotations := func(name, size string) marks { return marks{AnnotationGroupName: name, AnnotationGroupSize: size} }
	byLabels := func(name, size string) marks { return marks{LabelGroupName: name, LabelGroupSize: size} }
	with := func(m marks, keysAndValues ...string) marks {
		for i := 0; i < len(keysAndValues); i += 2 {
			m[keysAndValues[i]] = keysAndValues[i+1]
		}
		return m
	}
	const podGroup, oldPodGroup, jobKey = "scheduling.x-k8s.io/pod-group", "pod-group.scheduling.sigs.k8s.io", "jobset.sigs.k8s.io/job-key"
	replica := func(size string) marks { return marks{"leaderworkerset.sigs.k8s.io/size": size} }
	ofReplica := marks{"leaderworkerset.sigs.k8s.io/group-key": "2f1a", "leaderworkerset.sigs.k8s.io/name": "serve"}
	long := strings.Repeat("x", 64)
	for name, tc := range map[string]struct {
		annotations, labels marks
		want                Group
		err                 error
	}{
		"nothing":                      {},
		"other annotations and labels": {annotations: marks{"a": "b"}, labels: marks{"c": "d"}},
		"annotations":                  {annotations: byAnnotations("qj-1", "3"), want: Group{Name: "qj-1", Size: 3}},
		"labels":                       {labels: byLabels("qj-1", "3"), want: Group{Name: "qj-1", Size: 3}},
		"both, which agree":            {byAnnotations("a", "3"), byLabels("a", "3"), Group{Name: "a", Size: 3}, nil},
		"both, other names":            {byAnnotations("a", "3"), byLabels("b", "3"), Group{Name: "a"}, ErrGroupContradictory},
		"both, other sizes":            {byAnnotations("a", "3"), byLabels("a", "4"), Group{Name: "a"}, ErrGroupContradictory},
		"both, one invalid":            {byAnnotations("a", "x"), byLabels("a", "4"), Group{Name: "a"}, ErrGroupSize},
		"a name alone":                 {annotations: marks{AnnotationGroupName: "a"}, want: Group{Name: "a"}, err: ErrGroupUnsized},
		"a size alone":                 {annotations: marks{AnnotationGroupSize: "3"}, err: ErrGroupUnnamed},
		"an empty name":                {labels: byLabels("", "3"), err: ErrGroupUnnamed},
		"a name, another's size":       {annotations: marks{AnnotationGroupName: "a"}, labels: marks{LabelGroupSize: "3"}, want: Group{Name: "a"}, err: ErrGroupUnsized},
		"a name with an escape":        {annotations: byAnnotations("x\x1b[2J", "3"), want: Group{Name: "x\x1b[2J"}, err: ErrGroupName},
		"a name of 64 letters":         {annotations: byAnnotations(long, "3"), want: Group{Name: long}, err: ErrGroupName},
		"a name with a slash":          {annotations: byAnnotations("a/b", "3"), want: Group{Name: "a/b"}, err: ErrGroupName},
		"no number":                    {annotations: byAnnotations("a", "three"), want: Group{Name: "a"}, err: ErrGroupSize},
		"a size of zero":               {annotations: byAnnotations("a", "0"), want: Group{Name: "a"}, err: ErrGroupSize},
		"a negative size":              {annotations: byAnnotations("a", "-3"), want: Group{Name: "a"}, err: ErrGroupSize},
		"more than 64 bits":            {annotations: byAnnotations("a", "99999999999999999999"), want: Group{Name: "a"}, err: ErrGroupSize},
		"a fractional size":            {annotations: byAnnotations("a", "1.5"), want: Group{Name: "a"}, err: ErrGroupSize},
		"a label completes the name": {
			annotations: with(byAnnotations("a", "3"), AnnotationGroupLabel, jobKey), labels: marks{jobKey: "9c"}, want: Group{Name: "a/9c", Size: 3},
		},
		"a label completes the name of a group by labels": {
			annotations: marks{AnnotationGroupLabel: jobKey}, labels: with(byLabels("a", "3"), jobKey, "9c"), want: Group{Name: "a/9c", Size: 3},
		},
		"the label that completes the name is missing": {
			annotations: with(byAnnotations("a", "3"), AnnotationGroupLabel, jobKey), want: Group{Name: "a"}, err: ErrGroupLabel,
		},
		"the annotation names no label": {
			annotations: with(byAnnotations("a", "3"), AnnotationGroupLabel, ""), want: Group{Name: "a"}, err: ErrGroupLabel,
		},
		"a label completes the name, without a size": {
			annotations: marks{AnnotationGroupName: "a", AnnotationGroupLabel: jobKey}, labels: marks{jobKey: "9c"}, want: Group{Name: "a/9c"}, err: ErrGroupUnsized,
		},
		"a replica of a LeaderWorkerSet":                 {with(byAnnotations("a", "3"), "leaderworkerset.sigs.k8s.io/size", "3"), ofReplica, Group{"a/2f1a", 3, true}, nil},
		"fewer than the replica's pods":                  {with(replica("3"), AnnotationGroupName, "a", AnnotationGroupSize, "2"), ofReplica, Group{"a/2f1a", 2, true}, nil},
		"several replicas as one group":                  {with(replica("3"), AnnotationGroupName, "a", AnnotationGroupSize, "6"), ofReplica, Group{"a", 6, true}, nil},
		"a replica whose size is unknown":                {byAnnotations("a", "6"), ofReplica, Group{"a/2f1a", 6, true}, nil},
		"all replicas as one group, by the annotation":   {with(byAnnotations("a", "2"), AnnotationGroupLabel, "leaderworkerset.sigs.k8s.io/name"), ofReplica, Group{"a/serve", 2, true}, nil},
		"the size and a PodGroup of scheduler-plugins":   {marks{AnnotationGroupSize: "3"}, marks{podGroup: "a"}, Group{Name: "a", Size: 3}, nil},
		"the size and an older PodGroup":                 {marks{AnnotationGroupSize: "3"}, marks{oldPodGroup: "a"}, Group{Name: "a", Size: 3}, nil},
		"the size as a label, and such a PodGroup":       {labels: marks{podGroup: "a", LabelGroupSize: "3"}, want: Group{Name: "a", Size: 3}},
		"a group, and the same PodGroup":                 {byAnnotations("a", "3"), marks{podGroup: "a"}, Group{Name: "a", Size: 3}, nil},
		"a group, and another PodGroup":                  {byAnnotations("a", "3"), marks{podGroup: "b"}, Group{Name: "a"}, ErrGroupContradictory},
		"two PodGroups of scheduler-plugins":             {marks{AnnotationGroupSize: "3"}, marks{podGroup: "a", oldPodGroup: "b"}, Group{Name: "a"}, ErrGroupContradictory},
		"a PodGroup of scheduler-plugins without a size": {labels: marks{podGroup: "a"}},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: tc.annotations, Labels: tc.labels}}
		expect(t, name+": InGroup", tc.want != (Group{}) || tc.err != nil, InGroup(pod))
		if got, err := GroupOf(pod); got != tc.want || !errors.Is(err, tc.err) {
			t.Errorf("%s: got %+v, %v; want %+v, %v", name, got, err, tc.want, tc.err)
		}
	}
}

func TestParsePodGroup(t *testing.T) {
	gang := func(n int32) schedulingv1beta1.PodGroupSchedulingPolicy {
		return schedulingv1beta1.PodGroupSchedulingPolicy{Gang: &schedulingv1beta1.GangSchedulingPolicy{MinCount: n}}
	}
	type spec = schedulingv1beta1.PodGroupSpec
	parent, topology := "parent", &schedulingv1beta1.PodGroupSchedulingConstraints{Topology: []schedulingv1beta1.TopologyConstraint{{Key: "rack"}}}
	for name, tc := range map[string]struct {
		spec  spec
		size  int
		alone bool
		err   error
	}{
		"gang":                 {spec: spec{SchedulingPolicy: gang(4)}, size: 4},
		"no constraints":       {spec: spec{SchedulingPolicy: gang(4), SchedulingConstraints: &schedulingv1beta1.PodGroupSchedulingConstraints{}}, size: 4},
		"basic":                {spec: spec{SchedulingPolicy: schedulingv1beta1.PodGroupSchedulingPolicy{Basic: &schedulingv1beta1.BasicSchedulingPolicy{}}}, alone: true},
		"no policy":            {err: ErrPodGroupPolicy},
		"a minCount of zero":   {spec: spec{SchedulingPolicy: gang(0)}, err: ErrPodGroupMinCount},
		"a very large one":     {spec: spec{SchedulingPolicy: gang(maxGroup + 1)}, err: ErrPodGroupMinCount},
		"a composite group's":  {spec: spec{SchedulingPolicy: gang(4), ParentCompositePodGroupName: &parent}, err: ErrPodGroupComposite},
		"topology constraints": {spec: spec{SchedulingPolicy: gang(4), SchedulingConstraints: topology}, err: ErrPodGroupTopology},
	} {
		size, alone, err := ParsePodGroup(&schedulingv1beta1.PodGroup{Spec: tc.spec})
		if size != tc.size || alone != tc.alone || !errors.Is(err, tc.err) {
			t.Errorf("%s: got %d, %v, %v; want %d, %v, %v", name, size, alone, err, tc.size, tc.alone, tc.err)
		}
	}
}

func FuzzGroupOf(f *testing.F) {
	f.Add("qj-1", "3", "", "", uint8(3))
	f.Add("", "", "qj-1", "3", uint8(12))
	f.Add("a", "1", "a", "1", uint8(15))
	f.Add("a", "-1", "b", "99999999999999999999", uint8(15))
	f.Fuzz(func(t *testing.T, name, size, labelName, labelSize string, there uint8) {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{}, Labels: map[string]string{}}}
		for i, mark := range []struct {
			in         map[string]string
			key, value string
		}{
			{pod.Annotations, AnnotationGroupName, name}, {pod.Annotations, AnnotationGroupSize, size},
			{pod.Labels, LabelGroupName, labelName}, {pod.Labels, LabelGroupSize, labelSize},
		} {
			if there&(1<<i) != 0 {
				mark.in[mark.key] = mark.value
			}
		}
		group, err := GroupOf(pod)
		if InGroup(pod) != (there&15 != 0) {
			t.Fatal("InGroup is wrong")
		}
		switch {
		case there&15 == 0:
			if err != nil || group != (Group{}) {
				t.Errorf("no group at all: %+v, %v", group, err)
			}
		case err == nil && (len(validation.IsValidLabelValue(group.Name)) > 0 || group.Name == "" || group.Size < 1 || group.Size > maxGroup):
			t.Errorf("taken for a group: %+v", group)
		case err != nil && group.Size != 0:
			t.Errorf("a size in spite of %v: %+v", err, group)
		}
	})
}

func TestTemplateHash(t *testing.T) {
	pod := func(edit func(*corev1.Pod)) *corev1.Pod {
		p := annotated(nil, limited("8"))
		p.Name, p.UID, p.Labels = "worker-0", "1", map[string]string{"index": "0"}
		p.Spec.NodeSelector = map[string]string{"a": "b", "c": "d"}
		p.Spec.Volumes = []corev1.Volume{{Name: "token", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{}}}}
		edit(p)
		return p
	}
	initContainer := func(p *corev1.Pod) { p.Spec.InitContainers, p.Spec.Containers = p.Spec.Containers, nil }
	for name, tc := range map[string]struct {
		edit func(*corev1.Pod)
		same bool
	}{
		"name":              {func(p *corev1.Pod) { p.Name, p.UID, p.Labels["index"] = "worker-1", "2", "1" }, true},
		"environment":       {func(p *corev1.Pod) { p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "RANK", Value: "1"}} }, true},
		"hostname":          {func(p *corev1.Pod) { p.Spec.Hostname = "worker-1" }, true},
		"name of the token": {func(p *corev1.Pod) { p.Spec.Volumes[0].Name = "token-2" }, true},
		"node":              {func(p *corev1.Pod) { p.Spec.NodeName = "n1" }, true},
		"request":           {func(p *corev1.Pod) { p.Spec.Containers[0] = limited("9") }, false},
		"kind of container": {initContainer, false},
		"sidecar":           {func(p *corev1.Pod) { initContainer(p); p.Spec.InitContainers[0] = sidecar(p.Spec.InitContainers[0]) }, false},
		"pod-level request": {func(p *corev1.Pod) {
			p.Spec.Resources = &corev1.ResourceRequirements{Requests: list(corev1.ResourceCPU, "1")}
		}, false},
		"node selector": {func(p *corev1.Pod) { p.Spec.NodeSelector["a"] = "x" }, false},
		"toleration":    {func(p *corev1.Pod) { p.Spec.Tolerations = []corev1.Toleration{{Key: "gpu"}} }, false},
		"affinity":      {func(p *corev1.Pod) { p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{}} }, false},
		"claim of a volume": {func(p *corev1.Pod) {
			p.Spec.Volumes[0].VolumeSource = corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}}
		}, false},
	} {
		expect(t, name+": the same template", tc.same, TemplateHash(pod(func(*corev1.Pod) {})) == TemplateHash(pod(tc.edit)))
		expect(t, name+": the same shape", tc.same || name == "claim of a volume", ShapeHash(pod(func(*corev1.Pod) {})) == ShapeHash(pod(tc.edit)))
	}
}
