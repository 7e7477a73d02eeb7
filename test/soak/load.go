package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/simkubelet"
)

// load creates jobs and stands for their controllers: it deletes pods that have ended, and replaces those that failed or
// disappeared before their end.
type load struct {
	options
	pods typedcorev1.PodInterface
	all  informers.SharedInformerFactory

	mu       sync.Mutex
	random   *rand.Rand
	serial   int
	members  map[string]*member
	services []*job
	counts   counts
	// waits are the times in seconds from creation to binding since the last sample.
	waits []float64
	book  *book
	// failure is what was wrong: unexpected answers of the API server, or a card with too many pods.
	failure error
}

// counts are totals of the run. heldBack counts the arrivals that didn't happen, see maxWaiting.
type counts struct{ created, ended, failed, lost, heldBack int }

// job is a set of pods that are created together.
type job struct {
	name    string
	members []*member
	// over is true once the job's pods aren't replaced any more.
	over bool
}

// member is one pod of a job, whatever the number of its replacements.
type member struct {
	job     *job
	index   int
	pod     *framework.PodWrapper
	created time.Time
	bound   bool
	// failed is true once the pod has failed, until it is replaced, and done once it has run to its end.
	failed, done bool
	serial       int
}

// name returns the name of the member's current pod.
func (m *member) name() string { return fmt.Sprintf("%s-%d-%d", m.job.name, m.index, m.serial) }

func newLoad(o options, client kubernetes.Interface, random *rand.Rand) *load {
	return &load{
		options: o, pods: client.CoreV1().Pods(metav1.NamespaceDefault), random: random, members: map[string]*member{},
		book: newBook(o.cards, cardMemory),
		all:  informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(metav1.NamespaceDefault)),
	}
}

// follow creates jobs until the week is over, and then waits until all pods have ended.
func (l *load) follow(ctx context.Context, over <-chan struct{}) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	handler, err := l.all.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(pod any) { l.changed(ctx, pod.(*corev1.Pod)) },
		UpdateFunc: func(_, after any) { l.changed(ctx, after.(*corev1.Pod)) },
		DeleteFunc: func(last any) {
			if unknown, ok := last.(cache.DeletedFinalStateUnknown); ok {
				last = unknown.Obj
			}
			l.gone(ctx, last.(*corev1.Pod))
		},
	})
	if err != nil {
		return err
	}
	l.all.StartWithContext(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), handler.HasSynced) {
		return ctx.Err()
	}
	started := time.Now()
	next := started
	for !isClosed(over) && l.err() == nil {
		l.arrive(ctx)
		next = next.Add(l.pause(next.Sub(started))) // On a busy machine each pause ends late. That must not make arrivals fewer.
		select {
		case <-time.After(time.Until(next)):
		case <-over:
		}
	}
	err = l.drain(ctx)
	return errors.Join(l.err(), err)
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func (l *load) err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.failure
}

// podsPerArrival is the mean number of pods that arrive creates.
const podsPerArrival = 2.3

// pause returns the time until the next arrival: exponentially distributed, and by night three times as long as by day.
func (l *load) pause(since time.Duration) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	daylight := 1 - 0.5*math.Cos(2*math.Pi*since.Seconds()/l.day().Seconds())
	return time.Duration(l.random.ExpFloat64() * podsPerArrival / (l.rate * daylight) * float64(time.Second))
}

// maxWaiting is the number of waiting pods from which on nothing arrives. A slow machine that binds fewer pods than arrive would
// show the growth of its queue instead: each queued pod makes the next one dearer.
const maxWaiting = 1000

// arrive creates the pods of one arrival, unless too many pods wait.
func (l *load) arrive(ctx context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.waiting() >= maxWaiting {
		l.counts.heldBack++
		return
	}
	switch kind := l.random.Float64(); {
	case kind < 0.80:
		l.start(ctx, 1, l.anyPod())
	case kind < 0.93: // A group.
		l.startGroup(ctx, 2+l.random.IntN(7))
	case kind < 0.97: // A burst of single pods.
		for range 10 + l.random.IntN(20) {
			l.start(ctx, 1, l.anyPod())
		}
	case len(l.services) < 6:
		l.services = append(l.services, l.startService(ctx))
	default: // A deployment is updated: the new pods are created before the old ones are deleted.
		i := l.random.IntN(len(l.services))
		old := l.services[i]
		l.services[i] = l.startService(ctx)
		l.stop(ctx, old)
	}
}

// fill is the part of all memory that pods use on average. By day it is half as much again, so that bursts and groups wait.
const fill = 0.6

// runTime returns how long a pod runs: some run ten times as long as most.
func (l *load) runTime() time.Duration {
	const meanMemory, spread = 6.2, 1.0
	mean := fill * float64(l.nodes*l.cards*cardMemory) / meanMemory / l.rate
	return time.Duration(mean * math.Exp(spread*l.random.NormFloat64()-spread*spread/2) * float64(time.Second))
}

// sizes are what pods request, in units.
var sizes = []int64{1, 2, 2, 4, 4, 8, 8, 12, cardMemory}

func (l *load) anyPod() *framework.PodWrapper {
	size := sizes[l.random.IntN(len(sizes))]
	pod := framework.MakePod("").Namespace(metav1.NamespaceDefault).GPUMem(size).
		Annotation(simkubelet.AnnotationExitAfter, l.runTime().Round(time.Millisecond).String())
	switch kind := l.random.Float64(); {
	case kind < 0.08 && size%2 == 0:
		pod.Cards(2)
	case kind < 0.16:
		pod.Cores(5 + 5*l.random.Int64N(10))
	case kind < 0.20 && size < cardMemory:
		pod.Container("second", 1)
	}
	return pod
}

func (l *load) startGroup(ctx context.Context, size int) {
	pod := l.anyPod()
	l.start(ctx, size, pod.Group("g"+strconv.Itoa(l.serial), size).ControlledBy("g"+strconv.Itoa(l.serial)))
}

func (l *load) startService(ctx context.Context) *job {
	pod := framework.MakePod("").Namespace(metav1.NamespaceDefault).GPUMem(2)
	return l.start(ctx, 1+l.random.IntN(4), pod)
}

// start creates a job of equal pods. l.mu is locked, as in all functions below unless they say so.
func (l *load) start(ctx context.Context, size int, pod *framework.PodWrapper) *job {
	j := &job{name: "j" + strconv.Itoa(l.serial)}
	l.serial++
	for i := range size {
		m := &member{job: j, index: i, pod: pod}
		j.members = append(j.members, m)
		l.create(ctx, m)
	}
	return j
}

func (l *load) create(ctx context.Context, m *member) {
	pod := m.pod.Clone().Obj()
	m.serial++
	pod.Name = m.name()
	m.created, m.bound, m.failed, m.done = time.Now(), false, false, false
	l.members[pod.Name] = m
	l.counts.created++
	go func() {
		_, err := l.pods.Create(ctx, pod, metav1.CreateOptions{})
		l.fail(ctx, err)
	}()
}

func (l *load) delete(ctx context.Context, name string, grace *int64) {
	go func() {
		err := l.pods.Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: grace})
		if !apierrors.IsNotFound(err) {
			l.fail(ctx, err)
		}
	}()
}

// fail notes an unexpected answer. l.mu must not be locked.
func (l *load) fail(ctx context.Context, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failure = errors.Join(l.failure, err)
}

// changed handles a pod that was changed. l.mu must not be locked.
func (l *load) changed(ctx context.Context, pod *corev1.Pod) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failure = errors.Join(l.failure, l.book.apply(pod, false))
	m := l.members[pod.Name]
	if m == nil || m.failed || m.done || pod.DeletionTimestamp != nil {
		return
	}
	if pod.Spec.NodeName != "" && !m.bound {
		m.bound = true
		l.waits = append(l.waits, time.Since(m.created).Seconds())
	}
	if m.job.over { // It was created while its job was stopped.
		l.delete(ctx, pod.Name, nil)
		return
	}
	switch pod.Status.Phase {
	case corev1.PodSucceeded:
		l.counts.ended++
		m.done = true
		l.finish(ctx, m.job)
	case corev1.PodFailed: // The kubelet rejected it, because the device plugin or a card was away.
		m.failed = true
		l.counts.failed++
		l.delete(ctx, pod.Name, ptr.To[int64](0))
	}
}

// finish deletes the pods of a job of which all have run to their end. Until then they stay, as a Job's do: a group is known by them.
func (l *load) finish(ctx context.Context, j *job) {
	if slices.ContainsFunc(j.members, func(m *member) bool { return !m.done }) {
		return
	}
	for _, m := range j.members {
		delete(l.members, m.name())
		l.delete(ctx, m.name(), ptr.To[int64](0))
	}
}

// gone handles a pod that was deleted: one that hasn't succeeded is replaced. l.mu must not be locked.
func (l *load) gone(ctx context.Context, pod *corev1.Pod) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failure = errors.Join(l.failure, l.book.apply(pod, true))
	m := l.members[pod.Name]
	if m == nil {
		return
	}
	delete(l.members, pod.Name)
	if !m.job.over {
		l.counts.lost++
		l.create(ctx, m)
	}
}

// stop deletes the pods of a job.
func (l *load) stop(ctx context.Context, j *job) {
	j.over = true
	for name, m := range l.members {
		if m.job == j {
			l.delete(ctx, name, nil)
		}
	}
}

// drainTime is the longest time after the week until all pods have been bound and have ended.
const drainTime = 10 * time.Minute

// drain deletes each job as soon as all of its pods are bound: what waits must still get a card. l.mu must not be locked.
func (l *load) drain(ctx context.Context) error {
	for end := time.Now().Add(drainTime); time.Now().Before(end); {
		l.stopBound(ctx)
		if left := l.left(); len(left) == 0 || ctx.Err() != nil {
			return ctx.Err()
		}
		time.Sleep(time.Second)
	}
	left := l.left()
	if len(left) == 0 {
		return nil
	}
	return fmt.Errorf("%d pods have not ended %v after the last arrival, such as %s", len(left), drainTime, left[0])
}

// stopBound stops the jobs of which all pods are bound or have ended. l.mu must not be locked.
func (l *load) stopBound(ctx context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range l.members {
		if !m.job.over && !slices.ContainsFunc(m.job.members, func(m *member) bool { return !m.bound }) {
			l.stop(ctx, m.job)
		}
	}
}

func (l *load) left() (names []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name := range l.members {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// loadSample is what the load shows at a moment.
type loadSample struct {
	// waits are the times in seconds from creation to binding since the last sample, in order.
	waits []float64
	// waiting is the number of pods that aren't bound, and allocated the memory that the others have.
	waiting   int
	allocated int64
}

// takeSample returns the waits since the last call. l.mu must not be locked.
func (l *load) takeSample() (s loadSample) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.waits, l.waits = l.waits, nil
	slices.Sort(s.waits)
	s.waiting, s.allocated = l.waiting(), l.book.total()
	return s
}

// waiting returns the number of pods that aren't bound. l.mu must be locked.
func (l *load) waiting() (n int) {
	for _, m := range l.members {
		if !m.bound {
			n++
		}
	}
	return n
}

// cardsOfRunning returns the cards in the annotations of running pods. l.mu must not be locked.
func (l *load) cardsOfRunning() map[types.UID]string {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[types.UID]string{}
	for uid, e := range l.book.pods {
		if e.running {
			out[uid] = e.annotation
		}
	}
	return out
}

// totals returns the counts. l.mu must not be locked.
func (l *load) totals() counts {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.counts
}
