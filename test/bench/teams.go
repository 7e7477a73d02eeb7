package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/test/fairness"
	"github.com/gpushare/gpushare/test/framework"
)

// The cluster in which teams share: the units of a card, the CPUs of a node that framework.MakeNode makes, the CPUs that a pod of a
// team restricted by CPU requests for each unit, and the part of the nodes in each of the two pools.
const (
	cardUnits, nodeCPUs, cpuPerUnit = 16, 64, 2
	poolPart                        = 10
)

// The run times of pods are distributed by Pareto, between the limits.
const (
	shortestRun, longestRun, paretoShape = 15 * time.Second, 5 * time.Minute, 1.5
	// gracePeriod is how long the containers of an evicted pod go on, in seconds.
	gracePeriod = 1
)

// team is a tenant. It keeps a number of pods: when one has ended, another one takes its place.
type team struct {
	name        string
	weight      int64
	restriction fairness.Restriction
	pods        int
	random      *rand.Rand
}

// job is what a pod asks for.
type job struct {
	memory int64
	run    time.Duration
}

// newTeams returns the teams. The first half of them has three quarters of the pods and comes first.
func newTeams(n, pods int, seed int64) (teams []*team) {
	restrictions := []fairness.Restriction{
		fairness.Anywhere, fairness.ByCPU, fairness.Anywhere, fairness.FirstPool, fairness.Anywhere, fairness.ByCPU, fairness.Anywhere, fairness.SecondPool,
	}
	random := rand.New(rand.NewPCG(uint64(seed), 2))
	for i, name := range tenantNames(n) {
		part := 3
		if i >= n/2 {
			part = 1
		}
		teams = append(teams, &team{
			name: name, weight: 1 + random.Int64N(4), restriction: restrictions[i%len(restrictions)], pods: pods * part / (2 * n),
			random: rand.New(rand.NewPCG(uint64(seed), uint64(100+i))),
		})
	}
	return teams
}

// next returns the team's next job.
func (t *team) next() job {
	memory := 1 + t.random.Int64N(cardUnits)
	run := time.Duration(float64(shortestRun) * math.Pow(1-t.random.Float64(), -1/paretoShape))
	return job{memory: memory, run: min(run, longestRun)}
}

// site is the teams' cluster. It also stands for their controllers, which replace pods, and for the kubelets, which end them.
type site struct {
	*bench
	teams []*team
	gate  string // the scheduling gate of each pod; empty for none
	group *errgroup.Group
	ctx   context.Context

	mu   sync.Mutex
	made int
	pods map[string]*sitePod
	// evicted counts the evicted pods, and useless those that got no room although others were evicted for them.
	evicted, useless int
}

// sitePod is a pod that exists.
type sitePod struct {
	job
	team           *team
	bound, leaving bool
}

// newSite watches the pods. It ends with ctx.
func newSite(ctx context.Context, b *bench, teams []*team, gate string) (*site, error) {
	s := &site{bench: b, teams: teams, gate: gate, pods: map[string]*sitePod{}}
	s.group, s.ctx = errgroup.WithContext(ctx)
	factory := informers.NewSharedInformerFactory(b.plane.Client, 0)
	handler, err := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		UpdateFunc: func(_, after any) { s.updated(after.(*corev1.Pod)) },
		DeleteFunc: func(object any) {
			if pod, ok := object.(*corev1.Pod); ok {
				s.deleted(pod)
			}
		},
	})
	if err != nil {
		return nil, err
	}
	factory.StartWithContext(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), handler.HasSynced) {
		return nil, ctx.Err()
	}
	return s, nil
}

// create creates a pod for the job.
func (s *site) create(t *team, j job) error {
	s.mu.Lock()
	s.made++
	pod := framework.MakePod(fmt.Sprintf("pod-%05d", s.made)).Namespace(t.name).GPUMem(j.memory).GracePeriod(gracePeriod)
	s.pods[pod.Name] = &sitePod{job: j, team: t}
	s.mu.Unlock()
	switch t.restriction {
	case fairness.ByCPU:
		pod.CPU(cpuPerUnit * j.memory)
	case fairness.FirstPool, fairness.SecondPool:
		pod.NodeSelector(labelPool, strconv.Itoa(int(t.restriction)))
	}
	pod.Spec.SchedulingGates = gates(s.gate)
	_, err := s.plane.Client.CoreV1().Pods(t.name).Create(s.ctx, pod.Obj(), metav1.CreateOptions{})
	return err
}

// come creates the pods of the teams alternately.
func (s *site) come(teams []*team) error {
	group := new(errgroup.Group)
	group.SetLimit(creators)
	for i, left := 0, true; left; i++ {
		left = false
		for _, t := range teams {
			if i < t.pods {
				left = true
				j := t.next()
				group.Go(func() error { return s.create(t, j) })
			}
		}
	}
	return group.Wait()
}

func (s *site) updated(pod *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pods[pod.Name]
	if p == nil {
		return
	}
	if pod.Spec.NodeName != "" && !p.bound {
		p.bound = true
		s.endAfter(p.run, pod)
	}
	// A deletion without grace period is that of a pod that has ended.
	if grace := pod.DeletionGracePeriodSeconds; grace != nil && *grace > 0 && !p.leaving {
		p.leaving = true
		s.evicted++
		s.endAfter(gracePeriod*time.Second, pod)
	}
}

// deleted replaces the pod. An evicted one begins again.
func (s *site) deleted(pod *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pods[pod.Name]
	delete(s.pods, pod.Name)
	if p == nil || s.ctx.Err() != nil {
		return
	}
	j := p.job
	if !p.leaving {
		j = p.team.next()
	}
	s.group.Go(func() error { return s.create(p.team, j) })
}

// endAfter deletes the pod after some time.
func (s *site) endAfter(run time.Duration, pod *corev1.Pod) {
	uid, namespace := pod.UID, pod.Namespace
	time.AfterFunc(run, func() {
		if s.ctx.Err() != nil {
			return
		}
		s.group.Go(func() error {
			err := s.plane.Client.CoreV1().Pods(namespace).Delete(s.ctx, pod.Name, metav1.DeleteOptions{
				GracePeriodSeconds: ptr.To[int64](0), Preconditions: &metav1.Preconditions{UID: &uid},
			})
			if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
				return nil
			}
			return err
		})
	})
}

// sample is what the teams have and ask for at one time.
type sample struct {
	at                time.Duration
	allocated, demand []int64
}

func (s *site) sample(at time.Duration) sample {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := sample{at, make([]int64, len(s.teams)), make([]int64, len(s.teams))}
	index := map[*team]int{}
	for i, t := range s.teams {
		index[t] = i
	}
	for _, p := range s.pods {
		i := index[p.team]
		out.demand[i] += p.memory
		if p.bound {
			out.allocated[i] += p.memory
		}
	}
	return out
}
