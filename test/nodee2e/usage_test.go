package nodee2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/inspect"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fakenvml"
	"github.com/gpushare/gpushare/test/framework"
)

// checkUsage gives each GPU container's process memory of its card, as containerd knows these processes, and compares what
// `kubectl inspect gpushare --usage` shows: through the API server's and the kubelet's port-forward, from the plugin's pod.
func (s *installation) checkUsage(t *testing.T) {
	t.Helper()
	running, err := s.node.running()
	check.Must(t, err)
	pids := map[string]int{}
	for _, o := range running {
		pids[o.ID] = o.Pid
	}
	pods, err := s.Client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
	check.Must(t, err)
	var processes []fakenvml.Process
	want := map[string]uint64{}
	for i := range pods.Items {
		pod := &pods.Items[i]
		card, err := strconv.Atoi(pod.Annotations[protocol.AnnotationIndex])
		if err != nil || len(pod.Status.ContainerStatuses) == 0 {
			continue
		}
		_, id, _ := strings.Cut(pod.Status.ContainerStatuses[0].ContainerID, "://")
		if pid := pids[id]; pid != 0 {
			mib := int64(100 + i)
			processes = append(processes, fakenvml.Process{Card: cardUUID(card), PID: pid, MiB: mib})
			want[pod.Name] = uint64(mib) << 20
		}
	}
	if len(want) < 3 {
		t.Fatalf("%d of %d pods run: %v", len(want), len(pods.Items), pids)
	}
	check.Must(t, s.node.driver.SetProcesses(processes...))
	framework.Eventually(t, "kubectl inspect gpushare --usage shows what the containers use", func(ctx context.Context) error {
		out, err := exec.CommandContext(ctx, s.Binary("kubectl-inspect-gpushare"), "--usage", "-o", "json", "--kubeconfig", s.KubeconfigPath).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		var report inspect.UsageReport
		if err := json.Unmarshal(out, &report); err != nil {
			return err
		}
		found := 0
		for _, node := range report.Nodes {
			for _, c := range node.Containers {
				if c.Used > 0 && c.Used == want[c.Pod] && c.Requested == 2<<30 && c.Processes == 1 {
					found++
				}
			}
		}
		if found != len(want) || len(report.Nodes) != 1 || len(report.Nodes[0].Problems) > 0 {
			return fmt.Errorf("want %v, got %s", want, out)
		}
		return nil
	})
	check.Must(t, s.node.driver.SetProcesses())
}
