package scheduling

import (
	"errors"
	"slices"

	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// The methods in this file only read. They serve the web page, the metrics and the inspect path.

// Nodes returns the nodes of the ledger with their allocations.
func (s *Scheduler) Nodes() []ledger.Node { return s.markGone(s.ledger.Nodes()) }

// Node returns one node of the ledger.
func (s *Scheduler) Node(name string) (ledger.Node, bool) { return s.ledger.Node(name) }

// Stranded returns the memory that nodes can't give to pods for lack of CPU or memory, as of the last explanation.
func (s *Scheduler) Stranded() ledger.Stranded { return s.Explain().Stranded }

// AwaitedIdle returns the parts of the memory that awaited reservations keep idle, see ledger.Ledger.
func (s *Scheduler) AwaitedIdle() map[string]float64 { return s.ledger.AwaitedIdle() }

// ChangesSince returns the nodes of the ledger that have changed since a revision, see ledger.Ledger.
func (s *Scheduler) ChangesSince(revision uint64) ledger.Changes {
	changes := s.ledger.ChangesSince(revision)
	changes.Nodes = s.markGone(changes.Nodes)
	return changes
}

// markGone sets Gone to false for nodes that exist and share nothing: the ledger doesn't know them.
func (s *Scheduler) markGone(nodes []ledger.Node) []ledger.Node {
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
	s.fair.mu.Lock()
	defer s.fair.mu.Unlock()
	return len(s.fair.problems)
}

// GangStates returns the number of runs of gangs in each phase; nil if gangs are off.
func (s *Scheduler) GangStates() map[string]int {
	if s.Gangs.Hold == 0 {
		return nil
	}
	states := map[string]int{}
	for phase, n := range s.groups.manager.Phases() {
		states[phase.String()] = n
	}
	return states
}

// WatchVersions returns the resource version that each watch has reached, by resource.
func (s *Scheduler) WatchVersions() map[string]uint64 { return s.cache.WatchVersions() }

// Groups returns the runs of all groups with pods that exist, or an error that says why this process doesn't know them. It only reads.
func (s *Scheduler) Groups() ([]gang.Report, error) {
	if s.Gangs.Hold == 0 {
		return nil, errors.New("groups are turned off by --gang-hold=0")
	}
	reports, leads := s.groups.manager.Reports()
	if !leads {
		return nil, errors.New("only the replica that leads knows the state of groups, and this one doesn't lead")
	}
	return slices.DeleteFunc(reports, func(r gang.Report) bool { return len(r.Bound)+len(r.Pending)+r.Cardless == 0 }), nil
}
