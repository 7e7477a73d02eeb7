package cluster

import (
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	policyListersv1 "k8s.io/client-go/listers/policy/v1"
)

// budgetBook finds the disruption budgets of pods by kube-scheduler's rules (k8s.io/kubernetes
// pkg/scheduler/framework/plugins/defaultpreemption, filterPodsWithPDBViolation). It lists each namespace once, and is
// used for one request only.
type budgetBook struct {
	lister     policyListersv1.PodDisruptionBudgetLister
	namespaces map[string][]budget
}

type budget struct {
	*policyv1.PodDisruptionBudget
	selector labels.Selector
}

// of returns the budgets of which the pod's eviction uses one disruption.
func (b *budgetBook) of(pod *corev1.Pod) []*policyv1.PodDisruptionBudget {
	var out []*policyv1.PodDisruptionBudget
	for _, candidate := range b.in(pod.Namespace) {
		if !candidate.selector.Matches(labels.Set(pod.Labels)) {
			continue
		}
		if _, counted := candidate.Status.DisruptedPods[pod.Name]; !counted {
			out = append(out, candidate.PodDisruptionBudget)
		}
	}
	return out
}

func (b *budgetBook) in(namespace string) []budget {
	if budgets, known := b.namespaces[namespace]; known {
		return budgets
	}
	list, _ := b.lister.PodDisruptionBudgets(namespace).List(labels.Everything()) // A List from the cache never fails.
	var budgets []budget
	for _, object := range list {
		selector, err := metav1.LabelSelectorAsSelector(object.Spec.Selector)
		if err != nil || selector.Empty() {
			continue // An invalid or empty selector matches no pod.
		}
		budgets = append(budgets, budget{object, selector})
	}
	if b.namespaces == nil {
		b.namespaces = map[string][]budget{}
	}
	b.namespaces[namespace] = budgets
	return budgets
}
