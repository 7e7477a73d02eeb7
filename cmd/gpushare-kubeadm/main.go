// gpushare-kubeadm gives the kube-scheduler of a kubeadm control-plane node the configuration with the extender.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpushare/gpushare/pkg/kubeadm"
	"github.com/gpushare/gpushare/pkg/version"
)

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	command := newCommand()
	command.SetArgs(args)
	if err := command.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "gpushare-kubeadm:", err)
		return 1
	}
	return 0
}

func newCommand() *cobra.Command {
	o := kubeadm.Options{}
	root := &cobra.Command{
		Use:   "gpushare-kubeadm",
		Short: "Give kube-scheduler on a kubeadm control-plane node the configuration with the gpushare extender",
		Long: `gpushare-kubeadm edits the static pod of kube-scheduler on the control-plane node where it runs, as root. It keeps the
file as it was outside the folder that the kubelet watches, waits until kube-scheduler runs with its new configuration,
and restores the file by itself if that doesn't happen in time. On several control-plane nodes run it on one after the
other.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version.Get().String(),
	}
	flags := root.PersistentFlags()
	flags.StringVar(&o.Manifest, "manifest", "/etc/kubernetes/manifests/kube-scheduler.yaml", "static pod `file` of kube-scheduler")
	flags.StringVar(&o.Folder, "folder", "/etc/kubernetes/gpushare", "`folder` for the configuration and for the static pod as it was")
	flags.DurationVar(&o.Timeout, "timeout", 3*time.Minute, "how long kube-scheduler may take to come back")
	flags.DurationVar(&o.Settle, "settle", 10*time.Second, "how long it must then run")
	o.Running = kubeadm.Processes("/proc")

	var config string
	install := &cobra.Command{
		Use:   "install --config scheduler-config.yaml",
		Short: "Give kube-scheduler the configuration; what it was given before by --config is kept, with the extender added",
		Args:  cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			ours, err := os.ReadFile(config)
			if err != nil {
				return fmt.Errorf("--config: %w", err)
			}
			o.Out = command.OutOrStdout()
			return kubeadm.Install(command.Context(), o, ours)
		},
	}
	install.Flags().StringVar(&config, "config", "", "KubeSchedulerConfiguration `file` with the extender, as the Helm chart's notes show it")
	_ = install.MarkFlagRequired("config") // It is there.
	undo := &cobra.Command{
		Use:   "undo",
		Short: "Restore the static pod as it was, to the byte",
		Args:  cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			o.Out = command.OutOrStdout()
			return kubeadm.Undo(command.Context(), o)
		},
	}
	root.AddCommand(install, undo)
	return root
}
