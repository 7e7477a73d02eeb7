package nodee2e

import (
	"context"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// cardMiB is the memory of a 16 GB card in MiB; it has 15 whole GiB.
const cardMiB = 16276

// cluster is a control plane with the extender and one real node, and a watcher that checks the node all the time.
type cluster struct {
	*framework.Cluster
	node    *node
	watcher *watcher
	// killed holds the UIDs of the pods whose containers a test has killed, so that the kubelet restarts them.
	killed map[string]bool
}

// startCluster is newCluster with a report at the end of the test.
func startCluster(t *testing.T, cards ...uint64) *cluster {
	t.Helper()
	c := newCluster(t, cards...)
	t.Cleanup(func() { c.report(t) })
	return c
}

// newCluster starts a cluster with cards of these sizes in MiB. It is stopped when the test ends. Clusters run in
// parallel, because a part of their time is waiting.
func newCluster(t *testing.T, cards ...uint64) *cluster {
	t.Helper()
	t.Parallel()
	requireNode(t)
	c := &cluster{killed: map[string]bool{}, Cluster: framework.StartForTest(t, framework.Options{ControlPlane: controlplane.Options{
		ControllerManager: true,
		// The programs under test run as processes, so no controller may create pods for their manifests.
		ExtraArgs: map[string][]string{"kube-controller-manager": {"--controllers=*,-daemonset,-deployment"}},
	}})}
	c.node = &node{name: "real", cards: cards, cluster: c.Cluster}
	dir := nodeDir(t, c.node)
	ctx, cancel := context.WithTimeout(t.Context(), framework.Patience)
	defer cancel()
	check.Must(t, c.node.start(ctx, dir))
	c.watch(t)
	return c
}

// nodeDir creates the folder of a node. The node is stopped when the test ends.
func nodeDir(t *testing.T, n *node) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "gpunode-") // The path is short because it contains sockets.
	check.Must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			for _, p := range n.processes() {
				t.Logf("the end of %s:\n%s", p.LogPath, p.Tail(15))
			}
			t.Logf("the logs of node %s are in %s", n.name, dir)
		}
		check.NoError(t, n.stop())
		if !t.Failed() {
			check.Must(t, os.RemoveAll(dir))
		}
	})
	return dir
}

// watch starts the watcher.
func (c *cluster) watch(t *testing.T) {
	t.Helper()
	var err error
	c.watcher, err = newWatcher(c)
	check.Must(t, err)
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); c.watcher.run(ctx) }()
	t.Cleanup(func() { stop(); <-done })
}

// waitCards waits until the node has its cards.
func (c *cluster) waitCards(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), framework.Patience)
	defer cancel()
	check.Must(t, c.node.awaitCards(ctx))
}

// report logs the results of the whole test. It fails the test for each container with a wrong card, unexpected restart
// of a container, and card above its total.
func (c *cluster) report(t *testing.T) {
	t.Helper()
	found := c.watcher.found()
	starts, err := c.node.starts()
	check.Must(t, err)
	wrong, containers := found.wrongCards(starts)
	rejected := 0
	for _, pod := range found.pods {
		if pod.Status.Reason == "UnexpectedAdmissionError" {
			rejected++
		}
	}
	restarted := restarts(starts)
	t.Logf("%d pods, %d of them rejected by the kubelet; %d GPU containers started; %d containers restarted, the test killed those "+
		"of %d pods; %d checks", len(found.pods), rejected, containers, len(restarted), len(c.killed), found.checks)
	for _, container := range restarted {
		if !c.killed[container.pod] {
			wrong = append(wrong, fmt.Sprintf("container %s of pod %s was restarted", container.name, container.pod))
		}
	}
	for _, problem := range slices.Concat(wrong, found.overused) {
		t.Error(problem)
	}
	if found.err != nil || found.checks == 0 || containers == 0 {
		t.Errorf("%d checks of %d containers: %v", found.checks, containers, found.err)
	}
}

// run runs a part of a test in its own namespace. At the end it compares all sources. If a part fails, the test ends,
// because the next part relies on the state of the node.
func (c *cluster) run(t *testing.T, title string, do func(s *scenario)) {
	t.Helper()
	passed := t.Run(title, func(t *testing.T) {
		start := time.Now()
		s := c.scenario(t)
		do(s)
		s.waitConsistent()
		t.Logf("%d pods in %s", s.made, time.Since(start).Round(time.Second/10))
	})
	if !passed {
		t.FailNow()
	}
}
