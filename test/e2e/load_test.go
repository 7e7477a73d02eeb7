package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// 400 pods of random sizes on 100 nodes of 8 cards, through the scheduler as it is shipped.
func TestLoad(t *testing.T) {
	const nodes, cards, pods = 100, 8, 400
	bed := framework.StartForTest(t, framework.Options{})
	s := newScene(t, bed)
	machines := make([]controlplane.Node, nodes)
	for i := range machines {
		machines[i] = controlplane.Node{Name: fmt.Sprintf("n%03d", i), Cards: controlplane.EqualCards(cards, cardMiB)}
	}
	s.addNodes(machines...)

	random := rand.New(rand.NewPCG(400, 100))
	var asked int64
	descriptions := make([]*corev1.Pod, pods)
	for i := range descriptions {
		size := 512 + random.Int64N(cardMiB-512+1)
		asked += size
		descriptions[i] = s.pod(fmt.Sprintf("pod-%03d", i), size)
	}

	start := time.Now()
	group, ctx := errgroup.WithContext(t.Context())
	group.SetLimit(16)
	for _, pod := range descriptions {
		group.Go(func() error {
			_, err := bed.Client.CoreV1().Pods(s.name).Create(ctx, pod, metav1.CreateOptions{})
			return err
		})
	}
	must(t, group.Wait())
	eventually(t, "all pods are bound", func(ctx context.Context) error {
		list, err := bed.Client.CoreV1().Pods(s.name).List(ctx, metav1.ListOptions{
			FieldSelector: "spec.nodeName=", ResourceVersion: "0",
		})
		if err == nil && len(list.Items) > 0 {
			err = fmt.Errorf("%d still wait", len(list.Items))
		}
		return err
	})
	took := time.Since(start)

	s.checkBooks()
	b, err := actual(t.Context(), bed)
	must(t, err)
	var inUse, total, used int64
	for _, node := range b {
		for _, card := range node {
			if card.Used > 0 {
				inUse++
				total += card.Total
				used += card.Used
			}
		}
	}
	if used != asked {
		t.Errorf("the cards hold %d MiB, the pods asked for %d", used, asked)
	}
	rejected, err := bed.RejectedRequests(t.Context())
	must(t, err)
	t.Logf("%d pods bound in %s from the first one's creation: %.0f pods/s; %d cards in use, %d%% of their memory used, against %d cards at the very least; %d requests throttled",
		pods, took.Round(time.Millisecond), pods/took.Seconds(), inUse, 100*used/total, (asked+cardMiB-1)/cardMiB, rejected)
}
