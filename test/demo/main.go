// Command demo shows gpushare's main functions on this machine: a real etcd, kube-apiserver and kube-scheduler, the
// extender, and simulated GPU nodes with the real device plugin. It explains each step, and exits with status 0 only if
// every step had the expected result.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// patience is the timeout of every wait.
const patience = time.Minute

func main() { os.Exit(run()) }

func run() int {
	keep := flag.Bool("keep", false, "keep the cluster running until Ctrl-C")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := play(ctx, *keep); err != nil {
		fmt.Fprintln(os.Stderr, "\nThe demo failed:", err)
		return 1
	}
	return 0
}

func play(ctx context.Context, keep bool) (err error) {
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
		Dir: dir, ControlPlane: controlplane.Options{ControllerManager: true},
	})
	if err != nil {
		return err
	}
	defer func() {
		if stopErr := cluster.Stop(); err == nil {
			err = stopErr
		}
	}()

	d := &demo{cluster: cluster}
	for _, step := range []func(context.Context) error{d.nodes, d.share, d.filter, d.bind, d.allocate, d.full, d.several, d.table} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	say("\nEvery step had the expected result.")
	if keep {
		d.waitForInterrupt(ctx)
	}
	return nil
}

// waitForInterrupt prints how to use the running cluster and waits until ctx ends.
func (d *demo) waitForInterrupt(ctx context.Context) {
	root, _ := controlplane.RepositoryRoot()
	say(`
The cluster is still running. Web page: %[4]s/ui/

In another terminal:

  export KUBECONFIG=%[1]s
  export PATH=%[2]s:$PATH
  kubectl inspect gpushare -d           # without kubectl: kubectl-inspect-gpushare -d

Create one more pod of 4000 MiB (the unit here is MiB):

  sed 's/gpu-mem: 2/gpu-mem: 4000/' %[3]s | kubectl apply -f -

Press Ctrl-C to stop.`, d.cluster.KubeconfigPath, filepath.Join(root, "bin"), filepath.Join(root, "deploy/samples/binpack-1.yaml"), d.cluster.PageURL)
	<-ctx.Done()
	say("\nStopping ...")
}

func say(format string, args ...any) { fmt.Printf(format+"\n", args...) }
