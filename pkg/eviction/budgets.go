package eviction

import (
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpushare/gpushare/pkg/clustercache"
)

// budgets finds the disruption budgets of pods by kube-scheduler's rules (k8s.io/kubernetes
// pkg/scheduler/framework/plugins/defaultpreemption, filterPodsWithPDBViolation). It lists each namespace once, and is
// used for one request only.
type budgets struct {
	cache      Cache
	namespaces map[string][]budget
}

type budget struct {
	*policyv1.PodDisruptionBudget
	selector labels.Selector
}

// of returns the budgets of which the pod's eviction uses one disruption.
func (b *budgets) of(pod *clustercache.PodInfo) []*policyv1.PodDisruptionBudget {
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

func (b *budgets) in(namespace string) []budget {
	if budgets, known := b.namespaces[namespace]; known {
		return budgets
	}
	var budgets []budget
	for _, object := range b.cache.Budgets(namespace) {
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

// budgetNumbers numbers the disruption budgets of one node's pods.
type budgetNumbers struct {
	budgets *budgets
	numbers map[*policyv1.PodDisruptionBudget]int
	allowed []int
}

func (n *budgetNumbers) of(pod *clustercache.PodInfo) []int {
	var out []int
	for _, budget := range n.budgets.of(pod) {
		number, known := n.numbers[budget]
		if !known {
			if n.numbers == nil {
				n.numbers = map[*policyv1.PodDisruptionBudget]int{}
			}
			number = len(n.allowed)
			n.numbers[budget] = number
			n.allowed = append(n.allowed, int(budget.Status.DisruptionsAllowed))
		}
		out = append(out, number)
	}
	return out
}
