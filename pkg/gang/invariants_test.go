package gang

// checkPlans checks the counts and the members of all plans.
func (s *fixture) checkPlans() {
	s.Helper()
	s.manager.mu.Lock()
	defer s.manager.mu.Unlock()
	for _, g := range s.manager.groups {
		for _, r := range g.runs {
			if r.plan != nil {
				s.checkPlan(r)
			}
		}
	}
}

func (s *fixture) checkPlan(r *run) {
	s.Helper()
	p, counted := r.plan, [memberStates]int{}
	for _, pm := range p.members {
		counted[pm.state]++
		switch {
		case (pm.permit != nil) != (pm.state == memberArrived):
			s.Errorf("member %s in state %d: a bind call is held: %v", pm.UID, pm.state, pm.permit != nil)
		case !p.isOpen() && pm.state > memberArrived, p.isOpen() && pm != p.last && pm.state < memberBinding, p.isOpen() && pm.state == memberLate:
			s.Errorf("member %s is in state %d; the barrier is open: %v, it is the last: %v", pm.UID, pm.state, p.isOpen(), pm == p.last)
		}
	}
	if counted != p.count {
		s.Errorf("members in states %v, the plan counts %v", counted, p.count)
	}
	if p.isOpen() != (r.phase == PhaseBinding) {
		s.Errorf("the run is %v, with members in states %v; the barrier is open: %v", r.phase, counted, p.isOpen())
	}
}
