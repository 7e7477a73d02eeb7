package clustercache

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// Sharing never mixes up pods that differ, whatever was shared before.
func TestSharingChangesNothing(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random, s := rand.New(rand.NewPCG(seed, 2)), new(sharing)
	for range 3000 {
		pod := randomPod(random)
		got, err := s.transform(pod)
		check.Must(t, err)
		wantEqual(t, "the shared pod info", NewPodInfo(pod), got.(*PodInfo), exported...)
		if again, err := s.transform(got); again != got || err != nil {
			t.Fatalf("transformed a second time: %v, %v", again, err)
		}
		if t.Failed() {
			t.Fatalf("%v", pod)
		}
	}
}

func TestEqualPartsAreShared(t *testing.T) {
	s := new(sharing)
	keep := func(name string, memory, cpus int64, app string) *PodInfo {
		pod, err := s.transform(fake.Pod(name, memory, fake.Bound("n1", 3), func(pod *corev1.Pod) {
			pod.Spec.Containers[0].Resources.Requests = fake.Amount(corev1.ResourceCPU, cpus)
			pod.Labels = map[string]string{"app": app}
		}))
		check.Must(t, err)
		return pod.(*PodInfo)
	}
	same := func(a, b any) bool { return reflect.ValueOf(a).Pointer() == reflect.ValueOf(b).Pointer() }
	a, b, c := keep("a", 16, 1, "x"), keep("b", 17, 1, "x"), keep("c", 16, 2, "y")
	if !same(a.Requests, b.Requests) || !same(a.Labels, b.Labels) {
		t.Error("equal requests or labels are kept twice")
	}
	if same(a.Requests, c.Requests) || same(a.Labels, c.Labels) {
		t.Error("different requests or labels are shared")
	}
	for i := range int64(maxShared + 10) {
		keep("p", 16, i, "x")
	}
	if n := len(s.requests.values); n > maxShared {
		t.Errorf("%d requests are remembered, want at most %d", n, maxShared)
	}
	wantEqual(t, "after forgetting", a, keep("a", 16, 1, "x"), exported...)
}

// randomPod returns a pod with random values in the fields that a pod info depends on.
func randomPod(random *rand.Rand) *corev1.Pod {
	one := func(of ...string) string { return of[random.IntN(len(of))] }
	containers := func(most int) []corev1.Container {
		out := make([]corev1.Container, random.IntN(most+1))
		for i := range out {
			out[i].Name, out[i].Image = fmt.Sprint("c", i), "image"
			if random.IntN(4) == 0 {
				always := corev1.ContainerRestartPolicyAlways
				out[i].RestartPolicy = &always
			}
			list := fake.Amount(corev1.ResourceCPU, random.Int64N(3))
			if random.IntN(2) == 0 {
				list[protocol.ResourceMemory] = fake.Amount("x", random.Int64N(5000))["x"]
			}
			if random.IntN(2) == 0 {
				out[i].Resources.Limits = list
			} else {
				out[i].Resources.Requests = list
			}
		}
		return out
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: one("ns", "default"), Name: "p", UID: types.UID(fmt.Sprint(random.Uint64())), ResourceVersion: "5",
			Labels: map[string]string{"a": one("b", "c")}, Annotations: map[string]string{"big": "text"},
		},
		Spec: corev1.PodSpec{
			NodeName: one("", "n1", "n2"), Containers: containers(3), InitContainers: containers(3),
			Overhead: fake.Amount(corev1.ResourceCPU, random.Int64N(2)),
		},
		Status: corev1.PodStatus{Phase: corev1.PodPhase(one("Pending", "Running", "Succeeded", "Failed", "Unknown"))},
	}
	if random.IntN(2) == 0 {
		pod.Labels[protocol.LabelGroupName], pod.Labels[protocol.LabelGroupSize] = one("job", "other"), one("2", "x")
	}
	for name, values := range map[string][]string{
		protocol.AnnotationIndex:      {"0", "7", "x", "0,1", "-1"},
		protocol.AnnotationAssumeTime: {"1700000000000000000", "x"},
		protocol.AnnotationAllocation: {`{"c0":{"1":7}}`, `{"c0":{"1":7,"2":9}}`, "{"},
	} {
		if random.IntN(2) == 0 {
			pod.Annotations[name] = one(values...)
		}
	}
	return pod
}
