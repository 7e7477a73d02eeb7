package scheduling

import (
	"errors"
	"time"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// The methods in this file only read. They serve the web page, the metrics and the inspect path.

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
	}
	e.last.Diagnoses, e.last.Places = s.diagnose(pods)
	if s.NodePolicy.ByCost() {
		e.last.Stranded = s.ledger.Stranded()
	}
	e.next = begin.Add(ExplainPause(s.Clock.Since(begin)))
	return e.last
}

// Nodes returns the nodes of the ledger with their allocations.
func (s *Scheduler) Nodes() []ledger.Node { return s.settleGone(s.ledger.Nodes()) }

// Node returns one node of the ledger.
func (s *Scheduler) Node(name string) (ledger.Node, bool) { return s.ledger.Node(name) }

// Stranded returns the memory that nodes can't give to pods for lack of CPU or memory, as of the last explanation.
func (s *Scheduler) Stranded() ledger.Stranded { return s.Explain().Stranded }

// AwaitedIdleRatio returns the part of the memory that awaited reservations keep idle, see ledger.Ledger.
func (s *Scheduler) AwaitedIdleRatio() float64 { return s.ledger.AwaitedIdleRatio() }

// ChangesSince returns the nodes of the ledger that have changed since a revision, see ledger.Ledger.
func (s *Scheduler) ChangesSince(revision uint64) ledger.Changes {
	changes := s.ledger.ChangesSince(revision)
	changes.Nodes = s.settleGone(changes.Nodes)
	return changes
}

// settleGone sets Gone to false for nodes that exist and share nothing: the ledger doesn't know them.
func (s *Scheduler) settleGone(nodes []ledger.Node) []ledger.Node {
	for i := range nodes {
		if nodes[i].Gone {
			_, exists := s.cache.Node(nodes[i].Name)
			nodes[i].Gone = !exists
		}
	}
	return nodes
}

// OwnerOf returns the controller of a pod as Kind/name; "" if it has none or isn't in the cache.
func (s *Scheduler) OwnerOf(namespace, name string) string {
	pod, ok := s.cache.Pod(namespace, name)
	if !ok {
		return ""
	}
	return pod.OwnerName()
}

// diagnose returns the diagnosis of each pending pod against the current state of the nodes, and its place in the queue. Explain costs less.
func (s *Scheduler) diagnose(pods []*clustercache.PodInfo) ([]diagnosis.Diagnosis, []diagnosis.Place) {
	if len(pods) == 0 {
		return nil, nil
	}
	pending := make([]*diagnosis.Pod, len(pods))
	for i := range pods {
		pending[i] = pods[i].Pending
	}
	diagnoser := diagnosis.NewDiagnoser(s.diagnosisNodes(), pending, s.Clock.Now())
	diagnoser.Turns, diagnoser.Awaited = s.fair.turns(), s.ledger.AwaitedNodes()
	return diagnoser.DiagnoseAll(pending, func(i int) *diagnosis.GroupWait { return s.groups.wait(pods[i]) })
}

// wait returns what the pending pod's group waits for; nil if the pod doesn't wait for a group.
func (g *groups) wait(pod *clustercache.PodInfo) *diagnosis.GroupWait {
	member := g.memberOf(pod)
	if member == nil {
		return nil
	}
	if status, waits := g.manager.Waits(pod.UID); waits {
		return &diagnosis.GroupWait{Group: status.Group.String(), Native: status.Group.Native, Reason: status.Reason, Since: status.Since}
	}
	if g.leading() == nil {
		return nil
	}
	return diagnosis.ReportedWait(member.Gang.String(), pod.Pending) // Only the leader knows the state of groups.
}

func (s *Scheduler) diagnosisNodes() []diagnosis.Node {
	deletion := func(pod gpu.Pod) (since, due time.Time) {
		if known, ok := s.cache.Pod(pod.Namespace, pod.Name); ok && known.UID == pod.UID {
			return known.DeletionRequested(), known.DeletionTime
		}
		return
	}
	return diagnosis.Nodes(s.ledger, s.cache.Node, deletion)
}

// Tenants returns the state of the tenants, by name; nil if fair sharing is off.
func (s *Scheduler) Tenants() []dispatch.Tenant {
	if s.fair == nil {
		return nil
	}
	return s.fair.manager.Tenants()
}

// InvalidNamespaces returns the number of namespaces with invalid annotations for fair sharing.
func (s *Scheduler) InvalidNamespaces() int {
	if s.fair == nil {
		return 0
	}
	return s.fair.problems.count()
}

// GangStates returns the number of runs of gangs in each phase.
func (s *Scheduler) GangStates() map[string]int { return s.groups.states() }

// WatchVersions returns the resource version that each watch has reached, by resource.
func (s *Scheduler) WatchVersions() map[string]uint64 { return s.cache.WatchVersions() }

// Groups returns the runs of all groups of pods, or an error that says why this process doesn't know them. It only reads.
func (s *Scheduler) Groups() ([]gang.Report, error) {
	if s.Gangs.Hold == 0 {
		return nil, errors.New("groups are turned off by --gang-hold=0")
	}
	reports, leads := s.groups.manager.Reports()
	if !leads {
		return nil, errors.New("only the replica that leads knows the state of groups, and this one doesn't lead")
	}
	return reports, nil
}
