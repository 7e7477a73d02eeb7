package upgrade

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/framework"
)

var must = check.Must

const (
	// lifetime is how long a pod stays bound, and a group whole.
	lifetime = 1500 * time.Millisecond
	// graceful is how long an evicted pod takes to end.
	graceful = 500 * time.Millisecond
	// groupSize is the number of members of each group.
	groupSize = 4
	// cutoff is the priority from which on pods need no turn.
	cutoff = 1000
	// labelKind is the label of nodes for pods of one kind, besides batch and single pods.
	labelKind = "kind"
)

// kind is what a pod of the load is. Each kind has a namespace of its own, which is a tenant.
type kind string

const (
	// batch pods wait for their turn, fill the cluster, and don't end. Others are created for those that are evicted.
	batch kind = "batch"
	// single pods wait for their turn and end soon.
	single kind = "single"
	// member pods are of a group that waits for its turn. Its tenant is never above its share, and it has nodes without urgent pods.
	member kind = "member"
	// urgent pods need no turn, and preempt others from a node.
	urgent kind = "urgent"
)

// load creates pods without pause, ends them as kubelets do, and judges every change of a pod.
type load struct {
	*testing.T
	cluster    *framework.Cluster
	namespaces map[kind]*framework.Namespace
	nodes      []corev1.Node
	stop       func() error

	mu sync.Mutex
	// ending is true once no pods are created any more, and batch pods end too. frozen is true while no pod is created or ended, except those
	// that are being deleted.
	ending, frozen bool
	pods           map[types.UID]*state
	next           int
	// bound and evicted count pods by kind, whole counts groups.
	bound, evicted map[kind]int
	whole          int
	wrong          []error
}

// state is a pod with when it was first seen bound, whole with its group, and terminating.
type state struct {
	*corev1.Pod
	bound, whole, terminating time.Time
	ended                     bool // by the load
}

// startLoad starts the load on four nodes with two cards of 16 GiB each.
func startLoad(t *testing.T, c *framework.Cluster) *load {
	t.Helper()
	l := &load{T: t, cluster: c, pods: map[types.UID]*state{}, bound: map[kind]int{}, evicted: map[kind]int{}, namespaces: map[kind]*framework.Namespace{}}
	for _, k := range []kind{batch, single, member, urgent} {
		l.namespaces[k] = c.NewNamespace(t)
	}
	_, err := c.Client.SchedulingV1().PriorityClasses().Create(t.Context(), &schedulingv1.PriorityClass{
		ObjectMeta: metav1.ObjectMeta{Name: string(urgent)}, Value: cutoff,
	}, metav1.CreateOptions{})
	must(t, err)
	for i := range 4 {
		of := urgent
		if i > 0 {
			of = member
		}
		node := framework.MakeNode(fmt.Sprintf("n%d", i)).Unit(gpu.GiB).Cards(2, 16).Label(labelKind, string(of))
		l.namespaces[batch].AddNodes(node)
		l.nodes = append(l.nodes, *node.Obj())
	}
	list, err := c.Client.CoreV1().Pods("").List(t.Context(), metav1.ListOptions{})
	must(t, err)
	changes, err := c.Client.CoreV1().Pods("").Watch(t.Context(), metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.run(ctx, changes) }()
	l.stop = sync.OnceValue(func() error {
		cancel()
		return <-done
	})
	t.Cleanup(func() {
		check.NoError(t, l.stop())
	})
	return l
}

// run follows the pods until ctx ends or a call fails.
func (l *load) run(ctx context.Context, changes watch.Interface) error {
	defer changes.Stop()
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case change, ok := <-changes.ResultChan():
			pod, isPod := change.Object.(*corev1.Pod)
			if !ok || !isPod {
				return fmt.Errorf("the watch for pods has ended: %v", change.Object)
			}
			l.follow(pod, change.Type == watch.Deleted, time.Now())
		case now := <-ticker.C:
			if err := l.step(ctx, now); err != nil && ctx.Err() == nil {
				return err
			}
		}
	}
}

// follow takes a pod's new state, and judges it.
func (l *load) follow(pod *corev1.Pod, deleted bool, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.kindOf(pod)
	s := l.pods[pod.UID]
	if s == nil {
		s = &state{}
		l.pods[pod.UID] = s
	}
	s.Pod = pod
	if pod.Spec.NodeName != "" && s.bound.IsZero() {
		s.bound = now
		l.bound[k]++
		l.checkCards()
		l.checkWhole(pod, now)
	}
	if pod.DeletionTimestamp != nil && s.terminating.IsZero() {
		s.terminating = now
		if !s.ended {
			l.evicted[k]++
			if k == member {
				l.wrong = append(l.wrong, fmt.Errorf("member %s was evicted: %v", pod.Name, pod.Status.Conditions))
			}
		}
	}
	if deleted {
		delete(l.pods, pod.UID)
		if s.bound.IsZero() {
			l.wrong = append(l.wrong, fmt.Errorf("pod %s was deleted before it was bound", pod.Name))
		}
	}
}

func (l *load) kindOf(pod *corev1.Pod) kind {
	for k, n := range l.namespaces {
		if n.ID == pod.Namespace {
			return k
		}
	}
	return ""
}

// checkCards checks that no card has allocated more than its memory.
func (l *load) checkCards() {
	var pods []corev1.Pod
	for _, s := range l.pods {
		pods = append(pods, *s.Pod)
	}
	allocations, err := framework.AddUp(l.nodes, pods)
	if overfull := allocations.Overfull(); len(overfull) > 0 {
		err = errors.New(strings.Join(overfull, "; "))
	}
	if err != nil {
		l.wrong = append(l.wrong, err)
	}
}

// checkWhole notes that a group is whole.
func (l *load) checkWhole(pod *corev1.Pod, now time.Time) {
	var members []*state
	for _, s := range l.pods {
		if group := pod.Labels[framework.LabelGroup]; group != "" && s.Labels[framework.LabelGroup] == group && !s.bound.IsZero() {
			members = append(members, s)
		}
	}
	if len(members) < groupSize {
		return
	}
	l.whole++
	for _, s := range members {
		s.whole = now
	}
}

// step ends pods and creates others.
func (l *load) step(ctx context.Context, now time.Time) error {
	l.mu.Lock()
	var ends []*state
	alive := map[kind]int{}
	for _, s := range l.pods {
		k := l.kindOf(s.Pod)
		since := s.bound
		if k == member {
			since = s.whole
		}
		lives := k != batch || l.ending
		switch {
		case s.ended:
		case !s.terminating.IsZero() && now.Sub(s.terminating) > graceful && !s.bound.IsZero(),
			!l.frozen && lives && !since.IsZero() && now.Sub(since) > lifetime:
			s.ended = true
			ends = append(ends, s)
		case s.terminating.IsZero():
			alive[k]++
		}
	}
	var creates []*framework.PodWrapper
	if !l.ending && !l.frozen {
		creates = l.missing(alive)
	}
	l.mu.Unlock()
	for _, s := range ends {
		err := l.cluster.Client.CoreV1().Pods(s.Namespace).Delete(ctx, s.Name, metav1.DeleteOptions{
			GracePeriodSeconds: new(int64), Preconditions: metav1.NewUIDPreconditions(string(s.UID)),
		})
		if err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	for _, pod := range creates {
		created, err := l.cluster.Client.CoreV1().Pods(pod.Pod.Namespace).Create(ctx, pod.Obj(), metav1.CreateOptions{})
		if err != nil {
			return err
		}
		l.mu.Lock()
		if l.pods[created.UID] == nil { // The watch reports it later.
			l.pods[created.UID] = &state{Pod: created}
		}
		l.mu.Unlock()
	}
	return nil
}

// missing builds the pods that are to be created: 24 batch pods, of which 16 fit, three single pods, a group and an urgent pod exist at any time.
func (l *load) missing(alive map[kind]int) (pods []*framework.PodWrapper) {
	add := func(k kind, gated bool, change func(*framework.PodWrapper)) {
		l.next++
		pod := framework.MakePod(fmt.Sprintf("%s-%d", k, l.next)).Namespace(l.namespaces[k].ID).GPUMem(8)
		if gated {
			pod.FairShareGate()
		}
		if change != nil {
			change(pod)
		}
		pods = append(pods, pod)
	}
	for range 24 - alive[batch] {
		add(batch, true, nil)
	}
	for range 3 - alive[single] {
		add(single, true, nil)
	}
	if alive[member] == 0 {
		group := fmt.Sprintf("group-%d", l.next)
		for range groupSize {
			add(member, true, func(pod *framework.PodWrapper) { pod.Group(group, groupSize).NodeSelector(labelKind, string(member)) })
		}
	}
	if alive[urgent] == 0 {
		add(urgent, false, func(pod *framework.PodWrapper) {
			pod.GPUMem(16).PriorityClass(string(urgent)).NodeSelector(labelKind, string(urgent))
		})
	}
	return pods
}

// waitProgress waits until pods of each kind were bound, groups became whole, and pods were evicted. Without reclaim it needs no groups.
func (l *load) waitProgress(reclaim bool) {
	l.Helper()
	l.mu.Lock()
	singles, groups, urgents, evicted := l.bound[single]+3, l.whole+1, l.bound[urgent]+1, l.evicted[batch]+2
	l.mu.Unlock()
	framework.Eventually(l, "pods and groups are bound, and others evicted", func(context.Context) error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.bound[single] < singles || l.bound[urgent] < urgents || reclaim && (l.whole < groups || l.evicted[batch] < evicted) {
			return fmt.Errorf("bound: %v, want %d single and %d urgent pods; %d groups are whole, want %d; %d batch pods were evicted, want %d; pending: %v",
				l.bound, singles, urgents, l.whole, groups, l.evicted[batch], evicted, l.pending())
		}
		return nil
	})
	l.check()
}

// waitEviction waits until a pod that was evicted is ending.
func (l *load) waitEviction() {
	l.Helper()
	framework.Eventually(l, "an evicted pod is ending", func(context.Context) error {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, s := range l.pods {
			if !s.terminating.IsZero() && !s.ended {
				return nil
			}
		}
		return errors.New("none is")
	})
}

// checkLedger stops the load for a moment, and compares the leader's ledger with the API server's pods.
func (l *load) checkLedger() {
	l.Helper()
	l.freeze(true)
	l.cluster.CheckLedger(l)
	l.freeze(false)
}

func (l *load) freeze(frozen bool) {
	l.mu.Lock()
	l.frozen = frozen
	l.mu.Unlock()
}

// check fails the test if something wrong was seen.
func (l *load) check() {
	l.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.wrong) > 0 {
		l.Fatal(l.wrong)
	}
}

// finish lets all pods run to their end.
func (l *load) finish() {
	l.Helper()
	l.mu.Lock()
	l.ending = true
	l.mu.Unlock()
	framework.Eventually(l, "all pods have run", func(context.Context) error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if len(l.pods) > 0 {
			return fmt.Errorf("%d are left; pending: %v", len(l.pods), l.pending())
		}
		return nil
	})
	must(l, l.stop())
	l.check()
}

// pending returns the pending pods with kube-scheduler's messages.
func (l *load) pending() []string {
	out := map[string]bool{}
	for _, s := range l.pods {
		if s.bound.IsZero() {
			out[fmt.Sprintf("%s %v: %s", s.Name, s.Spec.SchedulingGates, framework.SchedulerMessage(s.Pod))] = true
		}
	}
	return slices.Sorted(maps.Keys(out))
}
