package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/cluster"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// stopWithin is how long a program may take to end after SIGTERM: part of what is promised.
const stopWithin = 2 * time.Second

// What becomes of the books when connections are cut, answers lost, and programs killed.
func TestFaults(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{ThroughProxy: true})

	for title, fault := range map[string]struct {
		fault controlplane.Fault
		times int
		// result is what the extender takes the disturbed bind for.
		result string
	}{
		"a Binding whose answer is lost gives the card to nobody else":             {controlplane.CutAnswer, 1, cluster.ResultBound},
		"a Binding whose answer comes too late gives the card to nobody else":      {controlplane.HoldAnswer, 1, cluster.ResultBound},
		"a Binding that never reached the server is made again":                    {controlplane.CutConnection, 2, cluster.ResultUnknown},
		"a Binding that the server answered with trouble of its own is made again": {controlplane.Answer(http.StatusServiceUnavailable, 0), 2, cluster.ResultUnknown},
		"a Binding that the server gave up on is made again":                       {controlplane.Answer(http.StatusGatewayTimeout, 0), 2, cluster.ResultUnknown},
		"a Binding that the server was too busy for is made again":                 {controlplane.Answer(http.StatusTooManyRequests, 0), 2, cluster.ResultRefused},
	} {
		play(t, bed, title, func(s *scene) {
			s.addNodes(controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB, 4069)})
			counter := fmt.Sprintf("gpushare_extender_binds_total{result=%q}", fault.result)
			before := s.metric(counter)
			injected := bed.Proxy.Inject(controlplane.Bindings, fault.times, fault.fault)
			defer injected.Lift()

			s.sits(s.place("disturbed", 12207), s.at("n1"), 0)
			s.awaitMetric(counter, before+1)
			if got := injected.Hits(); got != fault.times {
				s.Errorf("%d Bindings met the fault, want %d", got, fault.times)
			}
			s.create("next", 8138)
			s.refused("next", "1 no GPU card has enough free memory")
			s.checkBooks()
			must(s, s.delete("disturbed", 0))
			s.sits(s.bound("next"), s.at("n1"), 0)
		})
	}

	play(t, bed, "an extender ends in time also while a Binding hangs", func(s *scene) {
		s.addNodes(controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB)})
		hanging := bed.Proxy.Inject(controlplane.Bindings, 0, controlplane.Hold)
		defer hanging.Lift()
		s.create("hangs", 8138)
		eventually(s, "a Binding hangs", func(context.Context) error {
			if hanging.Hits() == 0 {
				return errors.New("none has come")
			}
			return nil
		})
		terminate(s, bed.Extender)
		hanging.Lift()
		must(s, bed.Extender.Start(s.Context()))
		s.sits(s.bound("hangs"), s.at("n1"), 0)
	})

	play(t, bed, "a lost answer that can't be looked into keeps the card until it can", func(s *scene) {
		n1 := s.at("n1")
		s.addNodes(
			controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB, 4069)},
			controlplane.Node{Name: "n2", Cards: mebibytes(1)},
		)
		s.create("disturbed", 12207, gated)
		s.create("next", 8138, gated)
		// The watch tells in order: when the extender knows of this pod, it knows the others too.
		s.place("marker", 1, on(s.at("n2")))
		s.checkBooks()
		// From here on the extender learns nothing: its reads fail, and its watch stands still.
		reads := bed.Proxy.Inject(func(r *http.Request) bool {
			return r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/pods/disturbed")
		}, 0, controlplane.Answer(http.StatusServiceUnavailable, 0))
		defer reads.Lift()
		bed.Proxy.SetWatchDelay(time.Hour)
		defer bed.Proxy.SetWatchDelay(0)
		cut := bed.Proxy.Inject(controlplane.Bindings, 1, controlplane.CutAnswer)
		defer cut.Lift()
		unknown := s.metric(`gpushare_extender_binds_total{result="unknown"}`)
		settled := s.metric(`gpushare_extender_settled_binds_total{outcome="bound"}`)

		s.ungate("disturbed")
		s.sits(s.bound("disturbed"), n1, 0)
		s.awaitMetric(`gpushare_extender_binds_total{result="unknown"}`, unknown+1)
		s.ungate("next")
		s.refused("next", "1 no GPU card has enough free memory")

		reads.Lift()
		s.awaitMetric(`gpushare_extender_settled_binds_total{outcome="bound"}`, settled+1)
		s.checkBooks()
		if s.ask("next", n1) == "" {
			s.Error("the card is free for the next pod once the bind is settled")
		}
		bed.Proxy.SetWatchDelay(0)
		must(s, s.delete("disturbed", 0))
		s.sits(s.bound("next"), n1, 0)
	})

	play(t, bed, "memory that the extender sees come free two seconds after the scheduler still wakes the next pod", func(s *scene) {
		n1 := s.at("n1")
		s.addNodes(controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB, 4069)})
		s.sits(s.place("leaves", 12207), n1, 0)
		s.create("next", 8138)
		s.refused("next", "1 no GPU card has enough free memory")
		s.checkBooks()

		bed.Proxy.SetWatchDelay(2 * time.Second)
		defer bed.Proxy.SetWatchDelay(0)
		fragmented := s.metric(`gpushare_extender_filtered_nodes_total{reason="fragmented"}`)
		must(s, s.delete("leaves", 0))
		// The scheduler asks at once and is refused; left alone, it would ask again after five minutes.
		s.awaitMetric(`gpushare_extender_filtered_nodes_total{reason="fragmented"}`, fragmented+1)
		s.sits(s.bound("next"), n1, 0)
	})

	play(t, bed, "a pod that was refused just before the extender was killed is woken by the next one", func(s *scene) {
		n1 := s.at("n1")
		s.addNodes(controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB, 4069)})
		s.sits(s.place("leaves", 12207), n1, 0)
		s.create("next", 8138)
		s.refused("next", "1 no GPU card has enough free memory")
		s.checkBooks()

		// The scheduler sees the memory come free and asks; the extender doesn't see it, refuses, and dies.
		bed.Proxy.SetWatchDelay(time.Hour)
		defer bed.Proxy.SetWatchDelay(0)
		fragmented := s.metric(`gpushare_extender_filtered_nodes_total{reason="fragmented"}`)
		must(s, s.delete("leaves", 0))
		s.awaitMetric(`gpushare_extender_filtered_nodes_total{reason="fragmented"}`, fragmented+1)
		must(s, bed.Extender.Kill())
		bed.Proxy.SetWatchDelay(0)
		must(s, bed.Extender.Start(s.Context()))
		s.sits(s.bound("next"), n1, 0) // The scheduler by itself would look again after five minutes.
	})

	play(t, bed, "a watch that is cut catches up with what it missed", func(s *scene) {
		s.addNodes(controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB, cardMiB)})
		names := s.fill(s.at("n1"), 4069, 4069, 12207)
		heal := bed.Proxy.Blackhole()
		must(s, s.delete(names[0], 0))
		must(s, s.delete(names[2], 0))
		bed.Proxy.DropConnections()
		heal()
		s.checkBooks()
		s.sits(s.place("after", 12207), s.at("n1"), 0)
	})

	// Each is done under a stream of pods that come and go.
	for title, disturb := range map[string]func(s *scene, after func(pods int)){
		"the extender killed again and again": func(s *scene, after func(int)) {
			for range controlplane.Times(3, 50) {
				after(6)
				must(s, bed.Extender.Kill())
				after(3)
				must(s, bed.Extender.Start(s.Context()))
			}
		},
		// Its reservation stands, the Binding is on its way: half of them arrive, without an answer, half of them never do.
		"the extender killed between its reservation and the answer to its Binding": func(s *scene, after func(int)) {
			for i := range controlplane.Times(4, 50) {
				fault := controlplane.Hold
				if i%2 == 1 {
					fault = controlplane.HoldAnswer
				}
				held := bed.Proxy.Inject(controlplane.Bindings, 0, fault)
				after(4)
				eventually(s, "a Binding is held", func(context.Context) error {
					if held.Hits() == 0 {
						return errors.New("none has come")
					}
					return nil
				})
				must(s, bed.Extender.Kill())
				held.Lift()
				must(s, bed.Extender.Start(s.Context()))
			}
		},
		"the extender asked to end, and started again": func(s *scene, after func(int)) {
			for range 2 {
				after(6)
				terminate(s, bed.Extender)
				after(3)
				must(s, bed.Extender.Start(s.Context()))
			}
		},
		"the extender frozen for a while": func(s *scene, after func(int)) {
			after(6)
			must(s, bed.Extender.Pause())
			after(6)
			s.event("", "FailedScheduling", "gpushare-scheduler/filter", "deadline exceeded") // The scheduler has given up on a call.
			must(s, bed.Extender.Resume())
		},
		"the scheduler killed again and again": func(s *scene, after func(int)) {
			for range 2 {
				after(6)
				must(s, bed.Scheduler.Kill())
				after(3)
				must(s, bed.Scheduler.Start(s.Context()))
			}
		},
		"the API server killed": func(s *scene, after func(int)) {
			after(6)
			must(s, bed.APIServer.Restart(s.Context()))
			must(s, bed.Scheduler.Restart(s.Context())) // See patience: it isn't what is tested.
		},
		"the API server away for a while": func(s *scene, after func(int)) {
			after(6)
			must(s, bed.APIServer.Kill())
			pass(s, outage)
			must(s, bed.APIServer.Start(s.Context()))
			must(s, bed.Scheduler.Restart(s.Context()))
		},
		"etcd away for a while": func(s *scene, after func(int)) {
			after(6)
			must(s, bed.Etcd.Kill())
			pass(s, outage)
			must(s, bed.Etcd.Start(s.Context()))
			must(s, bed.Scheduler.Restart(s.Context()))
		},
		"the object of a node deleted and made anew": func(s *scene, after func(int)) {
			for range controlplane.Times(2, 20) {
				after(6)
				must(s, bed.Client.CoreV1().Nodes().Delete(s.Context(), s.at("n1"), metav1.DeleteOptions{}))
				after(3)
				must(s, bed.CreateNodes(s.Context(), streamNode(s.at("n1"), s.name)))
			}
		},
		"etcd and the API server killed, and the extender too": func(s *scene, after func(int)) {
			after(6)
			must(s, bed.Etcd.Kill())
			must(s, bed.APIServer.Kill())
			must(s, bed.Extender.Kill())
			must(s, bed.Etcd.Start(s.Context()))
			must(s, bed.APIServer.Start(s.Context()))
			must(s, bed.Extender.Start(s.Context()))
			must(s, bed.Scheduler.Restart(s.Context()))
		},
		"every other answer to a Binding lost": func(_ *scene, after func(int)) {
			var n atomic.Int64
			cut := bed.Proxy.Inject(func(r *http.Request) bool {
				return controlplane.Bindings(r) && n.Add(1)%2 == 0
			}, 0, controlplane.CutAnswer)
			defer cut.Lift()
			after(30)
		},
	} {
		play(t, bed, "under a stream of pods: "+title, func(s *scene) {
			s.addNodes(streamNode("n1", s.name), streamNode("n2", s.name))
			stream := &stream{scene: s, random: rand.New(rand.NewPCG(1, 2))}
			disturb(s, stream.next)
			stream.next(6)
			stream.awaitAll()
			s.checkBooks()

			before, err := inspected(s.Context(), bed)
			must(s, err)
			must(s, bed.Extender.Restart(s.Context()))
			after, err := inspected(s.Context(), bed)
			must(s, err)
			s.sameBooks("kept through everything", before, "rebuilt", after)
			s.Logf("%d pods made, %d of them bound at the end and the others deleted; 0 lost, 0 cards over their total, 0 memory held by nobody",
				stream.made, len(stream.alive))
		})
	}
}

// outage is how long something is away.
var outage = time.Duration(controlplane.Times(3, 20)) * time.Second

// pass lets time pass: what is tested is that it does.
func pass(t testing.TB, d time.Duration) {
	t.Helper()
	select {
	case <-t.Context().Done():
	case <-time.After(d):
	}
}

// streamNode is a node for a stream of pods: two of them hold the most that one leaves alive.
func streamNode(name, scene string) controlplane.Node {
	return controlplane.Node{
		Name: name, Unit: gpu.MiB, Labels: map[string]string{sceneLabel: scene}, Cards: mebibytes(cardMiB, cardMiB, cardMiB, cardMiB),
	}
}

// stream makes pods of random sizes, and deletes every third one some pods later, whatever has become of it by then.
type stream struct {
	*scene
	random *rand.Rand
	made   int
	alive  map[string]bool
	// order has the pods that are alive, the oldest first.
	order []string
}

// streamKeeps bounds the pods that are alive.
const streamKeeps = 25

func (s *stream) next(pods int) {
	s.Helper()
	if s.alive == nil {
		s.alive = map[string]bool{}
	}
	for range pods {
		name := fmt.Sprintf("pod-%03d", s.made)
		pod := s.pod(name, 512+s.random.Int64N(5000))
		eventually(s, "pod "+name+" is created", func(ctx context.Context) error {
			_, err := s.bed.Client.CoreV1().Pods(s.scene.name).Create(ctx, pod, metav1.CreateOptions{})
			if apierrors.IsAlreadyExists(err) {
				return nil
			}
			return err
		})
		s.alive[name] = true
		s.order = append(s.order, name)
		if s.made%3 == 2 {
			s.leaves(fmt.Sprintf("pod-%03d", s.made-2))
		}
		if len(s.order) > streamKeeps {
			s.leaves(s.order[0])
		}
		s.made++
	}
}

func (s *stream) leaves(name string) {
	s.Helper()
	if !s.alive[name] {
		return
	}
	must(s, s.delete(name, 0))
	delete(s.alive, name)
	s.order = slices.DeleteFunc(s.order, func(other string) bool { return other == name })
}

// awaitAll waits until all pods that are still there are bound.
func (s *stream) awaitAll() {
	s.Helper()
	for name := range s.alive {
		s.bound(name)
	}
}

// terminate asks a program to end, as its pod's deletion does, and checks that it does so in time and content.
func terminate(t testing.TB, p *controlplane.Process) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), stopWithin)
	defer cancel()
	if err := p.Terminate(ctx); err != nil {
		t.Errorf("%s didn't end within %s of SIGTERM: %v\n%s", p.Name, stopWithin, err, p.Tail(10))
		must(t, p.Kill())
		return
	}
	if code := p.ExitCode(); code != 0 {
		t.Errorf("%s ended with status %d after SIGTERM, want 0\n%s", p.Name, code, p.Tail(10))
	}
}
