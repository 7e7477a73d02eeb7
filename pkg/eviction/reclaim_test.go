package eviction

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reclaim"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// reclaimFixture is a Reclaimer with two nodes of one card of 16. Of the tenant bob, b1 and b2 of 8 fill n1, of which b2 is the newer
// one, and b3 of 16 fills n2. Of the tenant alice, a of 8 waits.
type reclaimFixture struct {
	*Reclaimer
	cluster  *cluster
	server   *fake.Server
	observer *fake.Observer
	clock    *clocktesting.FakeClock
	events   chan string
	standby  error
	// holds are the plans for which hold was called, after which it refuses or not.
	holds     []reclaim.Plan
	holdFails bool
	b         []*corev1.Pod
	a         *corev1.Pod
	meanwhile func(f *reclaimFixture)
}

func newReclaimFixture() *reclaimFixture {
	recorder := record.NewFakeRecorder(100)
	f := &reclaimFixture{
		server: fake.NewServer(), observer: &fake.Observer{}, clock: clocktesting.NewFakeClock(begin), events: recorder.Events,
		b: []*corev1.Pod{
			fake.Pod("b1", 8, fake.Bound("n1", 0)), fake.Pod("b2", 8, fake.Bound("n1", 0)), fake.Pod("b3", 16, fake.Bound("n2", 0)),
		},
		a: fake.Pod("a", 8),
	}
	n1, n2 := fake.Node("n1", 16), fake.Node("n2", 16)
	for _, node := range []*corev1.Node{n1, n2} {
		node.Labels = map[string]string{corev1.LabelHostname: node.Name}
	}
	f.cluster = newCluster(n1, n2, f.b[0], f.b[1], f.b[2], f.a)
	for _, pod := range append(slices.Clone(f.b), f.a) {
		f.server.Set(pod)
	}
	f.Reclaimer = NewReclaimer(NewExecutor(Options{
		API: f.server, Ledger: f.cluster.ledger, Cache: f.cluster, Recorder: recorder, Observer: f.observer, Reclaims: f.observer,
		AnswerLost: time.Minute, Leading: func() error { return f.standby }, Clock: f.clock, NewGroup: background.Goroutines,
	}, recordName))
	f.executor.Tick(context.Background())
	return f
}

// need returns what alice needs.
func (f *reclaimFixture) need() reclaim.Need {
	need := reclaim.Need{
		Items:   []reclaim.Item{{Tenant: "alice", Pods: []reclaim.Pod{{Pod: protocol.Pod(f.a), Nodes: []string{"n1", "n2"}}}}},
		Tenants: map[string]reclaim.Tenant{"alice": {Share: 16}, "bob": {Share: 16, Allocated: 32, Excess: 16}},
	}
	for i, pod := range f.b {
		need.Victims = append(need.Victims, reclaim.Victim{Tenant: "bob", Started: begin.Add(time.Duration(i) * time.Hour), Pods: []gpu.Pod{protocol.Pod(pod)}})
	}
	slices.Reverse(need.Victims)
	return need
}

func (f *reclaimFixture) reclaim(need reclaim.Need) bool {
	until := f.Reclaim(context.Background(), need, func(plan reclaim.Plan) bool {
		f.holds = append(f.holds, plan)
		if f.meanwhile != nil {
			f.meanwhile(f)
		}
		return !f.holdFails
	})
	return !until.IsZero()
}

// The answers of the API server to evictions.
func refuses(names ...string) func(gpu.Pod, bool) error {
	return func(pod gpu.Pod, _ bool) error {
		if slices.Contains(names, pod.Name) {
			return budgetRefusal()
		}
		return nil
	}
}

func TestReclaimer(t *testing.T) {
	really := func(answer func(gpu.Pod, bool) error) func(gpu.Pod, bool) error {
		return func(pod gpu.Pod, dryRun bool) error {
			if dryRun {
				return nil
			}
			return answer(pod, false)
		}
	}
	lost := func(gpu.Pod, bool) error { return errLost }
	hangs := func(pod gpu.Pod, _ bool) error {
		if pod.Name == "b2" {
			return errTimeout
		}
		return nil
	}
	for name, tc := range map[string]struct {
		change  func(f *reclaimFixture)
		made    bool
		evicted []string
		counts  map[string]int
	}{
		"a dry run, and then the eviction of the newest": {nil, true, []string{"?b2", "b2"}, map[string]int{"reclaimed evicted": 1, "reclaimed memory": 8}},
		"a refused victim is replaced":                   {func(f *reclaimFixture) { f.server.Answer(fake.Answers{Evict: refuses("b2")}) }, true, []string{"?b2", "?b1", "b1"}, map[string]int{"reclaimed evicted": 1}},
		"a victim whose webhook hangs is replaced": {func(f *reclaimFixture) { f.server.Answer(fake.Answers{Evict: hangs}) }, true,
			[]string{"?b2", "?b1", "b1"}, nil},
		"all webhooks hang, and other attempts wait": {func(f *reclaimFixture) {
			f.server.Answer(fake.Answers{Evict: func(gpu.Pod, bool) error { return errTimeout }})
		}, false, []string{"?b2", "?b1"}, map[string]int{"reclaimed failed": 1}},
		"all are refused": {func(f *reclaimFixture) { f.server.Answer(fake.Answers{Evict: refuses("b1", "b2", "b3")}) }, false,
			[]string{"?b2", "?b1", "?b3"}, map[string]int{"reclaimed refused": 1}},
		"the API server is away":             {func(f *reclaimFixture) { f.server.Answer(fake.Answers{Evict: lost}) }, false, []string{"?b2"}, map[string]int{"reclaimed failed": 1}},
		"the answer to the eviction is lost": {func(f *reclaimFixture) { f.server.Answer(fake.Answers{Evict: really(lost)}) }, true, []string{"?b2", "b2"}, map[string]int{"reclaimed failed": 1}},
		"a budget changes after the dry run": {func(f *reclaimFixture) { f.server.Answer(fake.Answers{Evict: really(refuses("b2"))}) }, false, []string{"?b2", "b2"}, map[string]int{"reclaimed refused": 1}},
		"the victim is gone": {func(f *reclaimFixture) {
			f.server.Answer(fake.Answers{Evict: really(func(gpu.Pod, bool) error { return apierrors.NewNotFound(fake.PodResource, "b2") })})
		}, true, []string{"?b2", "b2"}, nil},
		"reads fail":                           {func(f *reclaimFixture) { f.server.Answer(fake.Answers{Read: errors.New("away")}) }, false, nil, map[string]int{"reclaimed failed": 1}},
		"the pod is gone, says a live read":    {func(f *reclaimFixture) { f.server.Remove(f.a) }, false, nil, map[string]int{"reclaimed failed": 0}},
		"the pod is bound, says a live read":   {func(f *reclaimFixture) { f.server.Set(fake.Edited(f.a, fake.Bound("n2", 0))) }, false, nil, nil},
		"another pod has its name":             {func(f *reclaimFixture) { f.server.Set(fake.Edited(f.a, func(p *corev1.Pod) { p.UID = "other" })) }, false, nil, nil},
		"the victim is gone, says a live read": {func(f *reclaimFixture) { f.server.Remove(f.b[1]) }, true, nil, map[string]int{"reclaimed failed": 0}},
		"the victim has ended, says a live read": {func(f *reclaimFixture) {
			f.server.Set(fake.Edited(f.b[1], func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }))
		}, true, nil, map[string]int{"reclaimed failed": 0}},
		"the victim is being deleted, says a live read": {func(f *reclaimFixture) { f.server.Set(fake.Edited(f.b[1], fake.Terminating(begin))) }, true, nil,
			map[string]int{"reclaimed failed": 0}},
		"this process doesn't lead":         {func(f *reclaimFixture) { f.standby = errors.New("standby") }, false, nil, map[string]int{"reclaimed failed": 1}},
		"it stops leading before it evicts": {func(f *reclaimFixture) { f.meanwhile = func(f *reclaimFixture) { f.standby = errors.New("standby") } }, false, []string{"?b2"}, map[string]int{"reclaimed failed": 1}},
		"the plan isn't right any more":     {func(f *reclaimFixture) { f.holdFails = true }, false, []string{"?b2"}, nil},
		"another pod is placed on the card before it is reserved": {func(f *reclaimFixture) {
			f.halfFree()
			f.meanwhile = func(f *reclaimFixture) { f.cluster.report(fake.Pod("other", 8, fake.Bound("n1", 0))) }
		}, false, []string{"?b2"}, map[string]int{"reclaimed failed": 1}},
		"the card becomes unhealthy before it is reserved": {func(f *reclaimFixture) {
			f.halfFree()
			f.meanwhile = func(f *reclaimFixture) {
				f.cluster.ledger.SetNode("n1", ledger.NodeSpec{Unit: gpu.MiB, Cards: []gpu.Card{{Memory: 16, Unhealthy: "Xid 79"}}})
			}
		}, false, []string{"?b2"}, map[string]int{"reclaimed failed": 1}},
		"the cache isn't synced":     {func(f *reclaimFixture) { f.cluster.notReady = errors.New("not yet") }, false, nil, map[string]int{"reclaimed failed": 1}},
		"budgets are not listed yet": {func(f *reclaimFixture) { f.cluster.budgetsNotSynced = errors.New("not yet") }, false, nil, map[string]int{"reclaimed failed": 1}},
		"a pod that is being deleted is enough": {func(f *reclaimFixture) { f.cluster.report(fake.Edited(f.b[0], fake.Terminating(begin))) }, true, nil,
			map[string]int{"reclaimed evicted": 1, "reclaimed memory": 0}},
		"one that would be deleted in a month isn't, and ends sooner": {func(f *reclaimFixture) {
			for _, pod := range f.b[:2] {
				lingers := fake.Edited(pod, fake.Terminating(begin.Add(30*24*time.Hour)))
				lingers.DeletionGracePeriodSeconds = new(int64(30 * 24 * 60 * 60))
				f.server.Set(lingers)
				f.cluster.report(lingers)
			}
		}, true, []string{"?b2 600s", "b2 600s"}, map[string]int{"reclaimed memory": 8}},
		"one that should have ended long ago isn't": {func(f *reclaimFixture) {
			f.cluster.report(fake.Edited(f.b[0], fake.Terminating(begin.Add(-time.Hour))))
		}, true, []string{"?b2", "b2"}, nil},
		"a node without CPU": {func(f *reclaimFixture) { f.cluster.noCPU = map[string]bool{"n1": true} }, true, []string{"?b3", "b3"}, nil},
		"its anti-affinity keeps it off the node": {func(f *reclaimFixture) {
			f.server.Set(fake.Edited(f.a, apartFrom("db", "")))
			f.server.Set(fake.Edited(fake.Pod("db", 0, fake.Bound("n1", 0)), fake.Label("db")))
		}, true, []string{"?b3", "b3"}, nil},
		"the anti-affinity of a pod there does": {func(f *reclaimFixture) {
			f.server.Set(fake.Edited(f.a, fake.Label("web")))
			f.cluster.report(fake.Edited(f.b[0], apartFrom("web", "")))
			f.server.Set(fake.Edited(f.b[0], apartFrom("web", "")))
		}, true, []string{"?b3", "b3"}, nil},
		"it is for the victim": {func(f *reclaimFixture) {
			f.server.Set(fake.Edited(f.a, apartFrom("db", "")))
			f.server.Set(fake.Edited(f.b[1], fake.Label("db")))
		}, true, []string{"?b2", "b2"}, nil},
		"it is for another namespace": {func(f *reclaimFixture) {
			f.server.Set(fake.Edited(f.a, apartFrom("db", "other")))
			f.server.Set(fake.Edited(fake.Pod("db", 0, fake.Bound("n1", 0)), fake.Label("db")))
		}, true, []string{"?b2", "b2"}, nil},
		"it keeps it off each node": {func(f *reclaimFixture) {
			f.server.Set(fake.Edited(f.a, apartFrom("db", "")))
			for _, node := range []string{"n1", "n2"} {
				f.server.Set(fake.Edited(fake.Pod("db-"+node, 0, fake.Bound(node, 0)), fake.Label("db")))
			}
		}, false, nil, nil},
		"its host port is taken": {func(f *reclaimFixture) {
			f.server.Set(fake.Edited(f.a, hostPort))
			f.server.Set(fake.Edited(fake.Pod("web", 0, fake.Bound("n1", 0)), hostPort))
		}, true, []string{"?b3", "b3"}, nil},
		"its host port is the victim's": {func(f *reclaimFixture) {
			f.server.Set(fake.Edited(f.a, hostPort))
			f.server.Set(fake.Edited(f.b[1], hostPort))
		}, true, []string{"?b2", "b2"}, nil},
		"its volume can't be used on the node": {func(f *reclaimFixture) {
			f.server.Set(fake.Edited(f.a, withClaim("data")))
			f.server.SetClaim("data", volumeOn("n2"))
		}, true, []string{"?b3", "b3"}, nil},
		"its ephemeral volume can't": {func(f *reclaimFixture) {
			f.server.Set(fake.Edited(f.a, func(p *corev1.Pod) {
				p.Spec.Volumes = []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}}}
			}))
			f.server.SetClaim("a-scratch", volumeOn("n2"))
		}, true, []string{"?b3", "b3"}, nil},
		"its volume can be used on no node": {func(f *reclaimFixture) {
			f.server.Set(fake.Edited(f.a, withClaim("data")))
			f.server.SetClaim("data", volumeOn("n3"))
		}, false, nil, nil},
		"its volume can be used anywhere": {func(f *reclaimFixture) {
			f.server.Set(fake.Edited(f.a, withClaim("data")))
			f.server.SetClaim("data", &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "anywhere"}})
		}, true, []string{"?b2", "b2"}, nil},
		"its claim has no volume yet": {func(f *reclaimFixture) {
			f.server.Set(fake.Edited(f.a, withClaim("data")))
			f.server.SetClaim("data", nil)
		}, true, []string{"?b2", "b2"}, nil},
		"its claim is missing": {func(f *reclaimFixture) { f.server.Set(fake.Edited(f.a, withClaim("data"))) }, false, nil, nil},
		"a mirror pod stays":   {func(f *reclaimFixture) { f.cluster.report(fake.Edited(f.b[1], fake.Mirror)) }, true, []string{"?b1", "b1"}, nil},
		"a budget allows none": {func(f *reclaimFixture) {
			f.cluster.report(fake.Edited(f.b[1], fake.Label("x")))
			f.cluster.budgets = append(f.cluster.budgets, fake.Budget("x", "x", 0))
		}, true, []string{"?b1", "b1"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			f := newReclaimFixture()
			if tc.change != nil {
				tc.change(f)
			}
			if made := f.reclaim(f.need()); made != tc.made {
				t.Errorf("made: %v", made)
			}
			check.Equal(t, "evictions", tc.evicted, f.server.Calls().Evicted)
			for what, want := range tc.counts {
				if got := f.observer.Count(what); got != want {
					t.Errorf("%s: %d, want %d", what, got, want)
				}
			}
		})
	}
}

// A group isn't evicted if the budget of all pods of its namespace allows the eviction of one: the API server would refuse the others.
func TestReclaimerGroupInBudgetOfNamespace(t *testing.T) {
	f := newReclaimFixture()
	all := fake.Budget("all", "", 1)
	all.Spec.Selector = &metav1.LabelSelector{}
	f.cluster.budgets = append(f.cluster.budgets, all)
	need := f.need()
	need.Victims = []reclaim.Victim{
		{Tenant: "bob", Started: begin.Add(time.Hour), Pods: []gpu.Pod{protocol.Pod(f.b[0]), protocol.Pod(f.b[1])}},
		{Tenant: "bob", Started: begin, Pods: []gpu.Pod{protocol.Pod(f.b[2])}},
	}
	f.reclaim(need)
	check.Equal(t, "evictions", []string{"?b3", "b3"}, f.server.Calls().Evicted)
}

// halfFree frees a half of n1, and makes a ask for all of it.
func (f *reclaimFixture) halfFree() {
	f.a = fake.Pod("a", 16)
	f.server.Set(f.a)
	f.server.Remove(f.b[0])
	f.cluster.delete(f.b[0])
}

// apartFrom gives a pod required anti-affinity to the pods with a label in a namespace; in its own if that is empty.
func apartFrom(app, namespace string) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		term := corev1.PodAffinityTerm{TopologyKey: corev1.LabelHostname, LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}}
		if namespace != "" {
			term.Namespaces = []string{namespace}
		}
		pod.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{term}}}
	}
}

// hostPort makes a pod use a port of its node.
func hostPort(pod *corev1.Pod) {
	pod.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80, HostPort: 80}}
}

// withClaim gives a pod a claim.
func withClaim(name string) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		pod.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name},
		}}}
	}
}

// volumeOn returns a volume that can be used on one node.
func volumeOn(node string) *corev1.PersistentVolume {
	term := corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{
		{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{node}},
	}}
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "on-" + node},
		Spec: corev1.PersistentVolumeSpec{NodeAffinity: &corev1.VolumeNodeAffinity{
			Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{term}},
		}},
	}
}

// A pod that doesn't wait any more, says a live read, keeps nothing from the others of the plan.
func TestReclaimerWithoutGonePods(t *testing.T) {
	f := newReclaimFixture()
	need := f.need()
	gone := protocol.Pod(fake.Pod("gone", 8))
	need.Items = append([]reclaim.Item{{Tenant: "alice", Pods: []reclaim.Pod{{Pod: gone, Nodes: []string{"n1", "n2"}}}}}, need.Items...)
	if !f.reclaim(need) || len(f.holds) != 1 || len(f.holds[0].Served) != 1 || f.holds[0].Served[0].Pods[0].UID != protocol.Pod(f.a).UID {
		t.Errorf("not made for the other pod alone: %+v", f.holds)
	}
}

// A pod with a thousand claims, which the API server would have to read before each attempt for any tenant.
func TestReclaimerReadsFewClaims(t *testing.T) {
	f := newReclaimFixture()
	f.server.SetClaim("data", nil)
	f.server.Set(fake.Edited(f.a, func(p *corev1.Pod) {
		for range 1000 {
			p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"},
			}})
		}
	}))
	if !f.reclaim(f.need()) {
		t.Error("not made")
	}
	if reads := f.server.Calls().Reads; reads > 2*maxClaims {
		t.Errorf("%d reads", reads)
	}
}

// The Events name tenants, shares, and what the tenants have.
func TestReclaimerEvents(t *testing.T) {
	f := newReclaimFixture()
	f.reclaim(f.need())
	var got []string
	for len(f.events) > 0 {
		got = append(got, <-f.events)
	}
	want := []string{
		"Normal FairShareEvicted Evicted for pod default/a: tenant alice has 0 of its share of 16, and tenant bob has 32 of its share of 16",
		"Normal FairShareEvicting Evicting 1 pod(s), since tenant alice has 0 of its share of 16: tenant bob has 32 of its share of 16",
	}
	check.Equal(t, "the result", want, got)
}

// With --fair-share-by=label, the tenant of the namespaces without the label has an empty name.
func TestReclaimerEventsWithoutLabel(t *testing.T) {
	f := newReclaimFixture()
	need := f.need()
	need.Tenants[""] = need.Tenants["bob"]
	for i := range need.Victims {
		need.Victims[i].Tenant = ""
	}
	f.reclaim(need)
	for range 2 {
		if event := <-f.events; !strings.Contains(event, "tenant <none> has 32 of its share of 16") {
			t.Error(event)
		}
	}
}

// A refused victim stays out of the next plans for a while.
func TestReclaimerSpares(t *testing.T) {
	f := newReclaimFixture()
	f.server.Answer(fake.Answers{Evict: refuses("b2")})
	f.holdFails = true
	var mu sync.Mutex
	victims := func() string {
		mu.Lock()
		defer mu.Unlock()
		f.holds = nil
		f.reclaim(f.need())
		var names []string
		for _, v := range f.holds[0].Victims {
			names = append(names, v.Pods[0].Name)
		}
		return strings.Join(names, " ")
	}
	if got := victims(); got != "b1" {
		t.Errorf("victims %s", got)
	}
	f.server.Answer(fake.Answers{})
	if got := victims(); got != "b1" {
		t.Errorf("victims soon after the refusal: %s", got)
	}
	f.clock.Step(queue.LongestPause)
	if got := victims(); got != "b2" {
		t.Errorf("victims later: %s", got)
	}
}

// The API server fails for a while. It may fail for all pods, so they stay out of plans for a short time only.
func TestReclaimerSparesForShortTime(t *testing.T) {
	f := newReclaimFixture()
	f.server.Answer(fake.Answers{Evict: func(gpu.Pod, bool) error { return apierrors.NewInternalError(errors.New("etcdserver: leader changed")) }})
	for range 4 {
		if f.reclaim(f.need()) {
			t.Error("made")
		}
		f.clock.Step(queue.Retry)
	}
	f.server.Answer(fake.Answers{})
	f.clock.Step(4 * queue.Retry)
	if !f.reclaim(f.need()) {
		t.Error("not made soon after the API server works again")
	}
}

// The items of a plan don't see the awaited reservations of each other. With the places that are held for them these would count twice.
func TestReclaimerAwaited(t *testing.T) {
	f := newReclaimFixture()
	need := f.need()
	need.Items = nil
	for _, name := range []string{"first", "second"} {
		pod := fake.Pod(name, 8)
		f.server.Set(pod)
		requests := []ledger.Request{{Pod: protocol.Pod(pod), Nodes: []string{"n1"}}}
		if !f.cluster.ledger.ReserveAwaited(ledger.Item{ID: name, Label: name}, requests, time.Time{}.Add(-time.Hour)) {
			t.Fatalf("no card is reserved for %s", name)
		}
		need.Items = append(need.Items, reclaim.Item{Tenant: "alice", ID: name, Pods: []reclaim.Pod{{Pod: requests[0].Pod, Nodes: requests[0].Nodes}}})
	}
	f.meanwhile = func(f *reclaimFixture) {
		for _, served := range f.holds[0].Served {
			place := served.Places[0]
			f.cluster.ledger.AddReservation(served.ID, ledger.Reservation{
				Source: ledger.Reclaimed, Places: []ledger.Place{{Pod: served.Pods[0].Pod, Node: place.Node, On: place.On}},
			})
		}
	}
	if made := f.reclaim(need); !made || len(f.holds[0].Served) != 2 || len(f.holds[0].Victims) != 2 {
		t.Errorf("room was made: %t, by the plans %+v", made, f.holds)
	}
}

// A nomination keeps n2 from pods of lower priority. The plan must fit for these too, although another pod of it sees the room.
func TestReclaimerPriorities(t *testing.T) {
	f := newReclaimFixture()
	f.cluster.ledger.Remove("uid-b3")
	f.server.Remove(f.b[2])
	f.b = f.b[:2]
	high, low := fake.Pod("high", 8), fake.Pod("low", 8)
	need := f.need()
	need.Items = nil
	for _, pod := range []*corev1.Pod{high, low} {
		f.server.Set(pod)
		p := protocol.Pod(pod)
		if pod == high {
			p.Priority = 10
		}
		need.Items = append(need.Items, reclaim.Item{Tenant: "alice", ID: pod.Name, Pods: []reclaim.Pod{{Pod: p, Nodes: []string{"n1", "n2"}}}})
	}
	f.cluster.ledger.Nominate("n2", gpu.Pod{UID: "uid-nominated", Name: "nominated", Request: 16, Priority: 5})
	if made := f.reclaim(need); !made {
		t.Error("no room was made")
	}
	for _, served := range f.holds[0].Served {
		if served.Places[0].Node != "n1" {
			t.Errorf("%s gets a place on %s", served.Pods[0].Name, served.Places[0].Node)
		}
	}
}
