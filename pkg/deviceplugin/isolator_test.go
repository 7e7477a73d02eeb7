package deviceplugin

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/nodeconfig"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// isolationOptions are the options of a plugin for limits.
type isolationOptions struct {
	mode           isolation.Mode
	cgroups, specs string
	mps            isolation.MPSDirectory
}

// containerID is the ID of the only running container.
var containerID = strings.Repeat("c0", 32)

// newIsolation makes a node's files: cgroup v2 with one container, and a CDI specification with NVIDIA's hook for both cards.
func newIsolation(t testing.TB, mode isolation.Mode) *isolationOptions {
	t.Helper()
	o := &isolationOptions{mode, t.TempDir(), t.TempDir(), isolation.MPSDirectory(t.TempDir())}
	device := func(uuid string) string {
		return `{"name": "` + uuid + `", "containerEdits": {"hooks": [{"hookName": "createRuntime", "path": "/h", "args": ["h", "apply-cuda-memory-limits", "--gpu-id", "` + uuid + `"]}]}}`
	}
	err := errors.Join(
		os.WriteFile(filepath.Join(o.cgroups, "cgroup.controllers"), nil, 0o600),
		os.MkdirAll(filepath.Join(o.cgroups, "kubepods/pod/cri-containerd-"+containerID+".scope"), 0o755),
		os.WriteFile(filepath.Join(o.specs, "nvidia.json"), []byte(`{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [`+device("GPU-0")+`,`+device("GPU-1")+`]}`), 0o600),
	)
	check.Must(t, err)
	return o
}

// limiter is a driver with two cards that can limit the memory of cgroups, unless problem is set.
type limiter struct {
	hard    uint64
	problem error
	compute inventory.Compute
}

func (limiter) Cards() []string                               { return []string{"GPU-0", "GPU-1"} }
func (limiter) Memory(string) (used, free uint64, err error)  { return 0, 0, nil }
func (limiter) Processes(string) ([]inventory.Process, error) { return nil, nil }
func (limiter) Limits() bool                                  { return true }
func (l limiter) Limit(string, string) (inventory.MemoryLimit, error) {
	return inventory.MemoryLimit{Hard: l.hard}, l.problem
}
func (l limiter) Compute(string) (inventory.Compute, error) { return l.compute, l.problem }

// reservedCards returns two cards of 16 units, of which the driver keeps one.
func reservedCards() []gpu.Card {
	cards := newCards(16, 16)
	for i := range cards {
		cards[i].UUID = "GPU-" + string(rune('0'+i))
		cards[i].Reserved = 1
	}
	return cards
}

func (b *fixture) isolate(t *testing.T, value *string) {
	t.Helper()
	node := b.node()
	if node.Labels = nil; value != nil {
		node.Labels = map[string]string{protocol.LabelIsolation: *value}
	}
	if _, err := b.client.CoreV1().Nodes().Update(t.Context(), node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// responseOf returns the response that the kubelet's checkpoint has for a pod's only container.
func (k *kubelet) responseOf(t *testing.T, pod *corev1.Pod) *pluginapi.ContainerAllocateResponse {
	t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	var response pluginapi.ContainerAllocateResponse
	for _, e := range k.entries {
		if e.PodUID != string(pod.UID) {
			continue
		}
		check.Must(t, proto.Unmarshal(e.AllocResp, &response))
	}
	return &response
}

// devicesOf returns the CDI devices of a pod's only container.
func (k *kubelet) devicesOf(t *testing.T, pod *corev1.Pod) (devices []string) {
	t.Helper()
	for _, device := range k.responseOf(t, pod).CdiDevices {
		devices = append(devices, device.Name)
	}
	return devices
}

// startIsolated starts a plugin in this mode, and waits until the kubelet has all of the cards. In mode mps the daemons are ready.
func startIsolated(t *testing.T, mode isolation.Mode, driver limiter, cards []gpu.Card) (*fixture, *kubelet, *Plugin, func()) {
	t.Helper()
	b := newFixture(t)
	b.isolation = newIsolation(t, mode)
	if mode == isolation.MPS {
		b.isolation.writeStatus(t, ready)
	}
	k := startKubelet(t, b.dir)
	p, stop := b.start(nil)
	p.Measure(driver)
	p.SetCards(gpu.GiB, cards, nil, nil, "")
	healthy := 0
	for _, card := range cards {
		if healthy += int(card.Memory); mode.Rules().Limits {
			healthy -= int(card.Reserved)
		}
	}
	k.awaitDevices(healthy, healthy)
	return b, k, p, stop
}

// TestIsolation follows a limit from Allocate to its read-back, through a change of the mode and a restart.
func TestIsolation(t *testing.T) {
	b, k, p, stop := startIsolated(t, isolation.Driver, limiter{hard: inventory.NoLimit}, reservedCards())
	node, err := protocol.ParseInventory(b.node().Annotations)
	if err != nil || node.Isolation != "driver" || node.Cards[0].Memory != 15 {
		t.Errorf("the inventory has the mode %q and %+v, %v", node.Isolation, node.Cards, err)
	}

	limited := newPod("limited", main(2), assumed(1, 1))
	b.create(p, limited)
	k.mustAdmit(limited)
	want := []string{"nvidia.com/gpu=GPU-1", "gpushare.aliyun.com/memory-limit=2048Mi"}
	check.Equal(t, "devices", want, k.devicesOf(t, limited))
	b.awaitAssigned("limited", 1)
	running := b.pod("limited")
	ran(true)(running)
	running.Status.ContainerStatuses[0].ContainerID = "containerd://" + containerID
	if _, err := b.client.CoreV1().Pods("default").UpdateStatus(t.Context(), running, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	await.True(t, "the informer to know the container", func() bool { info, _ := p.pods.info("uid-limited"); return len(info.instances) > 0 })
	annotated := func(value string) {
		t.Helper()
		await.True(t, "the annotation "+value, func() bool { return b.pod("limited").Annotations[protocol.AnnotationIsolation] == value })
	}
	p.Measure(limiter{hard: 2 << 30})
	annotated("driver")
	p.Measure(limiter{hard: inventory.NoLimit})
	annotated("driver: container main: its cgroup has no limit")
	b.awaitEvent("GPULimitNotInForce container main: its cgroup has no limit")
	if got := testutil.ToFloat64(p.metrics.limits.WithLabelValues("not_in_force")); got != 1 {
		t.Errorf("%v limits are not in force", got)
	}
	p.Measure(limiter{hard: 2 << 30})
	annotated("driver")

	// The label takes precedence. A change of the mode counts for new containers.
	b.isolate(t, new("none"))
	k.awaitDevices(32, 32)
	unlimited := newPod("unlimited", main(16), assumed(0, 2))
	b.create(p, unlimited)
	k.mustAdmit(unlimited)
	if devices := k.devicesOf(t, unlimited); len(devices) > 0 {
		t.Errorf("in mode none a container gets %v", devices)
	}

	// The first container can still be started again. The plugin tries until it can write the specification.
	stop()
	specification := filepath.Join(b.isolation.specs, "gpushare.aliyun.com-memory-limit.json")
	inTheWay := filepath.Join(specification, "file")
	check.Must(t, errors.Join(os.Remove(specification), os.Mkdir(specification, 0o755), os.WriteFile(inTheWay, nil, 0o600)))
	next, _ := b.start(reservedCards())
	await.True(t, "the start", func() bool { return next.node.Written() })
	check.Must(t, os.RemoveAll(specification))
	await.True(t, "the specification of its limit", func() bool {
		text, _ := os.ReadFile(specification)
		return strings.Contains(string(text), "NVIDIA_GPU_MEMORY_LIMIT=2048")
	})
	if got := next.allocator.snapshots.record.Pod("uid-limited")["main"].Limit; got != 2<<30 {
		t.Errorf("after a restart the container has the limit %d", got)
	}
}

// TestIsolationNotReady: no new container starts on a card on which its limit would not hold.
func TestIsolationNotReady(t *testing.T) {
	for name, test := range map[string]struct {
		label  *string
		driver *limiter
		broken func(*isolationOptions)
		want   string
	}{
		"ready":                      {nil, &limiter{}, nil, ""},
		"the driver wasn't asked":    {nil, nil, nil, "isolation mode driver: " + errNotAsked.Error()},
		"the driver is too old":      {nil, &limiter{problem: inventory.ErrUnsupported}, nil, "isolation mode driver: the driver can't limit its memory: R615 or later is needed"},
		"the driver fails":           {nil, &limiter{problem: errors.New("unknown error")}, nil, "isolation mode driver: unknown error"},
		"the toolkit has no hook":    {nil, &limiter{}, func(o *isolationOptions) { _ = os.Remove(filepath.Join(o.specs, "nvidia.json")) }, "isolation mode driver: no CDI specification"},
		"a label that names no mode": {new("strict"), &limiter{}, nil, `label gpushare.aliyun.com/isolation of the node: isolation mode "strict": want none, driver or mps`},
		"the label switches it off":  {new("none"), nil, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t)
			b.isolation = newIsolation(t, isolation.Driver)
			if test.broken != nil {
				test.broken(b.isolation)
			}
			if test.label != nil {
				b.isolate(t, test.label)
			}
			k := startKubelet(t, b.dir)
			p, _ := b.start(nil)
			if test.driver != nil {
				p.Measure(*test.driver)
			}
			cards := reservedCards()
			cards[1].Unhealthy = "Xid 79"
			p.SetCards(gpu.GiB, cards, nil, nil, "")
			await.True(t, "the inventory", func() bool { return b.node().Annotations[protocol.AnnotationInventory] != "" })
			all := 30
			if test.label != nil {
				all = 32
			}
			healthy := all / 2
			if test.want != "" {
				healthy = 0
			}
			k.awaitDevices(healthy, all)
			got := p.cards.Get().Cards
			if !strings.HasPrefix(got[0].Unhealthy, test.want) || (got[0].Unhealthy == "") != (test.want == "") || got[1].Unhealthy != "Xid 79" {
				t.Errorf("the cards are unhealthy: %q, %q; want %q", got[0].Unhealthy, got[1].Unhealthy, test.want)
			}
		})
	}
}

// TestIsolationChanges: what has changed since the cards were checked counts for the next container.
func TestIsolationChanges(t *testing.T) {
	labelled := func(mode string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{protocol.LabelIsolation: mode}}}
	}
	for name, test := range map[string]struct {
		excluded nodeconfig.Cards
		change   func(*isolator, *isolationOptions)
		// rejected is the begin of the rejection, unhealthy that of the card's reason; empty if there is none.
		rejected, unhealthy string
		// unlimited is true if the container gets no limit.
		unlimited bool
	}{
		"nothing":                       {},
		"the label switches limits off": {change: func(i *isolator, _ *isolationOptions) { i.SetNode(labelled("none")) }, unlimited: true},
		"the toolkit's specification is gone": {change: func(_ *isolator, o *isolationOptions) { _ = os.Remove(filepath.Join(o.specs, "nvidia.json")) },
			rejected: "isolation mode driver: no CDI specification"},
		"the label names no mode": {change: func(i *isolator, _ *isolationOptions) { i.SetNode(labelled("strict")) },
			rejected: "label " + protocol.LabelIsolation, unhealthy: "label " + protocol.LabelIsolation},
		"a card that isn't ready is no longer excluded": {excluded: nodeconfig.Cards{{Index: 0}}, change: func(i *isolator, _ *isolationOptions) {
			i.Ask(limiter{problem: errors.New("no answer")})
			i.cards.Exclude(nil)
		}, rejected: "isolation mode driver: no answer", unhealthy: "isolation mode driver: no answer"},
	} {
		t.Run(name, func(t *testing.T) {
			o := newIsolation(t, isolation.Driver)
			p := &Plugin{cards: newCardState(), options: Options{Isolation: isolation.Options{CgroupRoot: o.cgroups, SpecDirs: []string{o.specs}}}}
			p.addIsolator()
			p.cards.Set(gpu.GiB, reservedCards(), nil, nil, "")
			p.cards.Exclude(test.excluded)
			p.cards.SetHeld(map[int]gpu.Memory{})
			p.isolator.SetNode(labelled("driver"))
			p.isolator.Ask(limiter{})
			if test.change != nil {
				test.change(p.isolator, o)
			}
			if got := p.cards.Get().Cards[0].Unhealthy; !strings.HasPrefix(got, test.unhealthy) || (got == "") != (test.unhealthy == "") {
				t.Errorf("the card is unhealthy: %q", got)
			}
			// The decision's card has the memory that it has without limits: the decision is older than the mode.
			var decision allocation.Decision
			var limitation containerLimit
			await.True(t, "the decision", func() bool { // A change of the specifications is noticed a moment later.
				decision, limitation = p.isolator.Isolate(allocation.Decision{Cards: reservedCards()[:1], Container: allocation.Container{Request: 2}}, gpu.GiB)
				return (decision.Rejection != nil) == (test.rejected != "")
			})
			if limited := limitation.limit == 2<<30 && len(limitation.Devices) == 2; limited == (test.unlimited || test.rejected != "") {
				t.Errorf("the container gets %+v", limitation)
			}
			got := ""
			if decision.Rejection != nil {
				got = decision.Rejection.Text
			}
			if !strings.HasPrefix(got, test.rejected) || (got == "") != (test.rejected == "") {
				t.Errorf("the rejection is %q", got)
			}
		})
	}
}

// withLimit returns a plugin that doesn't run, and that knows the pod "a" with a limit for its container "main".
func withLimit(t *testing.T, edit podOption) *Plugin {
	t.Helper()
	b := newFixture(t)
	p, err := New(Options{Client: fakeClient(b.client), Events: b.events, NodeName: testNode, Directory: b.dir})
	check.Must(t, err)
	info, err := transformPod(newPod("a", main(2), ran(true), edit))
	check.Must(t, err)
	check.Must(t, p.pods.informer.GetStore().Add(info))
	p.limits.record.Add(allocation.ContainerKey{UID: "uid-a", Name: "main"}, allocation.Allocation{Mode: "driver", Limit: 2 << 30})
	return p
}

// TestLimitNotRead: a limit that can't be read is reported the second time, but not of a pod that is being deleted: a container of it
// can have ended long before the API server shows that.
func TestLimitNotRead(t *testing.T) {
	for name, test := range map[string]struct {
		edit podOption
		want protocol.PodIsolation
	}{
		"running":       {func(*corev1.Pod) {}, protocol.PodIsolation{Mode: "driver", Problem: "container main: no cgroup"}},
		"being deleted": {func(pod *corev1.Pod) { pod.DeletionTimestamp = new(metav1.Now()) }, protocol.PodIsolation{Mode: "driver"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := withLimit(t, test.edit)
			for i, problem := range []string{"", "no cgroup", "no cgroup", "no cgroup"} {
				p.limits.Update(protocol.Usage{Containers: []protocol.ContainerUsage{{UID: "uid-a", Container: "main", Given: new(uint64), NotInForce: problem, NotRead: problem != ""}}})
				want := test.want
				if i < 2 {
					want.Problem = ""
				}
				if got, _ := p.limits.Isolation("uid-a"); got != want {
					t.Errorf("measurement %d: got %+v, want %+v", i, got, want)
				}
			}
		})
	}
}

// TestIsolationFails: a limit that can't be set up is a rejection, not a container without it.
func TestIsolationFails(t *testing.T) {
	b, k, p, _ := startIsolated(t, isolation.Driver, limiter{}, reservedCards())
	// A directory in place of the file is an error that the check of the cards doesn't find.
	check.Must(t, os.Mkdir(filepath.Join(b.isolation.specs, "gpushare.aliyun.com-memory-limit.json"), 0o755))
	pod := newPod("a", main(2), assumed(0, 1))
	b.create(p, pod)
	if _, err := k.admit(pod); err == nil || !strings.Contains(err.Error(), "isolation mode driver: reading the CDI specification of limits") {
		t.Errorf("got %v", err)
	}
	b.awaitEvent("GPUCardRefused container main: isolation mode driver")
}

// One container of a pod was given a limit, and another one none: the mode was switched on between their Allocate calls, or the kubelet lost its
// checkpoint and has started only one of them again.
func TestPodLimitedInPart(t *testing.T) {
	p := withLimit(t, container("other", 2))
	p.limits.Update(protocol.Usage{Containers: []protocol.ContainerUsage{
		{UID: "uid-a", Container: "main", Requested: 2 << 30, Given: new(uint64), Limit: new(uint64)},
		{UID: "uid-a", Container: "other", Requested: 2 << 30}, // It was given none.
	}})
	got, _ := p.limits.Isolation("uid-a")
	if want := "driver: container other: it was started without a limit"; got.String() != want {
		t.Errorf("the annotation is %q, want %q", got, want)
	}
}

// With cdi-cri every container names its card as a CDI device. If no specification has the name (older toolkits name cards by index only), no
// container can start, so the card is not offered.
func TestCDIWithoutTheName(t *testing.T) {
	specs := t.TempDir()
	check.Must(t, os.WriteFile(filepath.Join(specs, "nvidia.json"), []byte(`{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "0", "containerEdits": {"env": ["A=b"]}}]}`), 0o600))
	p := &Plugin{cards: newCardState(), options: Options{DeviceList: ListByCDI, Isolation: isolation.Options{SpecDirs: []string{specs}}}}
	p.addIsolator()
	p.cards.Set(gpu.GiB, newCards(16), nil, nil, "")
	p.isolator.SetNode(&corev1.Node{})
	p.isolator.Ask(limiter{})
	if card := p.cards.Get().Cards[0]; card.Healthy() {
		t.Errorf("card %s is offered, although no specification has it", card.UUID)
	}
}

// A container can only be started again while the CDI specification of its limit exists. /var/run/cdi is shared with others.
func TestSpecificationRemoved(t *testing.T) {
	b, k, p, _ := startIsolated(t, isolation.Driver, limiter{hard: inventory.NoLimit}, reservedCards())
	pod := newPod("limited", main(2), assumed(1, 1))
	b.create(p, pod)
	k.mustAdmit(pod)
	specification := filepath.Join(b.isolation.specs, "gpushare.aliyun.com-memory-limit.json")
	check.Must(t, os.Remove(specification))
	await.True(t, "the specification", func() bool { _, err := os.Stat(specification); return err == nil })
}

// TestLimitsNotKept: a directory that can't be written for long is logged once.
func TestLimitsNotKept(t *testing.T) {
	dir, record := filepath.Join(t.TempDir(), "cdi"), allocation.NewRecord(nil)
	record.Add(allocation.ContainerKey{UID: "uid-a", Name: "main"}, allocation.Allocation{Limit: 2 << 30})
	w := &limitWatch{record: record, backends: isolation.NewBackends(isolation.Options{SpecDirs: []string{dir}})}
	var log bytes.Buffer
	ctx, failing := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log)))), false
	for _, step := range []struct {
		what  string
		do    func(string) error
		fails bool
		lines int
	}{
		{"the directory is missing", os.RemoveAll, true, 1},
		{"it is there", func(dir string) error { return os.Mkdir(dir, 0o755) }, false, 1},
		{"it is missing again", os.RemoveAll, true, 2},
	} {
		check.Must(t, step.do(dir))
		for range 3 {
			failing = w.Keep(ctx, failing)
		}
		if got := strings.Count(log.String(), "Could not keep"); failing != step.fails || got != step.lines {
			t.Errorf("%s: fails %t, %d lines, want %t, %d", step.what, failing, got, step.fails, step.lines)
		}
	}
}
