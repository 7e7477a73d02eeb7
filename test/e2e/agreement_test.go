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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// kubectl inspect gpushare says what the API server has, as JSON and as a table, also while pods come and go.
func TestInspectAgreesWithTheAPIServer(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{})
	play(t, bed, "under churn", func(s *scene) {
		for n := range 4 {
			s.addNodes(controlplane.Node{Name: fmt.Sprintf("n%d", n), Cards: mebibytes(cardMiB, cardMiB)})
		}
		for round := range 8 {
			s.churn(round)
			// kube-scheduler and the extender are still at it: what is compared changes underneath.
			eventually(s, "the command was asked while nothing changed", func(context.Context) error {
				if !s.compare() {
					return errors.New("pods still come or go")
				}
				return nil
			})
		}
	})
}

// churn makes pods, some of which fit nowhere, and deletes those of the round before the last.
func (s *scene) churn(round int) {
	s.Helper()
	const pods = 8
	for n := range pods {
		s.create(fmt.Sprintf("p%d-%d", round, n), int64(1000+1777*(round*pods+n)%cardMiB))
		if round >= 2 {
			must(s, s.bed.Client.CoreV1().Pods(s.name).Delete(s.Context(), fmt.Sprintf("p%d-%d", round-2, n),
				metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
		}
	}
}

// compare asks the command and the API server. What the API server said before and after must be the same for the
// answers to be of one moment; then it returns true, and differences are errors.
func (s *scene) compare() bool {
	s.Helper()
	inspect := func(args ...string) string {
		out, err := exec.CommandContext(s.Context(), s.bed.Binary("kubectl-inspect-gpushare"),
			append(args, "--kubeconfig", s.bed.KubeconfigPath, "-l", sceneLabel+"="+s.name)...).Output()
		must(s, err)
		return string(out)
	}
	agreed := true
	for _, form := range []struct {
		name  string
		books func() map[string]int64
	}{
		{"JSON", func() map[string]int64 { return usedInJSON(s, inspect("-o", "json")) }},
		{"table", func() map[string]int64 { return usedInTable(s, inspect("--no-headers")) }},
	} {
		before, got, after := s.used(), form.books(), s.used()
		if !cmp.Equal(before, after) {
			agreed = false
			continue
		}
		if diff := cmp.Diff(before, got); diff != "" {
			s.Errorf("%s (-API server +inspect):\n%s", form.name, diff)
		}
	}
	return agreed
}

// used is what the API server's pods hold of each card of the scene's nodes, by "node/card".
func (s *scene) used() map[string]int64 {
	s.Helper()
	all, err := actual(s.Context(), s.bed)
	must(s, err)
	used := map[string]int64{}
	for _, node := range s.nodes {
		for index, card := range all[node] {
			used[node+"/"+strconv.Itoa(index)] = card.Used
		}
	}
	return used
}

func usedInJSON(t testing.TB, text string) map[string]int64 {
	t.Helper()
	var report struct {
		Nodes []struct {
			Name  string
			Cards []struct {
				Index     int
				Allocated int64
			}
		}
	}
	must(t, json.Unmarshal([]byte(text), &report))
	used := map[string]int64{}
	for _, node := range report.Nodes {
		for _, card := range node.Cards {
			used[node.Name+"/"+strconv.Itoa(card.Index)] = card.Allocated
		}
	}
	return used
}

// usedInTable cuts the columns as scripts do: name, address, a column for each card, the node's sum.
func usedInTable(t testing.TB, text string) map[string]int64 {
	t.Helper()
	used := map[string]int64{}
	for line := range strings.Lines(text) {
		columns := strings.Fields(line)
		for card, cell := range columns[2 : len(columns)-1] {
			amount, _, _ := strings.Cut(cell, "/")
			n, err := strconv.ParseInt(amount, 10, 64)
			must(t, err)
			used[columns[0]+"/"+strconv.Itoa(card)] = n
		}
	}
	return used
}
