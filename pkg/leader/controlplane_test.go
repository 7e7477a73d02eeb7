package leader

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/controlplane"
)

// cluster is an API server and a ServiceAccount with exactly the permissions of an Elector.
type cluster struct {
	*controlplane.ControlPlane
	kubeconfig string
}

func startCluster(t *testing.T) cluster {
	t.Helper()
	c := cluster{ControlPlane: controlplane.StartForTest(t, controlplane.Options{WithoutScheduler: true})}
	const name = "gpushare-extender"
	meta := metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: name}
	rule := func(group, resource string, names []string, verbs ...string) rbacv1.PolicyRule {
		return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{resource}, ResourceNames: names, Verbs: verbs}
	}
	_, err := c.Client.CoreV1().ServiceAccounts(meta.Namespace).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: meta}, metav1.CreateOptions{})
	must(t, err)
	_, err = c.Client.CoreV1().Services(meta.Namespace).Create(t.Context(), &corev1.Service{
		ObjectMeta: meta, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 12345}}},
	}, metav1.CreateOptions{})
	must(t, err)
	_, err = c.Client.RbacV1().Roles(meta.Namespace).Create(t.Context(), &rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		rule("coordination.k8s.io", "leases", nil, "create"),
		rule("coordination.k8s.io", "leases", []string{LeaseName}, "get", "list", "watch", "update"),
		rule("", "services", []string{name}, "get"),
		rule("discovery.k8s.io", "endpointslices", nil, "create"),
		rule("discovery.k8s.io", "endpointslices", []string{name}, "get", "update", "delete"),
	}}, metav1.CreateOptions{})
	must(t, err)
	_, err = c.Client.RbacV1().RoleBindings(meta.Namespace).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: meta,
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: meta.Namespace, Name: name}},
	}, metav1.CreateOptions{})
	must(t, err)
	c.kubeconfig, err = c.ServiceAccountKubeconfig(t.Context(), meta.Namespace, name)
	must(t, err)
	return c
}

var must = check.Must

func client(t *testing.T, kubeconfig string) kubernetes.Interface {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	must(t, err)
	config.QPS, config.Burst = 100, 100
	client, err := kubernetes.NewForConfig(config)
	must(t, err)
	return client
}

// options returns the options of a replica with that address.
func options(client kubernetes.Interface, address string) Options {
	e := endpoint(address)
	return Options{
		Client: client, Identity: address, Endpoint: &e,
		LeaseDuration: 3 * time.Second, RenewDeadline: 2 * time.Second, RetryPeriod: 200 * time.Millisecond,
		BindDeadline: time.Second,
	}
}

// published returns the address in the EndpointSlice.
func (c cluster) published(t *testing.T) string {
	t.Helper()
	slice, err := c.Client.DiscoveryV1().EndpointSlices(metav1.NamespaceSystem).Get(context.Background(), "gpushare-extender", metav1.GetOptions{})
	if err != nil || len(slice.Endpoints) != 1 || len(slice.Endpoints[0].Addresses) != 1 {
		return ""
	}
	return slice.Endpoints[0].Addresses[0]
}

// neverTwo checks until the end of the test that the two replicas never lead at the same time.
func neverTwo(t *testing.T, a, b *replica) {
	done := make(chan struct{})
	var watching sync.WaitGroup
	t.Cleanup(func() { close(done); watching.Wait() })
	watching.Go(func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(time.Millisecond):
			}
			// a is read twice, because it can hand over between the reads of a and b.
			if a.Leading() == nil && b.Leading() == nil && a.Leading() == nil {
				t.Error("two replicas lead at the same time")
				return
			}
		}
	})
}

// TestPartition disconnects the leader from the API server. It is replaced, reconnects as a standby, and leads again.
func TestPartition(t *testing.T) {
	c := startCluster(t)
	proxy := c.StartProxyForTest(t)
	through, err := proxy.Kubeconfig(c.kubeconfig)
	must(t, err)
	first := run(t, options(client(t, through), "10.0.0.1"))
	first.changes.awaitLeading(t)
	await.True(t, "the first is published", func() bool { return c.published(t) == "10.0.0.1" })
	second := run(t, options(client(t, c.kubeconfig), "10.0.0.2"))
	neverTwo(t, first, second)
	await.True(t, "the second is on standby", func() bool {
		second.term.mu.Lock()
		defer second.term.mu.Unlock()
		return second.term.former.holder == "10.0.0.1"
	})

	begun := time.Now()
	heal := proxy.Blackhole()
	await.True(t, "the first has lapsed", func() bool { return errors.Is(first.CheckAnswering(), ErrLapsed) })
	lapsedAfter := time.Since(begun)
	await.True(t, "the second holds the Lease and waits", func() bool { return errors.Is(second.CheckAnswering(), ErrWaiting) })
	await.True(t, "the second answers", func() bool { return second.CheckAnswering() == nil })
	t.Logf("with 3 s of lease, 2 s to renew and 1 s for binds: the first stopped after %v, the second answered after %v",
		lapsedAfter.Round(time.Millisecond), time.Since(begun).Round(time.Millisecond))
	await.True(t, "the second is published", func() bool { return c.published(t) == "10.0.0.2" })

	slices := c.Client.DiscoveryV1().EndpointSlices(metav1.NamespaceSystem)
	must(t, slices.Delete(t.Context(), "gpushare-extender", metav1.DeleteOptions{}))
	await.True(t, "a deleted slice is created again", func() bool { return c.published(t) == "10.0.0.2" })
	spoiled, err := slices.Get(t.Context(), "gpushare-extender", metav1.GetOptions{})
	must(t, err)
	spoiled.Endpoints[0].Addresses[0] = "10.0.0.66"
	_, err = slices.Update(t.Context(), spoiled, metav1.UpdateOptions{})
	must(t, err)
	await.True(t, "a changed slice is restored", func() bool { return c.published(t) == "10.0.0.2" })

	heal()
	await.True(t, "the first is on standby", func() bool { return errors.Is(first.CheckAnswering(), ErrStandingBy) })
	before := renewed(second.term)
	await.True(t, "the second still leads", func() bool { return renewed(second.term).After(before) && second.CheckAnswering() == nil })
	if got := c.published(t); got != "10.0.0.2" {
		t.Errorf("published is %q", got)
	}

	second.stop()
	await.True(t, "the first leads again", func() bool { return first.CheckAnswering() == nil })
	await.True(t, "the first is published again", func() bool { return c.published(t) == "10.0.0.1" })
}

// A deleted Lease is created again by the leader, or taken by another replica, which waits until the writes of the
// former leader have ended.
func TestLeaseDeleted(t *testing.T) {
	c := startCluster(t)
	first := run(t, options(client(t, c.kubeconfig), "10.0.0.1"))
	first.changes.awaitLeading(t)
	second := run(t, options(client(t, c.kubeconfig), "10.0.0.2"))
	neverTwo(t, first, second)
	await.True(t, "the second is on standby", func() bool {
		second.term.mu.Lock()
		defer second.term.mu.Unlock()
		return second.term.former.holder == "10.0.0.1"
	})
	must(t, c.Client.CoordinationV1().Leases(metav1.NamespaceSystem).Delete(t.Context(), LeaseName, metav1.DeleteOptions{}))
	await.True(t, "the Lease is held again", func() bool {
		l, err := c.Client.CoordinationV1().Leases(metav1.NamespaceSystem).Get(t.Context(), LeaseName, metav1.GetOptions{})
		return err == nil && *l.Spec.HolderIdentity != ""
	})
	await.True(t, "one of them answers", func() bool { return first.CheckAnswering() == nil || second.CheckAnswering() == nil })
}
