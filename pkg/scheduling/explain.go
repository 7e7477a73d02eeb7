package scheduling

import (
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// Explanation is what is wrong with the pods of the cluster at one moment. It is shared by all readers, which must not change
// it.
type Explanation struct {
	// At is when it was made.
	At time.Time
	// Pending are the pending pods, ordered by namespace and name, and Diagnoses are why each of them is pending.
	Pending   []*clustercache.PodInfo
	Diagnoses []diagnosis.Diagnosis
	// RequestProblems are the pods that get no GPU memory although they seem to ask for some, ordered by namespace and name:
	// see PodInfo.RequestProblem. Most of them run.
	RequestProblems []*clustercache.PodInfo
	// Reported are the bound pods with over-use, with a limit that is not in force, or bound without the extender, ordered by namespace and
	// name.
	Reported []*clustercache.PodInfo
	// Tenants are the tenants, by name; nil if fair sharing is off.
	Tenants []dispatch.Tenant
	// Stranded is the free memory that is of no use; none with a node policy for which no pods are expected.
	Stranded ledger.Stranded
}

// ExplainPauseFactor limits the part of the time that explanations take. The time from the start of one explanation to the start of the next one is
// at least ExplainPauseFactor times its duration.
const ExplainPauseFactor = 50

// explainer holds the last explanation. mu guards its fields.
type explainer struct {
	mu   sync.Mutex
	last *Explanation
	// next is when the next one may be made.
	next time.Time
}

// Explain returns why pods are pending. All callers share one explanation. A new one is made at most once per second, and less often if it
// takes long; until then callers get the last one.
func (s *Scheduler) Explain() *Explanation {
	e := &s.explainer
	e.mu.Lock()
	defer e.mu.Unlock()
	begin := s.Clock.Now()
	if e.last != nil && begin.Before(e.next) {
		return e.last
	}
	pods := s.cache.Pending()
	e.last = &Explanation{
		At: begin, Pending: pods, RequestProblems: s.cache.RequestProblems(), Reported: s.cache.Reported(), Tenants: s.Tenants(),
		Diagnoses: s.diagnose(pods),
	}
	if s.NodePolicy.NeedsOutlook() {
		e.last.Stranded = s.ledger.Stranded()
	}
	e.next = begin.Add(ExplainPause(s.Clock.Since(begin)))
	return e.last
}

// ExplainPause returns the time from the start of an explanation, which took that long, to the start of the next one. It is a minute at most:
// the duration can include time in which the process was stopped and used no processor.
func ExplainPause(took time.Duration) time.Duration {
	return min(max(minCostly, ExplainPauseFactor*took), maxCostly)
}

// diagnose returns the diagnosis of each pending pod against the current state of the nodes. Explain costs less.
func (s *Scheduler) diagnose(pods []*clustercache.PodInfo) []diagnosis.Diagnosis {
	if len(pods) == 0 {
		return nil
	}
	pending := make([]*diagnosis.Pod, len(pods))
	for i := range pods {
		pending[i] = pods[i].Pending
	}
	deletion := func(pod gpu.Pod) (since, due time.Time) {
		if known, ok := s.cache.Pod(pod.Namespace, pod.Name); ok && known.UID == pod.UID {
			return known.DeletionRequested(), known.DeletionTime
		}
		return
	}
	diagnoser := diagnosis.NewDiagnoser(diagnosis.Nodes(s.ledger, s.cache.Node, deletion), pending, s.Clock.Now())
	diagnoser.Turns, diagnoser.Awaited = s.fair.turns(), s.ledger.AwaitedNodes()
	return diagnoser.DiagnoseAll(pending, func(i int) *diagnosis.GroupWait { return s.groups.wait(pods[i]) })
}

// wait returns what the pending pod's group waits for; nil if the pod doesn't wait for a group.
func (g *groups) wait(pod *clustercache.PodInfo) *diagnosis.GroupWait {
	member := g.memberOf(pod)
	if member == nil {
		return nil
	}
	if status, waits := g.manager.Status(pod.UID); waits {
		return &diagnosis.GroupWait{Group: status.Group.String(), Native: status.Group.Native, Reason: status.Reason, Since: status.Since}
	}
	if g.leading() == nil {
		return nil
	}
	return diagnosis.ReportedWait(member.Gang.String(), pod.Pending) // Only the leader knows the state of groups.
}
