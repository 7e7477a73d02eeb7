package eviction

import (
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpushare/gpushare/pkg/clustercache"
)

// budgets finds and numbers the disruption budgets of pods by kube-scheduler's rules (k8s.io/kubernetes
// pkg/scheduler/framework/plugins/defaultpreemption, filterPodsWithPDBViolation), for one request only. But an empty selector matches all pods of
// the namespace, as it does for evictions (pkg/registry/core/pod/storage/eviction.go, getPodDisruptionBudgets); for kube-scheduler it matches none.
type budgets struct {
	cache      Cache
	namespaces map[string][]budget
	// covering are the budgets that cover pods, by namespace and labels: most pods have the same labels as others.
	covering map[string][]budget
	// allowed holds how many disruptions each budget allows, by its number.
	allowed []int
}

type budget struct {
	*policyv1.PodDisruptionBudget
	selector labels.Selector
	number   int
}

func newBudgets(cache Cache) budgets {
	return budgets{cache: cache, namespaces: map[string][]budget{}, covering: map[string][]budget{}}
}

// of returns the numbers of the budgets of which the pod's eviction uses one disruption.
func (b *budgets) of(pod *clustercache.PodInfo) (numbers []int) {
	all := b.in(pod.Namespace)
	if len(all) == 0 {
		return nil
	}
	key := pod.Namespace + "/" + labels.FormatLabels(pod.Labels)
	covering, matched := b.covering[key]
	if !matched {
		for _, budget := range all {
			if budget.selector.Matches(labels.Set(pod.Labels)) {
				covering = append(covering, budget)
			}
		}
		b.covering[key] = covering
	}
	for _, budget := range covering {
		if _, counted := budget.Status.DisruptedPods[pod.Name]; !counted {
			numbers = append(numbers, budget.number)
		}
	}
	return numbers
}

// in returns the budgets of a namespace.
func (b *budgets) in(namespace string) []budget {
	found, known := b.namespaces[namespace]
	if known {
		return found
	}
	for _, object := range b.cache.Budgets(namespace) {
		selector, err := metav1.LabelSelectorAsSelector(object.Spec.Selector)
		if err != nil {
			continue // An invalid selector matches no pod.
		}
		found = append(found, budget{object, selector, len(b.allowed)})
		b.allowed = append(b.allowed, int(object.Status.DisruptionsAllowed))
	}
	b.namespaces[namespace] = found
	return found
}
