package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// half is a pod's request: the six cards of the nodes have room for twelve such pods.
const half, places = card / 2, 12

// shareFairly shows two tenants that share the cluster. It leaves the nodes empty and fair sharing off.
func (d *demo) shareFairly(ctx context.Context) error {
	title("Fair share: two teams, one of which submits more, earlier, and with a higher priority")
	usual := d.cluster.Extender.Args
	if err := errors.Join(d.cluster.Extender.Kill(), d.prepareShares(ctx)); err != nil {
		return err
	}
	say("  The nodes have room for %d pods of %d MiB. Bob submits %d with high priority, and then Alice 8 without a priority:", places, half, places+2)
	if err := errors.Join(d.submit(ctx, "bob", places+2, "high"), d.submit(ctx, "alice", 8, "")); err != nil {
		return err
	}
	say("  Start the extender with --fair-share=reclaim. It removes the scheduling gates of Bob's and of Alice's pods alternately:")
	if err := d.restart(ctx, append(slices.Clone(usual), "--fair-share=reclaim", "--fair-share-reclaim-after=1s", "--fair-share-min-runtime=0s")); err != nil {
		return err
	}
	if err := d.awaitShares(ctx, places/2, places/2); err != nil {
		return err
	}
	if err := d.inspect(ctx, "--shares"); err != nil {
		return err
	}
	say("  Alice's pods end. Nothing stays free:")
	if err := errors.Join(d.end(ctx, "alice"), d.awaitShares(ctx, 0, places)); err != nil {
		return err
	}
	say("  Alice comes again. After a second (--fair-share-reclaim-after) the excess of Bob's pods is evicted, and no more:")
	if err := errors.Join(d.submit(ctx, "alice", 8, ""), d.awaitShares(ctx, places/2, places/2), d.expectPods(ctx, "bob", places+2-places/2)); err != nil {
		return err
	}
	say("  Delete all of them, and turn fair sharing off.")
	if err := errors.Join(d.end(ctx, "alice"), d.end(ctx, "bob"), d.awaitShares(ctx, 0, 0)); err != nil {
		return err
	}
	return errors.Join(d.cluster.Extender.Kill(), d.restart(ctx, usual))
}

// prepareShares creates the tenants, a priority class, and the rights that the extender needs for fair sharing, as the chart does.
func (d *demo) prepareShares(ctx context.Context) error {
	client := d.cluster.Client
	_, err := client.SchedulingV1().PriorityClasses().Create(ctx, &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: "high"}, Value: 1000}, metav1.CreateOptions{})
	errs := []error{err, d.cluster.AllowFairShare(ctx)}
	for _, name := range []string{"alice", "bob"} {
		_, err := client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		if errs = append(errs, err); d.cluster.ControllerManager == nil {
			continue
		}
		errs = append(errs, d.poll(ctx, "namespace "+name+" should have its ServiceAccount", func(ctx context.Context) (bool, error) {
			_, err := client.CoreV1().ServiceAccounts(name).Get(ctx, "default", metav1.GetOptions{})
			return err == nil, nil
		}))
	}
	return errors.Join(errs...)
}

// restart starts the extender with the arguments.
func (d *demo) restart(ctx context.Context, args []string) error {
	d.cluster.Extender.Args = args
	return d.cluster.Extender.Start(ctx)
}

// submit creates pods of the tenant that wait for their turn.
func (d *demo) submit(ctx context.Context, tenant string, n int, priority string) error {
	for i := range n {
		p := pod(fmt.Sprintf("%s-%02d", tenant, i), half).Namespace(tenant).PriorityClass(priority).FairShareGate()
		if _, err := d.cluster.Client.CoreV1().Pods(tenant).Create(ctx, p.Obj(), metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("creating pod %s: %w", p.Name, err)
		}
	}
	return nil
}

// expectPods checks how many pods of the tenant exist.
func (d *demo) expectPods(ctx context.Context, tenant string, want int) error {
	pods, err := d.cluster.Client.CoreV1().Pods(tenant).List(ctx, metav1.ListOptions{})
	if err == nil && len(pods.Items) != want {
		return fmt.Errorf("%d pods of %s exist, want %d", len(pods.Items), tenant, want)
	}
	return err
}

// end deletes the tenant's pods.
func (d *demo) end(ctx context.Context, tenant string) error {
	return d.cluster.Client.CoreV1().Pods(tenant).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
}

// awaitShares waits until Alice and Bob have as many running pods, and prints that.
func (d *demo) awaitShares(ctx context.Context, alice, bob int) error {
	err := d.poll(ctx, fmt.Sprintf("Alice should have %d running pods and Bob %d", alice, bob), func(ctx context.Context) (bool, error) {
		for tenant, want := range map[string]int{"alice": alice, "bob": bob} {
			pods, err := d.cluster.Client.CoreV1().Pods(tenant).List(ctx, metav1.ListOptions{})
			if err != nil {
				return false, err
			}
			bound := 0
			for i := range pods.Items {
				if pods.Items[i].Spec.NodeName == "" {
					continue
				}
				if bound++; pods.Items[i].Annotations[protocol.AnnotationAssigned] != "true" {
					return false, nil
				}
			}
			if bound != want {
				return false, nil
			}
		}
		return true, nil
	})
	if err == nil {
		say("    Alice has %d running pods, Bob %d.", alice, bob)
	}
	return err
}

func (d *demo) poll(ctx context.Context, what string, done wait.ConditionWithContextFunc) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, done); err != nil {
		return fmt.Errorf("%s, but: %w", what, err)
	}
	return nil
}
