package eviction

import (
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/preemption"
)

// budgets finds and numbers the disruption budgets of pods by kube-scheduler's rules (k8s.io/kubernetes
// pkg/scheduler/framework/plugins/defaultpreemption, filterPodsWithPDBViolation), for one request only.
type budgets struct {
	cache      Cache
	namespaces map[string]namespaceBudgets
	// covering are the budgets that cover pods, by namespace and labels: most pods have the same labels as others.
	covering map[string][]budget
	// allowed holds how many disruptions each budget allows, by its number.
	allowed []int
	// work counts the selectors that are parsed and evaluated.
	work *preemption.Budget
}

// maxSelectors limits the size of all selectors of a namespace's budgets, in bytes, with selectorOverhead for each: more than a thousand usual
// ones. Any user can create budgets, and a request of another user must not wait until they are parsed.
const maxSelectors, selectorOverhead = 64 << 10, 32

// namespaceBudgets are the budgets of a namespace. They are unknown if their selectors exceed maxSelectors.
type namespaceBudgets struct {
	budgets []budget
	size    int
	unknown bool
}

type budget struct {
	*policyv1.PodDisruptionBudget
	selector labels.Selector
	number   int
}

func newBudgets(cache Cache, work *preemption.Budget) budgets {
	return budgets{cache: cache, namespaces: map[string]namespaceBudgets{}, covering: map[string][]budget{}, work: work}
}

// of returns the numbers of the budgets of which the pod's eviction uses one disruption. known is false if the budgets of its namespace are
// unknown.
func (b *budgets) of(pod *clustercache.PodInfo) (numbers []int, known bool) {
	all := b.in(pod.Namespace)
	if len(all.budgets) == 0 {
		return nil, !all.unknown
	}
	key := pod.Namespace + "/" + labels.FormatLabels(pod.Labels)
	covering, matched := b.covering[key]
	if !matched {
		b.work.Spend(all.size / matchedPerStep)
		for _, budget := range all.budgets {
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
	return numbers, true
}

// in returns the budgets of a namespace.
func (b *budgets) in(namespace string) namespaceBudgets {
	if found, ok := b.namespaces[namespace]; ok {
		return found
	}
	found := b.parse(b.cache.Budgets(namespace))
	b.namespaces[namespace] = found
	return found
}

// matchedPerStep and parsedPerStep are the bytes of a selector that are matched and parsed in one step of preemption.Budget.
const matchedPerStep, parsedPerStep = 16, 2

// parse parses the selectors of a namespace's budgets, and numbers the budgets.
func (b *budgets) parse(objects []*policyv1.PodDisruptionBudget) (found namespaceBudgets) {
	for _, object := range objects {
		found.size += selectorOverhead + object.Spec.Selector.Size()
		if found.size > maxSelectors {
			b.work.Spend(maxSelectors / parsedPerStep)
			return namespaceBudgets{unknown: true}
		}
	}
	b.work.Spend(found.size / parsedPerStep)
	for _, object := range objects {
		selector, err := metav1.LabelSelectorAsSelector(object.Spec.Selector)
		if err != nil || selector.Empty() {
			continue // An invalid or empty selector matches no pod.
		}
		found.budgets = append(found.budgets, budget{object, selector, len(b.allowed)})
		b.allowed = append(b.allowed, int(object.Status.DisruptionsAllowed))
	}
	return found
}
