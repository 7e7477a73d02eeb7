package eviction

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/apiserver/fake"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/usage"
)

// tenant is a pod of the model: what it requests and really uses of one card, in GiB.
type tenant struct {
	name            string
	card            int
	requested, used int64
	// over is since when it has used more than it requests by more than the tolerance; zero if it doesn't.
	over time.Time
	// bound is when it was bound. evicted is true once it is evicted, leaving once the watch shows that. A budget forbids the
	// eviction of a protected one.
	bound                       time.Time
	evicted, leaving, protected bool
}

// overuseModel is a node with two cards of 16 GiB whose pods use what they like. A device plugin measures them, and an extender
// evicts. The model checks each eviction by what the pods really use.
type overuseModel struct {
	t        *testing.T
	random   *rand.Rand
	clock    *clocktesting.FakeClock
	tracker  *usage.Overuse
	tenants  []*tenant
	reports  map[gpu.PodUID]protocol.Overuse
	evicted  int
	observer fake.Observer
	overuser *Overusers
}

const (
	modelTolerance = 10
	modelGrace     = time.Minute
	modelCard      = 16
)

func newOveruseModel(t *testing.T, seed uint64) *overuseModel {
	m := &overuseModel{
		t: t, random: rand.New(rand.NewPCG(seed, 1)), clock: clocktesting.NewFakeClock(begin),
		tracker: usage.NewOveruse(usage.OveruseOptions{Tolerance: modelTolerance, Grace: modelGrace}),
	}
	m.overuser = NewOverusers(Options{
		API: m, Recorder: record.NewFakeRecorder(1 << 16), Observer: &m.observer, AnswerLost: 30 * time.Second,
		Leading: func() error { return nil }, Clock: m.clock,
	}, m)
	return m
}

func (m *overuseModel) Ready() error { return nil }

func (m *overuseModel) Node(string) (*corev1.Node, bool) {
	inventory := protocol.Inventory{Unit: gpu.GiB, Cards: []gpu.Card{{Index: 0, Memory: modelCard}, {Index: 1, Memory: modelCard}}}
	text, err := inventory.Annotation()
	if err != nil {
		m.t.Fatal(err)
	}
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Annotations: map[string]string{protocol.AnnotationInventory: text}}}, true
}

func (m *overuseModel) PodsOn(string) (pods []*clustercache.PodInfo) {
	for _, tenant := range m.tenants {
		info := &clustercache.PodInfo{
			Pod:  gpu.Pod{UID: gpu.PodUID(tenant.name), Namespace: "d", Name: tenant.name, Request: gpu.Memory(tenant.requested), Leaving: tenant.leaving},
			Node: "n", Placement: gpu.On(tenant.card, gpu.Memory(tenant.requested)), AssumeTime: tenant.bound,
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

func (m *overuseModel) Overusing() []*clustercache.PodInfo {
	return slices.DeleteFunc(m.PodsOn("n"), func(p *clustercache.PodInfo) bool { return p.Overuse == nil })
}

// needs returns what the tenants of a card really need, as far as the last measurement showed it.
func (m *overuseModel) needs(card int) (sum int64) {
	for _, tenant := range m.tenants {
		if tenant.card == card && !tenant.evicted {
			need := tenant.requested
			if _, reported := m.reports[gpu.PodUID(tenant.name)]; reported {
				need = max(need, tenant.used)
			}
			sum += need
		}
	}
	return sum
}

// Evict implements API. It checks the eviction.
func (m *overuseModel) Evict(_ context.Context, pod gpu.Pod, _ bool) error {
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
	case tenant.over.IsZero() || now.Sub(tenant.over) < modelGrace:
		m.t.Errorf("%+v is evicted within its grace period, at %v", *tenant, now)
	case m.needs(tenant.card) <= modelCard:
		m.t.Errorf("%+v is evicted from a card that keeps its promises: %d of %d", *tenant, m.needs(tenant.card), modelCard)
	}
	for _, other := range m.tenants {
		_, reported := m.reports[gpu.PodUID(other.name)]
		if reported && other.card == tenant.card && !other.evicted && !other.protected && other.bound.After(tenant.bound) {
			m.t.Errorf("%+v is evicted before the younger %+v", *tenant, *other)
		}
	}
	switch {
	case tenant.protected:
		return apierrors.NewTooManyRequests("a budget", 0)
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
	for _, t := range m.tenants {
		switch exceeds := float64(t.used) > float64(t.requested)*(1+modelTolerance/100.); {
		case !exceeds:
			t.over = time.Time{}
		case t.over.IsZero():
			t.over = m.clock.Now()
		}
		report.Containers = append(report.Containers, protocol.ContainerUsage{
			UID: t.name, Container: "c", Card: t.card, Used: uint64(t.used) << 30, Requested: uint64(t.requested) << 30})
	}
	m.reports = m.tracker.Update(report, func(gpu.PodUID) *protocol.Overuse { return nil })
}

// round lets ten seconds pass: pods come and go and change their use, the plugin measures, and the extender makes its steps.
func (m *overuseModel) round() {
	m.watch()
	m.tenants = slices.DeleteFunc(m.tenants, func(t *tenant) bool { return t.leaving && m.random.IntN(3) == 0 || m.random.IntN(40) == 0 })
	for card := range 2 {
		free := int64(modelCard)
		for _, t := range m.tenants {
			if t.card == card {
				free -= t.requested
			}
		}
		if free > 0 && m.random.IntN(4) == 0 {
			m.tenants = append(m.tenants, &tenant{
				name: fmt.Sprint("p", m.random.Uint64()), card: card, requested: 1 + m.random.Int64N(free), bound: m.clock.Now().Add(time.Duration(m.random.IntN(1000))),
				protected: m.random.IntN(5) == 0,
			})
		}
	}
	m.clock.Step(5 * time.Second)
	for _, t := range m.tenants {
		if m.random.IntN(8) == 0 {
			if t.used = m.random.Int64N(t.requested + 1); m.random.IntN(2) == 0 {
				t.used = t.requested + m.random.Int64N(8)
			}
		}
	}
	m.measure()
	for range 2 {
		m.overuser.step(m.t.Context())
	}
	m.clock.Step(5 * time.Second)
}

// watch shows the evictions so far.
func (m *overuseModel) watch() {
	for _, t := range m.tenants {
		t.leaving = t.evicted
	}
}

// TestOverusersModel: in a thousand random rounds no pod is evicted that is within its request or its grace period, none from a card
// that keeps its promises, and none before a younger one. When the pods come to rest, no card is left to over-users.
func TestOverusersModel(t *testing.T) {
	evicted := 0
	for seed := range uint64(10) {
		m := newOveruseModel(t, seed)
		for range 100 {
			m.round()
		}
		for range 60 { // Nothing changes any more. A lost answer and a budget only delay.
			m.clock.Step(10 * time.Second)
			m.watch()
			m.tenants = slices.DeleteFunc(m.tenants, func(t *tenant) bool { return t.leaving })
			for _, t := range m.tenants {
				t.protected = false
			}
			m.measure()
			m.overuser.spared = pauses{}
			m.overuser.step(t.Context())
		}
		for card := range 2 {
			if m.needs(card) > modelCard {
				t.Errorf("seed %d: card %d is left with %d of %d", seed, card, m.needs(card), modelCard)
			}
		}
		evicted += m.evicted
	}
	if evicted < 20 {
		t.Errorf("only %d pods were evicted: the model shows nothing", evicted)
	}
}

// TestOverusersStep has the cases that the model doesn't: reports that don't count, and who may evict.
func TestOverusersStep(t *testing.T) {
	for name, test := range map[string]struct {
		change  func(*overuseModel)
		evicted int
	}{
		"a card that can't keep its promises": {func(*overuseModel) {}, 1},
		"a report that wasn't renewed": {func(m *overuseModel) {
			m.clock.Step(protocol.OveruseLife + time.Second)
		}, 0},
		"a report from the future": {func(m *overuseModel) {
			m.clock.SetTime(begin.Add(-protocol.OveruseLife - time.Second))
		}, 0},
		"another replica leads": {func(m *overuseModel) {
			m.overuser.Leading = func() error { return errors.New("standby") }
		}, 0},
		"memory that is promised to no pod": {func(m *overuseModel) { m.tenants[1].requested = 2 }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			m := newOveruseModel(t, 1)
			m.tenants = []*tenant{
				{name: "greedy", requested: 8, used: 12, over: begin.Add(-time.Hour), bound: begin}, {name: "modest", requested: 8, used: 1, bound: begin},
			}
			m.reports = map[gpu.PodUID]protocol.Overuse{"greedy": {Since: begin, At: begin, Cards: map[int]protocol.CardOveruse{0: {Used: 12 << 10, Requested: 8 << 10}}}}
			m.random = rand.New(rand.NewPCG(7, 7))
			test.change(m)
			m.overuser.step(t.Context())
			if m.evicted != test.evicted {
				t.Errorf("%d pods were evicted, want %d", m.evicted, test.evicted)
			}
		})
	}
}

// goneAPI is an API server that has none of the pods.
type goneAPI struct{}

func (goneAPI) Evict(_ context.Context, pod gpu.Pod, _ bool) error {
	return apierrors.NewNotFound(corev1.Resource("pods"), pod.Name)
}

// TestOverusersGone: a pod that the API server doesn't have any more isn't spared: the watch will show that it is gone, and until
// then no other pod is evicted.
func TestOverusersGone(t *testing.T) {
	m := newOveruseModel(t, 1)
	m.overuser.API = goneAPI{}
	m.reports = map[gpu.PodUID]protocol.Overuse{}
	for _, name := range []string{"a", "b"} {
		m.tenants = append(m.tenants, &tenant{name: name, requested: 1, used: 17, bound: begin})
		m.reports[gpu.PodUID(name)] = protocol.Overuse{At: begin, Cards: map[int]protocol.CardOveruse{0: {Used: 17 << 10, Requested: 1 << 10}}}
	}
	m.overuser.step(t.Context())
	if n := m.observer.Count("write eviction"); n != 1 {
		t.Errorf("%d evictions were requested at once, want 1: %v", n, m.observer.Counts())
	}
	if len(m.overuser.spared) > 0 {
		t.Errorf("spared: %v", m.overuser.spared)
	}
}
