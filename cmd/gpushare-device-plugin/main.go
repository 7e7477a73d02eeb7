// gpushare-device-plugin is the device plugin that reports a node's GPU memory to the kubelet, and allocates to each
// container the card that was chosen for its pod.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/gpushare/gpushare/cmd/internal/logflags"
)

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	command := newCommand(os.LookupEnv)
	command.SetArgs(args)
	if err := command.ExecuteContext(ctx); err != nil {
		logflags.PrintError(command.Flags(), component, err)
		return 1
	}
	return 0
}
