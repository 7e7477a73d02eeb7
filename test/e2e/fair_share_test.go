package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// Metrics of fair sharing.
const (
	metricTenantAllocated = "gpushare_extender_tenant_allocated_units"
	metricTenantWaiting   = "gpushare_extender_tenant_waiting_pods"
)

// faultRounds is how often each fault is injected. These tests run in the long form only.
const faultRounds = 20

func longOnly(t *testing.T) {
	if !controlplane.Long() {
		t.Skip("only in the long form")
	}
}

// gateWrites matches the requests that open gates.
func gateWrites(r *http.Request) bool {
	return r.Method == http.MethodPatch && strings.Contains(r.URL.Path, "/pods/") && !strings.HasSuffix(r.URL.Path, "/status")
}

// TestFairShareFaults injects a fault while the gates of two tenants' pods are opened. Afterwards the cards are full, all other
// pods get their turn when these end, no card is over its size, and no tenant is charged for pods that are gone.
func TestFairShareFaults(t *testing.T) {
	longOnly(t)
	c := framework.StartForTest(t, faulty(framework.Options{MemoryUnit: "GiB", Replicas: 2, FairShare: "dispatch", ExtenderArgs: shortLease}))
	for title, fault := range map[string]func(f *fairScene, round int){
		// Of every other round the write takes effect, although the leader doesn't see its answer.
		"the leader is killed between charge and gate": func(f *fairScene, round int) {
			f.killOpening([]controlplane.Fault{controlplane.Hold, controlplane.HoldAnswer}[round%2])
		},
		"the API server is away": func(f *fairScene, _ int) {
			held := c.Proxy.Inject(gateWrites, 0, controlplane.Hold)
			f.submit()
			f.waitHits(held)
			must(f, c.APIServer.Kill())
			held.Lift()
			pass(f.Context(), outage)
			must(f, c.APIServer.Start(f.Context()))
			must(f, c.Scheduler.Restart(f.Context())) // See framework.Patience.
		},
		"answers are lost": func(f *fairScene, _ int) {
			var n atomic.Int64
			cut := c.Proxy.Inject(func(r *http.Request) bool {
				return (gateWrites(r) || controlplane.Bindings(r)) && n.Add(1)%2 == 0
			}, 0, controlplane.CutAnswer)
			defer cut.Lift()
			f.submit()
			f.waitBound(8)
		},
		"writes are lost": func(f *fairScene, _ int) {
			var n atomic.Int64
			cut := c.Proxy.Inject(func(r *http.Request) bool {
				return (gateWrites(r) || controlplane.Bindings(r)) && n.Add(1)%2 == 0
			}, 0, controlplane.CutConnection)
			defer cut.Lift()
			f.submit()
			f.waitBound(8)
		},
	} {
		play(t, c, title, func(s *scene) {
			f := newFairScene(s)
			for round := range faultRounds {
				fault(f, round)
				f.finish()
			}
		})
	}
}

// TestReclaimFaults kills the leader between the evictions for a tenant that comes when another one has filled the cards. Afterwards
// both have their half, and no more pods were evicted than that takes.
func TestReclaimFaults(t *testing.T) {
	longOnly(t)
	c := framework.StartForTest(t, faulty(framework.Options{
		MemoryUnit: "GiB", Replicas: 2, FairShare: "reclaim",
		ExtenderArgs: append([]string{"--fair-share-reclaim-after=2s", "--fair-share-min-runtime=0s"}, shortLease...),
	}))
	play(t, c, "the leader is killed between evictions", func(s *scene) {
		f := newFairScene(s)
		for round := range faultRounds {
			for i := range 12 {
				f.other.Create(f.gated(i))
			}
			f.waitShares(0, 8)
			held, lift := f.holdEvictions(1+round%3, []controlplane.Fault{controlplane.Hold, controlplane.HoldAnswer}[round%2])
			for i := range 4 {
				f.Create(f.gated(i))
			}
			f.Eventually("evictions are held", func(context.Context) error {
				if held.Load() == 0 {
					return errors.New("none is")
				}
				return nil
			})
			leader := f.waitLeader(-1)
			must(f, c.Replicas[leader].Kill())
			lift()
			f.waitLeader(leader)
			must(f, c.Replicas[leader].Start(f.Context()))
			f.waitShares(4, 4)
			if f.evicted != 4 {
				f.Errorf("%d pods were evicted, want 4", f.evicted)
			}
			f.CheckLedger()
			must(f, f.DeleteAll(f.Context()))
			must(f, f.other.DeleteAll(f.Context()))
			f.waitNoCharge()
			f.evicted = 0
		}
	})
}

// holdEvictions lets the first n evictions pass, and applies the fault to the others until lift is called. held counts these.
func (f *fairScene) holdEvictions(n int, fault controlplane.Fault) (held *atomic.Int64, lift func()) {
	var made atomic.Int64
	held = new(atomic.Int64)
	injection := f.Cluster.Proxy.Inject(func(r *http.Request) bool {
		return r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/eviction")
	}, 0, func(w http.ResponseWriter, r *http.Request, next http.Handler, lifted <-chan struct{}) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		if bytes.Contains(body, []byte(metav1.DryRunAll)) || made.Add(1) <= int64(n) {
			next.ServeHTTP(w, r)
			return
		}
		held.Add(1)
		fault(w, r, next, lifted)
	})
	return held, injection.Lift
}

// fairScene has two tenants: its own namespace and another one, whose pods use the same nodes.
type fairScene struct {
	*scene
	other  *framework.Namespace
	random *rand.Rand
	// evicted counts the evicted pods.
	evicted int
}

// newFairScene returns a scene with two nodes of two cards.
func newFairScene(s *scene) *fairScene {
	s.AddNodes(framework.MakeNode("n1").Unit(gpu.GiB).Cards(2, 16), framework.MakeNode("n2").Unit(gpu.GiB).Cards(2, 16))
	return &fairScene{scene: s, other: s.Cluster.NewNamespace(s.T), random: rand.New(rand.NewPCG(1, 2))}
}

// gated builds a pod with the gate that asks for half of a card.
func (f *fairScene) gated(i int) *framework.PodWrapper {
	return f.Pod(fmt.Sprintf("pod-%d", i), 8).FairShareGate()
}

func (f *fairScene) tenants() []*framework.Namespace {
	return []*framework.Namespace{f.Namespace, f.other}
}

// submit creates six pods of each tenant, in random order. Eight of them fit.
func (f *fairScene) submit() {
	f.Helper()
	for _, i := range f.random.Perm(12) {
		f.tenants()[i%2].Create(f.gated(i / 2))
	}
}

// killOpening submits pods, kills the leader while its first writes that open gates meet the fault, and starts it again.
func (f *fairScene) killOpening(fault controlplane.Fault) {
	f.Helper()
	held := f.Cluster.Proxy.Inject(gateWrites, 0, fault)
	f.submit()
	f.waitHits(held)
	leader := f.waitLeader(-1)
	must(f, f.Cluster.Replicas[leader].Kill())
	held.Lift()
	f.waitLeader(leader)
	must(f, f.Cluster.Replicas[leader].Start(f.Context()))
}

// finish waits until all submitted pods have had their turn, and deletes them.
func (f *fairScene) finish() {
	f.Helper()
	f.waitBound(8)
	f.CheckLedger()
	f.end() // The others get their turn.
	f.waitBound(4)
	f.CheckLedger()
	f.end()
	f.waitNoCharge()
}

// bound returns the names of a tenant's bound pods. It ends evicted ones, since there is no kubelet that does.
func (f *fairScene) bound(ctx context.Context, tenant *framework.Namespace) (names []string, err error) {
	pods, err := tenant.List(ctx)
	for i := range pods {
		switch {
		case pods[i].Spec.NodeName == "":
		case pods[i].DeletionTimestamp == nil:
			names = append(names, pods[i].Name)
		default:
			if err := tenant.Pods().Delete(ctx, pods[i].Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); err != nil {
				return nil, err
			}
			f.evicted++
		}
	}
	return names, err
}

// waitShares waits until the tenants have as many bound pods.
func (f *fairScene) waitShares(want ...int) {
	f.Helper()
	f.waitCounts(fmt.Sprintf("the tenants have %v bound pods", want), func(got []int) bool { return slices.Equal(got, want) })
}

// waitBound waits until as many pods of both tenants are bound. Those that were created first may have got more of the places.
func (f *fairScene) waitBound(want int) {
	f.Helper()
	f.waitCounts(fmt.Sprintf("%d pods are bound", want), func(got []int) bool { return got[0]+got[1] == want })
}

func (f *fairScene) waitCounts(what string, wanted func(got []int) bool) {
	f.Helper()
	f.Eventually(what, func(ctx context.Context) error {
		var got []int
		for _, tenant := range f.tenants() {
			names, err := f.bound(ctx, tenant)
			if err != nil {
				return err
			}
			got = append(got, len(names))
		}
		if !wanted(got) {
			return fmt.Errorf("the tenants have %v", got)
		}
		return nil
	})
}

// end deletes the bound pods. It finds all of them first: others are bound as soon as one is deleted.
func (f *fairScene) end() {
	f.Helper()
	bound := map[*framework.Namespace][]string{}
	for _, tenant := range f.tenants() {
		names, err := f.bound(f.Context(), tenant)
		must(f, err)
		bound[tenant] = names
	}
	for tenant, names := range bound {
		tenant.Delete(names...)
	}
}

// waitNoCharge waits until the leader counts nothing for the tenants.
func (f *fairScene) waitNoCharge() {
	f.Helper()
	f.Eventually("the tenants have nothing", func(ctx context.Context) error {
		values, err := framework.Scrape(ctx, f.Cluster.ExtenderURL+"/metrics", metricTenantAllocated, metricTenantWaiting)
		for series, value := range values {
			if value != 0 {
				return fmt.Errorf("%s is %v", series, value)
			}
		}
		return err
	})
}
