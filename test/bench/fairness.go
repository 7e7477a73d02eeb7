package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fairness"
	"github.com/gpushare/gpushare/test/framework"
)

// fairnessDefaults are the values of flags that aren't set: a cluster whose cards are full before the late teams come.
var fairnessDefaults = map[string]string{"nodes": "100", "pods": "2000", "tenants": "20", "kinds": "stock,dispatch,reclaim"}

const (
	// warmUp is the time between the first teams' pods and those of the late teams.
	warmUp = 20 * time.Second
	// adaptation is how long after the late teams have come, and --fair-share-reclaim-after is over, the index begins to count.
	adaptation     = 10 * time.Second
	sampleInterval = 250 * time.Millisecond
)

// fairnessKinds returns the schedulers that share the cluster, in the order of the command line.
func (s *bench) fairnessKinds(named []string) (chosen []*kind, err error) {
	every := map[string]*kind{
		"stock":    {start: s.startShipped(nil, nil)}, // First come, first served.
		"dispatch": {start: s.startShipped([]string{fairShareMode + "dispatch"}, nil), gate: protocol.GateFairShare},
		"reclaim": {gate: protocol.GateFairShare, start: s.startShipped([]string{fairShareMode + "reclaim"},
			[]string{"--fair-share-reclaim-after=" + s.reclaimAfter.String(), "--fair-share-min-runtime=0s"})},
	}
	for _, name := range named {
		k := every[name]
		if k == nil {
			return nil, fmt.Errorf("-kinds: with -fairness want stock, dispatch or reclaim, got %q", name)
		}
		k.name = name
		chosen = append(chosen, k)
	}
	return chosen, nil
}

// fairnessNode returns a node of the cluster that the teams share.
func fairnessNode(i int, o options) *corev1.Node {
	node := framework.MakeNode(nodeName(i)).Unit(gpu.GiB).Cards(o.cards, cardUnits)
	if pool := 1 + i*poolPart/o.nodes; pool <= int(fairness.SecondPool) {
		node.Label(labelPool, strconv.Itoa(pool))
	}
	return node.Obj()
}

// fairnessRoom is the room of all nodes.
func fairnessRoom(o options) (r fairness.Room) {
	for i := range o.nodes {
		pool := min(i*poolPart/o.nodes, fairness.Pools-1)
		r.Memory[pool] += int64(o.cards) * cardUnits
		r.CPU[pool] += min(nodeCPUs/cpuPerUnit, int64(o.cards)*cardUnits)
	}
	return r
}

// measureFairness lets half of the teams fill the cluster, then the others come. It reports how evenly they share.
func measureFairness(ctx context.Context, s *bench) error {
	kinds, err := s.fairnessKinds(s.kindNames)
	if err != nil {
		return err
	}
	for _, t := range newTeams(s.tenants, s.pods, s.seed) {
		weight := map[string]string{protocol.AnnotationFairShareWeight: strconv.FormatInt(t.weight, 10)}
		if err := s.createNamespace(ctx, metav1.ObjectMeta{Name: t.name, Annotations: weight}); err != nil {
			return err
		}
	}
	for _, k := range kinds {
		samples, site, err := s.share(ctx, k)
		if err != nil {
			return fmt.Errorf("%s: %w", k.name, err)
		}
		f := judge(samples, site.teams, fairnessRoom(s.options), s.reclaimAfter+adaptation)
		fmt.Printf("%-9s Jain's index: mean %.3f, least %.3f   late tenants have 90%% of their shares after %s   %.1f%% of the memory in use\n",
			k.name, f.mean, f.least, f.adapted, 100*f.used)
		fmt.Printf("          lowest: %s\n", f.lowest)
		if site.evicted > 0 {
			fmt.Printf("          %d pods evicted, %d pods that got no room although others were evicted for them\n", site.evicted, site.useless)
		}
	}
	return nil
}

// share runs the teams with one kind of scheduler, and returns samples from the time at which the late ones come.
func (s *bench) share(ctx context.Context, k *kind) (samples []sample, c *site, err error) {
	extender, err := k.start(ctx)
	if err != nil {
		return nil, nil, err
	}
	if err := s.startScheduler(ctx, extender, k.edits); err != nil {
		return nil, nil, err
	}
	running, stop := context.WithCancel(ctx)
	defer stop()
	teams := newTeams(s.tenants, s.pods, s.seed)
	if c, err = newSite(running, s, teams, k.gate); err != nil {
		return nil, nil, err
	}
	if err := c.come(teams[:s.tenants/2]); err != nil {
		return nil, nil, err
	}
	if err := c.wait(warmUp); err != nil {
		return nil, nil, err
	}
	start := time.Now()
	late := make(chan error, 1)
	go func() { late <- c.come(teams[s.tenants/2:]) }()
	for time.Since(start) < s.fairness {
		samples = append(samples, c.sample(time.Since(start)))
		if err := c.wait(sampleInterval); err != nil {
			return nil, nil, err
		}
	}
	if err := <-late; err != nil {
		return nil, nil, err
	}
	stop()
	if err := c.group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return nil, nil, err
	}
	var t result
	if err := errors.Join(extender.finish(ctx, &t), s.plane.Scheduler.Kill()); err != nil {
		return nil, nil, err
	}
	c.useless = t.useless
	return samples, c, s.clear(ctx, tenantNames(s.tenants)...)
}

// wait lets time pass, unless a call has failed.
func (s *site) wait(d time.Duration) error {
	select {
	case <-s.ctx.Done():
		return errors.Join(s.group.Wait(), context.Cause(s.ctx))
	case <-time.After(d):
		return nil
	}
}

// verdict is how evenly the teams shared.
type verdict struct {
	// mean and least are of Jain's index of what the teams have in proportion to what they deserve.
	mean, least float64
	// adapted is when the late teams together first had 90% of what they deserve.
	adapted string
	// used is the used part of all memory.
	used float64
	// lowest describes the team that had the least in proportion.
	lowest string
}

// judge computes the figures from the samples; those of the first part count for adapted only.
func judge(samples []sample, teams []*team, r fairness.Room, from time.Duration) (f verdict) {
	f.least, f.adapted = 1, "more than "+samples[len(samples)-1].at.Round(time.Second).String()
	adapted, counted := false, 0
	ratios := make([]float64, len(teams)) // Sums over the samples.
	var all int64
	for _, memory := range r.Memory {
		all += memory
	}
	for _, s := range samples {
		shares := fairness.Shares(r, claims(teams, s))
		var have, deserve, used int64
		parts := make([]float64, len(teams))
		for i := range teams {
			if i >= len(teams)/2 {
				have, deserve = have+min(s.allocated[i], shares[i]), deserve+shares[i]
			}
			parts[i] = float64(s.allocated[i]) / float64(max(shares[i], 1))
			used += s.allocated[i]
		}
		if !adapted && deserve > 0 && 10*have >= 9*deserve {
			adapted, f.adapted = true, fmt.Sprintf("%.1f s", s.at.Seconds())
		}
		if s.at < from {
			continue
		}
		counted++
		index := fairness.Jain(parts)
		f.mean, f.least, f.used = f.mean+index, min(f.least, index), f.used+float64(used)/float64(all)
		for i := range parts {
			ratios[i] += parts[i]
		}
	}
	n := float64(max(counted, 1))
	f.mean, f.used = f.mean/n, f.used/n
	f.lowest = lowest(teams, ratios, n)
	return f
}

func claims(teams []*team, s sample) (out []fairness.Claim) {
	for i, t := range teams {
		out = append(out, fairness.Claim{Weight: t.weight, Demand: s.demand[i], Restriction: t.restriction})
	}
	return out
}

func lowest(teams []*team, sums []float64, n float64) string {
	at := 0
	for i := range sums {
		if sums[i] < sums[at] {
			at = i
		}
	}
	return fmt.Sprintf("%s with weight %d, restricted by %s: %.2f of what it deserves", teams[at].name, teams[at].weight, teams[at].restriction, sums[at]/n)
}
