package install

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// former returns the path of a part of the earlier version that `make test-upgrade` builds. It skips the test if it isn't there.
func former(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(controlplane.Repository(t), "bin", "former", name)
	if _, err := os.Stat(path); err != nil {
		t.Skip("SKIPPED: bin/former is missing: `make test-upgrade` builds it")
	}
	return path
}

// TestUpgrade upgrades the chart of an earlier version. Before, the extender of the present version starts with the arguments and rights of the
// earlier one: it warns of what has no effect any more, and evicts no pod for others.
func TestUpgrade(t *testing.T) {
	old := former(t, "deploy/helm/gpushare")
	c := start(t)
	c.helm.run(t, "install", "gpushare", old, "--namespace="+namespace, "--set=extender.fairShare.mode=reclaim",
		"--set=extender.fairShare.reclaimAfter=2s", "--set=extender.fairShare.minRuntime=1s", "--set=extender.fairShare.addGate=false",
		"--set=extender.extraArgs={--gang-claim-after=1m}")
	c.newNamespace("alice", nil)
	c.newNamespace("bob", nil)
	c.runPlugin()
	extender := c.runExtender()
	c.giveToScheduler(extender)
	if log := extender.process.Tail(100); !strings.Contains(log, "Flag --gang-claim-after has been deprecated, cards are reserved without a wait") {
		t.Errorf("no warning of a flag that went:\n%s", log)
	}

	for i := range 10 {
		c.submit(c.fairPod("bob", fmt.Sprintf("bob-%02d", i), 4, true))
	}
	c.waitShares(t, map[string]int{"bob": 8})
	for i := range 6 {
		c.submit(c.fairPod("alice", fmt.Sprintf("alice-%d", i), 4, true))
	}
	const failures = "gpushare_extender_eviction_record_failures_total"
	c.until("failures are counted", func(ctx context.Context) (bool, error) {
		values, err := framework.Scrape(ctx, extender.health+"/metrics", failures)
		return values[failures] >= 3, err
	})
	c.waitShares(t, map[string]int{"bob": 8})
	if log := extender.process.Tail(100); !framework.ContainsAll(log, "no pods are evicted for others", `ConfigMap kube-system/gpushare-evictions: configmaps \"gpushare-evictions\" is forbidden`) {
		t.Errorf("the log doesn't say why no pods are evicted:\n%s", log)
	}

	c.helm.run(t, "upgrade", "gpushare", chart, "--namespace="+namespace, "--reset-then-reuse-values")
	c.waitRolledOut()
	must(t, extender.process.Terminate(t.Context()))
	extender = c.runExtender()
	c.giveToScheduler(extender)
	c.waitShares(t, map[string]int{"alice": 4, "bob": 4})

	// The extender of the earlier version counts the pods that the present one has bound.
	c.helm.run(t, "rollback", "gpushare", "1", "--namespace="+namespace)
	c.waitRolledOut()
	must(t, extender.process.Terminate(t.Context()))
	c.giveToScheduler(c.runExtenderOf(former(t, "gpushare-extender")))
	c.end(t, "alice", 1)
	c.waitShares(t, map[string]int{"alice": 4, "bob": 4})
	c.end(t, "bob", 1)
	c.waitShares(t, map[string]int{"alice": 4, "bob": 4})
	c.mustLeaveNothing()
}

// waitRolledOut waits until all pods of the extender are of the latest release.
func (c *cluster) waitRolledOut() {
	c.t.Helper()
	c.until("the extender is rolled out", func(ctx context.Context) (bool, error) {
		d, err := c.Client.AppsV1().Deployments(namespace).Get(ctx, "gpushare-extender", metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		return d.Status.ObservedGeneration == d.Generation && d.Status.UpdatedReplicas == *d.Spec.Replicas && d.Status.Replicas == *d.Spec.Replicas, nil
	})
}

// TestFormerFlags: the extender accepts each flag of an earlier version, and the chart each value.
func TestFormerFlags(t *testing.T) {
	usage, err := exec.CommandContext(t.Context(), former(t, "gpushare-extender"), "--help").CombinedOutput()
	must(t, err)
	flags := regexp.MustCompile(`(?m)^ +(?:-\w, )?--([a-z0-9-]+) ?(\w*).*?(?:\(default "?([^")]+)"?\))?$`).FindAllStringSubmatch(string(usage), -1)
	if len(flags) < 30 {
		t.Fatalf("the earlier version has %d flags:\n%s", len(flags), usage)
	}
	zero := map[string]string{"": "true", "duration": "1s"}
	for _, flag := range flags {
		value := cmp.Or(flag[3], zero[flag[2]], "1") // A text can be 1, too.
		out, err := exec.CommandContext(t.Context(), filepath.Join(controlplane.Repository(t), "bin", "gpushare-extender"), "--"+flag[1]+"="+value, "--help").CombinedOutput()
		if err != nil {
			t.Errorf("--%s=%s: %v: %s", flag[1], value, err, out)
		}
	}
	h := newHelm(t, "")
	h.objects(t, "--values="+former(t, "deploy/helm/gpushare/values.yaml"))
}
