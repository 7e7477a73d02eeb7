package deviceplugin

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/watch"
	clienttesting "k8s.io/client-go/testing"
)

// slowly is more than anything takes between the calls of an admission on a machine with other work.
const slowly = 3 * time.Second

// A pod that the kubelet is admitting while the plugin is told to end gets its card, in both calls: otherwise the kubelet
// fails it for good.
func TestEndWithinAnAdmission(t *testing.T) {
	b := newBench(t)
	b.blind, b.hanging, b.admitting = true, &hanging{}, slowly
	unseen := watch.NewFake()
	b.client.PrependWatchReactor("pods", func(clienttesting.Action) (bool, watch.Interface, error) { return true, unseen, nil })
	k := startKubelet(t, b.dir)
	p, stop := b.start(newCards(16))
	k.awaitDevices(16, 16)
	pod := newPod("a", main(4), assumed(0, 1))
	b.create(p, pod)

	b.hanging.Hang()
	admitted := make(chan error, 1)
	go func() {
		_, err := k.admit(pod)
		admitted <- err
	}()
	await(t, "a list that hangs", func() bool { return b.hanging.held.Load() > 0 })
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		stop()
	}()
	time.Sleep(3 * arriving)
	b.hanging.Resume()
	if err := <-admitted; err != nil {
		t.Error(err)
	}
	<-ended
}

// So does one for which the kubelet takes its time between the two calls.
func TestEndBetweenTheCallsOfAnAdmission(t *testing.T) {
	b := newBench(t)
	b.admitting = slowly
	k := startKubelet(t, b.dir)
	p, stop := b.start(newCards(16))
	k.awaitDevices(16, 16)
	pod := newPod("a", main(4), assumed(0, 1))
	b.create(p, pod)

	ended := make(chan struct{})
	k.between = func() {
		go func() {
			defer close(ended)
			stop()
		}()
		time.Sleep(3 * arriving)
	}
	if _, err := k.admit(pod); err != nil {
		t.Error(err)
	}
	<-ended
}

// While the kubelet goes on calling a plugin that is to end, pods come and go as ever: one that has gone makes room for the
// next, and what was given is told.
func TestPodsComeAndGoWhileThePluginEnds(t *testing.T) {
	b := newBench(t)
	b.admitting = slowly
	k := startKubelet(t, b.dir)
	p, stop := b.start(newCards(16))
	k.awaitDevices(16, 16)
	first := newPod("first", main(4), assumed(0, 1))
	b.create(p, first)
	k.mustAdmit(first) // The plugin stays until no call has come for so long after one.

	ended := make(chan struct{})
	go func() {
		defer close(ended)
		stop()
	}()
	time.Sleep(arriving)
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
