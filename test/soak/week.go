package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"golang.org/x/sync/errgroup"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// week is one run.
type week struct {
	options
	cluster *framework.Cluster
	running []*framework.Node
	// pluginURL is where the watched plugin serves its metrics.
	pluginURL string
	load      *load
	trouble   *trouble
	record    *record
}

// The programs whose growth is judged are never restarted: the second replica, and the device plugin of the first node.
const (
	watchedReplica = 1
	watchedNode    = 0
)

func newWeek(o options, cluster *framework.Cluster) *week {
	w := &week{options: o, cluster: cluster}
	w.load = newLoad(o, cluster.Client, rand.New(rand.NewPCG(o.seed, 1)))
	w.trouble = &trouble{week: w, random: rand.New(rand.NewPCG(o.seed, 2))}
	return w
}

func (w *week) addNodes(ctx context.Context) error {
	port, err := controlplane.ReservePort()
	if err != nil {
		return err
	}
	w.pluginURL = port.URL("http")
	for i := range w.nodes {
		spec := framework.NodeSpec{Name: "n" + strconv.Itoa(i)}
		for range w.cards {
			spec.Cards = append(spec.Cards, 16276)
		}
		if i == watchedNode {
			spec.PluginArgs = []string{"--listen-address=" + port.Address()}
		}
		node, err := w.cluster.AddNode(ctx, spec)
		if err != nil {
			return err
		}
		w.running = append(w.running, node)
	}
	return nil
}

// run runs the week and then lets all pods end. It returns what was wrong.
func (w *week) run(ctx context.Context) error {
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
	return errors.Join(w.checkEmpty(ctx), judgeLoad(w.load.totals(), w.trouble.events), judgeSeries(w.record.all, w.calendar))
}

// judgeLoad returns an error if the run shows little because pods didn't run or nothing failed.
func judgeLoad(c counts, events []event) error {
	var errs []error
	if c.ended < c.created/2 {
		errs = append(errs, fmt.Errorf("only %d of %d pods ran to their end", c.ended, c.created))
	}
	happened := map[bool]int{}
	for _, e := range events {
		happened[e.update]++
	}
	if happened[false] == 0 || happened[true] == 0 {
		errs = append(errs, fmt.Errorf("there were %d faults and %d updates, want some of both", happened[false], happened[true]))
	}
	return errors.Join(errs...)
}

// checkEmpty checks that nothing is left once all pods have ended.
func (w *week) checkEmpty(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute) // The extender counts pending pods once a minute at least.
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

// leftOver returns an error for the first thing that is left: a pod, memory in the leader's ledger, or what either replica counts.
func (w *week) leftOver(ctx context.Context) error {
	pods, err := w.cluster.Client.CoreV1().Pods(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	ledger, err := w.cluster.LedgerAllocations(ctx)
	if err != nil {
		return err
	}
	var counted []map[string]float64
	for _, url := range w.cluster.ReplicaURLs {
		values, err := scrape(ctx, url, framework.MetricAllocations, framework.MetricGangs, framework.MetricPendingPods, metricOverfull)
		if err != nil {
			return err
		}
		counted = append(counted, values)
	}
	return judgeLeft(pods.Items, ledger, counted)
}

// judgeLeft returns an error for the first thing that isn't empty. counted are the gauges of each replica.
func judgeLeft(pods []corev1.Pod, ledger framework.Allocations, counted []map[string]float64) error {
	if len(pods) > 0 {
		return fmt.Errorf("%d pods, such as %s", len(pods), pods[0].Name)
	}
	for node, cards := range ledger {
		for index, card := range cards {
			if card.Used > 0 {
				return fmt.Errorf("card %d of %s has %d units allocated: %v", index, node, card.Used, card.Pods)
			}
		}
	}
	for replica, values := range counted {
		if len(values) == 0 {
			return fmt.Errorf("replica %d counts nothing", replica)
		}
		for name, value := range values {
			if value != 0 {
				return fmt.Errorf("replica %d counts %v of %s", replica, value, name)
			}
		}
	}
	return nil
}
