// gpushare-extender is the scheduler extender that filters nodes by the free memory of their GPU cards, and binds pods
// together with the card that they get.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/gpushare/gpushare/cmd/internal/logflags"
)

func main() {
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
