package upgrade

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// flags are accepted by both versions. They shorten the test; of the present version --gang-claim-after has no effect.
var flags = []string{
	"--bind-timeout=1s", "--leader-elect-lease-duration=3s", "--leader-elect-renew-deadline=2s", "--leader-elect-retry-period=200ms",
	"--gang-hold=3s", "--gang-patience=8s", "--gang-claim-after=2m", "--fair-share-reclaim-after=2s", "--fair-share-min-runtime=0s",
	fmt.Sprintf("--fair-share-priority-cutoff=%d", cutoff),
}

// start starts a cluster with the extender of the earlier version.
func start(t *testing.T, o framework.Options) *framework.Cluster {
	t.Helper()
	root, err := controlplane.RepositoryRoot()
	must(t, err)
	if _, err := os.Stat(filepath.Join(root, "bin", "former")); err != nil {
		t.Skip("SKIPPED: bin/former is missing: `make test-upgrade` builds it")
	}
	o.EarlierVersion, o.MemoryUnit = true, "GiB"
	return framework.StartForTest(t, o)
}

// TestRollout replaces two extenders under load, one after the other, by those of the other version: an upgrade, a downgrade in which the
// processes are killed, and another upgrade. No pod is lost, no card given twice, and no group evicted.
func TestRollout(t *testing.T) {
	c := start(t, framework.Options{Replicas: 2, FairShare: "reclaim", ExtenderArgs: flags})
	l := startLoad(t, c)
	r := rollout{l}
	r.waitLeader(-1)
	l.waitProgress(true)

	t.Log("upgrade")
	must(t, c.Apply(t.Context(), c.Manifests("manifests", false), c.Manifests("replicas", false)))
	r.replace(false, terminate, true)
	r.recorded()

	t.Log("downgrade")
	// Helm removes what the earlier chart doesn't have. Until the earlier version leads, no pods are evicted for tenants below their share.
	must(t, c.Client.RbacV1().Roles(metav1.NamespaceSystem).Delete(t.Context(), "gpushare-extender-evictions", metav1.DeleteOptions{}))
	r.replace(true, (*controlplane.Process).Kill, false)

	t.Log("upgrade again, beside the record of the first one")
	must(t, c.Apply(t.Context(), c.Manifests("replicas", false)))
	r.replace(false, terminate, true)
	l.finish()
	c.WaitNoneAssumed(t)
}

type rollout struct{ *load }

// replace replaces first the replica that stands by, then the leader, while pods that were evicted are ending. reclaims is true if the present leader
// evicts pods for tenants below their share.
func (r rollout) replace(former bool, stop func(*controlplane.Process) error, reclaims bool) {
	r.Helper()
	start := func(replica int) {
		r.Helper()
		p := r.cluster.Replicas[replica]
		must(r, stop(p))
		p.Path = r.cluster.ExtenderBinary(former)
		must(r, p.Start(r.Context()))
	}
	leader := r.waitLeader(-1)
	start(1 - leader)
	r.waitProgress(reclaims)
	if reclaims {
		r.waitEviction()
	}
	start(leader)
	r.waitLeader(leader)
	r.waitProgress(true)
	r.checkLedger()
}

func terminate(p *controlplane.Process) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	return p.Terminate(ctx)
}

// waitLeader waits until another replica than not leads, and returns it.
func (r rollout) waitLeader(not int) (leader int) {
	r.Helper()
	framework.Eventually(r, "a replica leads", func(ctx context.Context) error {
		if leader = r.cluster.Leader(ctx); leader < 0 || leader == not || !r.cluster.Replicas[leader].Running() {
			return fmt.Errorf("replica %d is published", leader)
		}
		return nil
	})
	return leader
}

// recorded waits until the present version has recorded evictions.
func (r rollout) recorded() {
	r.Helper()
	framework.Eventually(r, "evictions are recorded", func(ctx context.Context) error {
		record, err := r.cluster.Client.CoreV1().ConfigMaps(metav1.NamespaceSystem).Get(ctx, "gpushare-evictions", metav1.GetOptions{})
		if err == nil && record.Data["holder"] == "" {
			err = errors.New("none is")
		}
		return err
	})
}
