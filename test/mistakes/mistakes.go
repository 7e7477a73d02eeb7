// Package mistakes lists mistakes that users and administrators make, and what each view must say about them. The tests of packages diagnosis and
// scheduling run the same rows, and the page those of nodes. test/e2e tests that kubectl inspect, page and metrics agree.
package mistakes

import (
	"regexp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Mistake is a mistake with its objects.
type Mistake struct {
	// Name is the mistake in a short sentence. It is unique.
	Name string
	// Nodes and Pods are all objects of the cluster. They are shared by all calls of All, and must not be changed.
	Nodes []*corev1.Node
	Pods  []*corev1.Pod
	// Pod is the name of the pod, in the namespace default, that has the mistake.
	Pod string
	// Wait is what the pod's group waits for, as the leading extender knows it; nil if it waits for none.
	Wait *diagnosis.GroupWait
	// Cause is the reason of the pod's diagnosis. A pod that is NotPending isn't listed as pending: Words are then its request problem.
	Cause      reasons.Reason
	NotPending bool
	// Words is the whole message. Compare it with Comparable of what a view says.
	Words string
}

// Want returns what a view must say: the diagnosis, or Words without a reason for a pod that isn't listed as pending.
func (m Mistake) Want() diagnosis.Diagnosis {
	return diagnosis.Diagnosis{Reason: m.Cause, Message: m.Words}
}

// Subject returns the pod that has the mistake.
func (m Mistake) Subject() *corev1.Pod {
	return m.Pods[slices.IndexFunc(m.Pods, func(p *corev1.Pod) bool { return p.Name == m.Pod })]
}

// Diagnose returns the diagnosis of Subject by the objects and Wait.
func (m Mistake) Diagnose() diagnosis.Diagnosis {
	d := diagnosis.FromObjects(m.Nodes, m.Pods, Now).Diagnose(diagnosis.NewPod(m.Subject()), m.Wait)
	d.Message = Comparable(d.Message)
	return d
}

// Now is the time at which the mistakes are looked for.
var Now = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

// ofLeader matches what only the extender that leads knows exactly: since when a group waits, which other programs take from the pods' creation, and
// which cards in use are reserved.
var ofLeader = regexp.MustCompile(`(group \S+ waits) since \S+Z|; cards of \S+ are reserved for it, and .*$`)

// Comparable returns a message without what only the extender that leads knows.
func Comparable(words string) string { return ofLeader.ReplaceAllString(words, "$1") }

// All returns the mistakes.
func All() []Mistake { return slices.Concat(requests(), severalCards(), cluster(), groups()) }
