package nodee2e

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// TestDisagreements: the comparison that all tests rely on detects each kind of error.
func TestDisagreements(t *testing.T) {
	for name, test := range map[string]struct {
		spoil func(*truth)
		want  string // empty if there is no disagreement
	}{
		"all is well":                      {func(*truth) {}, ""},
		"another card in the container":    {func(t *truth) { give(t, 0, "0") }, "container main has card 0, the annotation says 1"},
		"a UUID of another card":           {func(t *truth) { t.running[0].Env[protocol.EnvVisibleDevices] = cardUUID(0) }, "which isn't card 1"},
		"no card in the container":         {func(t *truth) { t.running[0].Env[protocol.AnnotationIndex] = "" }, "has no card"},
		"another amount":                   {func(t *truth) { t.running[0].Env[protocol.EnvContainer] = "4" }, `has ALIYUN_COM_GPU_MEM_CONTAINER="4", want "3"`},
		"a container that doesn't run":     {func(t *truth) { t.running = t.running[:1] }, "its container second doesn't run"},
		"a container of an unknown pod":    {func(t *truth) { t.running[1].PodUID = "other" }, "containers run of pod other"},
		"not assigned":                     {func(t *truth) { delete(t.pods[0].Annotations, protocol.AnnotationAssigned) }, "don't say that it is assigned"},
		"no annotation":                    {func(t *truth) { delete(t.pods[0].Annotations, protocol.AnnotationIndex) }, "on the node without a card"},
		"another card in the ledger":       {func(t *truth) { t.ledger = holders{0: t.ledger[1]} }, "the extender's ledger"},
		"another card in PodResources":     {func(t *truth) { t.kubelet["a/pod"]["main"][2] = 0 }, "the kubelet books devices of cards [1 1 0]"},
		"too few devices":                  {func(t *truth) { t.kubelet["a/pod"]["second"] = nil }, "the kubelet books devices of cards []"},
		"a checkpoint that isn't checked":  {func(t *truth) { t.kubelet = nil }, ""},
		"a card over its total":            {func(t *truth) { t.pods = append(t.pods, sample("more", 13)) }, "card 1 is promised 18"},
		"a pod that isn't running":         {func(t *truth) { t.pods[0].Status.Phase = corev1.PodPending }, "it is Pending"},
		"what another pod asks for in all": {func(t *truth) { t.running[0].Env[protocol.AnnotationPod] = "4" }, `ALIYUN_COM_GPU_MEM_POD="4", want "5"`},
		"the same where pods are guessed": {func(t *truth) {
			t.running[0].Env[protocol.AnnotationPod], t.guessed = "4", true
		}, ""},
		"a failed pod that holds memory": {func(t *truth) { t.pods[0].Status.Phase = corev1.PodFailed }, "the extender's ledger"},
	} {
		t.Run(name, func(t *testing.T) {
			truth := sampleTruth()
			test.spoil(&truth)
			got := strings.Join(truth.disagreements([]uint64{cardMiB, cardMiB}), "\n")
			if test.want == "" && got != "" || !strings.Contains(got, test.want) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// sampleTruth returns a pod with two containers on card 1, without any disagreement.
func sampleTruth() truth {
	t := truth{
		pods: []corev1.Pod{sample("pod", 3, 2)},
		running: []sighting{
			{PodUID: "pod", Container: "main", Env: map[string]string{protocol.EnvContainer: "3"}},
			{PodUID: "pod", Container: "second", Env: map[string]string{protocol.EnvContainer: "2"}},
		},
		ledger:  holders{1: {"a/pod 5"}},
		kubelet: map[string]map[string][]int{"a/pod": {"main": {1, 1, 1}, "second": {1, 1}}},
	}
	for i := range t.running {
		t.running[i].Env[protocol.AnnotationPod], t.running[i].Env[protocol.AnnotationDevice] = "5", "15"
		give(&t, i, "1")
	}
	return t
}

// give sets the card of a container.
func give(t *truth, container int, card string) {
	env := t.running[container].Env
	env[protocol.AnnotationIndex], env[protocol.EnvVisibleDevices] = card, cardUUID(int(card[0]-'0'))
}

// sample returns a running pod on card 1.
func sample(name string, memory ...int64) corev1.Pod {
	pod := corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name, UID: types.UID(name), Annotations: map[string]string{
			protocol.AnnotationIndex: "1", protocol.AnnotationDevice: "15", protocol.AnnotationAssigned: "true",
			protocol.AnnotationAssumeTime: "1",
		}},
		Spec:   corev1.PodSpec{NodeName: "real"},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	for i, m := range memory {
		pod.Spec.Containers = append(pod.Spec.Containers, container([]string{"main", "second"}[i], m))
	}
	return pod
}
