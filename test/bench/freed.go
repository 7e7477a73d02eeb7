package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// longestPause is the longest time from a bind until the next card is freed: twice the chart's podMaxBackoffSeconds.
const longestPause = 10 * time.Second

// measureFreed fills all cards, lets pods wait for them, and frees one card after the other. It reports how long each is free until the first
// of the waiting pods is bound to its node.
func measureFreed(ctx context.Context, s *bench, kinds []*kind) error {
	if s.freed > s.nodes {
		return fmt.Errorf("-freed: must be at most the number of nodes, %d, got %d", s.nodes, s.freed)
	}
	for _, k := range kinds {
		if !k.waiting || k.gate != "" && k.gate != protocol.GateFairShare {
			return fmt.Errorf("-kinds: with -freed want queued or gated, got %q", k.name)
		}
		extender, err := s.begin(ctx, k)
		if err != nil {
			return fmt.Errorf("%s: %w", k.name, err)
		}
		random := rand.New(rand.NewPCG(uint64(s.seed), 3))
		var free []time.Duration
		for _, node := range random.Perm(s.nodes)[:s.freed] {
			select {
			case <-time.After(time.Duration(random.Int64N(int64(longestPause)))):
			case <-ctx.Done():
				return ctx.Err()
			}
			took, err := s.timeToBind(ctx, node, random.IntN(s.cards))
			if err != nil {
				return fmt.Errorf("%s: %w", k.name, err)
			}
			free = append(free, took)
		}
		slices.Sort(free)
		fmt.Printf("%-12s %d pods wait; each of %d freed cards is free until the first of them is bound for %.3f s (median), %.3f s at most\n",
			k.name, s.waiting, s.freed, free[len(free)/2].Seconds(), free[len(free)-1].Seconds())
		var t result
		if err := s.end(ctx, k, extender, &t); err != nil {
			return fmt.Errorf("%s: %w", k.name, err)
		}
	}
	return nil
}

// timeToBind deletes the pod of a card, and returns the time until one of the waiting pods is bound to the card's node.
func (s *bench) timeToBind(ctx context.Context, node, card int) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	changes, err := s.plane.Client.CoreV1().Pods(metav1.NamespaceAll).Watch(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("spec.nodeName", nodeName(node)).String(),
	})
	if err != nil {
		return 0, err
	}
	defer changes.Stop()
	start := time.Now()
	name := newPod(node*s.cards+card, cardMemory).Name
	if err := s.plane.Client.CoreV1().Pods(namespaceFull).Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
		return 0, err
	}
	for change := range changes.ResultChan() {
		if pod, ok := change.Object.(*corev1.Pod); ok && pod.Namespace != namespaceFull {
			return time.Since(start), nil
		}
	}
	return 0, fmt.Errorf("no pod was bound to %s, whose card %d is free for %s", nodeName(node), card, time.Since(start).Round(time.Second))
}
