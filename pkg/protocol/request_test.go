package protocol

import (
	"math"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/gpu"
)

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
		"a negative limit":                      {app: containers{limited("-1")}, want: 0},
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
		pod := &corev1.Pod{Spec: corev1.PodSpec{InitContainers: tc.init, Containers: tc.app, Overhead: tc.overhead}}
		before := pod.DeepCopy()
		expect(t, name, tc.want, PodRequest(pod))
		expect(t, name+": the pod afterwards", before, pod)
		if len(tc.init) == 0 && len(tc.app) == 1 {
			expect(t, name+": ContainerRequest", tc.want, ContainerRequest(&tc.app[0]))
		}
	}
}

func TestManaged(t *testing.T) {
	type containers = []corev1.Container
	other, whole := limitedTo(corev1.ResourceCPU, "2"), limitedTo(ResourceWholeCard, "1")
	for name, tc := range map[string]struct {
		spec               corev1.PodSpec
		managed, asksCards bool
	}{
		"nothing":                             {},
		"other resources":                     {corev1.PodSpec{Containers: containers{other}, InitContainers: containers{other}}, false, false},
		"memory":                              {corev1.PodSpec{Containers: containers{other, asks("4")}}, true, true},
		"a request of zero":                   {corev1.PodSpec{Containers: containers{requesting("0")}}, true, false},
		"an init container":                   {corev1.PodSpec{InitContainers: containers{limited("4")}}, true, true},
		"computing alone":                     {corev1.PodSpec{Containers: containers{limitedTo(ResourceCores, "5")}}, true, false},
		"whole cards":                         {corev1.PodSpec{Containers: containers{other, whole}}, true, true},
		"whole cards for initialization only": {corev1.PodSpec{InitContainers: containers{whole}}, true, false},
		"the pod's own request":               {corev1.PodSpec{Resources: &corev1.ResourceRequirements{Requests: list(ResourceWholeCard, "1")}}, true, false},
	} {
		pod := &corev1.Pod{Spec: tc.spec}
		expect(t, name+": Managed, RequestsCards", []bool{tc.managed, tc.asksCards}, []bool{Managed(pod), RequestsCards(pod)})
	}
}

// TestPod checks that the spec counts, not the annotations.
func TestPod(t *testing.T) {
	object := annotated(map[string]string{AnnotationPod: "1", AnnotationIndex: "0"}, limited("1024"))
	object.UID, object.Namespace, object.Name = "uid-1", "default", "binpack-1"
	want := gpu.Pod{UID: "uid-1", Namespace: "default", Name: "binpack-1", Request: 1024}
	expect(t, "without priority", want, Pod(object))
	object.Spec.Priority, object.DeletionTimestamp = ptr.To[int32](7), new(metav1.Now())
	want.Priority, want.Leaving = 7, true
	object.Labels, want.Cards = map[string]string{LabelCount: "2"}, 2
	object.Spec.Containers[0].Resources.Limits[ResourceCores], want.Cores = resource.MustParse("60"), 60
	expect(t, "with priority, terminating, with two cards and cores", want, Pod(object))
}

// TestPodContainers: those that have a share of a card at the same time count.
func TestPodContainers(t *testing.T) {
	type containers = []corev1.Container
	for name, tc := range map[string]struct {
		init, app containers
		want      int32
	}{
		"one":                                   {app: containers{asks("8")}},
		"one of two":                            {app: containers{asks("8"), limitedTo(corev1.ResourceCPU, "2"), asks("0")}},
		"several":                               {app: containers{asks("8"), asks("4"), asks("1")}, want: 3},
		"init containers run before":            {init: containers{asks("8"), asks("4")}, app: containers{asks("8")}},
		"sidecars run beside the others":        {init: containers{sidecar(asks("2")), asks("9")}, app: containers{asks("8")}, want: 2},
		"sidecars run beside an init container": {init: containers{sidecar(asks("2")), asks("9"), asks("0")}, app: containers{asks("0")}, want: 2},
		"sidecars that start after it":          {init: containers{asks("9"), sidecar(asks("2")), sidecar(asks("2"))}, app: containers{asks("0")}, want: 2},
	} {
		expect(t, name, tc.want, Pod(&corev1.Pod{Spec: corev1.PodSpec{InitContainers: tc.init, Containers: tc.app}}).Containers)
	}
}

// TestSharedMemory: a volume at /dev/shm counts if the container has GPU memory.
func TestSharedMemory(t *testing.T) {
	mounting := func(c corev1.Container, path string) []corev1.Container {
		c.VolumeMounts = []corev1.VolumeMount{{Name: "other", MountPath: "/data"}, {Name: "shm", MountPath: path}}
		return []corev1.Container{asks("1"), c}
	}
	for name, tc := range map[string]struct {
		spec corev1.PodSpec
		want bool
	}{
		"no volume":                         {corev1.PodSpec{Containers: mounting(asks("8"), "/tmp")}, false},
		"a volume there":                    {corev1.PodSpec{Containers: mounting(asks("8"), "/dev/shm")}, true},
		"of an init container":              {corev1.PodSpec{InitContainers: mounting(asks("8"), "/dev/shm/")}, true},
		"a path without a slash":            {corev1.PodSpec{Containers: mounting(asks("8"), "dev/shm")}, true},
		"below it, beside the shared one":   {corev1.PodSpec{Containers: mounting(asks("8"), "/dev/shm/own")}, false},
		"of a container without GPU memory": {corev1.PodSpec{Containers: mounting(asks("0"), "/dev/shm")}, false},
	} {
		expect(t, name, tc.want, Pod(&corev1.Pod{Spec: tc.spec}).SharedMemory)
	}
}

// TestTerminal checks that only the phase counts: a pod that is being deleted runs until the end of its grace period.
func TestTerminal(t *testing.T) {
	for phase, want := range map[corev1.PodPhase]bool{
		corev1.PodPending: false, corev1.PodRunning: false, corev1.PodSucceeded: true, corev1.PodFailed: true, corev1.PodUnknown: false,
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: new(metav1.Now())}, Status: corev1.PodStatus{Phase: phase}}
		expect(t, string(phase), want, Terminal(pod))
	}
}
