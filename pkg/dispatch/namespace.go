package dispatch

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Namespace is what a Manager knows of a namespace.
type Namespace struct {
	// Tenant is the tenant to which its pods belong.
	Tenant string
	fairshare.Terms
	// Exempt is true if its pods take no part in fair sharing.
	Exempt bool
}

// ParseNamespace returns what a namespace's labels and annotations say. label is the key of the label whose value names the tenant;
// if it is empty, each namespace is a tenant. problem is what is wrong with labels and annotations, for which default values are used;
// empty if nothing is.
func ParseNamespace(name string, labels, annotations map[string]string, label string) (ns Namespace, problem string) {
	ns = Namespace{Tenant: name, Terms: fairshare.DefaultTerms, Exempt: labels[protocol.LabelFairShare] == protocol.FairShareOff}
	if label != "" {
		ns.Tenant = labels[label]
	}
	var problems []string
	read := func(key string, set func(text string) error) {
		if text, given := annotations[key]; given {
			if err := set(text); err != nil {
				problems = append(problems, fmt.Sprintf("annotation %s: %v", key, err))
			}
		}
	}
	read(protocol.AnnotationFairShareWeight, func(text string) error {
		weight, err := fairshare.ParseWeight(text)
		ns.Weight = cmp.Or(weight, ns.Weight)
		return err
	})
	read(protocol.AnnotationFairShareGuaranteed, func(text string) (err error) {
		ns.Guaranteed, err = fairshare.ParseGuaranteed(text)
		return err
	})
	if value, given := labels[protocol.LabelFairShare]; given && !ns.Exempt {
		problems = append(problems, fmt.Sprintf("label %s: %q is not %q", protocol.LabelFairShare, value, protocol.FairShareOff))
	}
	problems = append(problems, unread("annotation", annotations, label)...)
	problems = append(problems, unread("label", labels, label)...)
	return ns, protocol.Shorten(strings.Join(problems, "; "))
}

// unread returns a problem for each of the namespace's keys, which are of that kind, that has the prefix of fair sharing and isn't read: it is misspelt,
// or it is a label that must be an annotation, or the reverse.
func unread(kind string, values map[string]string, tenantLabel string) (problems []string) {
	read := map[string]string{
		tenantLabel: "label", protocol.LabelFairShare: "label",
		protocol.AnnotationFairShareWeight: "annotation", protocol.AnnotationFairShareGuaranteed: "annotation",
	}
	for _, key := range slices.Sorted(maps.Keys(values)) {
		if !strings.HasPrefix(key, protocol.LabelFairShare) || read[key] == kind {
			continue
		}
		problem := fmt.Sprintf("nothing reads the %s %s", kind, key)
		if read[key] != "" {
			problem += ": it must be set as " + read[key]
		}
		problems = append(problems, problem)
	}
	return problems
}

// SetNamespace adds or updates a namespace.
func (m *Manager) SetNamespace(name string, next Namespace) {
	m.mu.Lock()
	defer m.mu.Unlock()
	former, known := m.namespaces[name]
	if known && former == next {
		return
	}
	m.namespaces[name] = next
	m.setExempt(name, next.Exempt)
	if !known || former.Tenant != next.Tenant || former.Exempt != next.Exempt {
		for _, p := range m.inNamespace[name] {
			m.withdraw(p)
			m.refresh(p)
			if next.Exempt && !p.Gated && p.awaitsBind() {
				m.effects.Requeue = true // Until now filter has rejected it.
			}
		}
	}
	m.setTerms(next.Tenant)
	if known && former.Tenant != next.Tenant {
		m.setTerms(former.Tenant)
	}
	m.changed = true
}

// RemoveNamespace removes a namespace that was deleted. Its pods are deleted before, but the watch can report that later.
func (m *Manager) RemoveNamespace(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	former := m.namespaces[name]
	delete(m.namespaces, name)
	m.setExempt(name, false)
	for _, p := range m.inNamespace[name] {
		m.withdraw(p)
	}
	m.setTerms(former.Tenant)
}

// setTerms sets the terms of a tenant: the largest values of its namespaces. A tenant without namespaces is removed.
func (m *Manager) setTerms(tenant string) {
	terms, found := fairshare.DefaultTerms, false
	for _, ns := range m.namespaces {
		if ns.Tenant == tenant && !ns.Exempt {
			found = true
			terms.Weight, terms.Guaranteed = max(terms.Weight, ns.Weight), max(terms.Guaranteed, ns.Guaranteed)
		}
	}
	if m.queue.SetTerms(tenant, terms); !found {
		m.queue.Forget(tenant)
	}
}

// ByNamespace is the value of --fair-share-by with which each namespace is a tenant.
const ByNamespace = "namespace"

// TenantLabel returns the key of the namespaces' label that names the tenant, by a value of --fair-share-by; empty for ByNamespace.
func TenantLabel(by string) (string, error) {
	label, byLabel := strings.CutPrefix(by, "label:")
	switch {
	case by == ByNamespace:
		return "", nil
	case byLabel && len(validation.IsQualifiedName(label)) == 0:
		return label, nil
	}
	return "", fmt.Errorf("--fair-share-by: want namespace or label:KEY with the key of a label, got %q", by)
}
