package deviceplugin

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// labelled sets the number of cards that the pod asks for.
func labelled(cards string) podOption {
	return func(pod *corev1.Pod) { pod.Labels = map[string]string{protocol.LabelCount: cards} }
}

// assumedOn sets the extender's annotations for a pod with these cards of 16 units.
func assumedOn(at int, cards ...int) podOption {
	return func(pod *corev1.Pod) {
		assignment := protocol.Assignment{Request: protocol.PodRequest(pod), AssumeTime: start.Add(time.Duration(at) * time.Second)}
		for _, card := range cards {
			assignment.Cards = append(assignment.Cards, protocol.AssignedCard{Index: card, Memory: 16})
		}
		for i := range pod.Spec.Containers {
			assignment.Containers = append(assignment.Containers, protocol.ContainerRequest(&pod.Spec.Containers[i]))
		}
		annotate(pod, assignment.Annotations())
	}
}

// TestSeveralCards admits pods with the same total request and different numbers of cards, in another order than they were assumed.
func TestSeveralCards(t *testing.T) {
	b := newFixture(t)
	b.servePodResources()
	k, p := b.up(16, 16, 16, 16)
	b.trust(k, p)
	one := newPod("one", main(8), assumed(1, 1))
	two := newPod("two", main(8), container("second", 4), fake.Cores(60), labelled("2"), assumedOn(2, 1, 3))
	four := newPod("four", main(8), labelled("4"), assumedOn(3, 0, 1, 2, 3))
	b.create(p, one, two, four)
	got := map[string]map[string]string{}
	for _, pod := range []*corev1.Pod{four, two, one} {
		for name, env := range k.mustAdmit(pod) {
			got[pod.Name+"/"+name] = env
		}
	}
	env := func(pod, cards, visible, memory, container string) map[string]string {
		env := map[string]string{
			"NVIDIA_VISIBLE_DEVICES": visible, "ALIYUN_COM_GPU_MEM_IDX": cards, "ALIYUN_COM_GPU_MEM_DEV": memory,
			"ALIYUN_COM_GPU_MEM_POD": pod, "ALIYUN_COM_GPU_MEM_CONTAINER": container,
		}
		if strings.Contains(cards, ",") {
			env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
		}
		return env
	}
	want := map[string]map[string]string{
		"one/main":   env("8", "1", "GPU-1", "16", "8"),
		"two/main":   env("12", "1,3", "GPU-1,GPU-3", "16,16", "4"),
		"two/second": env("12", "1,3", "GPU-1,GPU-3", "16,16", "2"),
		"four/main":  env("8", "0,1,2,3", "GPU-0,GPU-1,GPU-2,GPU-3", "16,16,16,16", "2"),
	}
	want["two/main"]["ALIYUN_COM_GPU_CORE_CONTAINER"] = "30"
	check.Equal(t, "the result", want, got)
	for _, e := range k.entries {
		cards := map[string][]int{"uid-known": {0}, "uid-one": {1}, "uid-two": {1, 3}, "uid-four": {0, 1, 2, 3}}[e.PodUID]
		if !evenlyOf(cards, e.DeviceIDs[-1]) {
			t.Errorf("pod %s has devices %v of cards %v in the kubelet's checkpoint", e.PodUID, e.DeviceIDs, cards)
		}
	}
	if n := testutil.ToFloat64(p.metrics.otherDevices); n != 0 {
		t.Errorf("counted %v allocations with devices of another card", n)
	}
	for card, want := range []uint64{0, 6 << 30, 0, 6 << 30} {
		if held := p.overuse.known(time.Now(), nil).Pods["uid-two"].Held[card]; held != want {
			t.Errorf("pod two holds %d of card %d, want %d", held, card, want)
		}
	}
	for _, pod := range []*corev1.Pod{one, two, four} {
		await.True(t, "pod "+pod.Name+" to be assigned", func() bool { return b.pod(pod.Name).Annotations[protocol.AnnotationAssigned] == "true" })
		after := b.pod(pod.Name).Annotations
		for key, value := range pod.Annotations {
			if key != protocol.AnnotationAssigned && after[key] != value {
				t.Errorf("pod %s: annotation %s was %q, is %q", pod.Name, key, value, after[key])
			}
		}
	}
}

// TestSeveralCardsAgain: what a container has of several cards counts after a restart of the plugin, and its annotations are
// repaired by it.
func TestSeveralCardsAgain(t *testing.T) {
	cores := protocol.ContainerEnv{Cards: newCards(16, 16, 16)[1:], ContainerCores: 80}
	b := newFixture(t, newPod("wrong", main(20), fake.Cores(80), labelled("2"), assumedOn(1, 0, 1), assigned))
	writeCheckpoint(t, b.dir, newEntryOf(t, "uid-wrong", "main", cores, idsOf(newCards(10, 10)...)...))
	k := startKubelet(t, b.dir)
	p, _ := b.start(newCards(16, 16, 16))
	k.awaitDevices(48, 48)
	b.awaitEvent("the annotations named card 0,1, the containers got card 1,2")
	after := b.pod("wrong").Annotations
	if after["ALIYUN_COM_GPU_MEM_IDX"] != "1,2" || after[protocol.AnnotationAllocation] != `{"0":{"1":10,"2":10}}` {
		t.Errorf("the annotations are %v", after)
	}
	// A pod that the plugin places itself finds room beside it.
	next := newPod("next", main(12), labelled("2"))
	invalid := newPod("invalid", main(3), labelled("2"))
	b.create(p, next, invalid)
	if env := k.mustAdmit(next)["main"]; cardOf(env) != "1,2" {
		t.Errorf("next got %v", env)
	}
	b.awaitCards("next", "1,2")
	if _, err := k.admit(invalid); err == nil {
		t.Error("a request that can't be divided is admitted")
	}
	b.awaitEvent("GPUCardRefused container main: pod default/invalid: container main: aliyun.com/gpu-mem 3 can't be divided evenly over 2 cards")
}

func (b *fixture) awaitCards(pod, cards string) {
	b.t.Helper()
	await.True(b.t, "pod "+pod+" to have cards "+cards, func() bool {
		annotations := b.pod(pod).Annotations
		return annotations["ALIYUN_COM_GPU_MEM_IDX"] == cards && annotations[protocol.AnnotationAssigned] == "true"
	})
}

// TestLimitsOfSeveralCards: each card is limited to the container's share of it.
func TestLimitsOfSeveralCards(t *testing.T) {
	o := newIsolation(t, isolation.Driver)
	p := &Plugin{cards: newCardState(), options: Options{Isolation: isolation.Options{CgroupRoot: o.cgroups, SpecDirs: []string{o.specs}}}}
	p.addIsolator()
	p.cards.Set(gpu.GiB, reservedCards(), nil, nil, "")
	p.isolator.Configure(isolation.Driver)
	p.isolator.SetNode(&corev1.Node{})
	p.isolator.Ask(limiter{})
	decision := allocation.Decision{Cards: reservedCards(), Container: allocation.Container{Request: 8}}
	d, got := p.isolator.Isolate(decision, gpu.GiB)
	want := containerLimit{
		Edits: isolation.Edits{Devices: []string{"nvidia.com/gpu=GPU-0", "gpushare.aliyun.com/memory-limit=4096Mi", "nvidia.com/gpu=GPU-1"}},
		mode:  isolation.Driver, limit: 4 << 30,
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(containerLimit{})); diff != "" || d.Rejection != nil {
		t.Errorf("%v (-want +got)\n%s", d.Rejection, diff)
	}
}

// TestMPSCores: with MPS a share of computing becomes a limit, and a pod with several cards is rejected.
func TestMPSCores(t *testing.T) {
	b, k, p, _ := startMPS(t, volta, reservedCards())
	pod, several := newPod("a", main(2), fake.Cores(30), assumed(0, 1)), newPod("several", main(4), labelled("2"), assumedOn(2, 0, 1))
	b.create(p, pod, several)
	if env := k.mustAdmit(pod)["main"]; env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] != "30" || env["ALIYUN_COM_GPU_CORE_CONTAINER"] != "30" {
		t.Errorf("got %v", env)
	}
	want := "isolation mode mps: a container can have one card, not 2"
	if _, err := k.admit(several); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %q", err, want)
	}
}
