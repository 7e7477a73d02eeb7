package dispatch

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// ParseNamespace returns what a namespace's labels and annotations say. label is the key of the label whose value names the tenant;
// if it is empty, each namespace is a tenant. problem is what is wrong with labels and annotations, for which default values are used;
// empty if nothing is.
func ParseNamespace(name string, labels, annotations map[string]string, label string) (ns Namespace, problem string) {
	ns = Namespace{Tenant: name, Terms: fairshare.DefaultTerms, Free: labels[protocol.LabelFairShare] == protocol.FairShareOff}
	if label != "" {
		ns.Tenant = labels[label]
	}
	var problems []string
	parse := func(key string, set func(text string) error) {
		if text, given := annotations[key]; given {
			if err := set(text); err != nil {
				problems = append(problems, fmt.Sprintf("annotation %s: %v", key, err))
			}
		}
	}
	parse(protocol.AnnotationFairShareWeight, func(text string) error {
		weight, err := fairshare.ParseWeight(text)
		ns.Weight = cmp.Or(weight, ns.Weight)
		return err
	})
	parse(protocol.AnnotationFairShareGuaranteed, func(text string) (err error) {
		ns.Guaranteed, err = fairshare.ParseGuaranteed(text)
		return err
	})
	if value, given := labels[protocol.LabelFairShare]; given && !ns.Free {
		problems = append(problems, fmt.Sprintf("label %s: %q is not %q", protocol.LabelFairShare, value, protocol.FairShareOff))
	}
	problems = append(problems, unread("annotation", annotations, annotationKeys, "label", labelKeys)...)
	problems = append(problems, unread("label", labels, append([]string{label}, labelKeys...), "annotation", annotationKeys)...)
	return ns, strings.Join(problems, "; ")
}

// labelKeys and annotationKeys are what ParseNamespace reads.
var (
	labelKeys      = []string{protocol.LabelFairShare}
	annotationKeys = []string{protocol.AnnotationFairShareWeight, protocol.AnnotationFairShareGuaranteed}
)

// unread returns a problem for each key that begins like those of fair sharing and isn't one of the kind: it is misspelt, or belongs to
// the other kind.
func unread(kind string, values map[string]string, keys []string, otherKind string, otherKeys []string) (problems []string) {
	for _, key := range slices.Sorted(maps.Keys(values)) {
		if !strings.HasPrefix(key, protocol.LabelFairShare) || slices.Contains(keys, key) {
			continue
		}
		problem := fmt.Sprintf("nothing reads the %s %s", kind, key)
		if slices.Contains(otherKeys, key) {
			problem += ": it must be set as " + otherKind
		}
		problems = append(problems, problem)
	}
	return problems
}
