// Command demo plays gpushare's main job on this machine: a real etcd, kube-apiserver and kube-scheduler, the extender,
// and GPU nodes that are simulated up to the driver library and the containers. It says at each step what happens and
// why, and ends with status 0 only if every step did what it should.
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
	"github.com/gpushare/gpushare/test/testbed"
)

// patience is how long the demo waits for anything.
const patience = time.Minute

func main() { os.Exit(run()) }

func run() int {
	keep := flag.Bool("keep", false, "leave everything running until Ctrl-C")
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
	bed, err := testbed.Start(ctx, testbed.Options{
		Dir: dir, ControlPlane: controlplane.Options{ControllerManager: true},
	})
	if err != nil {
		return err
	}
	defer func() {
		if stopErr := bed.Stop(); err == nil {
			err = stopErr
		}
	}()

	d := &demo{bed: bed, dir: dir}
	for _, scene := range []func(context.Context) error{d.nodes, d.filter, d.bind, d.allocate, d.full, d.table} {
		if err := scene(ctx); err != nil {
			return err
		}
	}
	say("\nEvery step did what it should.")
	if keep {
		d.hand(ctx)
	}
	return nil
}

// hand leaves everything to the user until ctx ends.
func (d *demo) hand(ctx context.Context) {
	root, _ := controlplane.RepositoryRoot()
	say(`
It is all still running. In a browser: %[4]s/ui/

In another terminal:

  export KUBECONFIG=%[1]s
  export PATH=%[2]s:$PATH
  kubectl inspect gpushare -d           # without kubectl: kubectl-inspect-gpushare -d

One more pod of 4000 MiB, which is the unit here:

  sed 's/gpu-mem: 2/gpu-mem: 4000/' %[3]s | kubectl apply -f -

Ctrl-C ends it.`, d.bed.KubeconfigPath, filepath.Join(root, "bin"), filepath.Join(root, "deploy/samples/binpack-1.yaml"), d.bed.PageURL)
	<-ctx.Done()
	say("\nStopping.")
}

func say(format string, args ...any) { fmt.Printf(format+"\n", args...) }
