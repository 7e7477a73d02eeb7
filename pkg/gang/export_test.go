package gang

import "testing"

// FailOnIllegalMove makes the test fail when a run changes its phase in a way that the transition table doesn't contain.
func (mgr *Manager) FailOnIllegalMove(t *testing.T) {
	mgr.illegalMove = func(from Phase, why trigger, to Phase) { t.Errorf("illegal move from %v to %v: %s", from, to, why) }
}
