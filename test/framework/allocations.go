package framework

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// Allocations are the cards of all nodes, by node and index.
type Allocations map[string]map[int]Card

// Card is a card's memory, and how much of it pods have.
type Card struct {
	Total, Used int64
	// Pods is sorted; each entry is "namespace/name memory".
	Pods []string
}

// Add adds a pod.
func (c *Card) Add(namespace, name string, memory int64) {
	c.Used += memory
	c.Pods = append(c.Pods, fmt.Sprintf("%s/%s %d", namespace, name, memory))
	slices.Sort(c.Pods)
}

// Overfull returns the cards that have allocated more than their memory.
func (a Allocations) Overfull() (out []string) {
	for node, cards := range a {
		for index, card := range cards {
			if card.Used > card.Total {
				out = append(out, fmt.Sprintf("card %d of node %s has allocated %d of %d: %v", index, node, card.Used, card.Total, card.Pods))
			}
		}
	}
	return out
}

// CheckLedger fails the test if a card has allocated more than its memory. Then it waits until the extender's ledger has
// the same allocations as the API server, because its watch can lag.
func (c *Cluster) CheckLedger(t testing.TB) {
	t.Helper()
	Eventually(t, "the extender's ledger equals the API server's pods and nodes", func(ctx context.Context) error {
		want, err := c.Allocations(ctx)
		if err != nil {
			return err
		}
		if cards := want.Overfull(); len(cards) > 0 {
			t.Fatal(cards)
		}
		got, err := c.LedgerAllocations(ctx)
		if err != nil {
			return err
		}
		if diff := cmp.Diff(want, got); diff != "" {
			return fmt.Errorf("(-API server +extender):\n%s", diff)
		}
		return nil
	})
}

// Allocations adds up the API server's pods on the cards of its nodes.
func (c *Cluster) Allocations(ctx context.Context) (Allocations, error) {
	nodes, err := c.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	pods, err := c.Client.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	return AddUp(nodes.Items, pods.Items)
}

// AddUp adds up the pods on the cards of the nodes. It shares no arithmetic with the programs under test.
func AddUp(nodes []corev1.Node, pods []corev1.Pod) (Allocations, error) {
	sum := Allocations{}
	for i := range nodes {
		cards, err := cardsOf(&nodes[i])
		if err != nil {
			return nil, err
		}
		if len(cards) > 0 {
			sum[nodes[i].Name] = cards
		}
	}
	for i := range pods {
		pod := &pods[i]
		memory := GPUMemOf(pod)
		if pod.Spec.NodeName == "" || memory == 0 || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
			continue
		}
		indexes := strings.Split(pod.Annotations[protocol.AnnotationIndex], ",")
		for _, text := range indexes {
			index, err := strconv.Atoi(text)
			if err != nil {
				return nil, fmt.Errorf("pod %s/%s is on node %s without a card: %w", pod.Namespace, pod.Name, pod.Spec.NodeName, err)
			}
			card, ok := sum[pod.Spec.NodeName][index]
			if !ok {
				return nil, fmt.Errorf("pod %s/%s is on card %d of node %s, which has no such card", pod.Namespace, pod.Name, index, pod.Spec.NodeName)
			}
			card.Add(pod.Namespace, pod.Name, memory/int64(len(indexes)))
			sum[pod.Spec.NodeName][index] = card
		}
	}
	return sum, nil
}

// cardsOf reads a node's cards from its inventory, or takes equal parts of its capacity.
func cardsOf(node *corev1.Node) (map[int]Card, error) {
	cards := map[int]Card{}
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
			cards[card.Index] = Card{Total: card.Memory}
		}
		return cards, nil
	}
	memory, count := node.Status.Capacity[protocol.ResourceMemory], node.Status.Capacity[protocol.ResourceCount]
	for i := range int(count.Value()) {
		cards[i] = Card{Total: memory.Value() / count.Value()}
	}
	return cards, nil
}

// GPUMemOf returns the pod's request for GPU memory: the sum over its containers and sidecars, or, if that is more, an
// init container with the sidecars that are started before it.
func GPUMemOf(pod *corev1.Pod) int64 {
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

// LedgerAllocations reads the extender's ledger by its inspect call, in the JSON that clients of AliyunContainerService's
// extender read.
func (c *Cluster) LedgerAllocations(ctx context.Context) (Allocations, error) {
	body, err := Fetch(ctx, c.ExtenderURL+"/gpushare-scheduler/inspect")
	if err != nil {
		return nil, err
	}
	var answer struct {
		Nodes []struct {
			Name              string
			TotalGPU, UsedGPU int64
			Devs              []struct {
				ID                int
				TotalGPU, UsedGPU int64
				Pods              []struct {
					Name, Namespace string
					UsedGPU         int64
				}
			}
		}
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return nil, fmt.Errorf("inspect answers %.200s: %w", body, err)
	}
	out := Allocations{}
	for _, node := range answer.Nodes {
		out[node.Name] = map[int]Card{}
		var total, used int64
		for _, dev := range node.Devs {
			card := Card{Total: dev.TotalGPU}
			for _, pod := range dev.Pods {
				card.Add(pod.Namespace, pod.Name, pod.UsedGPU)
			}
			card.Used = dev.UsedGPU
			out[node.Name][dev.ID] = card
			total, used = total+dev.TotalGPU, used+dev.UsedGPU
		}
		if node.TotalGPU != total || node.UsedGPU != used {
			return nil, fmt.Errorf("inspect answers %d of %d for node %s, but its cards add up to %d of %d",
				node.UsedGPU, node.TotalGPU, node.Name, used, total)
		}
	}
	return out, nil
}
