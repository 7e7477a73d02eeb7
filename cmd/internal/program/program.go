// Package program has what the main packages of the extender and the device plugin share: the flags that both have, the
// signals that end them, how they report errors and Events, and how they find the API server.
package program

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register" // --logging-format=json
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/version"
)

// New returns a program's command without its own flags. The environment sets the flags that are not on the command line,
// and logging is configured, before the command runs.
func New(name string, environment func(string) (string, bool)) *cobra.Command {
	logging := logsapi.NewLoggingConfiguration()
	command := &cobra.Command{
		Use:           name,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version.Get().String(),
		PreRunE: func(command *cobra.Command, _ []string) error {
			if err := SetFlags(command.Flags(), environment); err != nil {
				return err
			}
			return applyLogging(logging)
		},
	}
	addLoggingFlags(command.Flags(), logging)
	return command
}

// Run runs the command until it ends or a signal ends it, and returns the exit status.
func Run(command *cobra.Command) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command.ExecuteContext(ctx); err != nil {
		printError(command, err)
		return 1
	}
	return 0
}

// printError writes to standard error why the program ends: in words, or as a line of JSON if the flags select such logs.
func printError(command *cobra.Command, err error) {
	if command.Flag("logging-format").Value.String() != logsapi.JSONLogFormat {
		fmt.Fprintf(os.Stderr, "%s: %v\n", command.Name(), err)
		return
	}
	logging := logsapi.NewLoggingConfiguration()
	logging.Format = logsapi.JSONLogFormat
	_ = applyLogging(logging) // It fails if the flags were applied before, and they stay.
	klog.Background().WithName(command.Name()).Error(err, "The program ends")
}

// APIConfig returns the configuration of API clients, from the kubeconfig or, without one, from the pod's service account.
func APIConfig(kubeconfig, component string) (config *rest.Config, err error) {
	if kubeconfig == "" {
		if config, err = rest.InClusterConfig(); err != nil {
			return nil, fmt.Errorf("--kubeconfig is not set, and the pod's service account can't be used: %w", err)
		}
	} else if config, err = clientcmd.BuildConfigFromFlags("", kubeconfig); err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	config.UserAgent = component + "/" + version.Get().Version
	return config, nil
}
