package gang

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

// phasesAfter holds the phase of a run of three members after an event, by its phase before.
const phasesAfter = `
event                                   incomplete  pending     planned     permitting  binding     running     broken      evicting
a member is created                     pending     pending     planned     permitting  binding     running     broken      evicting
an unbound member is deleted            incomplete  incomplete  incomplete  incomplete  binding     running     broken      evicting
a bound member is deleted               -           -           -           -           -           running     incomplete  incomplete
its last unbound member is deleted      incomplete  incomplete  incomplete  incomplete  incomplete  running     broken      evicting
a member's size is edited               incomplete  incomplete  incomplete  incomplete  binding     running     broken      evicting
a member asks for two cards             incomplete  pending     pending     pending     binding     running     broken      evicting
the watch shows one more bound          broken      broken      broken      broken      binding     running     broken      evicting
a live read shows one more bound        broken      broken      broken      broken      binding     running     broken      evicting
the watch shows all bound               broken      running     running     running     running     running     running     running
a list shows a pod of another run       broken      broken      broken      broken      binding     broken      broken      evicting
filter offers nodes                     incomplete  planned     planned     permitting  binding     running     planned     evicting
a bind call arrives                     incomplete  pending     permitting  permitting  binding     running     broken      evicting
all bind calls arrive                   incomplete  pending     binding     binding     binding     running     broken      evicting
held bind calls are cancelled           incomplete  pending     planned     planned     binding     running     broken      evicting
a granted bind succeeds                 -           -           -           -           binding     running     -           -
a granted bind fails                    -           -           -           -           binding     running     -           -
all granted binds fail                  -           -           -           -           pending     running     -           -
the hold passes                         incomplete  pending     planned     planned     binding     running     broken      evicting
patience passes, reads are answered     incomplete  pending     pending     pending     binding     running     evicting    evicting
patience passes, no read is answered    incomplete  pending     pending     pending     binding     running     broken      evicting
a pod of higher priority needs a card   incomplete  pending     pending     pending     binding     running     broken      evicting
another leader takes over               incomplete  pending     pending     pending     pending     running     broken      broken
`

// newPhaseScene brings a run into a phase, the way that runs get there.
func newPhaseScene(t *testing.T, phase string) *fixture {
	s := newFixture(t)
	s.createMany(2, "job", 3, 16, "t")
	if phase == "incomplete" {
		return s
	}
	s.create("job", 3, 16, "t")
	broken := func() {
		s.filterMembers(0)
		s.arriveMembers(0, 1, 2)
		s.bind(s.granted[0], false)
		s.bind(s.granted[1], true)
		s.granted = nil
	}
	steps := map[string]func(){
		"pending":    func() {},
		"planned":    func() { s.filterMembers(0) },
		"permitting": func() { s.filterMembers(0); s.arriveMembers(0) },
		"binding":    func() { s.filterMembers(0); s.arriveMembers(0, 1, 2) },
		"running": func() {
			s.filterMembers(0)
			s.arriveMembers(0, 1, 2)
			s.bindGranted()
			s.collectDecided()
			s.bindGranted()
		},
		"broken":   broken,
		"evicting": func() { broken(); s.advance(testPatience + 10*time.Second) },
	}
	steps[phase]()
	s.collectDecided()
	if got := s.phase(); got != phase {
		t.Fatalf("the scene is %s, want %s", got, phase)
	}
	return s
}

// phase returns the phase of the run that isn't running, or else "running"; "" if there is no run.
func (s *fixture) phase() (out string) {
	for phase, n := range s.manager.Phases() {
		if n > 0 && (out == "" || phase != PhaseRunning) {
			out = phase.String()
		}
	}
	return out
}

func (s *fixture) filterMembers(members ...int) {
	for _, i := range members {
		s.filter(s.created[i])
	}
}

// arriveMembers makes the bind calls of members.
func (s *fixture) arriveMembers(members ...int) {
	for _, i := range members {
		if i >= len(s.created) || s.inBind(s.created[i]) || s.created[i].Node != "" {
			continue
		}
		p := s.created[i]
		node, _, _ := s.ledger.Lookup(p.UID)
		s.arrive(p, node)
	}
	s.collectDecided()
}

// member returns the oldest pod that is bound, or that isn't; nil if there is none.
func (s *fixture) member(bound bool) *pod {
	for _, p := range s.existing() {
		if (p.Node != "") == bound {
			return p
		}
	}
	return nil
}

// bound returns a member as it is once it is bound.
func (s *fixture) bound(p *pod) Member {
	m := p.Member
	if m.Node == "" {
		m.Node = "elsewhere"
	}
	return m
}

// phaseEvents are the events. They return false if they can't happen in the scene.
var phaseEvents = []struct {
	name  string
	apply func(s *fixture) bool
}{
	{"a member is created", func(s *fixture) bool { s.create("job", 3, 16, "t"); return true }},
	{"an unbound member is deleted", func(s *fixture) bool {
		if p := s.member(false); p != nil {
			s.delete(p)
		}
		return true
	}},
	{"a bound member is deleted", func(s *fixture) bool {
		p := s.member(true)
		if p != nil {
			s.delete(p)
		}
		return p != nil
	}},
	{"its last unbound member is deleted", func(s *fixture) bool {
		for p := s.member(false); p != nil && len(s.existing()) > 1; p = s.member(false) {
			s.delete(p)
		}
		return true
	}},
	{"a member's size is edited", func(s *fixture) bool { s.created[0].Size = 4; s.report(s.created[0]); return true }},
	{"a member asks for two cards", func(s *fixture) bool { s.created[0].Cards = 2; s.report(s.created[0]); return true }},
	{"the watch shows one more bound", func(s *fixture) bool {
		if p := s.member(false); p != nil {
			s.manager.SetMember(s.bound(p), s.now)
		}
		return true
	}},
	{"a live read shows one more bound", func(s *fixture) bool {
		if p := s.member(false); p != nil {
			s.manager.Confirmed(s.bound(p), s.now)
		}
		return true
	}},
	{"the watch shows all bound", func(s *fixture) bool {
		for _, p := range s.created {
			s.manager.SetMember(s.bound(p), s.now)
		}
		return true
	}},
	{"a list shows a pod of another run", func(s *fixture) bool {
		m := s.bound(s.created[0])
		m.UID, m.Run, m.BoundAt = "unknown", "z", s.now
		s.manager.SetMember(m, s.now)
		return true
	}},
	{"filter offers nodes", func(s *fixture) bool {
		s.manager.filterAll(s.created[len(s.created)-1].UID, s.nodes, s.now.Add(2*time.Second))
		return true
	}},
	{"a bind call arrives", func(s *fixture) bool { s.arriveMembers(1); return true }},
	{"all bind calls arrive", func(s *fixture) bool { s.arriveMembers(0, 1, 2); return true }},
	{"held bind calls are cancelled", func(s *fixture) bool {
		for _, bind := range s.held {
			if !s.manager.CancelPermit(bind.pod.UID, bind.permit, s.now) {
				s.Error("not cancelled")
			}
		}
		return true
	}},
	{"a granted bind succeeds", endBinds(1, true)},
	{"a granted bind fails", endBinds(1, false)},
	{"all granted binds fail", endBinds(2, false)},
	{"the hold passes", func(s *fixture) bool { s.advance(testHold + time.Second); return true }},
	{"patience passes, reads are answered", func(s *fixture) bool { s.advance(testPatience + 10*time.Second); return true }},
	{"patience passes, no read is answered", func(s *fixture) bool {
		s.answer = nil
		s.advance(10 * testPatience)
		return true
	}},
	{"a pod of higher priority needs a card", func(s *fixture) bool {
		s.createMany(8-s.allocated(), "", 0, 16, "")
		for _, p := range s.existing() {
			if p.Gang.Name == "" {
				s.bindSingle(p)
			}
		}
		s.manager.Displace(gpu.Pod{UID: "important", Request: 16, Priority: 1}, s.nodes, s.now)
		return true
	}},
	{"another leader takes over", func(s *fixture) bool {
		s.manager.StopLeading(s.now)
		s.manager.StartLeading(s.now)
		return true
	}},
}

func endBinds(n int, ok bool) func(s *fixture) bool {
	return func(s *fixture) bool {
		if len(s.granted) < n && s.phase() != "running" {
			return false
		}
		for _, bind := range s.granted[:min(n, len(s.granted))] {
			s.ended(bind, ok)
		}
		return true
	}
}

// allocated counts the allocations.
func (s *fixture) allocated() (n int) {
	for _, node := range s.ledger.Nodes() {
		n += len(node.Allocations)
	}
	return n
}

// TestPhases applies every event in every phase. Each move must be in the transition table, too: see newManager.
func TestPhases(t *testing.T) {
	var got strings.Builder
	got.WriteString("\n" + line("event", phaseNames[:]) + "\n")
	for _, event := range phaseEvents {
		var after []string
		for _, phase := range phaseNames {
			s := newPhaseScene(t, phase)
			if !event.apply(s) {
				after = append(after, "-")
				continue
			}
			after = append(after, s.phase())
		}
		got.WriteString(line(event.name, after) + "\n")
	}
	check.Equal(t, "the result", phasesAfter, got.String())
}

func line(event string, phases []string) string {
	text := fmt.Sprintf("%-40s", event)
	for _, phase := range phases {
		text += fmt.Sprintf("%-12s", phase)
	}
	return strings.TrimRight(text, " ")
}
