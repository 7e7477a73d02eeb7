package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// Metrics of fair sharing.
const (
	metricTenantAllocated = "gpushare_extender_tenant_allocated_units"
	metricTenantWaiting   = "gpushare_extender_tenant_waiting_pods"
)

// gateWrites matches the requests that open gates.
func gateWrites(r *http.Request) bool {
	return r.Method == http.MethodPatch && strings.Contains(r.URL.Path, "/pods/") && !strings.HasSuffix(r.URL.Path, "/status")
}

// TestFairShareFaults injects a fault while the gates of two tenants' pods are opened. Afterwards both have their half, all other
// pods get their turn when these end, no card is over its size, and no tenant is charged for pods that are gone.
func TestFairShareFaults(t *testing.T) {
	c := startFaulty(t, framework.Options{MemoryUnit: "GiB", Replicas: 2, ExtenderArgs: append([]string{"--fair-share=dispatch"}, shortLease...)})
	allowFairShare(t, c)
	for title, fault := range map[string]func(f *fairScene, round int){
		// Of every other round the write takes effect, although the leader doesn't see its answer.
		"the leader is killed between charge and gate": func(f *fairScene, round int) {
			held := c.Proxy.Inject(gateWrites, 0, []controlplane.Fault{controlplane.Hold, controlplane.HoldAnswer}[round%2])
			f.submit()
			f.waitHits(held)
			leader := f.waitLeader(-1)
			must(f, c.Replicas[leader].Kill())
			held.Lift()
			f.waitLeader(leader)
			must(f, c.Replicas[leader].Start(f.Context()))
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
			f.waitShares(4, 4)
		},
		"writes are lost": func(f *fairScene, _ int) {
			var n atomic.Int64
			cut := c.Proxy.Inject(func(r *http.Request) bool {
				return (gateWrites(r) || controlplane.Bindings(r)) && n.Add(1)%2 == 0
			}, 0, controlplane.CutConnection)
			defer cut.Lift()
			f.submit()
			f.waitShares(4, 4)
		},
	} {
		play(t, c, title, func(s *scene) {
			f := &fairScene{scene: s, other: c.NewNamespace(s.T), random: rand.New(rand.NewPCG(1, uint64(len(title))))}
			s.AddNodes(framework.MakeNode("n1").Unit(gpu.GiB).Cards(4, 16))
			for round := range controlplane.Times(1, 20) {
				fault(f, round)
				f.waitShares(4, 4)
				f.CheckLedger()
				f.end() // The others get their turn.
				f.waitShares(2, 2)
				f.CheckLedger()
				f.end()
				f.waitNoCharge()
			}
		})
	}
}

// allowFairShare gives the extender the rights that the chart gives it for fair sharing.
func allowFairShare(t *testing.T, c *framework.Cluster) {
	t.Helper()
	meta := metav1.ObjectMeta{Name: "gpushare-fair-share"}
	_, err := c.Client.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"patch"}},
		{APIGroups: []string{""}, Resources: []string{"namespaces"}, Verbs: []string{"list", "watch"}},
	}}, metav1.CreateOptions{})
	must(t, err)
	_, err = c.Client.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta,
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: meta.Name},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: metav1.NamespaceSystem, Name: "gpushare-extender"}},
	}, metav1.CreateOptions{})
	must(t, err)
}

// fairScene has two tenants: its own namespace and another one, whose pods use the same nodes.
type fairScene struct {
	*scene
	other  *framework.Namespace
	random *rand.Rand
}

func (f *fairScene) tenants() []*framework.Namespace {
	return []*framework.Namespace{f.Namespace, f.other}
}

// submit creates six gated pods of each tenant, each half as large as a card, in random order. Eight of them fit.
func (f *fairScene) submit() {
	f.Helper()
	for _, i := range f.random.Perm(12) {
		pod := f.Pod(fmt.Sprintf("pod-%d", i/2), 8)
		pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: protocol.GateFairShare}}
		f.tenants()[i%2].Create(pod)
	}
}

// bound returns the names of a tenant's bound pods.
func (f *fairScene) bound(ctx context.Context, tenant *framework.Namespace) (names []string, err error) {
	pods, err := tenant.List(ctx)
	for i := range pods {
		if pods[i].Spec.NodeName != "" {
			names = append(names, pods[i].Name)
		}
	}
	return names, err
}

// waitShares waits until the tenants have as many bound pods.
func (f *fairScene) waitShares(want ...int) {
	f.Helper()
	f.Eventually(fmt.Sprintf("the tenants have %v bound pods", want), func(ctx context.Context) error {
		var got []int
		for _, tenant := range f.tenants() {
			names, err := f.bound(ctx, tenant)
			if err != nil {
				return err
			}
			got = append(got, len(names))
		}
		if !slices.Equal(got, want) {
			return fmt.Errorf("they have %v", got)
		}
		return nil
	})
}

// end deletes the bound pods.
func (f *fairScene) end() {
	f.Helper()
	for _, tenant := range f.tenants() {
		names, err := f.bound(f.Context(), tenant)
		must(f, err)
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
