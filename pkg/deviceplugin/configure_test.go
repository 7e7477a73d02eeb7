package deviceplugin

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/nodeconfig"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

func TestReportedCards(t *testing.T) {
	sick := newCards(16, 16)
	sick[1].Unhealthy = "Xid 79"
	for name, test := range map[string]struct {
		all      []gpu.Card
		excluded nodeconfig.Cards
		held     map[int]gpu.Memory
		// want maps the index of each reported card to the reason why it takes no new pods.
		want map[int]string
	}{
		"nothing excluded":         {newCards(16, 16), nil, nil, map[int]string{0: "", 1: ""}},
		"pods are not known yet":   {newCards(16, 16), nodeconfig.Cards{{Index: 1}}, nil, map[int]string{0: "", 1: reasonExcluded}},
		"no pod uses the card":     {newCards(16, 16), nodeconfig.Cards{{Index: 1}}, map[int]gpu.Memory{0: 4}, map[int]string{0: ""}},
		"a pod uses the card":      {newCards(16, 16), nodeconfig.Cards{{Index: 1}}, map[int]gpu.Memory{1: 4}, map[int]string{0: "", 1: reasonExcluded}},
		"a sick card, with a pod":  {sick, nodeconfig.Cards{{Index: 1}}, map[int]gpu.Memory{1: 4}, map[int]string{0: "", 1: "Xid 79"}},
		"all cards, no pods":       {newCards(16, 16), nodeconfig.Cards{{Index: 1}, {Index: 0}}, map[int]gpu.Memory{}, map[int]string{0: reasonAllExcluded, 1: reasonAllExcluded}},
		"all cards, a pod":         {newCards(16, 16), nodeconfig.Cards{{Index: 1}, {Index: 0}}, map[int]gpu.Memory{0: 1}, map[int]string{0: reasonExcluded}},
		"the node has no such one": {newCards(16), nodeconfig.Cards{{UUID: "GPU-z"}}, map[int]gpu.Memory{}, map[int]string{0: ""}},
		"no cards":                 {nil, nodeconfig.Cards{{Index: 0}}, map[int]gpu.Memory{}, map[int]string{}},
	} {
		got := map[int]string{}
		for _, c := range withoutExcluded(test.all, test.excluded, test.held) {
			got[c.Index] = c.Unhealthy
		}
		check.Equal(t, name, test.want, got)
	}
}

// TestExcludeAnother: a card that is excluded later stays reported until it is known which pods use it.
func TestExcludeAnother(t *testing.T) {
	s := newCardState()
	s.Set(gpu.GiB, newCards(16, 16, 16), nil, nil, "")
	steps := []struct {
		what string
		do   func()
		want []int
	}{
		{"one card", func() { s.Exclude(nodeconfig.Cards{{Index: 0}}) }, []int{0, 1, 2}},
		{"no pod uses it", func() { s.SetHeld(map[int]gpu.Memory{1: 4}) }, []int{1, 2}},
		{"two others", func() { s.Exclude(nodeconfig.Cards{{Index: 1}, {Index: 2}}) }, []int{0, 1, 2}},
		{"a pod uses one", func() { s.SetHeld(map[int]gpu.Memory{1: 4}) }, []int{0, 1}},
		{"the driver is away", func() { s.Set(gpu.GiB, nil, nil, nil, "no driver") }, []int{0, 1}},
		{"none", func() { s.Exclude(nil) }, []int{0, 1, 2}},
	}
	for _, step := range steps {
		step.do()
		now := s.Get()
		got := []int{}
		for _, c := range now.Cards {
			got = append(got, c.Index)
		}
		if diff := cmp.Diff(step.want, got); diff != "" || now.Problem != nil {
			t.Errorf("%s: %v (-want +got)\n%s", step.what, now.Problem, diff)
		}
	}
}

// mountConfigs makes the directory contain these configurations, as the kubelet mounts a ConfigMap: it writes a new directory and
// swaps one link (k8s.io/kubernetes pkg/volume/util/atomic_writer.go).
func mountConfigs(t *testing.T, dir string, configs map[string]string) {
	t.Helper()
	version, err := os.MkdirTemp(dir, "..version")
	check.Must(t, err)
	for name, text := range configs {
		text = "apiVersion: " + nodeconfig.APIVersion + "\nkind: " + nodeconfig.Kind + "\n" + text
		check.Must(t, os.WriteFile(filepath.Join(version, name), []byte(text), 0o644))
	}
	link := filepath.Join(dir, "..data_tmp")
	check.Must(t, os.Symlink(filepath.Base(version), link))
	check.Must(t, os.Rename(link, filepath.Join(dir, "..data")))
	for name := range configs {
		if err := os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)); err != nil && !os.IsExist(err) {
			t.Fatal(err)
		}
	}
}

// label sets the node's label that selects its configuration.
func (b *fixture) label(config string) {
	b.t.Helper()
	node := b.node()
	metav1.SetMetaDataLabel(&node.ObjectMeta, protocol.LabelConfig, config)
	if _, err := b.client.CoreV1().Nodes().Update(context.Background(), node, metav1.UpdateOptions{}); err != nil {
		b.t.Fatal(err)
	}
}

// monitorCards sets the cards of a plugin as package inventory does, counted in the unit in force. sizes are in GiB.
func (b *fixture) monitorCards(p *Plugin, sizes ...gpu.Memory) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	b.t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		p.KnownCards(ctx)
		for used := (*nodeconfig.Settings)(nil); ctx.Err() == nil; {
			if latest := p.Settings(); latest != used {
				used = latest
				cards := newCards(sizes...)
				for i := range cards {
					cards[i].Memory = used.Unit.Count(gpu.GiB.Bytes(cards[i].Memory))
				}
				p.SetCards(used.Unit, cards, nil, nil, "")
			}
			select {
			case <-ctx.Done():
			case <-time.After(time.Millisecond): // It looks for new settings at an interval.
			}
		}
	}()
}

// inventory returns the reported cards by index, with the reason why they take no new pods.
func (b *fixture) inventory() (unit gpu.Unit, cards map[int]string) {
	b.t.Helper()
	inventory, err := protocol.ParseInventory(b.node().Annotations)
	check.Must(b.t, err)
	cards = map[int]string{}
	for _, c := range inventory.Cards {
		cards[c.Index] = c.Unhealthy
	}
	return inventory.Unit, cards
}

// TestExcludedInVain: an Event says which excluded cards the node doesn't have, at the plugin's start and after a change of the configuration.
func TestExcludedInVain(t *testing.T) {
	b := newFixture(t)
	dir := t.TempDir()
	mountConfigs(t, dir, map[string]string{"default": "excludedCards: [{index: 7}]", "display": "excludedCards: [{index: 1}, {model: NVIDIA T100O}, {uuid: GPU-x}]"})
	b.config = nodeconfig.Source{Path: dir, Default: "default"}
	k := startKubelet(t, b.dir)
	p, _ := b.start(nil)
	b.monitorCards(p, 16, 16)
	k.awaitDevices(32, 32)
	b.awaitEvent("GPUConfigChanged these entries of excludedCards match no card: index 7")
	b.label("display")
	b.awaitEvent("GPUConfigChanged configuration display is in force; changed: excludedCards")
	b.awaitEvent("GPUConfigChanged these entries of excludedCards match no card: NVIDIA T100O, GPU-x")
}

// TestNodeConfiguration changes a node's label and the files, while pods run there.
func TestNodeConfiguration(t *testing.T) {
	b := newFixture(t)
	dir := t.TempDir()
	configs := map[string]string{"default": "", "display": "excludedCards: [{index: 1}]", "small": "memoryUnit: 512MiB"}
	mountConfigs(t, dir, configs)
	b.config = nodeconfig.Source{Path: dir, Default: "default"}
	b.servePodResources()
	k := startKubelet(t, b.dir)
	k.podResources(b.socket)

	// At the start a label without a configuration: nothing is offered, and the reason is visible.
	b.label("shown")
	p, _ := b.start(nil)
	b.monitorCards(p, 16, 16)
	b.awaitEvent("GPUConfigRejected the configuration can't be used, the node offers no GPU memory until it is corrected: label gpushare.aliyun.com/config=shown")
	await.True(t, "the reason in readyz", func() bool { return p.configurator.Missing() != "" })
	b.label("")
	k.awaitDevices(32, 32)
	b.inForce(p, "default", false)

	// A card is excluded while a pod runs there. It takes no new pods, stays until the pod ends, and comes back.
	onIt := newPod("on-it", main(4), assumed(1, 1))
	b.create(p, onIt)
	k.mustAdmit(onIt)
	b.label("display")
	k.awaitDevices(16, 32)
	b.awaitEvent("GPUConfigChanged configuration display is in force; changed: excludedCards")
	b.inForce(p, "display", false)
	await.True(t, "the inventory with the excluded card", func() bool {
		_, cards := b.inventory()
		return cmp.Equal(cards, map[int]string{0: "", 1: reasonExcluded})
	})
	late := newPod("late", main(4), assumed(1, 2))
	b.create(p, late)
	if _, err := k.admit(late); err == nil {
		t.Error("an excluded card was given to a new pod")
	}
	b.delete(p, late)
	b.label("none")
	b.awaitEvent("GPUConfigRejected the configuration can't be used, the earlier one stays in force: label gpushare.aliyun.com/config=none")
	b.inForce(p, "display", true)
	b.delete(p, onIt)
	k.awaitDevices(16, 16)
	await.True(t, "the inventory without the excluded card", func() bool {
		_, cards := b.inventory()
		return cmp.Equal(cards, map[int]string{0: ""})
	})

	// A file that is broken changes nothing; when it is corrected, its new content applies.
	b.label("display")
	b.inForce(p, "display", false)
	configs["display"] = "excludedCard: []"
	mountConfigs(t, dir, configs)
	b.inForce(p, "display", true)
	if problem := *p.configurator.problem.Load(); !strings.Contains(problem, dir+"/display: excludedCard: unknown key") {
		t.Errorf("the problem is %s", problem)
	}
	configs["display"] = "excludedCards: [{uuid: GPU-0}]"
	mountConfigs(t, dir, configs)
	await.True(t, "another excluded card", func() bool {
		_, cards := b.inventory()
		return cmp.Equal(cards, map[int]string{1: ""})
	})
	b.inForce(p, "display", false)

	// The unit waits until no pod asks for memory.
	holds := newPod("holds", main(4), assumed(1, 3))
	b.create(p, holds)
	k.mustAdmit(holds)
	b.label("small")
	k.awaitDevices(32, 32)
	b.inForce(p, "small", true)
	if unit, _ := b.inventory(); unit != gpu.GiB {
		t.Errorf("the unit is %s while a pod runs", unit)
	}
	b.delete(p, holds)
	k.awaitDevices(64, 64)
	b.inForce(p, "small", false)
	await.True(t, "the inventory in the new unit", func() bool { unit, _ := b.inventory(); return unit == 512*gpu.MiB })
	fine := newPod("fine", main(4), assumed(1, 4))
	b.create(p, fine)
	if env := k.mustAdmit(fine)["main"]; env["ALIYUN_COM_GPU_MEM_DEV"] != "32" {
		t.Errorf("the card has %s units, want 32", env["ALIYUN_COM_GPU_MEM_DEV"])
	}

	if n := testutil.ToFloat64(p.metrics.registrations); n != 1 {
		t.Errorf("registered %v times, want once", n)
	}
}

// TestConfigLabelWithoutConfigurations: a label that selects a configuration is reported if the plugin has none.
func TestConfigLabelWithoutConfigurations(t *testing.T) {
	b := newFixture(t)
	k := startKubelet(t, b.dir)
	b.label("workstations")
	p, _ := b.start(nil)
	b.monitorCards(p, 16)
	k.awaitDevices(16, 16)
	b.awaitEvent("GPUConfigRejected label gpushare.aliyun.com/config=workstations has no effect: the device plugin has no directory of configurations")
	b.label("")
	b.inForce(p, "", false)
}

// inForce waits until a configuration is in force, completely or not.
func (b *fixture) inForce(p *Plugin, name string, outdated bool) {
	b.t.Helper()
	await.True(b.t, fmt.Sprintf("configuration %s in force, outdated %t", name, outdated), func() bool {
		metrics, err := p.metrics.registry.Gather()
		check.Must(b.t, err)
		got := ""
		for _, m := range metrics {
			if m.GetName() == "gpushare_device_plugin_config_info" && len(m.GetMetric()) == 1 {
				got = m.GetMetric()[0].GetLabel()[0].GetValue()
			}
		}
		return got == name && (testutil.ToFloat64(p.metrics.configOutdated) == 1) == outdated
	})
}

// TestNodeNotCreatedYet: a plugin that starts before its Node is created waits for it. That isn't a wrong configuration.
func TestNodeNotCreatedYet(t *testing.T) {
	b := newFixture(t)
	node := b.node()
	check.Must(t, b.client.CoreV1().Nodes().Delete(t.Context(), testNode, metav1.DeleteOptions{}))
	k := startKubelet(t, b.dir)
	p, _ := b.start(newCards(16))
	missing := func() string { return strings.Join(p.missing(), "; ") }
	want := "the API server has no node node-1; the kubelet isn't connected"
	await.True(t, "readiness: "+want, func() bool { return missing() == want })
	if _, err := b.client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	k.awaitDevices(16, 16)
	await.True(t, "ready", func() bool { return missing() == "" })
	for len(b.events.Events) > 0 {
		if event := <-b.events.Events; strings.Contains(event, "GPUConfig") {
			t.Error(event)
		}
	}
}

// TestUnitAfterRestart: a plugin that starts with another unit than the node's inventory keeps that one while pods use it.
func TestUnitAfterRestart(t *testing.T) {
	b := newFixture(t)
	k := startKubelet(t, b.dir)
	p, stop := b.start(newCards(16))
	k.awaitDevices(16, 16)
	pod := newPod("a", main(4), assumed(0, 1))
	b.create(p, pod)
	k.mustAdmit(pod)
	stop()
	unit := gpu.MiB
	b.config.Flags = func(s *nodeconfig.Settings) { s.Unit = unit }
	p, _ = b.start(nil)
	if cards, _ := p.KnownCards(t.Context()); p.Settings().Unit != gpu.GiB || cards[0].Memory != 16 {
		t.Errorf("unit %s, cards %v", p.Settings().Unit, cards)
	}
	b.awaitEvent("GPUConfigWaits the new memoryUnit MiB takes effect once no pod on the node asks for GPU memory, until then it is GiB")
	ended := b.pod("a")
	ended.Status.Phase = corev1.PodSucceeded
	if _, err := b.client.CoreV1().Pods("default").UpdateStatus(t.Context(), ended, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	await.True(t, "the new unit", func() bool { return p.Settings().Unit == gpu.MiB })
}

func TestUnitOf(t *testing.T) {
	annotation, err := protocol.Inventory{Unit: gpu.MiB, Cards: newCards(16384)}.Annotation()
	check.Must(t, err)
	for name, test := range map[string]struct {
		inventory string
		capacity  int64
		want      gpu.Unit
	}{
		"an inventory":                        {annotation, 16384, gpu.MiB},
		"the kubelet has no plugin":           {annotation, 0, gpu.MiB},
		"another plugin counts in GiB since":  {annotation, 16, 0},
		"the capacity lags behind":            {annotation, 24576, gpu.MiB},
		"no inventory":                        {"", 16, 0},
		"an inventory that can't be read":     {"{}", 16, 0},
		"neither an inventory nor a capacity": {"", 0, 0},
	} {
		node := &corev1.Node{Status: corev1.NodeStatus{Capacity: corev1.ResourceList{
			protocol.ResourceMemory: *newQuantity(test.capacity), protocol.ResourceCount: *newQuantity(1),
		}}}
		if test.inventory != "" {
			node.Annotations = map[string]string{protocol.AnnotationInventory: test.inventory}
		}
		if got := unitOf(node); got != test.want {
			t.Errorf("%s: %s, want %s", name, got, test.want)
		}
	}
}
