package deviceplugin

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/watch"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// slowly is longer than anything takes between the calls of an admission on a busy machine.
const slowly = 3 * time.Second

// endable starts a kubelet and a plugin with one card of 16 units. end makes the plugin stop. It returns when an idle plugin
// would have begun to stop its server. ended is closed when the plugin has stopped.
func (b *fixture) endable() (k *kubelet, p *Plugin, end func() (ended <-chan struct{})) {
	b.t.Helper()
	b.callGap = slowly
	k = startKubelet(b.t, b.dir)
	p, stop := b.start(newCards(16))
	k.awaitDevices(16, 16)
	return k, p, func() <-chan struct{} {
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			stop()
		}()
		time.Sleep(300 * time.Millisecond)
		return ended
	}
}

// TestEndDuringCall: a pod that the kubelet is admitting while the plugin is stopped gets its card, in both calls.
// Otherwise the kubelet fails the pod for good.
func TestEndDuringCall(t *testing.T) {
	b := newFixture(t)
	b.blind, b.hanging = true, &hanging{}
	unseen := watch.NewFake()
	b.client.PrependWatchReactor("pods", func(clienttesting.Action) (bool, watch.Interface, error) { return true, unseen, nil })
	k, p, end := b.endable()
	pod := newPod("a", main(4), assumed(0, 1))
	b.create(p, pod)

	b.hanging.Hang()
	admitted := make(chan error, 1)
	go func() {
		_, err := k.admit(pod)
		admitted <- err
	}()
	await.True(t, "a list that hangs", func() bool { return b.hanging.held.Load() > 0 })
	ended := end()
	b.hanging.Resume()
	check.NoError(t, <-admitted)
	<-ended
}

// TestEndBetweenCalls: so does a pod for which the plugin is stopped between the two calls.
func TestEndBetweenCalls(t *testing.T) {
	b := newFixture(t)
	k, p, end := b.endable()
	pod := newPod("a", main(4), assumed(0, 1))
	b.create(p, pod)

	var ended <-chan struct{}
	k.between = func() { ended = end() }
	if _, err := k.admit(pod); err != nil {
		t.Error(err)
	}
	<-ended
}

// TestEndSlowly: as long as the kubelet keeps calling a plugin that is stopping, it works as usual. A
// deleted pod makes room for the next one, and the annotations are written.
func TestEndSlowly(t *testing.T) {
	b := newFixture(t)
	k, p, end := b.endable()
	first := newPod("first", main(4), assumed(0, 1))
	b.create(p, first)
	k.mustAdmit(first) // The plugin stays until no call has come for that long after the last one.

	ended := end()
	for _, name := range []string{"second", "third"} {
		pod := newPod(name, main(12), assumed(0, 2))
		b.create(p, pod)
		k.mustAdmit(pod)
		b.awaitAssigned(name, 0)
		b.delete(p, pod)
		k.removePod(pod)
	}
	<-ended
}
