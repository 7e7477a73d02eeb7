package protocol

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"
)

func TestGroupOf(t *testing.T) {
	type marks = map[string]string
	for name, tc := range map[string]struct {
		annotations, labels marks
		want                Group
		err                 error
		outside             bool
	}{
		"nothing":                {outside: true},
		"something else":         {annotations: marks{"a": "b"}, labels: marks{"c": "d"}, outside: true},
		"annotations":            {annotations: marks{AnnotationGroupName: "qj-1", AnnotationGroupSize: "3"}, want: Group{"qj-1", 3}},
		"labels":                 {labels: marks{LabelGroupName: "qj-1", LabelGroupSize: "3"}, want: Group{"qj-1", 3}},
		"both, which agree":      {marks{AnnotationGroupName: "a", AnnotationGroupSize: "3"}, marks{LabelGroupName: "a", LabelGroupSize: "3"}, Group{"a", 3}, nil, false},
		"both, other names":      {marks{AnnotationGroupName: "a", AnnotationGroupSize: "3"}, marks{LabelGroupName: "b", LabelGroupSize: "3"}, Group{Name: "a"}, ErrGroupContradictory, false},
		"both, other sizes":      {marks{AnnotationGroupName: "a", AnnotationGroupSize: "3"}, marks{LabelGroupName: "a", LabelGroupSize: "4"}, Group{Name: "a"}, ErrGroupContradictory, false},
		"both, one unreadable":   {marks{AnnotationGroupName: "a", AnnotationGroupSize: "x"}, marks{LabelGroupName: "a", LabelGroupSize: "4"}, Group{Name: "a"}, ErrGroupSize, false},
		"a name alone":           {annotations: marks{AnnotationGroupName: "a"}, want: Group{Name: "a"}, err: ErrGroupUnsized},
		"a size alone":           {annotations: marks{AnnotationGroupSize: "3"}, err: ErrGroupUnnamed},
		"an empty name":          {labels: marks{LabelGroupName: "", LabelGroupSize: "3"}, err: ErrGroupUnnamed},
		"a name, another's size": {annotations: marks{AnnotationGroupName: "a"}, labels: marks{LabelGroupSize: "3"}, want: Group{Name: "a"}, err: ErrGroupUnsized},
		"a name with an escape":  {annotations: marks{AnnotationGroupName: "x\x1b[2J", AnnotationGroupSize: "3"}, want: Group{Name: "x\x1b[2J"}, err: ErrGroupName},
		"a name of 64 letters":   {annotations: marks{AnnotationGroupName: strings.Repeat("x", 64), AnnotationGroupSize: "3"}, want: Group{Name: strings.Repeat("x", 64)}, err: ErrGroupName},
		"a name with a slash":    {annotations: marks{AnnotationGroupName: "a/b", AnnotationGroupSize: "3"}, want: Group{Name: "a/b"}, err: ErrGroupName},
		"no number":              {annotations: marks{AnnotationGroupName: "a", AnnotationGroupSize: "three"}, want: Group{Name: "a"}, err: ErrGroupSize},
		"a size of zero":         {annotations: marks{AnnotationGroupName: "a", AnnotationGroupSize: "0"}, want: Group{Name: "a"}, err: ErrGroupSize},
		"a negative size":        {annotations: marks{AnnotationGroupName: "a", AnnotationGroupSize: "-3"}, want: Group{Name: "a"}, err: ErrGroupSize},
		"past 64 bits":           {annotations: marks{AnnotationGroupName: "a", AnnotationGroupSize: "99999999999999999999"}, want: Group{Name: "a"}, err: ErrGroupSize},
		"a fractional size":      {annotations: marks{AnnotationGroupName: "a", AnnotationGroupSize: "1.5"}, want: Group{Name: "a"}, err: ErrGroupSize},
	} {
		t.Run(name, func(t *testing.T) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: tc.annotations, Labels: tc.labels}}
			if got := InGroup(pod); got == tc.outside {
				t.Fatalf("InGroup is %t", got)
			}
			got, err := GroupOf(pod)
			if got != tc.want || !errors.Is(err, tc.err) {
				t.Errorf("got %+v, %v; want %+v, %v", got, err, tc.want, tc.err)
			}
		})
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

func TestTemplate(t *testing.T) {
	pod := func(edits ...func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "worker-0", UID: "1", Labels: map[string]string{"index": "0"}},
			Spec: corev1.PodSpec{
				Containers: []corev1.Container{limited("8")}, NodeSelector: map[string]string{"a": "b", "c": "d"},
				Volumes: []corev1.Volume{{Name: "kube-api-access-x2x4", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{}}}},
			},
		}
		for _, edit := range edits {
			edit(p)
		}
		return p
	}
	same := map[string]func(*corev1.Pod){
		"its name":          func(p *corev1.Pod) { p.Name, p.UID, p.Labels["index"] = "worker-1", "2", "1" },
		"its environment":   func(p *corev1.Pod) { p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "RANK", Value: "1"}} },
		"its hostname":      func(p *corev1.Pod) { p.Spec.Hostname = "worker-1" },
		"its token's name":  func(p *corev1.Pod) { p.Spec.Volumes[0].Name = "kube-api-access-q7z9" },
		"where it is bound": func(p *corev1.Pod) { p.Spec.NodeName = "n1" },
	}
	other := map[string]func(*corev1.Pod){
		"its request": func(p *corev1.Pod) { p.Spec.Containers[0] = limited("9") },
		"the time of its request": func(p *corev1.Pod) {
			p.Spec.InitContainers, p.Spec.Containers = p.Spec.Containers, nil
		},
		"its side-car": func(p *corev1.Pod) {
			p.Spec.InitContainers, p.Spec.Containers = p.Spec.Containers, nil
			p.Spec.InitContainers[0].RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
		},
		"the whole pod's request": func(p *corev1.Pod) {
			p.Spec.Resources = &corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}}
		},
		"its selector":  func(p *corev1.Pod) { p.Spec.NodeSelector["a"] = "x" },
		"its tolerance": func(p *corev1.Pod) { p.Spec.Tolerations = []corev1.Toleration{{Key: "gpu"}} },
		"its affinity":  func(p *corev1.Pod) { p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{}} },
		"its claim": func(p *corev1.Pod) {
			p.Spec.Volumes[0].VolumeSource = corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}}
		},
	}
	for name, edit := range same {
		if TemplateHash(pod()) != TemplateHash(pod(edit)) {
			t.Errorf("%s changes the template", name)
		}
	}
	for name, edit := range other {
		if TemplateHash(pod()) == TemplateHash(pod(edit)) {
			t.Errorf("%s does not change the template", name)
		}
	}
}
