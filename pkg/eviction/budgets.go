package eviction

import (
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpushare/gpushare/pkg/clustercache"
)

// budgets finds and numbers the disruption budgets of pods by kube-scheduler's rules (k8s.io/kubernetes
// pkg/scheduler/framework/plugins/defaultpreemption, filterPodsWithPDBViolation), for one request only.
type budgets struct {
	cache      Cache
	namespaces map[string][]budget
	// allowed holds how many disruptions each budget allows, by its number.
	allowed []int
}

type budget struct {
	*policyv1.PodDisruptionBudget
	selector labels.Selector
	number   int
}

// of returns the numbers of the budgets of which the pod's eviction uses one disruption.
func (b *budgets) of(pod *clustercache.PodInfo) (numbers []int) {
	for _, budget := range b.in(pod.Namespace) {
		_, counted := budget.Status.DisruptedPods[pod.Name]
		if !counted && budget.selector.Matches(labels.Set(pod.Labels)) {
			numbers = append(numbers, budget.number)
		}
	}
	return numbers
}

func (b *budgets) in(namespace string) []budget {
	if known, ok := b.namespaces[namespace]; ok {
		return known
	}
	var found []budget
	for _, object := range b.cache.Budgets(namespace) {
		selector, err := metav1.LabelSelectorAsSelector(object.Spec.Selector)
		if err != nil || selector.Empty() {
			continue // An invalid or empty selector matches no pod.
		}
		found = append(found, budget{object, selector, len(b.allowed)})
		b.allowed = append(b.allowed, int(object.Status.DisruptionsAllowed))
	}
	b.namespaces[namespace] = found
	return found
}
