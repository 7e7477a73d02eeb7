// Command demo shows gpushare's main functions on this machine: a real etcd, kube-apiserver and kube-scheduler, the
// extender, and simulated GPU nodes with the real device plugin. It explains each step, and exits with status 0 only if
// every step had the expected result.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// patience is the timeout of every wait.
const patience = time.Minute

func main() { os.Exit(run()) }

func run() int {
	keep := flag.Bool("keep", false, "keep the cluster running until Ctrl-C")
	fairShare := flag.String("fair-share", "off", "the extender's --fair-share after the steps")
	kubectl := flag.String("user-pages", "", "the kubectl with which to run the commands of the pages for users, after the steps; empty runs none")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := play(ctx, *keep, *fairShare, *kubectl); err != nil {
		fmt.Fprintln(os.Stderr, "\nThe demo failed:", err)
		return 1
	}
	return 0
}

func play(ctx context.Context, keep bool, fairShare, kubectl string) (err error) {
	dir, err := os.MkdirTemp("", "gpushare-demo-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			fmt.Fprintln(os.Stderr, "\nThe logs are in", dir)
			return
		}
		err = os.RemoveAll(dir)
	}()

	say("Starting etcd, kube-apiserver, kube-scheduler and the gpushare extender ...")
	cluster, err := framework.Start(ctx, framework.Options{
		Dir: dir, Guard: true, ControlPlane: controlplane.Options{ControllerManager: keep || kubectl != ""}, // For Deployments and Jobs.
	})
	if err != nil {
		return err
	}
	defer func() {
		if stopErr := cluster.Stop(); err == nil {
			err = stopErr
		}
	}()

	// The extender is a process of this machine, so the pods of its Deployment would stay pending.
	_, err = cluster.Client.AppsV1().Deployments(metav1.NamespaceSystem).Patch(ctx, "gpushare-extender", types.MergePatchType, []byte(`{"spec":{"replicas":0}}`), metav1.PatchOptions{})
	if err != nil {
		return fmt.Errorf("scaling the extender's Deployment to 0: %w", err)
	}
	d := &demo{cluster: cluster}
	for _, step := range []func(context.Context) error{d.nodes, d.shareCard, d.guard, d.shareFairly, d.filter, d.bind, d.allocate, d.full, d.several, d.table} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	if kubectl != "" {
		if err := d.userPages(ctx, kubectl); err != nil {
			return err
		}
	}
	if err := d.nonePending(ctx); err != nil {
		return err
	}
	say("\nEvery step had the expected result.")
	if fairShare != "off" {
		if err := errors.Join(cluster.Extender.Kill(), d.restart(ctx, append(slices.Clone(cluster.Extender.Args), "--fair-share="+fairShare))); err != nil {
			return err
		}
	}
	if keep {
		d.waitForInterrupt(ctx)
	}
	return nil
}

// nonePending waits until no pod of the extender's Deployment is left: no node can run one, and it would be pending for as long as the demo is kept.
func (d *demo) nonePending(ctx context.Context) error {
	return d.poll(ctx, "no pod of the extender should be left pending", func(ctx context.Context) (bool, error) {
		pods, err := d.cluster.Client.CoreV1().Pods(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{})
		return err == nil && !slices.ContainsFunc(pods.Items, func(pod corev1.Pod) bool { return strings.HasPrefix(pod.Name, "gpushare-extender") }), err
	})
}

// waitForInterrupt prints how to use the running cluster and waits until ctx ends.
func (d *demo) waitForInterrupt(ctx context.Context) {
	root, _ := controlplane.RepositoryRoot()
	say(`
The cluster is still running. Web page: %[4]s/ui/ Extender: %[5]s

In another terminal:

  export KUBECONFIG=%[1]s
  export PATH=%[2]s:$PATH
  kubectl inspect gpushare -d           # without kubectl: kubectl-inspect-gpushare -d

Create one more pod of 5000 MiB (the unit here is MiB):

  sed 's/gpu-mem: 2/gpu-mem: 5000/' %[3]s | kubectl apply -f -

The guard is installed. FAIR_SHARE=dispatch KEEP=1 make demo switches fair sharing on; then add its scheduling gate to your pods.

Press Ctrl-C to stop.`, d.cluster.KubeconfigPath, filepath.Join(root, "bin"), filepath.Join(root, "deploy/samples/binpack-1.yaml"), d.cluster.PageURL, d.cluster.ExtenderURL)
	<-ctx.Done()
	say("\nStopping ...")
}

func say(format string, args ...any) { fmt.Printf(format+"\n", args...) }
