package gang

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// shortTimeouts are extender flags that shorten the tests from minutes to seconds.
var shortTimeouts = []string{"--bind-timeout=1s", "--gang-hold=3s", "--gang-patience=8s"}

// TestFaults injects faults at random moments while a gang is gathered and bound, with slow binds. Afterwards the gang
// is whole or has no bound member, and nothing remains reserved.
func TestFaults(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB", ThroughProxy: true, ExtenderArgs: shortTimeouts})
	const size = 6
	rounds := shortOrLong(2, 20)

	play := func(name string, cards []int, inject func(f *fixture, gang string)) {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, bed, cards...)
			random := rand.New(rand.NewPCG(1, uint64(len(name))))
			var slow atomic.Int64
			boundAtFault := map[int]int{}
			for round := range rounds {
				slow.Store(random.Int64N(300))
				injection := bed.Proxy.Inject(controlplane.Bindings, 0, func(w http.ResponseWriter, r *http.Request, next http.Handler, lifted <-chan struct{}) {
					controlplane.Slow(time.Duration(rand.Int64N(slow.Load()+1))*time.Millisecond)(w, r, next, lifted)
				})
				gang := fmt.Sprintf("g%d", round)
				f.createGang(gang, size, card)
				pause := time.NewTimer(time.Duration(random.IntN(700)) * time.Millisecond) // A random moment, on purpose.
				<-pause.C
				counts, err := f.bound(t.Context())
				must(t, err)
				boundAtFault[counts[gang]]++
				inject(f, gang)
				injection.Lift()
				f.awaitWhole(size, gang)
				f.checkCards()
				f.deleteGang(gang)
				f.awaitBound(map[string]int{})
				f.awaitNoReservations()
			}
			t.Logf("%d rounds; rounds by bound members at the moment of the fault: %v", rounds, boundAtFault)
		})
	}

	enough := []int{4, 4}
	play("the extender is killed", enough, func(f *fixture, _ string) {
		must(f, bed.Extender.Kill())
		must(f, bed.Extender.Start(f.Context()))
	})
	play("kube-scheduler is killed", enough, func(f *fixture, _ string) {
		must(f, bed.Scheduler.Kill())
		must(f, bed.Scheduler.Start(f.Context()))
	})
	play("a member is deleted and replaced", enough, func(f *fixture, gang string) {
		f.deletePods(gang + "-3")
		f.createMembers(gang, size, 3, 4, card)
	})
	play("a node is deleted", []int{4, 4, 4}, func(f *fixture, _ string) {
		must(f, bed.Client.CoreV1().Nodes().Delete(f.Context(), f.node(0), metav1.DeleteOptions{}))
		defer func() {
			must(f, bed.CreateNodes(f.Context(), controlplane.Node{
				Name: f.node(0), Unit: gpu.GiB, Cards: controlplane.EqualCards(4, card), Labels: map[string]string{fixtureLabel: f.namespace},
			}))
		}()
	})
	play("binds fail for a while", enough, func(*fixture, string) {
		bed.Proxy.Inject(controlplane.Bindings, 5, controlplane.Answer(http.StatusServiceUnavailable, 0))
	})
	play("answers to binds are lost", enough, func(*fixture, string) {
		bed.Proxy.Inject(controlplane.Bindings, 3, controlplane.CutAnswer)
	})

	t.Run("a member can never be bound", func(t *testing.T) {
		f := newFixture(t, bed, enough...)
		evicted := 0
		for round := range rounds {
			gang := fmt.Sprintf("g%d", round)
			never := f.rejectBinds(gang + "-2")
			f.createGang(gang, size, card)
			// The gang is partial, then evicted. Without a controller its members aren't replaced.
			f.eventually("the bound members are evicted", func(ctx context.Context) error {
				pods, err := f.pods(ctx)
				if err != nil {
					return err
				}
				bound := 0
				for i := range pods {
					switch {
					case pods[i].Spec.NodeName == "":
					case pods[i].DeletionTimestamp == nil:
						bound++
					default: // There is no kubelet that ends it.
						if err := f.requestDeletion(ctx, &pods[i]); err != nil {
							return err
						}
						evicted++
					}
				}
				if bound > 0 || len(pods) == size {
					return fmt.Errorf("%d of %d are bound", bound, len(pods))
				}
				return nil
			})
			never.Lift()
			f.deleteGang(gang)
			f.awaitBound(map[string]int{})
			f.awaitNoReservations()
		}
		t.Logf("%d rounds; %d bound members were evicted", rounds, evicted)
	})
}

// TestLeaders: the leader is killed, terminated or frozen at a random moment while a gang is gathered and bound, and
// the other replica continues.
func TestLeaders(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB", Replicas: 2, ExtenderArgs: append([]string{
		"--leader-elect-lease-duration=3s", "--leader-elect-renew-deadline=2s", "--leader-elect-retry-period=200ms",
		// kube-scheduler's timeout can pass twice: for a bind and for a filter that the frozen leader doesn't answer.
	}, append(shortTimeouts, "--gang-patience=45s")...)})
	const size = 6
	random := rand.New(rand.NewPCG(5, 5))
	rounds := shortOrLong(1, 20)
	play := func(name string, inject func(leader *controlplane.Process) error, restore func(leader *controlplane.Process) error) {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, bed, 4, 4)
			boundAtFault := map[int]int{}
			for round := range rounds {
				var leader *controlplane.Process
				f.eventually("a replica leads", func(ctx context.Context) error {
					i := bed.Leader(ctx)
					if i < 0 {
						return errors.New("no leader is published")
					}
					leader = bed.Replicas[i]
					return nil
				})
				gang := fmt.Sprintf("g%d", round)
				f.createGang(gang, size, card)
				pause := time.NewTimer(time.Duration(random.IntN(60)) * time.Millisecond) // A random moment, on purpose.
				<-pause.C
				counts, err := f.bound(t.Context())
				must(t, err)
				boundAtFault[counts[gang]]++
				must(t, inject(leader))
				f.awaitWhole(size, gang)
				f.checkCards()
				must(t, restore(leader))
				must(t, leader.WaitReady(t.Context()))
				// The former leader can still act within its Lease and a bind's timeout, here 4 s.
				f.staysBound(5*time.Second, map[string]int{gang: size})
				f.deleteGang(gang)
				f.awaitBound(map[string]int{})
				f.awaitNoReservations()
			}
			t.Logf("%d rounds; rounds by bound members at the moment of the fault: %v", rounds, boundAtFault)
		})
	}
	start := func(leader *controlplane.Process) error { return leader.Start(t.Context()) }
	play("the leader is killed", (*controlplane.Process).Kill, start)
	play("the leader is terminated", func(leader *controlplane.Process) error { return leader.Terminate(t.Context()) }, start)
	play("the leader is frozen", (*controlplane.Process).Pause, (*controlplane.Process).Resume)
}

// rejectBinds rejects all binds of the pod with a permanent error until the injection is lifted.
func (f *fixture) rejectBinds(pod string) *controlplane.Injection {
	return f.bed.Proxy.Inject(func(r *http.Request) bool {
		return controlplane.Bindings(r) && strings.Contains(r.URL.Path, "/pods/"+pod+"/")
	}, 0, controlplane.Answer(http.StatusUnprocessableEntity, 0))
}

// awaitWhole waits until the gang is whole. If it isn't in time, it is partial, or not bound although it fits: both are
// failures.
func (f *fixture) awaitWhole(size int, gang string) {
	f.Helper()
	f.awaitBound(map[string]int{gang: size})
}

// awaitNoReservations waits until all allocations are those of bound pods.
func (f *fixture) awaitNoReservations() {
	f.Helper()
	f.eventually("no memory is reserved", func(ctx context.Context) error {
		body, err := framework.Fetch(ctx, f.bed.ExtenderURL+"/metrics")
		if err != nil {
			return err
		}
		if !strings.Contains(string(body), `gpushare_extender_holders{state="reserved"} 0`) {
			return errors.New("memory is reserved")
		}
		return nil
	})
}

// metric returns the value of the extender's metric with this name and labels, 0 if there is none.
func (f *fixture) metric(name string) (value float64) {
	f.Helper()
	body, err := framework.Fetch(f.Context(), f.bed.ExtenderURL+"/metrics")
	must(f, err)
	for line := range strings.Lines(string(body)) {
		if figure, ok := strings.CutPrefix(line, name+" "); ok {
			value, err = strconv.ParseFloat(strings.TrimSpace(figure), 64)
			must(f, err)
		}
	}
	return value
}
