package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// fairShareMode is the chart's value that turns fair sharing on.
const fairShareMode = "extender.fairShare.mode="

// gates are the scheduling gates of a pod with this gate; none if it is empty. The chart's policy would add the gate of fair sharing,
// but only some time after it was installed.
func gates(gate string) []corev1.PodSchedulingGate {
	if gate == "" {
		return nil
	}
	return []corev1.PodSchedulingGate{{Name: gate}}
}

// labelPool is the label of nodes that only some pods can use.
const labelPool = "gpushare.test/pool"

// poolFull are nodes whose cards pods of namespaceFull fill, which takes no part in fair sharing.
const poolFull, namespaceFull = "full", "full"

// fullNodes is the number of nodes of poolFull: all of them if their cards are freed.
func (o options) fullNodes() int {
	if o.freed > 0 {
		return o.nodes
	}
	return max(o.nodes/100, 1)
}

// tenantNames are the namespaces of the tenants.
func tenantNames(tenants int) (names []string) {
	for i := range tenants {
		names = append(names, fmt.Sprintf("tenant-%02d", i))
	}
	return names
}

// createNamespace creates a namespace unless it exists.
func (s *bench) createNamespace(ctx context.Context, meta metav1.ObjectMeta) error {
	_, err := s.plane.Client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: meta}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// createWaiting creates pods of all tenants that wait: they can use poolFull only, which is full. They have the gate, unless it is empty.
func (s *bench) createWaiting(ctx context.Context, gate string) error {
	names := tenantNames(s.tenants)
	for i, name := range names {
		weight := map[string]string{protocol.AnnotationFairShareWeight: strconv.Itoa(1 + i%4)}
		if err := s.createNamespace(ctx, metav1.ObjectMeta{Name: name, Annotations: weight}); err != nil {
			return err
		}
	}
	noPart := map[string]string{protocol.LabelFairShare: protocol.FairShareOff}
	if err := s.createNamespace(ctx, metav1.ObjectMeta{Name: namespaceFull, Labels: noPart}); err != nil {
		return err
	}
	g, creating := errgroup.WithContext(ctx)
	g.SetLimit(creators)
	create := func(namespace string, pod *corev1.Pod) {
		g.Go(func() error {
			_, err := s.plane.Client.CoreV1().Pods(namespace).Create(creating, pod, metav1.CreateOptions{})
			return err
		})
	}
	for i := range s.fullNodes() * s.cards {
		pod := newPod(i, cardMemory)
		pod.Spec.NodeName, pod.Annotations = nodeName(i/s.cards), protocol.Assignment{
			Cards: []protocol.AssignedCard{{Index: i % s.cards, Memory: cardMemory}}, Request: cardMemory, AssumeTime: time.Now(),
		}.Annotations()
		create(namespaceFull, pod)
	}
	for i, request := range sizes(s.waiting, s.seed) {
		pod := newPod(i, request)
		pod.Spec.NodeSelector, pod.Spec.SchedulingGates = map[string]string{labelPool: poolFull}, gates(gate)
		create(names[i%len(names)], pod)
	}
	return g.Wait()
}

// awaitTried waits until kube-scheduler has rejected each of the waiting pods.
func (s *bench) awaitTried(ctx context.Context) error {
	return wait.PollUntilContextTimeout(ctx, 5*time.Second, 20*time.Minute, false, func(ctx context.Context) (bool, error) {
		for _, namespace := range tenantNames(s.tenants) {
			pods, err := s.plane.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{ResourceVersion: "0"})
			if err != nil {
				return false, err
			}
			for i := range pods.Items {
				tried := func(c corev1.PodCondition) bool { return c.Reason == corev1.PodReasonUnschedulable }
				if !slices.ContainsFunc(pods.Items[i].Status.Conditions, tried) {
					return false, nil
				}
			}
		}
		return true, nil
	})
}
