package scheduling

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/binding"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

func TestBind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := fake.Pod("p", 8138)
		// The free memory is 12207, 8138, 4069 and 16276 MiB: card 1 fits best.
		f := start(t, Options{}, fake.Node("n1", 16276, 16276, 16276, 16276), pod, fake.Pod("a", 4069, fake.Bound("n1", 0)),
			fake.Pod("b", 8138, fake.Bound("n1", 1)), fake.Pod("c", 12207, fake.Bound("n1", 2)))
		check.Must(t, f.bind(pod))
		got := f.server.Get(pod)
		want := protocol.Assignment{Cards: []protocol.AssignedCard{{Index: 1, Memory: 16276}}, Request: 8138, AssumeTime: begin}.Annotations()
		if diff := cmp.Diff(want, got.Annotations); diff != "" || got.Spec.NodeName != "n1" {
			t.Errorf("bound to %q, annotations (-want +got):\n%s", got.Spec.NodeName, diff)
		}
		f.want(pod, "bound n1 card 1")
		f.wantEvent("Normal GPUCardAssumed Assumed GPU card 1 of node n1: 8138 MiB of its 16276 MiB")

		// Retries succeed and change nothing, before and after the watch reports the bind.
		f.clock.Step(time.Second)
		if err := f.bind(pod); err != nil {
			t.Errorf("a retry before the watch reports the bind: %v", err)
		}
		f.publish(pod)
		if err := f.bind(pod); err != nil {
			t.Errorf("a retry after the watch reported the bind: %v", err)
		}
		if diff := cmp.Diff(got, f.server.Get(pod)); diff != "" {
			t.Errorf("the pod changed (-before +after):\n%s", diff)
		}
		f.want(pod, "bound n1 card 1")
		if n := f.observer.Count("bind " + string(reasons.ResultBound)); n != 3 {
			t.Errorf("%d binds counted, want 3", n)
		}
	})
}

func TestBindBeforeSync(t *testing.T) {
	f := newFixture(t, Options{})
	if err := f.bind(fake.Pod("p", 10)); !errors.Is(err, clustercache.ErrNotSynced) || f.observer.Count("bind not_ready") != 1 {
		t.Errorf("%v, counted %v", err, f.observer.Counts())
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := f.TakeOver(ended); !errors.Is(err, clustercache.ErrNotSynced) {
		t.Errorf("TakeOver: %v", err)
	}
}

// A replica that gets the Lease before it has listed the pods leads as soon as it has.
func TestTakeOverWaitsForSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Options{}, fake.Node("n1", 100))
		tookOver := make(chan error, 1)
		go func() { tookOver <- f.TakeOver(t.Context()) }()
		f.run()
		check.NoError(t, <-tookOver)
	})
}

func TestBadBindRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod, bound, unmanaged := fake.Pod("p", 10), fake.Pod("b", 10, fake.Bound("n2", 0)), fake.Pod("unmanaged", 0, fake.CPU(1))
		unmanaged.Spec.Containers[0].Resources.Limits = nil
		f := start(t, Options{}, fake.Node("n1", 100), fake.Node("n2", 100), pod, bound, unmanaged)
		edited := func(edit func(r *BindRequest)) BindRequest {
			r := request(pod, "n1")
			edit(&r)
			return r
		}
		before := f.ledger.Nodes()
		for name, test := range map[string]struct {
			request BindRequest
			want    error
			text    string
		}{
			"no name":               {edited(func(r *BindRequest) { r.Name = "" }), binding.ErrBadRequest, "needed"},
			"no namespace":          {edited(func(r *BindRequest) { r.Namespace = "" }), binding.ErrBadRequest, "needed"},
			"no UID":                {edited(func(r *BindRequest) { r.UID = "" }), binding.ErrBadRequest, "needed"},
			"no node":               {edited(func(r *BindRequest) { r.Node = "" }), binding.ErrBadRequest, "needed"},
			"unknown pod":           {edited(func(r *BindRequest) { r.Name = "x" }), binding.ErrBadRequest, "there is no pod default/x with UID uid-p"},
			"wrong UID":             {edited(func(r *BindRequest) { r.UID = "other" }), binding.ErrBadRequest, "there is no pod default/p with UID other"},
			"unknown node":          {edited(func(r *BindRequest) { r.Node = "x" }), &ledger.NoRoomError{}, "shares no GPU memory"},
			"unmanaged pod":         {request(unmanaged, "n1"), binding.ErrBadRequest, "the pod asks for none of aliyun.com/gpu-mem, aliyun.com/gpu-count, aliyun.com/gpu-core.percentage and nvidia.com/gpu"},
			"bound to another node": {request(bound, "n1"), binding.ErrBadRequest, "bound to node n2 already"},
		} {
			if err := f.Bind(t.Context(), test.request); !sameError(err, test.want) || !strings.Contains(err.Error(), test.text) {
				t.Errorf("%s: %v, want %v with %q", name, err, test.want, test.text)
			}
		}
		f.server.Answer(fake.Answers{Read: errLost})
		err := f.Bind(t.Context(), edited(func(r *BindRequest) { r.Name = "x" }))
		if !errors.Is(err, errLost) || errors.Is(err, binding.ErrBadRequest) {
			t.Errorf("a pod that can't be read: %v", err)
		}
		want := map[string]int{"synced": 1, "bind bad_request": 8, "bind no_room": 1, "bind unreachable": 1}
		check.Equal(t, "counts", want, f.observer.Counts())
		if diff := cmp.Diff(before, f.ledger.Nodes()); diff != "" {
			t.Errorf("the ledger changed (-before +after):\n%s", diff)
		}
		if n := f.server.Calls().Binds; n != 0 {
			t.Errorf("%d writes", n)
		}
	})
}

// noRoom reports whether the pod doesn't fit the node.
func noRoom(err error) bool {
	_, is := errors.AsType[*ledger.NoRoomError](err)
	return is
}

// sameError reports whether a bind failed as it should: any NoRoomError stands for all.
func sameError(err, want error) bool { return errors.Is(err, want) || noRoom(err) && noRoom(want) }

// Bind finds no room if no card has any, if it is kept for a nominated pod, or if the card of an earlier bind is gone.
func TestBindNoRoom(t *testing.T) {
	pod := fake.Pod("p", 60, fake.Priority(5))
	for name, before := range map[string]func(f *fixture){
		"the card is full":         func(f *fixture) { f.ledger.SetBound("n1", gpu.Pod{UID: "a", Request: 50}, gpu.On(0, 50), begin) },
		"another pod is nominated": func(f *fixture) { f.ledger.Nominate("n1", gpu.Pod{UID: "a", Request: 50, Priority: 5}) },
		"the assumed card is gone": func(f *fixture) {
			if _, err := f.ledger.Reserve("n1", protocol.Pod(pod), placement.Binpack, begin); err != nil {
				f.t.Fatal(err)
			}
			f.ledger.SetNode("n1", ledger.NodeSpec{Cards: []gpu.Card{{Index: 5, Memory: 50}}})
		},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			f := start(t, Options{}, fake.Node("n1", 100), pod)
			before(f)
			if err := f.bind(pod); !noRoom(err) {
				t.Fatalf("%v, want a NoRoomError", err)
			}
			f.wantEvent("Warning GPUCardNotAssumed No GPU card could be assumed: node n1: no GPU card has enough free memory")
			f.want(pod, "none")
		}))
	}
}

func TestBindWithoutGPUMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := fake.Pod("p", 0) // With a request of 0: without the resource, kube-scheduler would not call the extender.
		f := start(t, Options{}, fake.Node("n1", 100), pod)
		for range 2 {
			check.Must(t, f.bind(pod))
		}
		if got := f.server.Get(pod); got.Spec.NodeName != "n1" || len(got.Annotations) != 0 {
			t.Errorf("bound to %q with %v", got.Spec.NodeName, got.Annotations)
		}
		f.want(pod, "none")
	})
}

// While a bind is in flight, other binds of the pod fail. It goes on when kube-scheduler disconnects.
func TestBindInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := fake.Pod("p", 10)
		f := start(t, Options{}, fake.Node("n1", 100), fake.Node("n2", 100), pod)
		writing, goOn := make(chan struct{}), make(chan struct{})
		f.server.Answer(fake.Answers{Bind: func(ctx context.Context, b *corev1.Binding) error {
			close(writing)
			<-goOn
			return errors.Join(ctx.Err(), f.server.Commit(b))
		}})
		ctx, cancel := context.WithCancel(t.Context())
		first := make(chan error, 1)
		go func() { first <- f.Bind(ctx, request(pod, "n1")) }()
		<-writing
		for _, node := range []string{"n1", "n2"} {
			if err := f.Bind(t.Context(), request(pod, node)); !errors.Is(err, binding.ErrInFlight) {
				t.Errorf("to %s: %v, want ErrInFlight", node, err)
			}
		}
		cancel()
		close(goOn)
		check.Must(t, <-first)
		f.want(pod, "bound n1 card 0")
		if n := f.server.Calls().Binds; n != 1 {
			t.Errorf("%d writes, want 1", n)
		}
	})
}

// A pod that has queued waits for other binds, with its card assumed; a new pod does not.
func TestBindWaitsForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, queued := fake.Pod("first", 10), fake.Pod("queued", 10)
		f := start(t, Options{BindWindow: 100 * time.Millisecond}, fake.Node("n1", 100), first, queued)
		f.clock.Step(time.Second)
		check.Must(t, f.bind(first))
		ended := make(chan error, 1)
		go func() { ended <- f.bind(queued) }()
		f.wantSettled(queued, "assumed n1 card 0")
		recent := fake.Pod("new", 10)
		f.server.Set(recent)
		f.publish(recent)
		check.NoError(t, f.bind(recent))
		f.want(queued, "assumed n1 card 0")
		f.clock.Step(100 * time.Millisecond)
		check.NoError(t, <-ended)
		f.want(queued, "bound n1 card 0")
	})
}

// A bind that has waited for others is written only if the pod, its node and its card still allow it. The pod has 10 of card 0 of n1.
func TestBindChecksAfterWait(t *testing.T) {
	pod, others := fake.Pod("p", 10), &standby{}
	cards := func(cards ...gpu.Card) func(f *fixture) {
		return func(f *fixture) { f.ledger.SetNode("n1", ledger.NodeSpec{Cards: cards}) }
	}
	becomes := func(edits ...fake.PodEdit) func(f *fixture) {
		return func(f *fixture) {
			changed := fake.Edited(pod, edits...)
			f.server.Set(changed)
			f.publish(changed)
		}
	}
	for name, test := range map[string]struct {
		change func(f *fixture)
		want   string
		err    error
		// binds is the number of Bindings for the pod.
		binds int
	}{
		"nothing changes":                       {func(*fixture) {}, "bound n1 card 0", nil, 1},
		"the card fails":                        {cards(gpu.Card{Memory: 100, Unhealthy: "Xid 79"}, gpu.Card{Index: 1, Memory: 100}), "bound n1 card 1", nil, 1},
		"the card is gone":                      {cards(gpu.Card{Index: 1, Memory: 100}), "bound n1 card 1", nil, 1},
		"the card becomes smaller":              {cards(gpu.Card{Memory: 9}, gpu.Card{Index: 1, Memory: 100}), "bound n1 card 1", nil, 1},
		"the card fails, and no other has room": {cards(gpu.Card{Memory: 100, Unhealthy: "Xid 79"}, gpu.Card{Index: 1, Memory: 9}), "none", &ledger.NoRoomError{}, 0},
		"another scheduler fills the card": {func(f *fixture) {
			f.ledger.SetBound("n1", gpu.Pod{UID: "theirs", Request: 91}, gpu.On(0, 91), begin)
		}, "bound n1 card 1", nil, 1},
		"the node is deleted":                      {func(f *fixture) { f.ledger.DeleteNode("n1") }, "none", &ledger.NoRoomError{}, 0},
		"the pod asks for another number of cards": {becomes(fake.Cards(2)), "bound n1 cards 0, 1", nil, 1},
		"another leader binds the pod there":       {becomes(fake.Bound("n1", 1)), "bound n1 card 1", nil, 0},
		"another leader binds the pod elsewhere":   {becomes(fake.Bound("n2", 0)), "bound n2 card 0", binding.ErrBadRequest, 0},
		"the pod is deleted": {func(f *fixture) {
			f.server.Remove(pod)
			f.publishGone(pod)
		}, "none", binding.ErrBadRequest, 0},
		"another replica leads": {func(f *fixture) { others.Store(true) }, "none", errStandby, 0},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			first := fake.Pod("first", 10)
			defer others.Store(false)
			f := start(t, Options{BindWindow: 100 * time.Millisecond, Leading: others.leading}, fake.Node("n1", 100, 100), fake.Node("n2", 100), first, pod)
			f.filter(pod, "n1")
			f.clock.Step(time.Second)
			check.Must(t, f.Bind(t.Context(), request(first, "n2")))
			ended := make(chan error, 1)
			go func() { ended <- f.bind(pod) }()
			f.wantSettled(pod, "assumed n1 card 0")
			test.change(f)
			f.clock.Step(100 * time.Millisecond)
			if err := <-ended; !sameError(err, test.err) {
				t.Errorf("%v, want %v", err, test.err)
			}
			f.want(pod, test.want)
			if n := f.server.Calls().Binds - 1; n != test.binds {
				t.Errorf("%d Bindings, want %d", n, test.binds)
			}
		}))
	}
}

// A retry of an unconfirmed bind waits for others while a live read would show that the first write has failed for certain. It keeps its card:
// n1 has 39, 39 and 59 free, and no other card has room for either pod.
func TestRetryKeepsCardWhileItWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod, other, next := fake.Pod("p", 59), fake.Pod("other", 10), fake.Pod("next", 59)
		f := startCache(t, Options{BindWindow: 150 * time.Millisecond}, fake.Node("n1", 100, 100, 100), fake.Node("n2", 100), pod, other, next,
			fake.Pod("x", 61, fake.Bound("n1", 0)), fake.Pod("y", 61, fake.Bound("n1", 1)), fake.Pod("z", 41, fake.Bound("n1", 2)))
		f.server.Answer(fake.Answers{Bind: func(context.Context, *corev1.Binding) error { return errLost }})
		if err := f.bind(pod); !errors.Is(err, binding.ErrUnconfirmed) {
			t.Fatal(err)
		}
		f.server.Answer(fake.Answers{})
		f.clock.Step(f.BindDeadline())
		check.Must(t, f.Bind(t.Context(), request(other, "n2")))
		waiters, ended := f.clock.Waiters(), make(chan error, 1)
		go func() { ended <- f.bind(pod) }()
		f.await("the retry to wait for other binds", func() bool { return f.clock.Waiters() > waiters })
		f.clock.Step(10 * time.Millisecond)
		f.binder.Resolve(t.Context())
		f.want(pod, "assumed n1 card 2")
		if err := f.bind(next); !noRoom(err) {
			t.Errorf("the next pod: %v, want a NoRoomError", err)
		}
		f.clock.Step(20 * time.Millisecond)
		check.NoError(t, <-ended)
		f.want(pod, "bound n1 card 2")
	})
}

// The card of an unconfirmed bind fails. No retry writes it again. It stays assumed as long as the first write can still be made.
func TestNoRetryOnFailedCard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := fake.Pod("p", 10)
		f := start(t, Options{}, fake.Node("n1", 100, 100), pod)
		f.server.Answer(fake.Answers{Bind: func(context.Context, *corev1.Binding) error { return errLost }})
		if err := f.bind(pod); !errors.Is(err, binding.ErrUnconfirmed) {
			t.Fatal(err)
		}
		f.server.Answer(fake.Answers{})
		f.ledger.SetNode("n1", ledger.NodeSpec{Cards: []gpu.Card{{Memory: 100, Unhealthy: "Xid 79"}, {Index: 1, Memory: 100}}})
		if err := f.bind(pod); !noRoom(err) || f.server.Calls().Binds != 1 {
			t.Errorf("%v after %d Bindings, want a NoRoomError after 1", err, f.server.Calls().Binds)
		}
		f.want(pod, "assumed n1 card 0")
		f.clock.Step(f.BindDeadline())
		f.pass("the card to be released", func() bool { return f.allocation("uid-p") == "none" })
		check.NoError(t, f.bind(pod))
		f.want(pod, "bound n1 card 1")
	})
}

// A new leader learns of the last binds of the former one before its own.
func TestBindAfterTakeOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		theirs, ours := fake.Pod("theirs", 60), fake.Pod("ours", 60)
		f := start(t, Options{Leading: new(standby).leading}, fake.Node("n1", 100), theirs, ours)
		check.Must(t, f.TakeOver(t.Context()))
		f.server.Set(fake.Edited(theirs, fake.Bound("n1", 0)))
		if err := f.bind(ours); !noRoom(err) {
			t.Errorf("to a card that the former leader gave away: %v, want a NoRoomError", err)
		}
		f.want(theirs, "bound n1 card 0")
	})
}
