package preemption

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// overuseGrace is the device plugin's --overuse-grace in the tests.
const overuseGrace = 2 * time.Second

// TestOveruse covers --overuse-policy=evict with the real device plugin, which measures real processes in real cgroups, and
// annotates pods with its own rights.
func TestOveruse(t *testing.T) {
	c := start(t, "--overuse-policy=evict")

	playUse(t, c, "memory that no pod requests may be used, and is reported", func(s *useStage) {
		s.place("greedy", 4, 1, 0)
		s.place("modest", 4, 1, 0)
		s.use("greedy", 8)
		s.use("modest", 4)
		since := s.reported("greedy", 8, 4).Since
		s.WaitEvent("greedy", "GPUMemoryOveruse", "The pod uses 8192 MiB of GPU memory and requests 4096 MiB")
		s.shown("greedy", fmt.Sprintf("uses 8192 MiB of GPU memory and requests 4096 MiB, since %s", since.UTC().Format(time.RFC3339)))
		// More is used, but the card still has what all request: 12 and 4 of 16.
		s.use("greedy", 12)
		if again := s.reported("greedy", 12, 4); !again.Since.Equal(since) {
			s.Errorf("the over-use began %v, and later %v", since, again.Since)
		}
		s.notEvicted("greedy", "modest")
		s.use("greedy", 4)
		s.notReported("greedy")
	})

	playUse(t, c, "of pods within their limits, the youngest is evicted while the card is low on free memory", func(s *useStage) {
		s.placeLimited("old", 2, 8)
		s.placeLimited("young", 2, 8)
		s.place("within", 8, 1, 0)
		s.use("old", 6)
		s.use("young", 6)
		s.use("within", 3)
		s.measured("young", 6) // 15 of 16, and a sixteenth is free.
		s.notReported("old")
		s.notReported("young")
		s.use("within", 4)
		s.evicted("young")
		s.WaitEvent("young", "GPUMemoryOveruse", "The pod uses 6144 MiB of GPU memory and requests 2048 MiB with a limit of 8192 MiB; its card is low on free memory")
		s.WaitEvent("young", "GPUMemoryOveruseEvicted", "it uses 6144 MiB of GPU memory and requests 2048 MiB with a limit of 8192 MiB")
		s.end("young")
		s.notReported("old")
		s.use("within", 8)
		s.measured("within", 8) // 14 of 16: nothing more is requested.
		s.notEvicted("old", "within")
		s.counted("evicted", 1)
	})

}

// placeLimited creates a pod with a limit above its request, in GiB.
func (s *useStage) placeLimited(name string, memory, limit int64) {
	s.Helper()
	s.Create(s.pod(name, memory, 1).Annotation(protocol.AnnotationLimit(framework.MainContainer), fmt.Sprint(limit)+"Gi"))
	s.wantCard(name, 0)
}

// measured waits until the device plugin has measured that the pod uses so many GiB.
func (s *useStage) measured(name string, used uint64) {
	s.Helper()
	s.Eventually(fmt.Sprintf("pod %s is measured to use %d GiB", name, used), func(ctx context.Context) error {
		text, err := framework.Fetch(ctx, s.usage.URL("http")+"/usage")
		if err != nil {
			return err
		}
		var report protocol.Usage
		if err := json.Unmarshal(text, &report); err != nil {
			return err
		}
		if !slices.ContainsFunc(report.Containers, func(c protocol.ContainerUsage) bool { return c.Pod == name && c.Used == used<<30 }) {
			return fmt.Errorf("%s", text)
		}
		return nil
	})
}

// useStage is a stage with a real device plugin.
type useStage struct {
	*stage
	workload *framework.Workload
	// usage is where the plugin serves measured use.
	usage *controlplane.Port
	// before are the counted evictions at the begin.
	before map[string]float64
}

// playUse runs a part of a test on a node with a card of 16 GiB.
func playUse(t *testing.T, c *framework.Cluster, title string, act func(s *useStage)) {
	t.Helper()
	t.Run(title, func(t *testing.T) {
		s := &useStage{stage: &stage{Namespace: c.NewNamespace(t), slow: true}}
		s.Kubelets = true
		s.node = s.NodeName("node")
		port, err := controlplane.ReservePort()
		must(t, err)
		t.Cleanup(port.Release)
		s.usage = port
		node := c.AddNodeForTest(t, framework.NodeSpec{
			Name: s.node, Cards: []uint64{16 << 10}, Labels: map[string]string{framework.LabelNamespace: s.ID},
			PluginArgs: []string{"--usage-interval=200ms", "--overuse-grace=" + overuseGrace.String(), "--usage-listen-address=" + port.Address()},
		})
		t.Cleanup(func() { must(t, s.DeleteAll(context.Background())) }) // While the kubelet runs.
		s.workload = node.NewWorkload(t)
		s.before, err = c.Metrics(t.Context(), metricEvictions)
		must(t, err)
		act(s)
		s.CheckLedger()
	})
}

// use lets the pod's container use so many GiB of the card.
func (s *useStage) use(name string, gibibytes int64) {
	s.Helper()
	s.workload.Use(s.Namespace, name, 0, gibibytes<<10)
}

// end removes what an evicted pod used, as if its process had ended.
func (s *useStage) end(name string) {
	s.Helper()
	s.workload.End(name)
	s.WaitGone(name)
}

// reported waits until the pod's annotation has these GiB. It is not written before the grace period is over.
func (s *useStage) reported(name string, used, requested int64) (report protocol.Overuse) {
	s.Helper()
	s.Eventually(fmt.Sprintf("pod %s is reported to use %d of %d GiB", name, used, requested), func(context.Context) error {
		found, err := protocol.ParseOveruse(s.Get(name).Annotations[protocol.AnnotationOveruse])
		if err != nil || found == nil || found.Used != used<<10 || found.Requested != requested<<10 {
			return fmt.Errorf("%+v, %w", found, err)
		}
		report = *found
		return nil
	})
	if report.At.Sub(report.Since) < overuseGrace {
		s.Errorf("pod %s is reported within the grace period: %+v", name, report)
	}
	return report
}

func (s *useStage) notReported(name string) {
	s.Helper()
	s.Eventually("pod "+name+" is reported no longer", func(context.Context) error {
		if text, has := s.Get(name).Annotations[protocol.AnnotationOveruse]; has {
			return errors.New(text)
		}
		return nil
	})
}

// shown checks that kubectl inspect shows the note of a pod, and that the page has the same figures.
func (s *useStage) shown(name, note string) {
	s.Helper()
	out, err := exec.CommandContext(s.Context(), s.Cluster.Binary("kubectl-inspect-gpushare"), s.node, "-d", "--kubeconfig", s.Cluster.KubeconfigPath).CombinedOutput()
	if err != nil || !strings.Contains(string(out), note) {
		s.Errorf("kubectl inspect gpushare doesn't show %q: %v\n%s", note, err, out)
	}
	s.Eventually("the page has "+note, func(ctx context.Context) error {
		text, err := framework.Fetch(ctx, s.Cluster.PageURL+"/ui/data.json")
		if err != nil {
			return err
		}
		type report struct {
			Name, Namespace       string
			UsedMiB, RequestedMiB int64
			Since                 int64
		}
		var page struct{ Reports []report }
		if err := json.Unmarshal(text, &page); err != nil {
			return err
		}
		if !slices.ContainsFunc(page.Reports, func(r report) bool {
			since := time.UnixMilli(r.Since).UTC().Format(time.RFC3339)
			return r.Namespace == s.ID && r.Name == name && note == fmt.Sprintf("uses %d MiB of GPU memory and requests %d MiB, since %s", r.UsedMiB, r.RequestedMiB, since)
		}) {
			return fmt.Errorf("it has %+v", page.Reports)
		}
		return nil
	})
}

const metricEvictions = "gpushare_extender_overuse_evictions_total"

// counted checks how many evictions with this result the extender has counted in this part of the test. It is at least that: a
// budget refuses again and again.
func (s *useStage) counted(result string, least float64) {
	s.Helper()
	s.Eventually(fmt.Sprintf("at least %v evictions are counted as %s", least, result), func(ctx context.Context) error {
		now, err := s.Cluster.Metrics(ctx, metricEvictions)
		series := framework.Series(metricEvictions, "result", result)
		if got := now[series] - s.before[series]; err == nil && got < least {
			err = fmt.Errorf("%v", got)
		}
		return err
	})
}
