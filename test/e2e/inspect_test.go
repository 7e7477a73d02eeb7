package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/mistakes"
)

// TestInspect compares the output of `kubectl inspect gpushare` with the API server's pods while pods are created and
// deleted, and its reasons for pending pods with those of the extender's page and metric. That the extender's ledger equals
// the API server is checked after every scene.
func TestInspect(t *testing.T) {
	c := shared.Start(t)
	play(t, c, "under churn", func(s *scene) {
		for n := range 4 {
			s.AddNodes(framework.MakeNode(fmt.Sprintf("n%d", n)).Unit(1<<30).Cards(2, 16))
		}
		const pods, rounds = 8, 8
		for round := range rounds {
			for i := range pods {
				s.Create(s.Pod(fmt.Sprintf("p%d-%d", round, i), int64(1+5*(round*pods+i)%17))) // 17 fits on no card.
				if round >= 2 {
					s.Delete(fmt.Sprintf("p%d-%d", round-2, i))
				}
			}
			var reasons int
			s.Eventually("the outputs agree", func(ctx context.Context) (err error) {
				reasons, err = s.compare(ctx)
				return err
			})
			if round == rounds-1 && reasons == 0 {
				s.Error("no pod was pending: the comparison of reasons shows nothing")
			}
		}
	})
}

// pendingPod is a pod, kube-scheduler's message about it, and its diagnosis, in the JSON of `kubectl inspect gpushare`.
type pendingPod struct{ Name, Reason, Cause, Explanation string }

// requestProblem is a pod whose request gets it no card.
type requestProblem struct{ Name, Problem string }

// compare returns an error if outputs differ. Pods may be created or bound meanwhile, so only an error that persists is a
// defect. It returns the number of pending pods.
func (s *scene) compare(ctx context.Context) (pending int, err error) {
	want, err := s.Cluster.Allocations(ctx)
	if err != nil {
		return 0, err
	}
	var report struct {
		Nodes []struct {
			Name  string
			Cards []struct {
				Index            int
				Allocated, Total int64
			}
			Pods []struct {
				Namespace, Name string
				Shares          []struct {
					Card   int
					Memory int64
				}
			}
		}
		Problems        []string
		PendingPods     []pendingPod
		RequestProblems []requestProblem
	}
	out, err := s.kubectlInspect(ctx, "-o", "json")
	if err == nil {
		err = json.Unmarshal([]byte(out), &report)
	}
	if err != nil {
		return 0, err
	}
	asJSON := framework.Allocations{}
	for _, node := range report.Nodes {
		cards := map[int]framework.Card{}
		for _, pod := range node.Pods {
			for _, share := range pod.Shares {
				card := cards[share.Card]
				card.Add(pod.Namespace, pod.Name, share.Memory)
				cards[share.Card] = card
			}
		}
		for _, card := range node.Cards {
			cards[card.Index] = framework.Card{Total: card.Total, Used: card.Allocated, Pods: cards[card.Index].Pods}
		}
		asJSON[node.Name] = cards
	}
	if out, err = s.kubectlInspect(ctx, "--no-headers"); err != nil {
		return 0, err
	}
	sums := map[string]string{} // The table has no pods.
	for node, cards := range want {
		for index, card := range cards {
			sums[fmt.Sprintf("%s/%d", node, index)] = fmt.Sprintf("%d/%d", card.Used, card.Total)
		}
	}
	asTable := tableSums(out)

	var page struct {
		Pending  []struct{ Name, SchedulerMessage, Reason, Message string }
		Problems []requestProblem
	}
	body, err := framework.Fetch(ctx, s.Cluster.PageURL+"/ui/data.json")
	if err == nil {
		err = json.Unmarshal(body, &page)
	}
	if err != nil {
		return 0, err
	}
	metric, err := s.Cluster.Metrics(ctx, framework.MetricPendingPods)
	if err != nil {
		return 0, err
	}
	problems, err := s.Cluster.Metrics(ctx, framework.MetricRequestProblems)
	if err != nil {
		return 0, err
	}
	reasons := map[string]float64{}
	for series := range metric {
		reasons[series] = 0
	}
	onPage := []pendingPod{}
	for _, pod := range page.Pending {
		reasons[framework.Series(framework.MetricPendingPods, "reason", pod.Reason)]++
		onPage = append(onPage, pendingPod{Name: pod.Name, Reason: pod.SchedulerMessage, Cause: pod.Reason, Explanation: mistakes.Comparable(pod.Message)})
	}
	for i := range report.PendingPods {
		pod := &report.PendingPods[i]
		pod.Explanation = mistakes.Comparable(pod.Explanation)
	}
	for _, pair := range []struct {
		name      string
		want, got any
	}{
		{"-API server +JSON", want, asJSON},
		{"-API server +table", sums, asTable},
		{"-none +JSON, problems of the cluster", []string{}, report.Problems},
		{"-page +JSON", onPage, report.PendingPods},
		{"-page +metric", reasons, metric},
		{"-page +JSON, request problems", page.Problems, report.RequestProblems},
		{"-page +metric, request problems", map[string]float64{framework.MetricRequestProblems: float64(len(page.Problems))}, problems},
	} {
		if diff := cmp.Diff(pair.want, pair.got); diff != "" {
			err = errors.Join(err, fmt.Errorf("(%s):\n%s", pair.name, diff))
		}
	}
	return len(page.Pending), err
}

// tableSums reads the table as scripts do: name, address, a column for each card, the node's sum. It returns the cells by
// node and card.
func tableSums(table string) map[string]string {
	sums := map[string]string{}
	for line := range strings.Lines(table) {
		columns := strings.Fields(line)
		if len(columns) < 4 {
			continue
		}
		for card, cell := range columns[2 : len(columns)-1] {
			sums[columns[0]+"/"+strconv.Itoa(card)] = cell
		}
	}
	return sums
}

// kubectlInspect returns the output of `kubectl inspect gpushare`.
func (s *scene) kubectlInspect(ctx context.Context, args ...string) (string, error) {
	command := exec.CommandContext(ctx, s.Cluster.Binary("kubectl-inspect-gpushare"), append(args, "--kubeconfig="+s.Cluster.KubeconfigPath)...)
	var stderr strings.Builder
	command.Stderr = &stderr
	out, err := command.Output()
	if err != nil {
		return "", fmt.Errorf("%v: %w: %s", command.Args, err, stderr.String())
	}
	return string(out), nil
}
