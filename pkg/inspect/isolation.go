package inspect

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// addFound adds what the device plugin has found: limits that aren't in force, use above the request, and cards that are gone.
func (p *Pod) addFound(object *corev1.Pod) {
	isolation := protocol.ParsePodIsolation(object.Annotations)
	p.Isolation = isolation.Mode
	if isolation.Problem != "" {
		p.Notes = append(p.Notes, "limit not in force: "+isolation.Problem)
	}
	if lost := object.Annotations[protocol.AnnotationLostCards]; lost != "" {
		p.Notes = append(p.Notes, "card "+protocol.Shorten(lost)+" is not on the node any more, containers can't start again: delete the pod")
	}
	if overuse, err := protocol.ParseOveruse(object.Annotations[protocol.AnnotationOveruse]); err == nil && overuse != nil {
		// Without its device plugin the annotation stays, so the note has the time of the measurement.
		sum := overuse.Sum()
		what := "%s, since %s, measured %s"
		if sum.ForLowCard() {
			what += "; its card is low on free memory"
		}
		p.Notes = append(p.Notes, fmt.Sprintf(what, sum, overuse.Since.UTC().Format(time.RFC3339), overuse.At.UTC().Format(time.RFC3339)))
	}
}

// addIsolation adds the node's isolation mode, and marks pods that were started in another one.
func (n *Node) addIsolation(mode string) {
	n.Isolation = mode
	for i := range n.Pods {
		switch pod := &n.Pods[i]; {
		case pod.Isolation != "" && pod.Isolation != mode:
			pod.Notes = append(pod.Notes, "started with limits by "+pod.Isolation)
		case pod.Isolation == "" && mode != "" && pod.Phase == string(corev1.PodRunning):
			pod.Notes = append(pod.Notes, "started without a limit, or not checked yet")
		}
	}
}

// aboutRows returns the lines of --details on cards that are simulated, with the node's isolation mode, if shares of memory are enforced, and
// on how far cores are, if pods ask for some.
func (n *Node) aboutRows() (table rows) {
	if n.Simulated {
		table.add(plain, "CARDS:", "simulated for a trial: no container can compute on them")
	}
	if n.Isolation != "" {
		table.add(plain, "LIMITS:", n.Isolation)
	}
	if n.coresInUse() {
		text := "counted, not enforced"
		if protocol.RulesOfIsolation(n.Isolation).Cores {
			text = "enforced by " + n.Isolation
		}
		table.add(plain, "CORES:", text)
	}
	return table
}

// coresInUse reports whether pods ask for cores of the node's cards.
func (n *Node) coresInUse() bool {
	return slices.ContainsFunc(n.Cards, func(c Card) bool { return c.AllocatedCores > 0 })
}
