package scheduling

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fake"
)

// fairSharing is how tenants share the memory of a world. The zero value means that they don't.
type fairSharing struct {
	// tenants are the namespaces of the pods.
	tenants []simTenant
	// reclaimAfter is 0 if nothing is reclaimed.
	reclaimAfter, minRuntime time.Duration
	provisioning             int
	// pause is the time between two ticks.
	pause time.Duration
}

// simTenant is a tenant, with one namespace of that name.
type simTenant struct{ name, weight string }

// testGate is a gate that users remove.
const testGate = "test/gate"

func (f fairSharing) on() bool { return len(f.tenants) > 0 }

func (f fairSharing) options(w *world) FairShareOptions {
	return FairShareOptions{
		On: f.on(), PriorityCutoff: dispatch.DefaultPriorityCutoff, Provisioning: f.provisioning, ReclaimAfter: f.reclaimAfter, MinRuntime: f.minRuntime,
		Observer: fairObserver{&fake.Observer{}, w},
	}
}

// namespace returns the object of the tenant's namespace.
func (t simTenant) namespace() *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: t.name, Annotations: map[string]string{protocol.AnnotationFairShareWeight: t.weight}}}
}

// randomSharing turns fair sharing on.
func (w *world) randomSharing() {
	w.fair = fairSharing{provisioning: w.random.IntN(3), pause: w.between(minTickPause, tickInterval)}
	for _, name := range []string{"alice", "bob", "carol", "dave"}[:2+w.random.IntN(3)] {
		w.fair.tenants = append(w.fair.tenants, simTenant{name, []string{"1", "1", "3"}[w.random.IntN(3)]})
	}
	if w.chance(0.7) {
		w.fair.reclaimAfter, w.fair.minRuntime = w.between(20*time.Second, 2*time.Minute), w.between(0, time.Minute)
	}
}

// randomTenant gives a pod to a tenant, if the world has any. The first tenants have more pods.
func (w *world) randomTenant(spec *podSpec) {
	if w.fair.on() {
		spec.tenant = w.fair.tenants[min(w.random.IntN(len(w.fair.tenants)), w.random.IntN(len(w.fair.tenants)))].name
		spec.fairGate = w.chance(0.6)
	}
}

// beginFairSharing reports the namespaces, and begins the loop of fair sharing.
func (r *replica) beginFairSharing() {
	for _, t := range r.w.fair.tenants {
		r.scheduler.fair.NamespaceUpdated(t.namespace())
	}
	r.w.after(r.w.between(0, r.w.fair.pause), r.share)
}

// share is the loop of fair sharing.
func (r *replica) share() {
	if !r.runs(r.share) {
		return
	}
	r.scheduler.fair.tick(r.w.context())
	r.w.after(r.w.fair.pause, r.share)
}

// checkCharges checks that the leader counts no pod of a tenant twice, and none that doesn't exist.
func (w *world) checkCharges(r *replica) {
	if !w.fair.on() {
		return
	}
	requested := map[string]gpu.Memory{}
	for _, p := range r.cache.pods {
		if !p.Ended {
			requested[p.Namespace] += p.Request
		}
	}
	for _, t := range r.scheduler.fair.manager.Tenants() {
		if t.Allocated > requested[t.Name] {
			w.fail("%s counts %d for tenant %s, whose pods request %d", r.name, t.Allocated, t.Name, requested[t.Name])
		}
	}
}

// removeGate removes one scheduling gate of a pod.
func (a *apiServer) removeGate(p *apiPod, gate string) {
	a.edit(p, func(object *corev1.Pod) {
		object.Spec.SchedulingGates = slices.DeleteFunc(slices.Clone(object.Spec.SchedulingGates), func(g corev1.PodSchedulingGate) bool { return g.Name == gate })
	})
}

// openGate is the API server's part of the removal of a gate.
func (a *apiServer) openGate(pod gpu.Pod, gate, by string) error {
	p := a.pods[pod.Name]
	switch {
	case p == nil:
		return apierrors.NewNotFound(fake.PodResource, pod.Name)
	case p.uid() != pod.UID:
		return apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Pod").GroupKind(), pod.Name, nil)
	case !slices.ContainsFunc(p.object.Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool { return g.Name == gate }):
		return nil
	}
	a.w.stats.opened++
	a.w.trace("api: %s opens the gate of %s", by, p.name())
	a.removeGate(p, gate)
	return nil
}

// taskGroup is a group of tasks of a replica.
type taskGroup struct {
	r       *replica
	running int
	err     error
	// waiting is the task that waits for the others; nil if none does.
	waiting *task
}

// newGroup is Options.newGroup. The limit is more than there are pods.
func (r *replica) newGroup(int) background.Group { return &taskGroup{r: r} }

// Go implements background.Group.
func (g *taskGroup) Go(run func() error) {
	g.running++
	g.r.w.start(g.r, func() {
		if err := run(); err != nil && g.err == nil {
			g.err = err
		}
		if g.running--; g.running == 0 && g.waiting != nil {
			g.waiting.wake()
		}
	})
}

// Wait implements background.Group.
func (g *taskGroup) Wait() error {
	if g.running > 0 {
		g.waiting = g.r.w.current
		g.r.w.park()
		g.waiting = nil
	}
	return g.err
}

// fairObserver counts what fair sharing does.
type fairObserver struct {
	*fake.Observer
	w *world
}

func (o fairObserver) ChargeExpired() { o.w.stats.failed["charge expired"]++ }
func (o fairObserver) ReclaimFailed() { o.w.stats.failed["reclaim failed"]++ }
