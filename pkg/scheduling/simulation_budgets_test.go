package scheduling

import (
	"errors"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// budget is a disruption budget with the part of its controller, which computes the status late.
type budget struct {
	api *apiServer
	// label is the label of the pods in it, and least the number of healthy pods that it demands.
	label string
	least int
	// object is never changed in place; nil once the budget was deleted.
	object *policyv1.PodDisruptionBudget
	// counting is true while the controller is about to compute the status.
	counting bool
}

// randomBudgets creates budgets for a part of the pods, in each namespace.
func (w *world) randomBudgets() {
	namespaces := []string{corev1.NamespaceDefault}
	for _, t := range w.fair.tenants {
		namespaces = append(namespaces, t.name)
	}
	for _, namespace := range namespaces {
		for _, label := range simBudgets {
			w.addBudget(namespace, label, w.random.IntN(12))
		}
	}
}

// addBudget creates a budget of a namespace for the pods with the label.
func (w *world) addBudget(namespace, label string, least int) {
	b := &budget{api: w.api, label: label, least: least}
	available := intstr.FromInt(least)
	b.object = &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: label}, Spec: policyv1.PodDisruptionBudgetSpec{
		MinAvailable: &available, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{label: "yes"}},
	}}
	w.api.budgets = append(w.api.budgets, b)
	b.publish()
}

// simBudgets are the names of the budgets of each namespace, and the labels of their pods.
var simBudgets = []string{"budget-a", "budget-b"}

// randomBudget adds a pod to budgets, rarely to several.
func (w *world) randomBudget(spec *podSpec) {
	for _, label := range simBudgets {
		if len(w.api.budgets) > 0 && w.chance(0.3) {
			spec.budgets = append(spec.budgets, label)
		}
	}
	spec.unhealthy = len(spec.budgets) > 0 && w.chance(0.1)
}

func (b *budget) publish() { b.api.publish(change{budget: b, disruptions: b.object}) }

func (b *budget) covers(p *apiPod) bool {
	return b.object != nil && p.object.Namespace == b.object.Namespace && p.object.Labels[b.label] != ""
}

// healthy reports whether the pod is ready and not about to be disrupted.
func (b *budget) healthy(p *apiPod) bool {
	_, disrupted := b.object.Status.DisruptedPods[p.name()]
	return p.ready() && !disrupted
}

// change replaces the status.
func (b *budget) change(how func(*policyv1.PodDisruptionBudgetStatus)) {
	object := b.object.DeepCopy()
	how(&object.Status)
	b.object = object
	b.publish()
}

// budgetsChanged lets the controller compute the status of the budgets that cover the pod.
func (a *apiServer) budgetsChanged(p *apiPod) {
	for _, b := range a.budgets {
		if b.counting || !b.covers(p) {
			continue
		}
		b.counting = true
		lag := a.w.between(10*time.Millisecond, 200*time.Millisecond)
		if a.w.chance(0.2) { // The controller is busy.
			lag = a.w.between(time.Second, 30*time.Second)
		}
		a.w.after(lag, b.count)
	}
}

// count computes the status.
func (b *budget) count() {
	b.counting = false
	if b.object == nil {
		return
	}
	healthy := 0
	disrupted := maps.Clone(b.object.Status.DisruptedPods)
	for _, p := range b.api.order {
		if !p.exists || !b.covers(p) {
			continue
		}
		if b.healthy(p) {
			healthy++
		}
	}
	maps.DeleteFunc(disrupted, func(name string, _ metav1.Time) bool {
		p := b.api.pods[name]
		return p == nil || p.info.Leaving
	})
	b.change(func(s *policyv1.PodDisruptionBudgetStatus) {
		s.CurrentHealthy, s.DesiredHealthy, s.DisruptionsAllowed = int32(healthy), int32(b.least), int32(max(0, healthy-b.least))
		s.DisruptedPods = disrupted
	})
}

// endBudgets deletes the budgets.
func (w *world) endBudgets() {
	for _, b := range w.api.budgets {
		b.object = nil
		b.publish()
	}
	w.api.budgets = nil
}

// disrupt asks the budgets of a pod for its eviction, as the API server does (k8s.io/kubernetes pkg/registry/core/pod/storage/eviction.go).
func (a *apiServer) disrupt(p *apiPod, dryRun bool) error {
	if !p.live() || p.info.Leaving || p.object.Status.Phase == corev1.PodPending {
		return nil
	}
	var covering []*budget
	for _, b := range a.budgets {
		if b.covers(p) {
			covering = append(covering, b)
		}
	}
	switch {
	case len(covering) == 0:
		return nil
	case len(covering) > 1:
		return apierrors.NewInternalError(errors.New("this pod has more than one PodDisruptionBudget"))
	}
	b := covering[0]
	status := b.object.Status
	switch {
	case !p.ready() && status.DesiredHealthy > 0 && status.CurrentHealthy >= status.DesiredHealthy:
		return nil
	case status.DisruptionsAllowed <= 0:
		a.w.stats.protected++
		err := apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", 0)
		err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes, metav1.StatusCause{Type: policyv1.DisruptionBudgetCause})
		return err
	case dryRun:
		return nil
	}
	b.change(func(s *policyv1.PodDisruptionBudgetStatus) {
		s.DisruptionsAllowed--
		if s.DisruptedPods == nil {
			s.DisruptedPods = map[string]metav1.Time{}
		}
		s.DisruptedPods[p.name()] = metav1.NewTime(virtualClock{a.w}.Now())
	})
	return nil
}

// Budgets implements clusterCache.
func (c *simCache) Budgets(namespace string) (out []*policyv1.PodDisruptionBudget) {
	for _, b := range c.r.w.api.budgets {
		if object := c.budgets[b]; object != nil && object.Namespace == namespace {
			out = append(out, object)
		}
	}
	return out
}

// evict is the API server's part of an eviction.
func (a *apiServer) evict(pod gpu.Pod, by string, why evictionReason, grace *int64, dryRun bool) error {
	p := a.pods[pod.Name]
	switch {
	case p == nil:
		return notFound(pod.Name)
	case p.uid() != pod.UID:
		return conflict(pod.Name, "another UID")
	}
	if err := a.disrupt(p, dryRun); err != nil || dryRun {
		return err
	}
	a.w.stats.evictions++
	a.w.trace("api: %s evicts %s", by, p.name())
	a.w.checkEviction(p, why, by)
	if grace != nil {
		p.grace = time.Duration(*grace) * time.Second
	}
	a.delete(p)
	return nil
}
