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
	"github.com/gpushare/gpushare/test/testbed"
)

// quick are flags under which what takes half a minute by default takes seconds.
var shortTimeouts = []string{"--bind-timeout=1s", "--gang-hold=3s", "--gang-patience=8s"}

// TestFaults strikes at random moments while a group is gathered and bound, with its binds slowed down: whatever ends or goes
// away, the group is whole afterwards, or nobody of it is bound; and nothing stays reserved.
func TestFaults(t *testing.T) {
	bed := testbed.StartForTest(t, testbed.Options{MemoryUnit: "GiB", ThroughProxy: true, ExtenderArgs: shortTimeouts})
	const size = 6
	rounds := shortOrLong(2, 20)

	play := func(name string, cards []int, strike func(f *fixture, gang string)) {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, bed, cards...)
			random := rand.New(rand.NewPCG(1, uint64(len(name))))
			var slow atomic.Int64
			struck := map[int]int{}
			for round := range rounds {
				slow.Store(random.Int64N(300))
				injection := bed.Proxy.Inject(controlplane.Bindings, 0, func(w http.ResponseWriter, r *http.Request, next http.Handler, lifted <-chan struct{}) {
					controlplane.Slow(time.Duration(rand.Int64N(slow.Load()+1))*time.Millisecond)(w, r, next, lifted)
				})
				gang := fmt.Sprintf("g%d", round)
				f.createGang(gang, size, card)
				pause := time.NewTimer(time.Duration(random.IntN(700)) * time.Millisecond) // Any moment will do.
				<-pause.C
				counts, err := f.bound(t.Context())
				must(t, err)
				struck[counts[gang]]++
				strike(f, gang)
				injection.Lift()
				f.awaitWhole(size, gang)
				f.checkCards()
				f.deleteGang(gang)
				f.awaitBound(map[string]int{})
				f.awaitNoReservations()
			}
			t.Logf("%d rounds; so many members were bound at the moment of the fault, how often: %v", rounds, struck)
		})
	}

	roomy := []int{4, 4}
	play("the extender is killed", roomy, func(f *fixture, _ string) {
		must(f, bed.Extender.Kill())
		must(f, bed.Extender.Start(f.Context()))
	})
	play("kube-scheduler is killed", roomy, func(f *fixture, _ string) {
		must(f, bed.Scheduler.Kill())
		must(f, bed.Scheduler.Start(f.Context()))
	})
	play("a member is deleted and made anew", roomy, func(f *fixture, gang string) {
		f.deletePods(gang + "-3")
		f.createMembers(gang, size, 3, 4, card)
	})
	play("a node is lost", []int{4, 4, 4}, func(f *fixture, _ string) {
		must(f, bed.Client.CoreV1().Nodes().Delete(f.Context(), f.node(0), metav1.DeleteOptions{}))
		defer func() {
			must(f, bed.CreateNodes(f.Context(), controlplane.Node{
				Name: f.node(0), Unit: gpu.GiB, Cards: controlplane.EqualCards(4, card), Labels: map[string]string{fixtureLabel: f.namespace},
			}))
		}()
	})
	play("binds fail for a while", roomy, func(*fixture, string) {
		bed.Proxy.Inject(controlplane.Bindings, 5, controlplane.Answer(http.StatusServiceUnavailable, 0))
	})
	play("answers to binds are lost", roomy, func(*fixture, string) {
		bed.Proxy.Inject(controlplane.Bindings, 3, controlplane.CutAnswer)
	})

	t.Run("a member can't be bound at all", func(t *testing.T) {
		f := newFixture(t, bed, roomy...)
		evicted := 0
		for round := range rounds {
			gang := fmt.Sprintf("g%d", round)
			never := f.rejectBinds(gang + "-2")
			f.createGang(gang, size, card)
			// Bound in part at first, then given up: without a controller nobody makes new ones.
			f.eventually("the members that were bound are evicted", func(ctx context.Context) error {
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
					default: // No kubelet is there to end it.
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
		t.Logf("%d rounds; %d members that were bound were evicted", rounds, evicted)
	})
}

// TestLeaders: the extender that leads is killed, asked to end or frozen at a random moment while a group is gathered and
// bound, and another one goes on with it.
func TestLeaders(t *testing.T) {
	bed := testbed.StartForTest(t, testbed.Options{MemoryUnit: "GiB", Replicas: 2, ExtenderArgs: append([]string{
		"--leader-elect-lease-duration=3s", "--leader-elect-renew-deadline=2s", "--leader-elect-retry-period=200ms",
		// kube-scheduler may wait out its timeout twice: for a bind and for a filter that the frozen one doesn't answer.
	}, append(shortTimeouts, "--gang-patience=45s")...)})
	const size = 6
	random := rand.New(rand.NewPCG(5, 5))
	rounds := shortOrLong(1, 20)
	play := func(name string, strike func(leader *controlplane.Process) error, mend func(leader *controlplane.Process) error) {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, bed, 4, 4)
			struck := map[int]int{}
			for round := range rounds {
				var leader *controlplane.Process
				f.eventually("a replica leads", func(ctx context.Context) error {
					i := bed.Leader(ctx)
					if i < 0 {
						return errors.New("none is published")
					}
					leader = bed.Replicas[i]
					return nil
				})
				gang := fmt.Sprintf("g%d", round)
				f.createGang(gang, size, card)
				pause := time.NewTimer(time.Duration(random.IntN(60)) * time.Millisecond) // Any moment will do.
				<-pause.C
				counts, err := f.bound(t.Context())
				must(t, err)
				struck[counts[gang]]++
				must(t, strike(leader))
				f.awaitWhole(size, gang)
				f.checkCards()
				must(t, mend(leader))
				must(t, leader.WaitReady(t.Context()))
				// What the old leader still does when it is back it does within its Lease and a bind's timeout, here 4 s.
				f.staysBound(5*time.Second, map[string]int{gang: size})
				f.deleteGang(gang)
				f.awaitBound(map[string]int{})
				f.awaitNoReservations()
			}
			t.Logf("%d rounds; so many members were bound at that moment, how often: %v", rounds, struck)
		})
	}
	start := func(leader *controlplane.Process) error { return leader.Start(t.Context()) }
	play("the leader is killed", (*controlplane.Process).Kill, start)
	play("the leader is asked to end", func(leader *controlplane.Process) error { return leader.Terminate(t.Context()) }, start)
	play("the leader is frozen", (*controlplane.Process).Pause, (*controlplane.Process).Resume)
}

// neverBound turns every bind of the pod away, for good and not for a moment, until that is lifted.
func (f *fixture) rejectBinds(pod string) *controlplane.Injection {
	return f.bed.Proxy.Inject(func(r *http.Request) bool {
		return controlplane.Bindings(r) && strings.Contains(r.URL.Path, "/pods/"+pod+"/")
	}, 0, controlplane.Answer(http.StatusUnprocessableEntity, 0))
}

// settled waits until the group is whole. A group that isn't after patience is bound in part, or not at all
// though there is room: neither may be.
func (f *fixture) awaitWhole(size int, gang string) {
	f.Helper()
	f.awaitBound(map[string]int{gang: size})
}

// nothingReserved waits until no pod holds memory without being bound.
func (f *fixture) awaitNoReservations() {
	f.Helper()
	f.eventually("nothing is reserved", func(ctx context.Context) error {
		body, err := testbed.Fetch(ctx, f.bed.ExtenderURL+"/metrics")
		if err != nil {
			return err
		}
		if !strings.Contains(string(body), `gpushare_extender_holders{state="reserved"} 0`) {
			return errors.New("something is")
		}
		return nil
	})
}

// metric returns the extender's figure of that name and labels, 0 where it has none.
func (f *fixture) metric(name string) (value float64) {
	f.Helper()
	body, err := testbed.Fetch(f.Context(), f.bed.ExtenderURL+"/metrics")
	must(f, err)
	for line := range strings.Lines(string(body)) {
		if figure, ok := strings.CutPrefix(line, name+" "); ok {
			value, err = strconv.ParseFloat(strings.TrimSpace(figure), 64)
			must(f, err)
		}
	}
	return value
}
