package gang

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/gpushare/gpushare/test/controlplane"
)

// faultySize is the size of the gangs in the tests with faults.
const faultySize = 6

// TestFaults injects a fault at a random moment while a gang is gathered and bound, with slow binds. Afterwards the gang is
// whole, and nothing is assumed.
func TestFaults(t *testing.T) {
	c := hasty.Start(t)
	rounds := controlplane.Times(1, 20)
	for title, program := range map[string]*controlplane.Process{"the extender is killed": c.Extender, "kube-scheduler is killed": c.Scheduler} {
		t.Run(title, func(t *testing.T) {
			f := newFixture(t, c, 4, 4)
			random := rand.New(rand.NewPCG(1, uint64(len(title))))
			boundAtFault := map[int]int{}
			for round := range rounds {
				slow := random.Int64N(300)
				injection := c.Proxy.Inject(controlplane.Bindings, 0, func(w http.ResponseWriter, r *http.Request, next http.Handler, lifted <-chan struct{}) {
					controlplane.Slow(time.Duration(rand.Int64N(slow+1))*time.Millisecond)(w, r, next, lifted)
				})
				gang := fmt.Sprintf("g%d", round)
				f.createGang(gang, faultySize)
				boundAtFault[f.boundAfter(random.IntN(700), gang)]++
				must(t, program.Restart(t.Context()))
				injection.Lift()
				f.waitBound(map[string]int{gang: faultySize})
				f.CheckLedger()
				f.endGang(gang)
			}
			t.Logf("%d rounds; rounds by bound members at the moment of the fault: %v", rounds, boundAtFault)
		})
	}

	// The gang is partially bound, then evicted. Without a controller its members aren't replaced.
	t.Run("a member can never be bound", func(t *testing.T) {
		f := newFixture(t, c, 4, 4)
		evicted := 0
		for round := range controlplane.Times(1, 20) {
			gang := fmt.Sprintf("g%d", round)
			never := f.rejectBinds(gang + "-2")
			f.createGang(gang, faultySize)
			f.Eventually("the bound members are evicted", func(ctx context.Context) error {
				pods, err := f.List(ctx)
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
				if bound > 0 || len(pods) == faultySize {
					return fmt.Errorf("%d of %d are bound", bound, len(pods))
				}
				return nil
			})
			never.Lift()
			f.endGang(gang)
		}
		t.Logf("%d bound members were evicted", evicted)
	})
}

// boundAfter returns the number of bound members after some time, which is random on purpose.
func (f *fixture) boundAfter(milliseconds int, gang string) int {
	f.Helper()
	pause := time.NewTimer(time.Duration(milliseconds) * time.Millisecond)
	<-pause.C
	counts, err := f.bound(f.Context())
	must(f, err)
	return counts[gang]
}

// rejectBinds rejects all binds of the pod with a permanent error until the injection is lifted.
func (f *fixture) rejectBinds(pod string) *controlplane.Injection {
	return f.Cluster.Proxy.Inject(func(r *http.Request) bool {
		return controlplane.Bindings(r) && strings.Contains(r.URL.Path, "/pods/"+pod+"/")
	}, 0, controlplane.Answer(http.StatusUnprocessableEntity, 0))
}
