package dispatch

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// ParseNamespace returns what a namespace's labels and annotations say. label is the key of the label whose value names the tenant;
// if it is empty, each namespace is a tenant. problem is what is wrong with annotations, for which default values are used; empty
// if nothing is.
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
	return ns, strings.Join(problems, "; ")
}
