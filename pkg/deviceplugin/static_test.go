package deviceplugin

import (
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
)

func TestStaticPod(t *testing.T) {
	b := newBench(t)
	k, p := b.up(16, 16)
	mirror := newPod("static", main(10), mirrors("static-uid"))
	if got := cardOf(k.mustAdmit(mirror)["main"]); got != "0" {
		t.Errorf("got card %s", got)
	}
	// It has no object, and holds its memory all the same.
	other := newPod("other", main(10))
	b.create(p, other)
	if got := cardOf(k.mustAdmit(other)["main"]); got != "1" {
		t.Errorf("other got card %s", got)
	}
	b.create(p, mirror)
	b.awaitAssigned("static", 0)
}

// A static pod is served before there is an object that would tell what else it asks for.
func TestStaticPodHasOneCard(t *testing.T) {
	b := newBench(t)
	k, p := b.up(16, 16)
	other := newPod("other", main(10), assumed(0, 1))
	b.create(p, other)
	k.mustAdmit(other)

	// By binpack alone x would go to card 0, and y couldn't follow.
	env := k.mustAdmit(newPod("static", container("x", 4), container("y", 8), container("z", 4), mirrors("static-uid")))
	for name := range env {
		if got := cardOf(env[name]); got != "1" {
			t.Errorf("container %s got card %s, want 1 as the others", name, got)
		}
	}
}

func TestStaticPodIsNeverSplit(t *testing.T) {
	b := newBench(t)
	b.patience = time.Millisecond
	k, _ := b.up(16, 16)
	env, err := k.admit(newPod("static", container("x", 10), container("y", 10), mirrors("static-uid")))
	if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "static pod static-uid has card 0 for other containers") {
		t.Errorf("got %v and %v, want y to be refused", env, err)
	}
}

// Two static pods in a row are told apart by the mirror of the first.
func TestStaticPodsInARow(t *testing.T) {
	b := newBench(t)
	k, p := b.up(16, 16)
	one, two := newPod("one", main(16), mirrors("static-1")), newPod("two", main(16), mirrors("static-2"))
	if got := cardOf(k.mustAdmit(one)["main"]); got != "0" {
		t.Errorf("one got card %s", got)
	}
	created := make(chan struct{})
	go func() { // As the kubelet's worker does while the next pod is being admitted.
		defer close(created)
		b.create(p, one)
	}()
	if got := cardOf(k.mustAdmit(two)["main"]); got != "1" {
		t.Errorf("two got card %s", got)
	}
	<-created
}

// Nobody waits for the mirror of a static pod that was turned away: the kubelet offers its devices again.
func TestStaticPodTurnedAway(t *testing.T) {
	for name, admit := range map[string]func(*kubelet, *corev1.Pod) error{
		"by the plugin": func(k *kubelet, pod *corev1.Pod) error { _, err := k.admit(pod); return err },
		"by the kubelet": func(k *kubelet, pod *corev1.Pod) error {
			_, err := k.admit(pod, "x")
			return errors.Join(err, errors.New("too little CPU"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.patience = time.Millisecond
			k, _ := b.up(16)
			first := newPod("first", container("x", 6), container("y", 11), mirrors("static-1"))
			if err := admit(k, first); err == nil {
				t.Fatal("the first static pod was admitted")
			}
			k.forget(first)
			if got := cardOf(k.mustAdmit(newPod("second", main(16), mirrors("static-2")))["main"]); got != "0" {
				t.Errorf("the second static pod got card %s", got)
			}
		})
	}
}

// A static pod whose mirror is late can make the kubelet fail the next one, but not one after the other: if it still
// holds its devices after a refusal, that wasn't for a container of its own.
func TestOneRefusalEndsTheDoubt(t *testing.T) {
	b := newBench(t)
	b.patience = time.Millisecond
	k, _ := b.up(16, 16)
	k.mustAdmit(newPod("first", main(10), mirrors("static-1")))
	if _, err := k.admit(newPod("second", main(10), mirrors("static-2"))); status.Code(err) != codes.ResourceExhausted {
		t.Fatalf("got %v, want the second one to be refused", err)
	}
	if got := cardOf(k.mustAdmit(newPod("third", main(10), mirrors("static-3")))["main"]); got != "1" {
		t.Errorf("the third static pod got card %s", got)
	}
}

// The kubelet's checkpoint goes on showing static pods that are over until something else is allocated.
func TestStaticPodsThatAreOverMakeRoom(t *testing.T) {
	b := newBench(t)
	k := startKubelet(t, b.dir)
	p, stop := b.start(newCards(16, 16))
	k.awaitDevices(32, 32)
	over := func(uid, card string) {
		t.Helper()
		pod := newPod("static", container("x", 4), container("y", 8), mirrors(uid))
		k.mustAdmit(pod)
		b.create(p, pod)
		index, _ := strconv.Atoi(card)
		b.awaitAssigned("static", index)
		b.delete(p, pod)
		k.forget(pod)
	}
	over("0123456789abcdef0123456789abcdef", "0")
	one := newPod("one", main(16), assumed(0, 1))
	b.create(p, one)
	if got := cardOf(k.mustAdmit(one)["main"]); got != "0" {
		t.Errorf("one got card %s", got)
	}
	over("f123456789abcdef0123456789abcdef", "1")
	// A plugin that starts now can't tell it from one that has no mirror yet.
	stop()
	p, _ = b.start(newCards(16, 16))
	k.awaitRegistrations(2)
	k.awaitDevices(32, 32)
	two := newPod("two", main(16), assumed(1, 2))
	b.create(p, two)
	if got := cardOf(k.mustAdmit(two)["main"]); got != "1" {
		t.Errorf("two got card %s", got)
	}
}

// A static pod that was taken away runs through its grace period, for which its mirror stays. The kubelet has let go of
// its devices by then.
func TestStaticPodInItsGracePeriod(t *testing.T) {
	b := newBench(t)
	b.patience = time.Millisecond
	b.askable()
	k, p := b.up(16)
	going := newPod("going", main(10), mirrors("static-1"))
	k.mustAdmit(going)
	b.create(p, going)
	b.awaitAssigned("going", 0)
	b.trust(k, p)
	k.forget(going)
	scheduled := newPod("scheduled", main(10), assumed(0, 2))
	b.create(p, scheduled)
	if env, err := k.admit(scheduled); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a scheduled pod got %v and %v, want it to be refused", env, err)
	}
	b.delete(p, scheduled)
	if env, err := k.admit(newPod("another", main(10), mirrors("static-2"))); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("another static pod got %v and %v, want it to be refused", env, err)
	}
	if got := cardOf(k.mustAdmit(newPod("going", main(12), mirrors("static-3")))["main"]); got != "0" {
		t.Errorf("the one that was edited got card %s", got)
	}
}

// The informer may hear of a mirror late; the API server itself is asked before a static pod counts as over.
func TestStaticPodWhoseMirrorIsUnheardOf(t *testing.T) {
	b := newBench(t)
	b.blind = true
	k, p := b.up(16)
	going := newPod("going", main(10), mirrors("static-1"))
	k.mustAdmit(going)
	b.create(p, going)
	k.forget(going)
	scheduled := newPod("scheduled", main(10), assumed(0, 1))
	b.create(p, scheduled)
	if env, err := k.admit(scheduled); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("got %v and %v, want the pod to be refused", env, err)
	}
}

// Between two containers of a static pod there is nothing but the kubelet's checkpoint that tells of it.
func TestPluginRestartBetweenContainersOfStaticPod(t *testing.T) {
	b := newBench(t)
	b.patience = time.Millisecond
	k := startKubelet(t, b.dir)
	p, stop := b.start(newCards(16, 16))
	k.awaitDevices(32, 32)
	ordinary := newPod("ordinary", main(4), assumed(0, 1))
	b.create(p, ordinary)
	k.mustAdmit(ordinary)
	static := newPod("static", container("x", 9), container("y", 2), mirrors("0123456789abcdef0123456789abcdef"))
	if got := cardOf(k.mustAdmit(static, "x")["x"]); got != "1" {
		t.Fatalf("x got card %s, want 1", got)
	}
	stop()
	b.start(newCards(16, 16))
	k.awaitRegistrations(2)
	k.awaitDevices(32, 32)
	if got := cardOf(k.mustAdmit(static, "y")["y"]); got != "1" {
		t.Errorf("y got card %s, want 1 as x", got)
	}
	if _, err := k.admit(newPod("another", main(13), mirrors("static-2"))); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("got %v, want no room beside the static pod", err)
	}
}

// An edited static pod is another pod to the kubelet, which starts it when the one before it has ended.
func TestEditedStaticPod(t *testing.T) {
	b := newBench(t)
	k, p := b.up(16)
	before := newPod("static", container("x", 8), container("y", 6), mirrors("static-1"))
	k.mustAdmit(before)
	b.create(p, before)
	b.awaitAssigned("static", 0)

	k.forget(before)
	after := newPod("static", container("x", 9), container("y", 7), mirrors("static-2"))
	for name, env := range k.mustAdmit(after) {
		if cardOf(env) != "0" {
			t.Errorf("%s got %v", name, env)
		}
	}
}

// A static pod that the kubelet turned away after its first container never gets a mirror, and hinders nobody later.
func TestStaticPodLeftBehind(t *testing.T) {
	s := &snapshot{Cards: newCards(16, 16), Served: served{"turned-away": {"x": serving{Card: 0, Request: 10, At: start}}}}
	for after, want := range map[time.Duration]string{time.Second: "static pod turned-away has card 0", time.Minute: "1"} {
		s.Now = start.Add(after)
		card, err := s.Static(10, nil)
		if got := strconv.Itoa(card.Index); err == nil && got != want || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("after %v: card %s, %v, want %s", after, got, err, want)
		}
	}
}

// While the kubelet has not let go of a pod, its memory isn't free, whatever the kubelet asks for.
func TestStaticPodHoldsItsMemory(t *testing.T) {
	s := &snapshot{
		Cards:  newCards(16),
		Pods:   views(newPod("static", main(10), mirrors("static-1")), newPod("ordinary", main(2))),
		Served: served{"static-1": {"main": given(0, "00", "01")}, "uid-ordinary": {"main": given(0, "02")}},
	}
	s.Served["static-1"]["main"] = func(v serving) serving { v.Sample = "00"; return v }(s.Served["static-1"]["main"])
	if released := s.Released([]string{"03", "04"}, nil); len(released) > 0 {
		t.Errorf("released: %v", released)
	}
	if released := s.Released([]string{"00", "01", "02"}, []string{"00", "01"}); len(released) > 0 {
		t.Errorf("released, though its next container is to use them again: %v", released)
	}
	if released := s.Released([]string{"00", "01", "02"}, nil); len(released) != 1 || !released["static-1"] {
		t.Errorf("released: %v, want the static pod alone", released)
	}
	lost := s.Served["static-1"]["main"]
	lost.Lost = true
	s.Served["static-1"]["main"] = lost
	if released := s.Released([]string{"00", "01", "02"}, nil); len(released) > 0 {
		t.Errorf("released by a kubelet that has lost its books: %v", released)
	}
}
