package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// books are what each card of each node has and holds.
type books map[string]map[int]page

// page is one card. Pods are in order, each as "namespace/name memory".
type page struct {
	Total, Used int64
	Pods        []string
}

// overfull returns the cards that hold more than they have.
func (b books) overfull() []string {
	var over []string
	for node, cards := range b {
		for index, card := range cards {
			if card.Used > card.Total {
				over = append(over, fmt.Sprintf("card %d of node %s holds %d of %d: %v", index, node, card.Used, card.Total, card.Pods))
			}
		}
	}
	return over
}

func (b books) diff(other books) string { return cmp.Diff(b, other) }

// checkBooks checks that no card is over its total, and waits until the extender's ledger says the same as the API
// server, of which its watch may be some moments behind.
func (s *scene) checkBooks() {
	s.Helper()
	checkBooks(s, s.bed)
}

func checkBooks(t testing.TB, bed *framework.Cluster) {
	t.Helper()
	eventually(t, "the extender's ledger equals what the API server's pods and nodes add up to", func(ctx context.Context) error {
		want, err := actual(ctx, bed)
		if err != nil {
			return err
		}
		if over := want.overfull(); len(over) > 0 {
			t.Fatalf("%v", over)
		}
		got, err := inspected(ctx, bed)
		if err != nil {
			return err
		}
		if diff := want.diff(got); diff != "" {
			return fmt.Errorf("(-API server +extender):\n%s", diff)
		}
		return nil
	})
}

// actual adds up what the API server's pods hold of its nodes' cards. It shares no arithmetic with the programs under
// test.
func actual(ctx context.Context, bed *framework.Cluster) (books, error) {
	nodes, err := bed.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	pods, err := bed.Client.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	sum := books{}
	for i := range nodes.Items {
		cards, err := cardsOf(&nodes.Items[i])
		if err != nil {
			return nil, err
		}
		if len(cards) > 0 {
			sum[nodes.Items[i].Name] = cards
		}
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		memory := memoryOf(pod)
		if pod.Spec.NodeName == "" || memory == 0 || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
			continue
		}
		index, err := strconv.Atoi(pod.Annotations[protocol.AnnotationIndex])
		if err != nil {
			return nil, fmt.Errorf("pod %s/%s is on node %s without a card: %w", pod.Namespace, pod.Name, pod.Spec.NodeName, err)
		}
		card, ok := sum[pod.Spec.NodeName][index]
		if !ok {
			return nil, fmt.Errorf("pod %s/%s is on card %d of node %s, which has no such card", pod.Namespace, pod.Name, index, pod.Spec.NodeName)
		}
		card.Used += memory
		card.Pods = append(card.Pods, entry(pod.Namespace, pod.Name, memory))
		slices.Sort(card.Pods)
		sum[pod.Spec.NodeName][index] = card
	}
	return sum, nil
}

// cardsOf reads a node's cards: from its inventory, or as equal parts of its capacity.
func cardsOf(node *corev1.Node) (map[int]page, error) {
	cards := map[int]page{}
	if text, ok := node.Annotations[protocol.AnnotationInventory]; ok {
		var inventory struct {
			Cards []struct {
				Index  int
				Memory int64
			}
		}
		if err := json.Unmarshal([]byte(text), &inventory); err != nil {
			return nil, fmt.Errorf("the inventory of node %s: %w", node.Name, err)
		}
		for _, card := range inventory.Cards {
			cards[card.Index] = page{Total: card.Memory}
		}
		return cards, nil
	}
	memory, count := node.Status.Capacity[protocol.ResourceMemory], node.Status.Capacity[protocol.ResourceCount]
	for i := range int(count.Value()) {
		cards[i] = page{Total: memory.Value() / count.Value()}
	}
	return cards, nil
}

// memoryOf is what the pod asks for: the sum of its containers and sidecars, or an init container beside the sidecars
// started before it, whatever is most.
func memoryOf(pod *corev1.Pod) int64 {
	var sidecars, most, sum int64
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		memory := c.Resources.Limits[protocol.ResourceMemory]
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			sidecars += memory.Value()
		} else {
			most = max(most, sidecars+memory.Value())
		}
	}
	for i := range pod.Spec.Containers {
		memory := pod.Spec.Containers[i].Resources.Limits[protocol.ResourceMemory]
		sum += memory.Value()
	}
	return max(most, sidecars+sum)
}

func entry(namespace, name string, memory int64) string {
	return fmt.Sprintf("%s/%s %d", namespace, name, memory)
}

// inspection is the JSON shape that users of the existing extender read, written down once more.
type inspection struct {
	Nodes []struct {
		Name     string
		TotalGPU int64
		UsedGPU  int64
		Devs     []struct {
			ID       int
			TotalGPU int64
			UsedGPU  int64
			Pods     []struct {
				Name, Namespace string
				UsedGPU         int64
			}
		}
	}
}

// inspected reads the extender's ledger.
func inspected(ctx context.Context, bed *framework.Cluster) (books, error) {
	body, err := framework.Fetch(ctx, bed.ExtenderURL+"/gpushare-scheduler/inspect")
	if err != nil {
		return nil, err
	}
	var answer inspection
	if err := json.Unmarshal(body, &answer); err != nil {
		return nil, fmt.Errorf("inspect answers %.200s: %w", body, err)
	}
	out := books{}
	for _, node := range answer.Nodes {
		out[node.Name] = map[int]page{}
		var total, used int64
		for _, dev := range node.Devs {
			card := page{Total: dev.TotalGPU, Used: dev.UsedGPU}
			for _, pod := range dev.Pods {
				card.Pods = append(card.Pods, entry(pod.Namespace, pod.Name, pod.UsedGPU))
			}
			slices.Sort(card.Pods)
			out[node.Name][dev.ID] = card
			total, used = total+dev.TotalGPU, used+dev.UsedGPU
		}
		if node.TotalGPU != total || node.UsedGPU != used {
			return nil, fmt.Errorf("inspect says %d of %d used on node %s, its cards add up to %d of %d", node.UsedGPU, node.TotalGPU, node.Name, used, total)
		}
	}
	return out, nil
}
