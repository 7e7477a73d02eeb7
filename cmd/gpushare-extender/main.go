// gpushare-extender answers kube-scheduler: which nodes have a GPU card with room for a pod, and binds the pod to one.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/gpushare/gpushare/cmd/internal/logflags"
)

func main() {
	calm()
	os.Exit(run(os.Args[1:]))
}

func run(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	command := newCommand()
	command.SetArgs(args)
	if err := command.ExecuteContext(ctx); err != nil {
		logflags.PrintError(command.Flags(), component, err)
		return 1
	}
	return 0
}
