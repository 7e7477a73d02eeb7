package eviction

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/usage"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// tenant is a pod of the model: what it requests and really uses of one card, in GiB.
type tenant struct {
	name            string
	card            int
	requested, used int64
	// limit is what it may use, at least what it requests.
	limit int64
	// over is since when it has used more than it requests by more than the tolerance; zero if it doesn't.
	over time.Time
	// bound is when it was bound. evicted is true once it is evicted, leaving once the watch shows that. A budget forbids the
	// eviction of a protected one.
	bound                       time.Time
	evicted, leaving, protected bool
	// deleted is true if its owner has deleted it.
	deleted bool
	// grouped is true for a member of a group, partial if that isn't bound completely.
	grouped, partial bool
}

// overuseModel is a node with two cards whose pods use what they like. A device plugin measures them, and an extender evicts. The
// model checks each eviction by what the pods really use.
type overuseModel struct {
	Cache
	t *testing.T
	// cards is the memory of the cards in GiB. An administrator can lower it while pods run there.
	cards   [2]int64
	random  *rand.Rand
	clock   *clocktesting.FakeClock
	tracker *usage.Overuse
	tenants []*tenant
	reports map[gpu.PodUID]protocol.Overuse
	evicted int
	// measured is the time of the last measurement, and there the pods then.
	measured time.Time
	there    []*tenant
	// borrowers is how many of these were within their limits, early how many above them for less than the grace period.
	borrowers, early int
	// hidden is memory of each card in GiB that no pod uses: of the driver, or of processes that aren't known.
	hidden   [2]int64
	observer fake.Observer
	overuser *OveruseEvictor
	// unseen, if not nil, makes the changes of the pods that the watch doesn't show yet.
	unseen func(pods []*clustercache.PodInfo)
}

const (
	modelTolerance = 10
	modelGrace     = time.Minute
	modelCard      = 16
)

// known returns what the device plugin knows beside a measurement.
func (m *overuseModel) known() usage.Known {
	known := usage.Known{Pods: map[gpu.PodUID]usage.KnownPod{}, Cards: map[int]usage.KnownCard{}}
	for i, memory := range m.cards {
		known.Cards[i] = usage.KnownCard{Memory: uint64(memory) << 30}
	}
	for _, t := range m.tenants {
		requested, card := uint64(t.requested)<<30, known.Cards[t.card]
		known.Pods[gpu.PodUID(t.name)] = usage.KnownPod{Held: map[int]uint64{t.card: requested}, Leaving: t.leaving, EndsSoon: t.leaving}
		card.Promised += requested
		known.Cards[t.card] = card
	}
	return known
}

// rank is the tenant's place in the order of evictions: 0 if it has exceeded its limit for longer than the grace period, 1 if for less, 2 if it
// uses no more than its limit.
func (m *overuseModel) rank(t *tenant) int {
	switch {
	case !t.over.IsZero() && m.measured.Sub(t.over) >= modelGrace:
		return 0
	case t.used > t.limit:
		return 1
	}
	return 2
}

// short reports whether a card had less free memory at the last measurement than pods may need at once of what they were promised, without
// the pods that are evicted or deleted, and whether a pod had borrowed some.
func (m *overuseModel) short(card int) bool {
	var used, unused float64
	lent := false
	for _, t := range m.there {
		lent = lent || t.card == card && t.limit > t.requested && float64(t.used) > float64(t.requested)*(1+modelTolerance/100.)
		if t.card == card && !t.evicted && !t.deleted {
			used, unused = used+float64(t.used), unused+float64(max(t.requested-t.used, 0))
		}
	}
	return lent && max(float64(m.cards[card]-m.hidden[card])-used, 0) < min(unused, float64(m.cards[card])/16)
}

func newOveruseModel(t *testing.T, seed uint64) *overuseModel {
	m := &overuseModel{
		t: t, cards: [2]int64{modelCard, modelCard}, random: rand.New(rand.NewPCG(seed, 1)), clock: clocktesting.NewFakeClock(begin),
		tracker: usage.NewOveruse(usage.OveruseOptions{Tolerance: modelTolerance, Grace: modelGrace}),
	}
	m.overuser = NewOveruseEvictor(Options{
		API: &overuseAPI{live: m.live, evict: m.evict}, Cache: m, Recorder: record.NewFakeRecorder(1 << 16), Observer: &m.observer, AnswerLost: 30 * time.Second,
		Leading: func() error { return nil }, Clock: m.clock,
	}, m)
	return m
}

func (m *overuseModel) Ready() error { return nil }

func (m *overuseModel) Node(string) (*corev1.Node, bool) {
	inventory := protocol.Inventory{Unit: gpu.GiB, Cards: []gpu.Card{{Index: 0, Memory: gpu.Memory(m.cards[0])}, {Index: 1, Memory: gpu.Memory(m.cards[1])}}}
	text, err := inventory.Annotation()
	check.Must(m.t, err)
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Annotations: map[string]string{protocol.AnnotationInventory: text}}}, true
}

func (m *overuseModel) PodsOn(string) (pods []*clustercache.PodInfo) {
	for _, tenant := range m.tenants {
		info := &clustercache.PodInfo{
			PodUse: eligibility.PodUse{Pod: gpu.Pod{UID: gpu.PodUID(tenant.name), Namespace: "d", Name: tenant.name, Request: gpu.Memory(tenant.requested), Leaving: tenant.leaving}, Node: "n"}, Placement: gpu.On(tenant.card, gpu.Memory(tenant.requested)), AssumeTime: tenant.bound,
		}
		if tenant.limit > tenant.requested {
			info.Limits = info.Limits.With(uint64(tenant.limit)<<30, info.Request, 1)
		}
		if tenant.leaving {
			info.DeletionTime = m.clock.Now().Add(time.Minute)
		}
		if report, ok := m.reports[info.UID]; ok {
			info.Overuse = &report
		}
		pods = append(pods, info)
	}
	return pods
}

func (m *overuseModel) Membership(uid gpu.PodUID) (member, whole bool) {
	i := slices.IndexFunc(m.tenants, func(t *tenant) bool { return t.name == string(uid) })
	return m.tenants[i].grouped, !m.tenants[i].partial
}

func (m *overuseModel) MayOveruse() []*clustercache.PodInfo { return mayOveruse(m.PodsOn("n")) }

func mayOveruse(pods []*clustercache.PodInfo) []*clustercache.PodInfo {
	return slices.DeleteFunc(slices.Clone(pods), func(p *clustercache.PodInfo) bool { return p.Overuse == nil && p.Limits == (gpu.Limits{}) })
}

// overuseAPI is an API server that has the pods that live returns, and evicts them by evict.
type overuseAPI struct {
	API
	live  func() []*clustercache.PodInfo
	evict func(pod gpu.Pod) error
}

// PodsOn implements API.
func (a *overuseAPI) PodsOn(context.Context, string) (pods []corev1.Pod, err error) {
	for _, info := range a.live() {
		var cards []int
		for _, part := range info.Placement {
			cards = append(cards, part.Card)
		}
		pod := fake.Pod(info.Name, int64(info.Request), fake.Cards(len(cards)), fake.Bound("n", cards...),
			fake.Annotation(protocol.AnnotationAssumeTime, strconv.FormatInt(info.AssumeTime.UnixNano(), 10)))
		pod.Namespace, pod.UID = info.Namespace, types.UID(info.UID)
		if info.Leaving {
			pod = fake.Edited(pod, fake.Terminating(info.DeletionTime))
			pod.DeletionGracePeriodSeconds = new(int64(info.GraceSeconds))
		}
		if info.Overuse != nil {
			pod.Annotations[protocol.AnnotationOveruse] = info.Overuse.Annotation()
		}
		pods = append(pods, *pod)
	}
	return pods, nil
}

// Pod implements API.
func (a *overuseAPI) Pod(ctx context.Context, _, name string) (*corev1.Pod, error) {
	pods, err := a.PodsOn(ctx, "n")
	if err != nil {
		return nil, err
	}
	if i := slices.IndexFunc(pods, func(p corev1.Pod) bool { return p.Name == name }); i >= 0 {
		return &pods[i], nil
	}
	return nil, apierrors.NewNotFound(fake.PodResource, name)
}

// Evict implements API.
func (a *overuseAPI) Evict(_ context.Context, pod gpu.Pod, _ *int64, _ bool) error {
	return a.evict(pod)
}

// live returns the pods that the API server has.
func (m *overuseModel) live() []*clustercache.PodInfo {
	pods := m.PodsOn("n")
	for i, tenant := range m.tenants {
		if tenant.evicted {
			pods[i].Leaving, pods[i].DeletionTime = true, m.clock.Now().Add(time.Minute)
		}
	}
	if m.unseen != nil {
		m.unseen(pods)
	}
	return pods
}

// needs returns what the tenants of a card really need, as far as the last measurement showed it.
func (m *overuseModel) needs(card int) (sum int64) {
	for _, tenant := range m.tenants {
		if tenant.card == card && !tenant.evicted {
			need := tenant.requested
			if _, reported := m.reports[gpu.PodUID(tenant.name)]; reported && m.rank(tenant) == 0 {
				need = max(need, tenant.used)
			}
			sum += need
		}
	}
	return sum
}

// evict evicts a pod, and checks that this is right.
func (m *overuseModel) evict(pod gpu.Pod) error {
	i := slices.IndexFunc(m.tenants, func(t *tenant) bool { return t.name == pod.Name })
	if i < 0 || m.tenants[i].evicted {
		m.t.Errorf("%s is evicted, but is gone", pod)
		return nil
	}
	tenant := m.tenants[i]
	now := m.clock.Now()
	switch {
	case tenant.used <= tenant.requested:
		m.t.Errorf("%+v is evicted within its request", *tenant)
	case tenant.partial:
		m.t.Errorf("%+v is evicted from a group that is bound in part", *tenant)
	case m.short(tenant.card) && m.rank(tenant) == 2:
		m.borrowers++
	case m.short(tenant.card) && m.rank(tenant) == 1:
		m.early++
	case m.short(tenant.card):
	case m.rank(tenant) > 0:
		m.t.Errorf("%+v is evicted within its limit or its grace period from a card of which pods don't borrow what others need, at %v", *tenant, now)
	case m.needs(tenant.card) <= m.cards[tenant.card]:
		m.t.Errorf("%+v is evicted from a card that keeps its promises: %d of %d", *tenant, m.needs(tenant.card), m.cards[tenant.card])
	}
	for _, other := range m.tenants {
		_, reported := m.reports[gpu.PodUID(other.name)]
		if !reported || other.card != tenant.card || other.evicted || other.deleted || other.protected || other.partial || m.rank(tenant) < m.rank(other) {
			continue
		}
		if m.rank(tenant) > m.rank(other) {
			m.t.Errorf("%+v, of rank %d, is evicted before %+v, of rank %d", *tenant, m.rank(tenant), *other, m.rank(other))
		} else if tenant.grouped && !other.grouped || tenant.grouped == other.grouped && other.bound.After(tenant.bound) {
			m.t.Errorf("%+v is evicted before %+v", *tenant, *other)
		}
	}
	switch {
	case tenant.protected:
		return budgetRefusal()
	case m.random.IntN(10) == 0:
		return errors.New("the call is lost")
	}
	tenant.evicted = true
	m.evicted++
	if m.random.IntN(10) == 0 {
		return errors.New("the answer is lost")
	}
	return nil
}

// measure reports what the tenants use, as the device plugin does.
func (m *overuseModel) measure() {
	report := protocol.Usage{Time: m.clock.Now()}
	for card, memory := range m.cards {
		free := memory - m.hidden[card]
		for _, t := range m.tenants {
			if t.card == card {
				free -= t.used
			}
		}
		report.Cards = append(report.Cards, protocol.CardUsage{Index: card, Free: new(uint64(max(free, 0)) << 30)})
	}
	for _, t := range m.tenants {
		t.limit = max(t.limit, t.requested)
		switch exceeds := float64(t.used) > float64(t.limit)*(1+modelTolerance/100.); {
		case !exceeds:
			t.over = time.Time{}
		case t.over.IsZero():
			t.over = m.clock.Now()
		}
		report.Containers = append(report.Containers, protocol.ContainerUsage{
			UID: t.name, Container: "c", Card: t.card, Used: uint64(t.used) << 30, Requested: uint64(t.requested) << 30, Allowed: uint64(t.limit) << 30})
	}
	m.measured, m.there = report.Time, slices.Clone(m.tenants)
	m.reports = m.tracker.Update(report, m.known())
}

// round lets ten seconds pass: pods come and go and change their use, the plugin measures, and the extender makes its steps.
func (m *overuseModel) round() {
	m.watch()
	if m.random.IntN(3) == 0 {
		m.measure() // Just before some of these pods end.
	}
	m.tenants = slices.DeleteFunc(m.tenants, func(t *tenant) bool { return t.leaving && m.random.IntN(3) == 0 || m.random.IntN(40) == 0 })
	for _, t := range m.tenants {
		if m.random.IntN(40) == 0 {
			t.deleted, t.leaving = true, true
		}
	}
	m.overuser.Tick(m.t.Context()) // The last report doesn't know what the watch shows.
	for card := range m.cards {
		if m.random.IntN(10) == 0 {
			m.cards[card] = modelCard - m.random.Int64N(2)*m.random.Int64N(modelCard)
		}
		if m.random.IntN(10) == 0 {
			m.hidden[card] = m.random.Int64N(2) * m.random.Int64N(3)
		}
		free := m.cards[card]
		for _, t := range m.tenants {
			if t.card == card {
				free -= t.requested
			}
		}
		if free > 0 && m.random.IntN(4) == 0 {
			m.tenants = append(m.tenants, &tenant{
				name: fmt.Sprint("p", m.random.Uint64()), card: card, requested: 1 + m.random.Int64N(free), bound: m.clock.Now().Add(time.Duration(m.random.IntN(1000))),
				protected: m.random.IntN(5) == 0, grouped: m.random.IntN(3) == 0,
			})
			if added := m.tenants[len(m.tenants)-1]; m.random.IntN(2) == 0 {
				added.limit = added.requested + m.random.Int64N(10)
			}
		}
	}
	m.clock.Step(5 * time.Second)
	for _, t := range m.tenants {
		t.partial = t.grouped && m.random.IntN(3) == 0
		if m.random.IntN(8) == 0 {
			if t.used = m.random.Int64N(t.requested + 1); m.random.IntN(2) == 0 {
				t.used = t.requested + m.random.Int64N(8)
			}
		}
	}
	m.measure()
	for range 2 {
		m.overuser.Tick(m.t.Context())
	}
	m.clock.Step(5 * time.Second)
}

// watch shows the evictions so far.
func (m *overuseModel) watch() {
	for _, t := range m.tenants {
		t.leaving = t.evicted || t.deleted
	}
}

// TestOverusersModel: in 1,500 random rounds no pod is evicted that is within its request. None is evicted from a card that keeps its promises, or
// within its grace period, unless the card is low on free memory of which a pod borrows some. None that borrows is evicted before one above its
// limit, none before a younger one, none from a group that is bound in part. Also if a card's memory is lowered until requests alone exceed it, and
// if processes that aren't known use some. When the pods come to rest, no such card is left to over-users or borrowers.
func TestOverusersModel(t *testing.T) {
	evicted, borrowers, early := 0, 0, 0
	for seed := range uint64(15) {
		m := newOveruseModel(t, seed)
		for range 100 {
			m.round()
		}
		for range 60 { // Nothing changes any more. A lost answer and a budget only delay.
			m.clock.Step(10 * time.Second)
			m.watch()
			m.tenants = slices.DeleteFunc(m.tenants, func(t *tenant) bool { return t.leaving })
			for _, t := range m.tenants {
				t.protected, t.partial = false, false
			}
			m.measure()
			m.overuser.spared = queue.Pauses[gpu.PodUID]{}
			m.overuser.Tick(t.Context())
		}
		m.watch()
		m.tenants = slices.DeleteFunc(m.tenants, func(t *tenant) bool { return t.leaving })
		m.measure()
		for card, memory := range m.cards { // By what the pods really use: those that should be reported and aren't would stay as well.
			var sum int64
			over := false
			for _, t := range m.tenants {
				if t.card == card && m.rank(t) == 0 {
					sum, over = sum+t.used, true
				} else if t.card == card {
					sum += t.requested
				}
			}
			if over && sum > memory {
				t.Errorf("seed %d: card %d is left with %d of %d", seed, card, sum, memory)
			}
			if m.short(card) {
				t.Errorf("seed %d: card %d stays low on free memory beside pods that borrow it", seed, card)
			}
		}
		evicted, borrowers, early = evicted+m.evicted, borrowers+m.borrowers, early+m.early
	}
	if borrowers < 20 || early < 20 || evicted-borrowers-early < 20 {
		t.Errorf("only %d pods were evicted, of these %d within their limits and %d within their grace periods: the model shows nothing", evicted, borrowers, early)
	}
}

// TestOverusersStep has the cases that the model doesn't: reports that don't count, and who may evict.
func TestOverusersStep(t *testing.T) {
	for name, test := range map[string]struct {
		change  func(*overuseModel)
		evicted []string
	}{
		"a card that can't keep its promises": {func(*overuseModel) {}, []string{"greedy"}},
		"a report that wasn't renewed": {func(m *overuseModel) {
			m.clock.Step(protocol.OveruseLife + time.Second)
		}, nil},
		"a report from the future": {func(m *overuseModel) {
			m.clock.SetTime(begin.Add(-protocol.OveruseLife - time.Second))
		}, nil},
		"a report that is withdrawn, which the watch doesn't show": {func(m *overuseModel) {
			m.unseen = func(pods []*clustercache.PodInfo) { pods[0].Overuse = nil }
		}, nil},
		"a report of less use, which the watch doesn't show": {func(m *overuseModel) {
			m.tenants[1].requested = 7
			m.unseen = func(pods []*clustercache.PodInfo) {
				pods[0].Overuse = &protocol.Overuse{Since: begin, At: begin, Cards: map[int]protocol.CardOveruse{0: {Used: 9 << 10, Requested: 8 << 10}}}
			}
		}, nil},
		"another pod that is being deleted, which the watch doesn't show": {func(m *overuseModel) {
			m.unseen = func(pods []*clustercache.PodInfo) {
				pods[1].Leaving, pods[1].DeletionTime = true, begin.Add(time.Minute)
			}
		}, nil},
		"another replica leads": {func(m *overuseModel) {
			m.overuser.Leading = func() error { return errors.New("standby") }
		}, nil},
		"memory that is promised to no pod":                    {func(m *overuseModel) { m.tenants[1].requested = 2 }, nil},
		"requests alone exceed the lowered memory of the card": {func(m *overuseModel) { m.cards[0] = 4 }, []string{"greedy"}},
		"the same, and the reported pod is within the request of all its containers": {func(m *overuseModel) {
			m.cards[0], m.tenants[0].requested = 4, 12
		}, nil},
		"a budget forbids it":                          {func(m *overuseModel) { m.tenants[0].protected = true }, nil},
		"a member of a group that is bound completely": {func(m *overuseModel) { m.tenants[0].grouped = true }, []string{"greedy"}},
		"a member of a group that is bound in part": {func(m *overuseModel) {
			m.tenants[0].grouped, m.tenants[0].partial = true, true
		}, nil},
		"an older pod without a group before a member": {func(m *overuseModel) {
			m.tenants[0].grouped = true
			m.tenants[1].used, m.tenants[1].over, m.tenants[1].bound = 10, begin.Add(-time.Hour), begin.Add(-time.Minute)
			m.reports["modest"] = protocol.Overuse{Since: begin, At: begin, Cards: map[int]protocol.CardOveruse{0: {Used: 10 << 10, Requested: 8 << 10}}}
		}, []string{"modest"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := newOveruseModel(t, 1)
			m.tenants = []*tenant{
				{name: "greedy", requested: 8, used: 12, over: begin.Add(-time.Hour), bound: begin}, {name: "modest", requested: 8, used: 1, bound: begin},
			}
			m.reports = map[gpu.PodUID]protocol.Overuse{"greedy": {Since: begin, At: begin, Cards: map[int]protocol.CardOveruse{0: {Used: 12 << 10, Requested: 8 << 10}}}}
			m.random, m.measured = rand.New(rand.NewPCG(1, 2)), begin
			test.change(m)
			m.overuser.Tick(t.Context())
			var evicted []string
			for _, tenant := range m.tenants {
				if tenant.evicted {
					evicted = append(evicted, tenant.name)
				}
			}
			check.Equal(t, "evicted", test.evicted, evicted)
			want := map[string]int{}
			if len(test.evicted) > 0 {
				want = map[string]int{"overuser evicted": 1, "write eviction": 1}
			} else if m.tenants[0].protected {
				want = map[string]int{"overuser refused": 1, "write eviction": 1}
			}
			check.Equal(t, "counted", want, m.observer.Counts(), cmpopts.EquateEmpty())
		})
	}
}

// TestOverusersShort: which pods are evicted from a card that is low on free memory, one after the other, while nothing ends there.
func TestOverusersShort(t *testing.T) {
	report := func(at time.Time, used, requested, limit, short int64) *protocol.Overuse {
		return &protocol.Overuse{Since: begin, At: at, Cards: map[int]protocol.CardOveruse{0: {Used: used << 10, Requested: requested << 10, Limit: limit << 10, Short: short}}}
	}
	type pod struct {
		name    string
		request int64
		age     time.Duration
		report  *protocol.Overuse
	}
	borrower, older := pod{"borrower", 2, 0, report(begin, 6, 2, 8, 1)}, pod{"older", 2, time.Hour, report(begin, 6, 2, 8, 1)}
	for name, test := range map[string]struct {
		pods []pod
		// protected are those that a budget protects. newLeader is true if the first step follows a change of the leader.
		protected []string
		newLeader bool
		// ends is a pod that is terminating at first and then gone, unseen one that is terminating, which the watch doesn't show.
		ends, unseen string
		// slow is a pod that began to terminate half an hour ago and has a day for it.
		slow string
		// completes is a pod that ends after the first step, vanishes one that is gone then, missed one of which the watch doesn't show that.
		completes, vanishes, missed string
		// before is a pod that is gone at the step that sees the first report, and was there at the step before.
		before string
		want   []string
	}{
		"the youngest that borrows":                       {pods: []pod{older, borrower}, want: []string{"borrower"}},
		"the next one, if a budget protects the youngest": {pods: []pod{older, borrower}, protected: []string{"borrower"}, want: []string{"older"}},
		"one above its limit first, although the card keeps its promises": {
			pods: []pod{borrower, {"above", 2, time.Hour, report(begin, 8, 2, 4, 0)}}, want: []string{"above"},
		},
		"one above its limit within its grace period too": {
			pods: []pod{borrower, {"above", 2, time.Hour, report(begin, 8, 2, 4, 1)}}, want: []string{"above"},
		},
		"one above its request without a limit too": {
			pods: []pod{borrower, {"above", 2, time.Hour, report(begin, 3, 2, 0, 1)}}, want: []string{"above"},
		},
		"a report of a former leader's time":            {pods: []pod{borrower}, newLeader: true},
		"beside a pod that ends, after the report":      {pods: []pod{borrower, {"other", 2, 0, nil}}, ends: "other"},
		"beside a pod whose end the watch doesn't show": {pods: []pod{borrower, {"other", 2, 0, nil}}, unseen: "other"},
		"beside a pod that may take a day to end":       {pods: []pod{borrower, {"other", 2, 0, nil}}, slow: "other", want: []string{"borrower"}},
		"not by a report before a pod's end, after a refused eviction": {
			pods: []pod{older, borrower, {"other", 2, 0, nil}}, protected: []string{"borrower"}, completes: "other",
		},
		"not by a report before a pod was gone, after a refused eviction": {
			pods: []pod{older, borrower, {"other", 2, 0, nil}}, protected: []string{"borrower"}, vanishes: "other",
		},
		"the same, and the watch doesn't show it": {
			pods: []pod{older, borrower, {"other", 2, 0, nil}}, protected: []string{"borrower"}, missed: "other",
		},
		"not by the first report, which was made before a pod was gone": {pods: []pod{borrower, {"other", 2, 0, nil}}, before: "other"},
		"nothing, if none borrows any more":                             {pods: []pod{{"within", 2, 0, nil}}},
	} {
		t.Run(name, func(t *testing.T) {
			c := &overuseCluster{overuseModel: newOveruseModel(t, 1), protected: test.protected}
			for _, p := range test.pods {
				info := &clustercache.PodInfo{
					PodUse:    eligibility.PodUse{Pod: gpu.Pod{UID: gpu.PodUID(p.name), Name: p.name, Request: gpu.Memory(p.request)}, Node: "n"},
					Placement: gpu.On(0, gpu.Memory(p.request)), AssumeTime: begin.Add(-p.age), Overuse: p.report,
				}
				if p.report != nil {
					info.Limits = info.Limits.With(uint64(p.report.Cards[0].Limit)<<20, info.Request, 1)
				}
				if p.name == test.ends {
					info.Leaving, info.DeletionTime = true, begin.Add(time.Minute)
				}
				if p.name == test.slow {
					info.Leaving, info.DeletionTime, info.GraceSeconds = true, begin.Add(24*time.Hour-30*time.Minute), 24*60*60
				}
				c.pods = append(c.pods, info)
			}
			stepped := false
			c.overuser.Cache, c.overuser.groups = c, c
			c.overuser.API = &overuseAPI{evict: c.evict, live: func() (pods []*clustercache.PodInfo) {
				for _, p := range c.pods {
					if stepped && p.Name == test.missed {
						continue
					}
					if p.Name == test.unseen {
						p = new(*p)
						p.Leaving, p.DeletionTime = true, begin.Add(time.Minute)
					}
					pods = append(pods, p)
				}
				return pods
			}}
			if !test.newLeader {
				c.overuser.cards = map[string]map[int]cardSeen{}
			}
			if test.before != "" {
				reports := slices.Clone(c.pods)
				for i, p := range reports {
					c.pods[i] = new(*p)
					c.pods[i].Overuse = nil
				}
				c.overuser.Tick(t.Context())
				c.pods = slices.DeleteFunc(reports, func(p *clustercache.PodInfo) bool { return p.Name == test.before })
			}
			for range 3 { // After an eviction, no report is newer.
				c.overuser.Tick(t.Context())
				c.clock.Step(time.Second)
				c.pods = slices.DeleteFunc(c.pods, func(p *clustercache.PodInfo) bool { return p.Name == test.ends || p.Name == test.vanishes })
				for _, p := range c.pods {
					p.Ended = p.Name == test.completes
				}
				stepped = true
			}
			var got []string
			for _, uid := range c.evicted {
				got = append(got, string(uid))
			}
			check.Equal(t, "evicted", test.want, got)
		})
	}
}

// TestOverusersGone: a pod that the API server doesn't have any more isn't spared: the watch will show that it is gone, and until
// then no other pod is evicted.
func TestOverusersGone(t *testing.T) {
	m := newOveruseModel(t, 1)
	gone := func(pod gpu.Pod) error { return apierrors.NewNotFound(fake.PodResource, pod.Name) } // Between a read and its eviction.
	m.overuser.API = &overuseAPI{live: m.live, evict: gone}
	m.reports = map[gpu.PodUID]protocol.Overuse{}
	for _, name := range []string{"a", "b"} {
		m.tenants = append(m.tenants, &tenant{name: name, requested: 1, used: 17, bound: begin})
		m.reports[gpu.PodUID(name)] = protocol.Overuse{At: begin, Cards: map[int]protocol.CardOveruse{0: {Used: 17 << 10, Requested: 1 << 10}}}
	}
	m.overuser.Tick(t.Context())
	if n := m.observer.Count("write eviction"); n != 1 {
		t.Errorf("%d evictions were requested at once, want 1: %v", n, m.observer.Counts())
	}
	if len(m.overuser.spared) > 0 {
		t.Errorf("spared: %v", m.overuser.spared)
	}
}

// overusers is a cluster that knows which of its pods may use more than they request.
type overusers struct{ *cluster }

func (c overusers) MayOveruse() []*clustercache.PodInfo {
	return mayOveruse(slices.Collect(maps.Values(c.pods)))
}

func (c overusers) Membership(gpu.PodUID) (member, whole bool) { return false, false }

// TestOverusersTimeout: no answer to the eviction of a pod comes in time. That delays no other node. The next pod of its card is evicted once that eviction
// can't take effect any more, unless it did.
func TestOverusersTimeout(t *testing.T) {
	for made, want := range map[bool][]string{false: {"a1", "b", "a2"}, true: {"a1", "b"}} {
		over := func(name, node string, used int64, age time.Duration) *corev1.Pod {
			report := protocol.Overuse{Since: begin, At: begin, Cards: map[int]protocol.CardOveruse{0: {Used: used, Requested: 4}}}
			return fake.Pod(name, 4, fake.Bound(node, 0), fake.Annotation(protocol.AnnotationOveruse, report.Annotation()),
				fake.Annotation(protocol.AnnotationAssumeTime, strconv.FormatInt(begin.Add(-age).UnixNano(), 10)))
		}
		pods := []*corev1.Pod{
			over("a1", "n1", 12, 0), over("a2", "n1", 6, time.Hour), fake.Pod("a3", 4, fake.Bound("n1", 0)),
			over("b", "n2", 12, 0), fake.Pod("b2", 8, fake.Bound("n2", 0)),
		}
		c := overusers{newCluster(fake.Node("n1", 16), fake.Node("n2", 16))}
		clock, server, times := clocktesting.NewFakeClock(begin), fake.NewServer(), map[string]time.Duration{}
		for _, pod := range pods {
			c.report(pod)
			server.Set(pod)
		}
		server.Answer(fake.Answers{Evict: func(pod gpu.Pod, _ bool) error {
			times[pod.Name] = clock.Since(begin)
			leaving := fake.Edited(pods[slices.IndexFunc(pods, func(p *corev1.Pod) bool { return p.Name == pod.Name })], fake.Terminating(clock.Now()))
			if pod.Name != "a1" {
				c.report(leaving)
				return nil
			}
			if made {
				server.Set(leaving)
			}
			return errTimeout
		}})
		o := NewOveruseEvictor(Options{
			API: server, Cache: c, Recorder: record.NewFakeRecorder(10), Observer: &fake.Observer{}, AnswerLost: 30 * time.Second,
			Leading: func() error { return nil }, Clock: clock,
		}, c)
		for range 10 {
			o.Tick(t.Context())
			clock.Step(queue.Retry)
		}
		check.Equal(t, fmt.Sprintf("made %t: evicted", made), want, server.Calls().Evicted)
		if times["b"] > queue.Retry || !made && times["a2"] <= o.AnswerLost {
			t.Errorf("made %t: evicted at %v", made, times)
		}
	}
}

// TestOverusersOfSeveralCards: a pod with a share of both cards, or that uses one without a share of it, is judged by each card for itself, and evicted
// once.
func TestOverusersOfSeveralCards(t *testing.T) {
	type pod struct {
		name  string
		cards []int
		// used is what it uses of each of its cards, in GiB. It requests 8. Further ones are of the cards after these, of which it has no share.
		used []int64
		age  time.Duration
	}
	two := func(used ...int64) pod { return pod{"two", []int{0, 1}, used, time.Hour} }
	for name, test := range map[string]struct {
		pods []pod
		want []string
	}{
		"over on a card that is promised to another pod": {
			[]pod{two(8, 12), {"other", []int{1}, []int64{1}, 0}}, []string{"two from card 1: 12 of 8 GiB"},
		},
		"over on a card that no other pod has": {[]pod{two(12, 8), {"other", []int{1}, []int64{1}, 0}}, nil},
		"over on both cards, and both are promised": {
			[]pod{two(12, 13), {"a", []int{0}, []int64{1}, 0}, {"b", []int{1}, []int64{1}, 0}}, []string{"two from card 0: 12 of 8 GiB"},
		},
		"another pod is over": {[]pod{two(8, 8), {"other", []int{1}, []int64{12}, 0}}, []string{"other from card 1: 12 of 8 GiB"}},
		"another one is too, and is younger": {
			[]pod{two(8, 12), {"other", []int{1}, []int64{12}, 0}}, []string{"other from card 1: 12 of 8 GiB"},
		},
		"another one is too, and is older": {
			[]pod{two(8, 12), {"other", []int{1}, []int64{12}, 2 * time.Hour}}, []string{"two from card 1: 12 of 8 GiB"},
		},
		"another one uses a card that it wasn't given": {
			[]pod{{"two", []int{1}, []int64{8}, 0}, {"other", []int{0}, []int64{1, 12}, time.Hour}}, []string{"other from card 1: 12 of 0 GiB"},
		},
		"the same, and the card has room for it": {[]pod{{"two", []int{1}, []int64{8}, 0}, {"other", []int{0}, []int64{1, 6}, time.Hour}}, nil},
	} {
		c := &overuseCluster{overuseModel: newOveruseModel(t, 1)}
		c.reports = map[gpu.PodUID]protocol.Overuse{}
		for _, p := range test.pods {
			info := &clustercache.PodInfo{PodUse: eligibility.PodUse{Pod: gpu.Pod{UID: gpu.PodUID(p.name), Name: p.name, Request: 8 * gpu.Memory(len(p.cards))}, Node: "n"}, AssumeTime: begin.Add(-p.age)}
			over := map[int]protocol.CardOveruse{}
			for i, card := range p.cards {
				info.Placement = append(info.Placement, gpu.Share{Card: card, Memory: 8})
				if p.used[i] > 8 {
					over[card] = protocol.CardOveruse{Used: p.used[i] << 10, Requested: 8 << 10}
				}
			}
			for i, used := range p.used[len(p.cards):] {
				over[len(p.cards)+i] = protocol.CardOveruse{Used: used << 10}
			}
			if len(over) > 0 {
				info.Overuse = &protocol.Overuse{Since: begin, At: begin, Cards: over}
				c.reports[info.UID] = *info.Overuse
			}
			c.pods = append(c.pods, info)
		}
		events := record.NewFakeRecorder(10)
		c.overuser.API = &overuseAPI{live: func() []*clustercache.PodInfo { return c.pods }, evict: c.evict}
		c.overuser.Cache, c.overuser.groups, c.overuser.Recorder = c, c, events
		for range 3 {
			c.overuser.Tick(t.Context())
		}
		var got []string
		for range c.evicted {
			var card int
			var used, requested int64
			if _, err := fmt.Sscanf(<-events.Events, "Warning GPUMemoryOveruseEvicted Evicted from GPU card %d of node n: it uses %d MiB of GPU memory and requests %d MiB", &card, &used, &requested); err != nil {
				t.Fatal(err)
			}
			got = append(got, fmt.Sprintf("%s from card %d: %d of %d GiB", c.evicted[len(got)], card, used>>10, requested>>10))
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s: evicted (-want +got):\n%s", name, diff)
		}
	}
}

// overuseCluster is a node with these pods. The watch shows an eviction at once.
type overuseCluster struct {
	*overuseModel
	pods    []*clustercache.PodInfo
	evicted []gpu.PodUID
	// protected are the pods that a budget protects.
	protected []string
}

func (c *overuseCluster) PodsOn(string) []*clustercache.PodInfo { return c.pods }

func (c *overuseCluster) MayOveruse() []*clustercache.PodInfo { return mayOveruse(c.pods) }

func (c *overuseCluster) Membership(gpu.PodUID) (member, whole bool) { return false, false }

// evict evicts a pod.
func (c *overuseCluster) evict(pod gpu.Pod) error {
	if slices.Contains(c.protected, pod.Name) {
		return budgetRefusal()
	}
	c.evicted = append(c.evicted, pod.UID)
	c.pods = slices.DeleteFunc(c.pods, func(p *clustercache.PodInfo) bool { return p.UID == pod.UID })
	return nil
}

// TestOverusersReadReportedNodesOnly: a node on which no pod uses more than it requests isn't read at each step, though pods there may.
func TestOverusersReadReportedNodesOnly(t *testing.T) {
	c := &overuseCluster{overuseModel: newOveruseModel(t, 1)}
	pod := gpu.Pod{UID: "a", Name: "a", Request: 8, Limits: gpu.Limits{Largest: 16, MaxUnit: 16}}
	c.pods = []*clustercache.PodInfo{{PodUse: eligibility.PodUse{Pod: pod, Node: "n"}, Placement: []gpu.Share{{Memory: 8}}}}
	c.overuser.Cache = unreadNode{c}
	c.overuser.Tick(t.Context())
}

// unreadNode fails the test if a node is read.
type unreadNode struct{ *overuseCluster }

func (c unreadNode) Node(name string) (*corev1.Node, bool) {
	c.t.Errorf("node %s is read", name)
	return nil, false
}
