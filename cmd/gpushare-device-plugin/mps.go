package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/cmd/internal/program"
	"github.com/gpushare/gpushare/pkg/connlimit"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/mps"
	"github.com/gpushare/gpushare/pkg/version"
)

// defaultMPSDirectory is the default of --mps-pipe-directory, for the plugin and for the command mps.
const defaultMPSDirectory = "/run/gpushare/mps"

// mpsOptions are the values of the flags of the command mps.
type mpsOptions struct {
	directory     string
	control       string
	library       string
	listenAddress string
	sharedMemory  string
}

func newMPSCommand(environment func(string) (string, bool)) *cobra.Command {
	var o mpsOptions
	command := program.New("mps", environment)
	command.Short = "Run an MPS control daemon for each card of this node (experimental)"
	command.Long = `mps runs a control daemon of NVIDIA's Multi-Process Service for each card of this node, for --isolation=mps of the device plugin. It
starts the daemons, asks them every three seconds, and restarts one that ends or doesn't answer. It sets the compute mode of the cards to
EXCLUSIVE_PROCESS, and restores it at its end if no container has the card.

It needs nvidia-cuda-mps-control, NVIDIA's driver library, the right to set compute modes (CAP_SYS_ADMIN), and the machine's PID namespace. If it
ends, the programs that use the cards end.`
	command.RunE = func(command *cobra.Command, _ []string) error {
		if !filepath.IsAbs(o.directory) {
			return fmt.Errorf("--mps-pipe-directory: %q is not an absolute path", o.directory)
		}
		if o.sharedMemory != "" {
			return o.mountSharedMemory()
		}
		return o.serve(command.Context())
	}
	f := command.Flags()
	f.StringVar(&o.directory, "mps-pipe-directory", defaultMPSDirectory, "`directory` of the daemons' pipes and logs, with a directory for each card; the same path on the machine and in the device plugin")
	f.StringVar(&o.control, "mps-control", "nvidia-cuda-mps-control", "`path` of NVIDIA's control daemon; a name is searched for in PATH")
	f.StringVar(&o.library, "nvml-library", "", "`path` of libnvidia-ml.so.1; if empty, the dynamic linker searches for it")
	f.StringVar(&o.listenAddress, "listen-address", ":12349", "`address` of /readyz and /metrics, in plain HTTP; if empty, they are not served")
	f.StringVar(&o.sharedMemory, "mount-shared-memory", "", "mount the memory that containers with a share of a card have as /dev/shm, with this `size` such as 1Gi, and exit; a mount that exists stays")
	return command
}

func (o mpsOptions) mountSharedMemory() error {
	size, err := resource.ParseQuantity(o.sharedMemory)
	if err != nil {
		return fmt.Errorf("--mount-shared-memory: %w", err)
	}
	if size.Sign() <= 0 {
		return fmt.Errorf("--mount-shared-memory: must be positive, got %s", o.sharedMemory)
	}
	return mps.MountSharedMemory(isolation.MPSDirectory(o.directory), size.Value())
}

// serve runs the daemons until ctx ends.
func (o mpsOptions) serve(ctx context.Context) error {
	logger := klog.FromContext(ctx).WithName("mps")
	logger.Info("Starting", "version", version.Get().String(), "directory", o.directory)
	if os.Getpid() == 1 {
		logger.Error(nil, "Without the machine's PID namespace the driver's process IDs mean nothing here, and containers that still have a card aren't found")
	}
	open := func() (mps.Driver, error) { return inventory.OpenSession(o.library) }
	supervisor, err := mps.New(mps.Options{Directory: isolation.MPSDirectory(o.directory), Open: open, Control: o.control})
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(klog.NewContext(ctx, logger))
	if o.listenAddress != "" {
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", o.listenAddress)
		if err != nil {
			return fmt.Errorf("--listen-address: %w", err)
		}
		group.Go(func() error {
			return connlimit.Serve(ctx, listener, 64, nil, supervisor.Handler())
		})
	}
	group.Go(func() error { return supervisor.Run(ctx) })
	err = group.Wait()
	logger.Info("Stopped")
	return err
}
