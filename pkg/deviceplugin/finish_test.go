package deviceplugin

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/watch"
	clienttesting "k8s.io/client-go/testing"
)

// slowly is more than anything takes between the calls of an admission on a machine with other work.
const slowly = 3 * time.Second

// endable starts a kubelet and a plugin with a card of 16. end tells the plugin to end, which it has once ended is closed,
// and returns when an idle one would have begun to stop its server.
func (b *bench) endable() (k *kubelet, p *Plugin, end func() (ended <-chan struct{})) {
	b.t.Helper()
	b.admitting = slowly
	k = startKubelet(b.t, b.dir)
	p, stop := b.start(newCards(16))
	k.awaitDevices(16, 16)
	return k, p, func() <-chan struct{} {
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			stop()
		}()
		time.Sleep(3 * arriving)
		return ended
	}
}

// A pod that the kubelet is admitting while the plugin is told to end gets its card, in both calls: otherwise the kubelet
// fails it for good.
func TestEndWithinAnAdmission(t *testing.T) {
	b := newBench(t)
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
	await(t, "a list that hangs", func() bool { return b.hanging.held.Load() > 0 })
	ended := end()
	b.hanging.Resume()
	if err := <-admitted; err != nil {
		t.Error(err)
	}
	<-ended
}

// So does one for which the kubelet takes its time between the two calls.
func TestEndBetweenTheCallsOfAnAdmission(t *testing.T) {
	b := newBench(t)
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

// While the kubelet goes on calling a plugin that is to end, pods come and go as ever: one that has gone makes room for the
// next, and what was given is told.
func TestPodsComeAndGoWhileThePluginEnds(t *testing.T) {
	b := newBench(t)
	k, p, end := b.endable()
	first := newPod("first", main(4), assumed(0, 1))
	b.create(p, first)
	k.mustAdmit(first) // The plugin stays until no call has come for so long after one.

	ended := end()
	for _, name := range []string{"second", "third"} {
		pod := newPod(name, main(12), assumed(0, 2))
		b.create(p, pod)
		k.mustAdmit(pod)
		b.awaitAssigned(name, 0)
		b.delete(p, pod)
		k.forget(pod)
	}
	<-ended
}
