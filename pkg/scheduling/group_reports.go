package scheduling

import (
	"errors"

	"github.com/gpushare/gpushare/pkg/gang"
)

// Groups returns the runs of all groups of pods, or an error that says why this process doesn't know them. It only reads.
func (s *Scheduler) Groups() ([]gang.Report, error) {
	if s.groups == nil {
		return nil, errors.New("groups are turned off by --gang-hold=0")
	}
	reports, leads := s.groups.manager.Reports()
	if !leads {
		return nil, errors.New("only the replica that leads knows the state of groups, and this one doesn't lead")
	}
	return reports, nil
}
