package deviceplugin

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

func TestPluginRestartBetweenContainers(t *testing.T) {
	b := newFixture(t)
	k := startKubelet(t, b.dir)
	p, stop := b.start(newCards(16, 16))
	k.awaitDevices(32, 32)
	pod := newPod("a", container("x", 2), container("y", 2), assumed(1, 5))
	other := newPod("b", main(2), assumed(0, 9))
	b.create(p, pod, other)
	k.mustAdmit(pod, "x")
	stop()
	b.start(newCards(16, 16))
	k.awaitRegistrations(2)
	k.awaitDevices(32, 32)
	if got := cardOf(k.mustAdmit(pod, "y")["y"]); got != "1" {
		t.Errorf("y got card %s", got)
	}
	b.awaitAssigned("a", 1)
}

func TestRepairAtStart(t *testing.T) {
	unassigned := newPod("unassigned", main(1), assumed(1, 1))
	wrong := newPod("wrong", main(1), assumed(0, 1), assigned)
	b := newFixture(t, unassigned, wrong)
	writeCheckpoint(t, b.dir, newEntry(t, "uid-unassigned", "main", 1, "10"), newEntry(t, "uid-wrong", "main", 1, "11"),
		newEntry(t, "uid-gone", "main", 1, "12"))
	p, _ := b.start(newCards(16, 16))
	b.awaitAssigned("unassigned", 1)
	b.awaitAssigned("wrong", 1)
	b.awaitEvent("the annotations named card 0, the containers got card 1")
	check.Equal(t, "the result", map[string][]int{"uid-unassigned/main": {1}, "uid-wrong/main": {1}}, cardsOf(p.allocator.snapshots.record))
}

func TestKubeletRestarts(t *testing.T) {
	b := newFixture(t)
	k, p := b.up(16)
	a := newPod("a", main(4), assumed(0, 1))
	b.create(p, a)
	k.mustAdmit(a)
	for range 3 {
		k.stop()
		k = startKubelet(t, b.dir, k.entries...)
		k.awaitDevices(16, 16)
	}
	next := newPod("next", main(4), assumed(0, 2))
	b.create(p, next)
	k.mustAdmit(next)
	b.awaitAssigned("next", 0)

	// A kubelet that starts without its checkpoint calls Allocate again for the containers that it has to start.
	k = k.loseCheckpoint(b)
	if got := cardOf(k.mustAdmit(a)["main"]); got != "0" {
		t.Errorf("got card %s", got)
	}
	if missing := p.missing(); len(missing) > 0 {
		t.Errorf("not ready: %v", missing)
	}
}

// A kubelet clears its directory before it listens. A plugin whose socket was removed must not register: the kubelet
// would dial it without success and meanwhile reject pods.
func TestKubeletRestartsDuringRegistration(t *testing.T) {
	b := newFixture(t)
	k := startKubelet(t, b.dir)
	p, _ := b.start(nil)
	before, next := p.registrar.beforeRegister, make(chan *kubelet, 1)
	p.registrar.beforeRegister = func(ctx context.Context) {
		if k != nil {
			k.stop()
			k = nil
			next <- startKubelet(t, b.dir)
		}
		before(ctx)
	}
	p.SetCards(gpu.GiB, newCards(16), nil, nil, "")
	k2 := <-next
	k2.awaitDevices(16, 16)
	k2.mu.Lock()
	defer k2.mu.Unlock()
	if k2.unreached > 0 || k2.registrations != 1 {
		t.Errorf("%d registrations without a reachable plugin, %d others, want 0 and 1", k2.unreached, k2.registrations)
	}
}

// The kubelet keeps its connection if another program removes the sockets. If the plugin ended that, to register again, the kubelet would fail the
// pods that it admits meanwhile.
func TestSocketsRemoved(t *testing.T) {
	b := newFixture(t)
	k, p := b.up(80)
	admitted := 0
	admitAfterRemoval := func(pattern string) {
		t.Helper()
		sockets, err := filepath.Glob(filepath.Join(b.dir, pattern))
		check.Must(t, err)
		for _, socket := range sockets {
			check.Must(t, os.Remove(socket))
		}
		for range 40 { // The checkpoint is written for each, so the plugin looks at the directory again and again.
			admitted++
			pod := newPod(fmt.Sprint("p", admitted), main(1), assumed(0, admitted))
			b.create(p, pod)
			k.mustAdmit(pod)
		}
	}
	admitAfterRemoval("gpushare*.sock")
	k.awaitRegistrations(1)
	// The kubelet connects again.
	k.mu.Lock()
	check.Must(t, k.connection.Close())
	k.mu.Unlock()
	k.awaitRegistrations(2)
	k.awaitDevices(80, 80)

	admitAfterRemoval("*.sock")
	k.awaitRegistrations(2)
	k.stop()
	startKubelet(t, b.dir, k.entries...).awaitDevices(80, 80)
}

// A kubelet can end the stream and go on: those before 1.37 do when another plugin of the resource ends, such as an older one whose pod was deleted by
// force. They have no devices then.
func TestStreamEnded(t *testing.T) {
	b := newFixture(t)
	k, _ := b.up(16)
	k.mu.Lock()
	check.Must(t, k.connection.Close())
	k.mu.Unlock()
	k.awaitRegistrations(2)
	k.awaitDevices(16, 16)
}

// A stream that the registrar hasn't seen while it was open has ended too: it registers again at once.
func TestStreamEndedUnseen(t *testing.T) {
	r := registrar{dir: t.TempDir(), service: &service{}, cards: newCardState()}
	r.cards.Set(gpu.GiB, newCards(16), nil, nil, "")
	r.service.streams.Add(1)
	if err := r.watch(t.Context(), &serving{}); err == nil || err.Error() != "the kubelet has ended its stream" {
		t.Errorf("got %v", err)
	}
}

func TestDirectoryCreatedAgain(t *testing.T) {
	b := newFixture(t)
	k, _ := b.up(16)
	k.stop()
	check.Must(t, os.RemoveAll(b.dir))
	check.Must(t, os.Mkdir(b.dir, 0o700))
	k = startKubelet(t, b.dir)
	k.awaitDevices(16, 16)
}
