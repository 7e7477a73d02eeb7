package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// faulty returns the options of a cluster for injected faults. kube-scheduler waits for a frozen extender only a little
// longer than a bind may take, and retries pods soon.
func faulty(o framework.Options) framework.Options {
	o.ThroughProxy = true
	o.ControlPlane.Scheduler.Edits = []controlplane.ConfigEdit{controlplane.ExtenderTimeout(6 * time.Second), controlplane.MaxBackoff(1)}
	return o
}

// TestFaults cuts connections, loses answers, and kills programs. The ledger must stay correct.
func TestFaults(t *testing.T) {
	c := framework.StartForTest(t, faulty(framework.Options{}))

	for title, test := range map[string]struct {
		fault controlplane.Fault
		hits  int
		// result is the extender's result of the bind.
		result string
	}{
		"a Binding whose answer is lost keeps the card":      {controlplane.CutAnswer, 1, "bound"},
		"a Binding whose answer is late keeps the card":      {controlplane.HoldAnswer, 1, "bound"},
		"a Binding that never arrived is repeated":           {controlplane.CutConnection, 2, "unconfirmed"},
		"a Binding that the API server rejected is repeated": {controlplane.Answer(http.StatusTooManyRequests, 0), 2, "rejected"},
	} {
		play(t, c, title, func(s *scene) {
			s.AddNodes(node("n1", cardMiB, 4069))
			before := c.Metric(s, framework.MetricBinds, "result", test.result)
			injected := c.Proxy.Inject(controlplane.Bindings, test.hits, test.fault)
			defer injected.Lift()

			s.WantCard(s.Place(s.Pod("disturbed", 12207)), s.NodeName("n1"), 0)
			c.WaitMetric(s, before+1, framework.MetricBinds, "result", test.result)
			if got := injected.Hits(); got != test.hits {
				s.Errorf("%d Bindings met the fault, want %d", got, test.hits)
			}
			s.Create(s.Pod("next", 8138))
			s.rejected("next", "1 no GPU card has enough free memory")
			s.CheckLedger()
			s.Delete("disturbed")
			s.WantCard(s.WaitBound("next"), s.NodeName("n1"), 0)
		})
	}

	play(t, c, "the extender ends in time while a Binding hangs", func(s *scene) {
		s.AddNodes(node("n1", cardMiB))
		c.RestartExtenderWith(s, "--bind-timeout="+(2*stopWithin).String()) // An extender that waited for the bind would be late.
		hanging := c.Proxy.Inject(controlplane.Bindings, 0, controlplane.Hold)
		defer hanging.Lift()
		s.Create(s.Pod("hangs", 8138))
		s.waitHits(hanging)
		terminate(s, c.Extender)
		hanging.Lift()
		must(s, c.Extender.Start(s.Context()))
		s.WantCard(s.WaitBound("hangs"), s.NodeName("n1"), 0)
	})

	// kube-scheduler sees that memory is freed and retries the pod. The extender doesn't see it yet and rejects the pod
	// again. Without a requeue kube-scheduler retries the pod after five minutes, which is longer than framework.Patience.
	for title, recoverFrom := range map[string]func(s *scene){
		"a slow watch": func(*scene) { c.Proxy.SetWatchDelay(0) },
		"a killed extender": func(s *scene) {
			must(s, c.Extender.Kill())
			c.Proxy.SetWatchDelay(0)
			must(s, c.Extender.Start(s.Context()))
		},
	} {
		play(t, c, "a pod is requeued after "+title, func(s *scene) {
			s.AddNodes(node("n1", cardMiB, 4069))
			s.WantCard(s.Place(s.Pod("leaves", 12207)), s.NodeName("n1"), 0)
			s.Create(s.Pod("next", 8138))
			s.rejected("next", "1 no GPU card has enough free memory")
			s.CheckLedger()

			c.Proxy.SetWatchDelay(time.Hour)
			defer c.Proxy.SetWatchDelay(0)
			before := c.Metric(s, framework.MetricFilteredNodes, "reason", "fragmented")
			s.Delete("leaves")
			c.WaitMetric(s, before+1, framework.MetricFilteredNodes, "reason", "fragmented")
			recoverFrom(s)
			s.WantCard(s.WaitBound("next"), s.NodeName("n1"), 0)
		})
	}

	for title, disturb := range map[string]func(s *stream){
		// Half of the Bindings that are sent arrive without an answer, half of them never arrive.
		"the extender is killed while it waits for the answer to a Binding": func(s *stream) {
			for i := range controlplane.Times(2, 50) {
				fault := controlplane.Hold
				if i%2 == 1 {
					fault = controlplane.HoldAnswer
				}
				held := c.Proxy.Inject(controlplane.Bindings, 0, fault)
				s.next(4)
				s.waitHits(held)
				must(s, c.Extender.Kill())
				held.Lift()
				must(s, c.Extender.Start(s.Context()))
			}
		},
		"the API server is away": func(s *stream) {
			s.next(6)
			must(s, c.APIServer.Kill())
			pass(s.Context(), outage)
			must(s, c.APIServer.Start(s.Context()))
			must(s, c.Scheduler.Restart(s.Context())) // See framework.Patience.
		},
		"a node is deleted and created again": func(s *stream) {
			for range controlplane.Times(1, 20) {
				s.next(6)
				must(s, c.Client.CoreV1().Nodes().Delete(s.Context(), s.NodeName("n1"), metav1.DeleteOptions{}))
				s.next(3)
				s.AddNodes(node("n1", cardMiB, cardMiB, cardMiB, cardMiB))
			}
		},
		"etcd, API server and extender are killed": func(s *stream) {
			s.next(6)
			must(s, c.Etcd.Kill())
			must(s, c.APIServer.Kill())
			must(s, c.Extender.Kill())
			must(s, c.Etcd.Start(s.Context()))
			must(s, c.APIServer.Start(s.Context()))
			must(s, c.Extender.Start(s.Context()))
			must(s, c.Scheduler.Restart(s.Context()))
		},
	} {
		play(t, c, "during a stream of pods "+title, func(s *scene) {
			stream := newStream(s, 2)
			disturb(stream)
			stream.next(6)
			stream.waitAll()
			s.CheckLedger()

			before, err := c.LedgerAllocations(s.Context())
			must(s, err)
			must(s, c.Extender.Restart(s.Context()))
			after, err := c.LedgerAllocations(s.Context())
			must(s, err)
			if diff := cmp.Diff(before, after); diff != "" {
				s.Errorf("the ledger (-before a restart of the extender +after):\n%s", diff)
			}
			s.Logf("%d pods were created; %d of them are bound, the others were deleted", stream.made, len(stream.alive))
		})
	}
}

// outage is how long a program is away.
var outage = time.Duration(controlplane.Times(3, 20)) * time.Second

// pass lets time pass, because the test needs an outage of that length.
func pass(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// stream creates pods of random sizes, and deletes every third one some pods later, in whatever state it is by then.
type stream struct {
	*scene
	random *rand.Rand
	made   int
	// alive has the pods that exist, the oldest first.
	alive []string
}

// streamKeeps bounds the pods that exist. Two nodes of a stream have room for them.
const streamKeeps = 25

// newStream creates the nodes, each with four cards.
func newStream(s *scene, nodes int) *stream {
	s.Helper()
	for i := range nodes {
		s.AddNodes(node(fmt.Sprintf("n%d", i), cardMiB, cardMiB, cardMiB, cardMiB))
	}
	return &stream{scene: s, random: rand.New(rand.NewPCG(1, 2))}
}

func (s *stream) next(pods int) {
	s.Helper()
	for range pods {
		name := fmt.Sprintf("pod-%03d", s.made)
		pod := s.Pod(name, 512+s.random.Int64N(5000)).Obj()
		s.Eventually("pod "+name+" is created", func(ctx context.Context) error {
			_, err := s.Pods().Create(ctx, pod, metav1.CreateOptions{})
			if apierrors.IsAlreadyExists(err) {
				return nil
			}
			return err
		})
		s.alive = append(s.alive, name)
		if s.made%3 == 2 {
			s.delete(fmt.Sprintf("pod-%03d", s.made-2))
		}
		if len(s.alive) > streamKeeps {
			s.delete(s.alive[0])
		}
		s.made++
	}
}

func (s *stream) delete(name string) {
	s.Helper()
	if i := slices.Index(s.alive, name); i >= 0 {
		s.Delete(name)
		s.alive = slices.Delete(s.alive, i, i+1)
	}
}

// waitAll waits until all pods that exist are bound.
func (s *stream) waitAll() {
	s.Helper()
	for _, name := range s.alive {
		s.WaitBound(name)
	}
}
