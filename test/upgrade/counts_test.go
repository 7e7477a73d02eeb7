package upgrade

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// TestCounts: each version counts the pods that the other has bound, with cards, cores and groups. Runs that were begun by the one stay whole
// under the other, also where the present version completes the names of groups.
func TestCounts(t *testing.T) {
	c := start(t, framework.Options{ExtenderArgs: []string{"--gang-hold=2s", "--gang-patience=3s", "--gang-claim-after=1m"}})
	s := counted{c.NewNamespace(t)}
	s.AddNodes(framework.MakeNode("n0").Unit(gpu.GiB).Cards(8, 16), framework.MakeNode("n1").Unit(gpu.GiB).Cards(8, 16))

	s.place("former")
	s.swap(false)
	s.place("present")
	// A replica that the earlier version has bound is created again.
	s.Delete("former-lws-0", "former-lws-0-1")
	s.Create(s.replica("former", 0)...)
	s.settle()
	s.swap(true)
	s.place("again")
	s.swap(false)
}

type counted struct{ *framework.Namespace }

// swap replaces the extender by that of the other version.
func (s counted) swap(former bool) {
	s.Helper()
	before := s.uids()
	s.Cluster.Extender.Path = s.Cluster.ExtenderBinary(former)
	must(s, s.Cluster.Extender.Restart(s.Context()))
	s.settle()
	if after := s.uids(); !slices.Equal(before, after) {
		s.Errorf("the pods were %v, and are %v", before, after)
	}
}

// uids returns the UIDs of the pods that aren't being deleted.
func (s counted) uids() (uids []string) {
	s.Helper()
	pods, err := s.List(s.Context())
	must(s, err)
	for i := range pods {
		if pods[i].DeletionTimestamp == nil {
			uids = append(uids, pods[i].Name+"/"+string(pods[i].UID))
		}
	}
	return uids
}

// place creates pods of all kinds, each with the prefix, and waits until they are bound.
func (s counted) place(prefix string) {
	s.Helper()
	pods := []*framework.PodWrapper{
		s.Pod(prefix+"-one", 6),
		s.Pod(prefix+"-two", 8).Cards(2),
		s.Pod(prefix+"-cores", 4).Cores(40),
	}
	for i := range 3 {
		pods = append(pods, s.Pod(fmt.Sprintf("%s-member-%d", prefix, i), 4).Group(prefix+"-train", 3).ControlledBy(prefix+"-train"))
	}
	for i := range 4 {
		pods = append(pods, s.Pod(fmt.Sprintf("%s-job-%d", prefix, i), 4).Group(prefix+"-jobs", 2).ControlledBy(fmt.Sprint(prefix, "-job-", i/2)).
			Label("job", fmt.Sprint(i/2)).Annotation(protocol.AnnotationGroupLabel, "job"))
	}
	pods = append(pods, append(s.replica(prefix, 0), s.replica(prefix, 1)...)...)
	s.Create(pods...)
	s.settle()
}

// replica returns the two pods of a LeaderWorkerSet's replica.
func (s counted) replica(prefix string, i int) []*framework.PodWrapper {
	name := fmt.Sprintf("%s-lws-%d", prefix, i)
	of := func(name, controller string) *framework.PodWrapper {
		return s.Pod(name, 4).Group(prefix+"-lws", 2).Label("leaderworkerset.sigs.k8s.io/group-key", fmt.Sprint(prefix, "-key-", i)).
			Annotation("leaderworkerset.sigs.k8s.io/size", "2").ControlledBy(controller)
	}
	return []*framework.PodWrapper{of(name, prefix+"-lws"), of(name+"-1", name)}
}

// settle waits until all pods are bound and all groups run, and checks the ledger.
func (s counted) settle() {
	s.Helper()
	s.Eventually("all pods are bound, and all groups run", func(ctx context.Context) error {
		pods, err := s.List(ctx)
		for i := range pods {
			if pods[i].Spec.NodeName == "" || pods[i].DeletionTimestamp != nil {
				err = errors.Join(err, fmt.Errorf("pod %s: %s", pods[i].Name, framework.SchedulerMessage(&pods[i])))
			}
		}
		gangs, metricsErr := s.Cluster.Metrics(ctx, framework.MetricGangs)
		maps.DeleteFunc(gangs, func(_ string, n float64) bool { return n == 0 })
		if running := framework.Series(framework.MetricGangs, "phase", "running"); len(gangs) != 1 || gangs[running] == 0 {
			err = errors.Join(err, fmt.Errorf("groups by phase: %v", gangs))
		}
		return errors.Join(err, metricsErr)
	})
	s.CheckLedger()
}
