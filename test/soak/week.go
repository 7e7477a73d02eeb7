package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"golang.org/x/sync/errgroup"

	"github.com/gpushare/gpushare/test/framework"
)

// week is one run.
type week struct {
	options
	cluster *framework.Cluster
	running []*framework.Node
	load    *load
	trouble *trouble
	record  *record
}

// The programs whose growth is judged are never restarted: the second replica, and the device plugin of the first node.
const (
	watchedReplica = 1
	watchedNode    = 0
)

func (w *week) addNodes(ctx context.Context) error {
	cards := make([]uint64, w.cards)
	for i := range cards {
		cards[i] = cardMemory
	}
	for i := range w.nodes {
		node, err := w.cluster.AddNode(ctx, framework.NodeSpec{Name: "n" + strconv.Itoa(i), Cards: cards})
		if err != nil {
			return err
		}
		w.running = append(w.running, node)
	}
	return nil
}

// run runs the week and then lets all pods end. It returns the first thing that was wrong.
func (w *week) run(ctx context.Context) error {
	w.load = newLoad(w.options, w.cluster.Client, rand.New(rand.NewPCG(w.seed, 1)))
	w.trouble = &trouble{week: w, random: rand.New(rand.NewPCG(w.seed, 2))}
	w.record = newRecord(w)
	g, all := errgroup.WithContext(ctx)
	during, stop := context.WithTimeout(all, w.length)
	defer stop()
	g.Go(func() error { return w.load.follow(all, during.Done()) })
	g.Go(func() error { return w.trouble.run(during) })
	g.Go(func() error { return w.record.run(during) })
	if err := g.Wait(); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return errors.New("interrupted")
	}
	if err := w.checkEmpty(ctx); err != nil {
		return err
	}
	return w.record.judge()
}

// drainTime is the longest time for which pods may still wait and run after the week.
const drainTime = 10 * time.Minute

// checkEmpty checks that nothing is left once all pods have ended.
func (w *week) checkEmpty(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var left error
	err := wait.PollUntilContextCancel(ctx, time.Second, true, func(ctx context.Context) (bool, error) {
		left = w.leftOver(ctx)
		return left == nil, nil
	})
	if err != nil {
		return fmt.Errorf("something is left after all pods have ended: %w", left)
	}
	return nil
}

func (w *week) leftOver(ctx context.Context) error {
	pods, err := w.cluster.Client.CoreV1().Pods(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	if len(pods.Items) > 0 {
		return fmt.Errorf("%d pods, such as %s", len(pods.Items), pods.Items[0].Name)
	}
	cards, err := w.cluster.LedgerAllocations(ctx)
	if err != nil {
		return err
	}
	for node, on := range cards {
		for index, card := range on {
			if card.Used > 0 {
				return fmt.Errorf("card %d of %s has %d MiB allocated: %v", index, node, card.Used, card.Pods)
			}
		}
	}
	for _, metric := range []string{framework.MetricAllocations, framework.MetricGangs, metricOverfull} {
		series, err := w.cluster.Metrics(ctx, metric)
		if err != nil {
			return err
		}
		for name, value := range series {
			if value != 0 {
				return fmt.Errorf("%s is %v", name, value)
			}
		}
	}
	return nil
}
