package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

const (
	// creators is how many pods are created at the same time: their order is nearly that of the replay.
	creators = 4
	// settled is how long nothing must change after all pods were tried, because a rejected pod can be tried again.
	settled = 5 * time.Second
)

// outcome is what a run on a control plane, or its replay, has allocated in the end.
type outcome struct {
	// allocated is in percent of the cards.
	allocated float64
	// rate is how many pods were bound or rejected in a second.
	rate float64
}

func (o *outcome) add(other outcome, seeds int) {
	o.allocated += other.allocated / float64(seeds)
	o.rate += other.rate / float64(seeds)
}

// onControlPlane lets the pods of each workload come to a real control plane with the same nodes and in the same order as in a replay. It prints
// a line for each rule and workload, with what is allocated in the end by the policy, what the replay allocates, the difference, the pods tried
// in a second, the same by binpack, and the ratio.
func onControlPlane(ctx context.Context, out io.Writer, o options, nodes []traceNode, workloads []string) error {
	for _, rule := range []rule{byScheduler, away} {
		if rule == away && !o.allNodes {
			continue
		}
		for _, workload := range workloads {
			pods, err := readPods(o.dir, workload)
			if err != nil {
				return err
			}
			var ours, replayed, binpack outcome
			for seed := int64(firstSeed); seed < int64(firstSeed+o.seeds); seed++ {
				arriving, nodeOrder := order(pods, nodes, multiple, seed)
				replay := newCluster(nodes, nodeOrder, o.policy, rule, rand.New(rand.NewPCG(uint64(seed), 0)))
				for i := range arriving {
					replay.arrive(&arriving[i], i)
				}
				replayed.add(outcome{allocated: 100 * replay.used()}, o.seeds)
				for _, run := range []struct {
					policy placement.Policy
					sum    *outcome
				}{{o.policy, &ours}, {placement.Binpack, &binpack}} {
					result, err := runOnControlPlane(ctx, run.policy, rule, nodes, arriving)
					if err != nil {
						return err
					}
					run.sum.add(result, o.seeds)
					fmt.Fprintf(os.Stderr, "seed %d %s: %.2f%% allocated, %.1f pods/s; replay of %s %.2f%%\n",
						seed, run.policy, result.allocated, result.rate, o.policy, 100*replay.used())
				}
			}
			fmt.Fprintf(out, "%s %s %.2f %.2f %+.2f %.1f %.1f %.2f\n", rule, strings.TrimPrefix(workload, podList),
				ours.allocated, replayed.allocated, ours.allocated-replayed.allocated, ours.rate, binpack.rate, ours.rate/binpack.rate)
		}
	}
	return nil
}

// runOnControlPlane creates the pods on a new control plane, and returns what is allocated when each is bound or was rejected.
func runOnControlPlane(ctx context.Context, policy placement.Policy, rule rule, nodes []traceNode, arriving []tracePod) (result outcome, err error) {
	dir, err := os.MkdirTemp("", "gpushare-packing-")
	if err != nil {
		return result, err
	}
	defer os.RemoveAll(dir)
	options := framework.Options{Dir: dir, ExtenderArgs: []string{"--node-policy=" + policy.String()}}
	options.ControlPlane.Scheduler.Edits = []controlplane.ConfigEdit{controlplane.ClientLimits(5000, 10000)}
	if rule == away {
		options.ControlPlane.Scheduler.Edits = append(options.ControlPlane.Scheduler.Edits, preferOthers)
	}
	c, err := framework.Start(ctx, options)
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, c.Stop()) }()
	var objects []*corev1.Node
	for i := range nodes {
		objects = append(objects, nodes[i].object())
	}
	if err := c.CreateNodes(ctx, objects...); err != nil {
		return result, err
	}
	time.Sleep(time.Second) // kube-scheduler and the extender see the nodes.

	ctx, stop := context.WithCancel(ctx) // The watch ends before the control plane.
	defer stop()
	tried := newTried(arriving)
	if err := framework.WatchPods(ctx, c.Client, tried.update); err != nil {
		return result, err
	}
	start := time.Now()
	group, creating := errgroup.WithContext(ctx)
	group.SetLimit(creators)
	for i := range arriving {
		group.Go(func() error {
			_, err := c.Client.CoreV1().Pods(metav1.NamespaceDefault).Create(creating, arriving[i].request(i), metav1.CreateOptions{})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return result, err
	}
	for !tried.settled(time.Now()) {
		select {
		case <-ctx.Done():
			return result, ctx.Err()
		case <-time.After(settled / 10):
		}
	}
	return outcome{
		allocated: 100 * float64(tried.allocated) / float64(allCards(nodes)*cardMemory),
		rate:      float64(len(arriving)) / tried.lastTried.Sub(start).Seconds(),
	}, nil
}

// preferOthers makes kube-scheduler prefer nodes that share no cards for pods without GPU memory. For the others it changes nothing, because
// they can use no such node.
func preferOthers(config map[string]any) error {
	profile := map[string]any{"schedulerName": corev1.DefaultSchedulerName, "pluginConfig": []any{map[string]any{
		"name": "NodeAffinity",
		"args": map[string]any{"addedAffinity": map[string]any{"preferredDuringSchedulingIgnoredDuringExecution": []any{map[string]any{
			"weight": int64(1),
			"preference": map[string]any{"matchExpressions": []any{
				map[string]any{"key": protocol.LabelShared, "operator": string(corev1.NodeSelectorOpDoesNotExist)},
			}},
		}}}},
	}}}
	return unstructured.SetNestedSlice(config, []any{profile}, "profiles")
}

// request returns the Pod object that asks for all that the pod of the trace asks for.
func (p *tracePod) request(number int) *corev1.Pod {
	object := p.object()
	object.Name = podName(number)
	container := framework.MakeContainer(framework.MainContainer, int64(p.gpu()))
	container.Resources.Requests = corev1.ResourceList{
		corev1.ResourceCPU:    *resource.NewMilliQuantity(p.cpu, resource.DecimalSI),
		corev1.ResourceMemory: *resource.NewQuantity(p.memory*mebibyte, resource.BinarySI),
	}
	object.Spec.Containers = []corev1.Container{container}
	if p.gpu() == 0 {
		object.Labels = nil
	}
	return object
}

func podName(number int) string { return fmt.Sprintf("pod-%05d", number) }

// tried is which pods kube-scheduler has tried. mu guards the fields.
type tried struct {
	mu sync.Mutex
	// untried has the pods that were neither bound nor rejected, and bound those that were bound.
	untried, bound map[string]bool
	// asked is what each pod asks for of the cards, allocated what the bound ones ask for.
	asked     map[string]int
	allocated int
	// lastTried is when a pod was tried first, most recently, and changed when a pod was tried first or bound.
	lastTried, changed time.Time
}

func newTried(arriving []tracePod) *tried {
	t := &tried{untried: map[string]bool{}, bound: map[string]bool{}, asked: map[string]int{}}
	for i := range arriving {
		t.untried[podName(i)], t.asked[podName(i)] = true, arriving[i].gpu()
	}
	return t
}

func (t *tried) update(pod *corev1.Pod) {
	t.mu.Lock()
	defer t.mu.Unlock()
	isBound := pod.Spec.NodeName != "" && !t.bound[pod.Name]
	if isBound {
		t.bound[pod.Name] = true
		t.allocated += t.asked[pod.Name]
	}
	// kube-scheduler writes a condition if it rejects a pod.
	isTried := t.untried[pod.Name] && (isBound || len(pod.Status.Conditions) > 0)
	if isTried {
		delete(t.untried, pod.Name)
		t.lastTried = time.Now()
	}
	if isBound || isTried {
		t.changed = time.Now()
	}
}

// settled reports whether all pods were tried, and nothing has changed for a while.
func (t *tried) settled(now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.untried) == 0 && now.Sub(t.changed) > settled
}
