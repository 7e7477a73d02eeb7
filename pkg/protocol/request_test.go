package protocol

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// list builds a resource list of one resource; an empty amount is an empty list.
func list(name corev1.ResourceName, amount string) corev1.ResourceList {
	if amount == "" {
		return nil
	}
	return corev1.ResourceList{name: resource.MustParse(amount)}
}

// asks builds a container as the API server stores it, with equal limit and request.
func asks(amount string) corev1.Container {
	return corev1.Container{Resources: corev1.ResourceRequirements{
		Limits: list(ResourceMemory, amount), Requests: list(ResourceMemory, amount),
	}}
}

// limited builds a container with a limit only, as in most manifests.
func limited(amount string) corev1.Container {
	return corev1.Container{Resources: corev1.ResourceRequirements{Limits: list(ResourceMemory, amount)}}
}

// requesting builds a container with a request only.
func requesting(amount string) corev1.Container {
	return corev1.Container{Resources: corev1.ResourceRequirements{Requests: list(ResourceMemory, amount)}}
}

func sidecar(container corev1.Container) corev1.Container {
	container.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
	return container
}

func TestPodRequest(t *testing.T) {
	type containers = []corev1.Container
	cpuOnly := corev1.Container{Resources: corev1.ResourceRequirements{Requests: list(corev1.ResourceCPU, "2")}}
	for name, tc := range map[string]struct {
		init, app containers
		overhead  corev1.ResourceList
		want      gpu.Memory
	}{
		"one container":                  {app: containers{asks("8138")}, want: 8138},
		"no GPU":                         {app: containers{cpuOnly}, want: 0},
		"a limit alone":                  {app: containers{limited("8138")}, want: 8138},
		"a request alone":                {app: containers{requesting("8138")}, want: 8138},
		"app containers add up":          {app: containers{asks("8"), cpuOnly, asks("4")}, want: 12},
		"limits and requests in one pod": {app: containers{limited("8"), requesting("4")}, want: 12},
		"a smaller init container is within the app":   {init: containers{asks("4")}, app: containers{asks("8")}, want: 8},
		"a larger init container is the whole":         {init: containers{asks("12")}, app: containers{asks("8")}, want: 12},
		"init containers run one after the other":      {init: containers{asks("5"), asks("6")}, app: containers{asks("8")}, want: 8},
		"an init container with a limit alone":         {init: containers{limited("12")}, app: containers{limited("8")}, want: 12},
		"an init container asks, the app doesn't":      {init: containers{asks("6")}, app: containers{cpuOnly}, want: 6},
		"a sidecar adds to the app":                    {init: containers{sidecar(asks("2"))}, app: containers{asks("8")}, want: 10},
		"a sidecar with a limit alone":                 {init: containers{sidecar(limited("2"))}, app: containers{limited("8")}, want: 10},
		"a sidecar runs beside later init containers":  {init: containers{sidecar(asks("2")), asks("9")}, app: containers{asks("8")}, want: 11},
		"a sidecar runs after earlier init containers": {init: containers{asks("9"), sidecar(asks("2"))}, app: containers{asks("6")}, want: 9},
		"sidecars add up to the step between them":     {init: containers{sidecar(asks("1")), sidecar(asks("2")), asks("20"), sidecar(asks("4"))}, app: containers{asks("8")}, want: 23},
		"zero":                                  {app: containers{asks("0")}, want: 0},
		"zero beside something":                 {app: containers{asks("0"), asks("4")}, want: 4},
		"a negative amount is nothing":          {app: containers{asks("-5"), asks("4")}, want: 4},
		"thousands":                             {app: containers{asks("8k")}, want: 8000},
		"the largest there is":                  {app: containers{asks("9223372036854775807")}, want: math.MaxInt64},
		"more than 64 bits stop at the largest": {app: containers{asks("9223372036854775807"), asks("9223372036854775807")}, want: math.MaxInt64},
		"more than 64 bits in initialization":   {init: containers{sidecar(asks("9223372036854775807")), asks("9223372036854775807")}, app: containers{asks("1")}, want: math.MaxInt64},
		"a runtime class's overhead isn't a container's": {
			app: containers{asks("8")}, overhead: list(ResourceMemory, "3"), want: 8,
		},
		"no containers": {want: 0},
	} {
		t.Run(name, func(t *testing.T) {
			pod := &corev1.Pod{Spec: corev1.PodSpec{InitContainers: tc.init, Containers: tc.app, Overhead: tc.overhead}}
			before := pod.DeepCopy()
			if diff := cmp.Diff(tc.want, PodRequest(pod)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(before, pod); diff != "" {
				t.Errorf("the pod was changed (-before +after):\n%s", diff)
			}
		})
	}
}

func TestManaged(t *testing.T) {
	whole := corev1.Container{Resources: corev1.ResourceRequirements{Limits: list(ResourceWholeCard, "1")}}
	cpuOnly := corev1.Container{Resources: corev1.ResourceRequirements{Requests: list(corev1.ResourceCPU, "2")}}
	for name, tc := range map[string]struct {
		spec corev1.PodSpec
		want bool
	}{
		"nothing":               {},
		"other resources":       {spec: corev1.PodSpec{Containers: []corev1.Container{cpuOnly}, InitContainers: []corev1.Container{cpuOnly}}},
		"memory":                {corev1.PodSpec{Containers: []corev1.Container{cpuOnly, asks("4")}}, true},
		"a request of zero":     {corev1.PodSpec{Containers: []corev1.Container{requesting("0")}}, true},
		"an init container":     {corev1.PodSpec{InitContainers: []corev1.Container{limited("4")}}, true},
		"whole cards":           {corev1.PodSpec{Containers: []corev1.Container{whole}}, true},
		"the pod's own request": {corev1.PodSpec{Resources: &corev1.ResourceRequirements{Requests: list(ResourceWholeCard, "1")}}, true},
	} {
		if got := Managed(&corev1.Pod{Spec: tc.spec}); got != tc.want {
			t.Errorf("%s: %t, want %t", name, got, tc.want)
		}
	}
}

func TestContainerRequest(t *testing.T) {
	for name, tc := range map[string]struct {
		container corev1.Container
		want      gpu.Memory
	}{
		"limit and request": {asks("8"), 8},
		"a limit alone":     {limited("8"), 8},
		"a request alone":   {requesting("8"), 8},
		"nothing":           {corev1.Container{}, 0},
		"a negative limit":  {limited("-1"), 0},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, ContainerRequest(&tc.container)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestPod(t *testing.T) {
	object := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			UID: "uid-1", Namespace: "default", Name: "binpack-1",
			// Only the spec counts, not the annotations.
			Annotations: map[string]string{AnnotationPod: "1", AnnotationIndex: "0"},
		},
		Spec: corev1.PodSpec{Containers: []corev1.Container{limited("1024")}},
	}
	want := gpu.Pod{UID: "uid-1", Namespace: "default", Name: "binpack-1", Request: 1024}
	if diff := cmp.Diff(want, Pod(object)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestTerminal(t *testing.T) {
	now := metav1.Now()
	for name, tc := range map[string]struct {
		pod  corev1.Pod
		want bool
	}{
		"pending":   {corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodPending}}, false},
		"running":   {corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodRunning}}, false},
		"succeeded": {corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodSucceeded}}, true},
		"failed":    {corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodFailed}}, true},
		"unknown":   {corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodUnknown}}, false},
		"running through its grace period": {corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &now}, Status: corev1.PodStatus{Phase: corev1.PodRunning},
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Terminal(&tc.pod); got != tc.want {
				t.Errorf("got %t, want %t", got, tc.want)
			}
		})
	}
}
