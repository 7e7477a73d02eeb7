package neighbours

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// TestLeaderWorkerSet: each replica of a LeaderWorkerSet is a group, without an annotation for that. A replica that is created again starts whole,
// although all cards are in use.
func TestLeaderWorkerSet(t *testing.T) {
	const size, label = 3, "leaderworkerset.sigs.k8s.io/group-index"
	w := startWorkloads(t, "lws", "config.lws.x-k8s.io/v1alpha1")
	create := func(s *workloadScene, startup string) {
		s.Helper()
		s.create(schema.GroupVersionResource{Group: "leaderworkerset.x-k8s.io", Version: "v1", Resource: "leaderworkersets"}, "LeaderWorkerSet", map[string]any{
			"replicas": 2, "startupPolicy": startup, "leaderWorkerTemplate": map[string]any{
				"size": size, "restartPolicy": "RecreateGroupOnPodRestart", "workerTemplate": podTemplate(s.member(size)),
			},
		})
	}
	both := map[string]int{"0": size, "1": size}

	t.Run("replicas", func(t *testing.T) {
		s := w.scene(t, 2*size, label)
		s.Place(s.Pod("single", 16).Label(label, "single"))
		create(s, "LeaderCreated")
		// One card too few is free: the pods of one replica hold no card.
		s.waitCounts("one replica is bound", func(got map[string]int) bool { return len(got) == 2 && got["0"]+got["1"] == size })
		s.Delete("single")
		pods := s.waitBound(both)
		must(s.T, s.SetRunning(s.Context(), pods...))

		// The leader of a replica is deleted.
		s.Delete("set-0")
		pods = s.waitReplaced(s.of(pods, "0"), both)
		must(s.T, s.SetRunning(s.Context(), pods...))

		// A worker's container restarts.
		s.Patch("set-1-2", map[string]any{"status": map[string]any{"containerStatuses": []map[string]any{{
			"name": "main", "image": "app", "imageID": "app", "restartCount": 1, "state": map[string]any{"running": map[string]any{}},
		}}}}, "status")
		pods = s.waitReplaced(s.of(pods, "1"), both)
		must(s.T, s.SetRunning(s.Context(), pods...))

		// A worker fails, as it does if its kubelet evicts it.
		s.Patch("set-0-1", map[string]any{"status": map[string]any{"phase": corev1.PodFailed}}, "status")
		s.waitReplaced(s.of(pods, "0"), both)
	})

	t.Run("example", func(t *testing.T) {
		kubectl, err := controlplane.Tool(t.Context(), "kubectl")
		must(t, err)
		framework.Eventually(t, "the API server and the webhooks accept the example", func(ctx context.Context) error {
			out, err := exec.CommandContext(ctx, kubectl, "--kubeconfig="+w.KubeconfigPath, "apply", "--dry-run=server", "--validate=strict",
				"--filename="+filepath.Join(controlplane.Repository(t), "deploy", "examples", "leaderworkerset.yaml")).CombinedOutput()
			if err != nil || !strings.Contains(string(out), "leaderworkerset.leaderworkerset.x-k8s.io/vllm created (server dry run)") || strings.Contains(string(out), "Warning") {
				return fmt.Errorf("kubectl prints %s (%w)", out, err)
			}
			return nil
		})
	})

	// With this policy the workers are created once the leader is ready, and the leader waits for them.
	t.Run("leader first", func(t *testing.T) {
		s := w.scene(t, 2*size, label)
		create(s, "LeaderReady")
		s.WaitEvent("set-0", "GangIncomplete", "1 of 3 members exist; a LeaderWorkerSet creates all pods of a replica at once only with startupPolicy LeaderCreated")
		s.waitBound(map[string]int{})
	})
}
