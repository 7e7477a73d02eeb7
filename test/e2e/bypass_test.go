package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// TestBoundWithoutExtender: a kube-scheduler whose configuration lacks the extender binds pods without cards. The extender and kubectl inspect
// report these pods, and no others.
func TestBoundWithoutExtender(t *testing.T) {
	c := framework.StartForTest(t, framework.Options{ControlPlane: controlplane.Options{Scheduler: controlplane.SchedulerOptions{
		Edits: []controlplane.ConfigEdit{func(config map[string]any) error {
			delete(config, "extenders")
			return nil
		}},
	}}})
	node := c.AddNodeForTest(t, framework.NodeSpec{Name: "node", Cards: []uint64{cardMiB, cardMiB}})
	play(t, c, "kube-scheduler doesn't call the extender", func(s *scene) {
		// binding binds a pod as another component does, with these annotations.
		binding := func(name string, annotations map[string]string) {
			must(s, s.Pods().Bind(s.Context(), &corev1.Binding{
				ObjectMeta: metav1.ObjectMeta{Namespace: s.ID, Name: name, Annotations: annotations},
				Target:     corev1.ObjectReference{Kind: "Node", Name: node.Name},
			}, metav1.CreateOptions{}))
		}
		pod := func(name string) *framework.PodWrapper { return s.Pod(name, 4000).OnNode(node.Name) }
		s.Create(pod("a"), pod("b"), pod("nodename").Node(node.Name), pod("by-another").Scheduler("another"), pod("by-extender").Scheduler("another"),
			pod("by-predecessor").Scheduler("another"))
		s.WaitAssigned("a")
		s.WaitAssigned("b")
		s.WaitAssigned("nodename")
		binding("by-another", nil)
		s.WaitAssigned("by-another")
		binding("by-extender", protocol.Assignment{Cards: []protocol.AssignedCard{{Index: 0, Memory: cardMiB}}, Request: 4000, AssumeTime: s.Get("a").CreationTimestamp.Time}.Annotations())
		s.WaitAssigned("by-extender")
		(&predecessor{scene: s, node: machine{Node: node}}).assume("by-predecessor", 1)
		s.WaitAssigned("by-predecessor")

		want := []string{"a", "b", "by-another"}
		s.Eventually("the page shows the pods", func(ctx context.Context) error { return s.wantBypasses(ctx, want) })
		s.WaitEvent("a", "GPUExtenderNotCalled", "configure its scheduler to call the extender")
		if got := c.Metric(s, framework.MetricBypasses); got != float64(len(want)) {
			s.Errorf("the metric is %v, want %d", got, len(want))
		}
		// A new extender has not seen the pods pending.
		c.RestartExtenderWith(s)
		s.Eventually("the page of a new extender shows the pods", func(ctx context.Context) error { return s.wantBypasses(ctx, want) })
		if got := c.Metric(s, framework.MetricBypasses); got != 0 {
			s.Errorf("the metric is %v after a restart, want 0", got)
		}
		s.Delete(want...)
		s.Eventually("nothing is shown once the pods are gone", func(ctx context.Context) error { return s.wantBypasses(ctx, nil) })
	})
}

// wantBypasses returns an error unless the page and kubectl inspect show that these pods, and no others, were bound without the extender.
func (s *scene) wantBypasses(ctx context.Context, want []string) error {
	var page struct {
		Reports []struct {
			Name            string
			WithoutExtender bool
		}
	}
	body, err := framework.Fetch(ctx, s.Cluster.PageURL+"/ui/data.json")
	if err == nil {
		err = json.Unmarshal(body, &page)
	}
	if err != nil {
		return err
	}
	var report struct {
		Problems []string
		Nodes    []struct {
			Pods []struct {
				Name  string
				Notes []string
			}
		}
	}
	out, err := s.kubectlInspect(ctx, "-o", "json")
	if err == nil {
		err = json.Unmarshal([]byte(out), &report)
	}
	if err != nil {
		return err
	}
	var onPage, inReport, problems []string
	for _, pod := range page.Reports {
		if pod.WithoutExtender {
			onPage = append(onPage, pod.Name)
		}
	}
	for _, node := range report.Nodes {
		for _, pod := range node.Pods {
			if slices.Contains(pod.Notes, "bound without the extender") {
				inReport = append(inReport, pod.Name)
			}
		}
	}
	slices.Sort(inReport)
	if len(want) > 0 {
		problems = []string{fmt.Sprintf("%d pods were bound without the extender: are another, default-scheduler configured to call it?", len(want))}
	}
	for what, diff := range map[string]string{
		"page":     cmp.Diff(want, onPage),
		"JSON":     cmp.Diff(want, inReport),
		"problems": cmp.Diff(strings.Join(problems, "\n"), strings.Join(report.Problems, "\n")),
	} {
		if diff != "" {
			err = fmt.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	return err
}
