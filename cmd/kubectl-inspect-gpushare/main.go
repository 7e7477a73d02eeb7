// kubectl-inspect-gpushare is the kubectl plugin of `kubectl inspect gpushare`. Under the name
// kubectl_complete-inspect-gpushare, a link to it, it completes the arguments of that command for kubectl.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/gpushare/gpushare/pkg/inspect"
	"github.com/gpushare/gpushare/pkg/version"

	// Authentication plugins that kubeconfigs of cloud providers use.
	_ "k8s.io/client-go/plugin/pkg/client/auth"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // A second Ctrl-C ends the process immediately.

	streams := genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr}
	cmd := inspect.NewCommand(streams, version.Get().String())
	if strings.HasPrefix(filepath.Base(os.Args[0]), "kubectl_complete-") {
		cmd.SetArgs(inspect.CompletionArgs(os.Args[1:]))
	}
	switch err := cmd.ExecuteContext(ctx); {
	case errors.Is(err, inspect.ErrInterrupted):
		return 130 // The status of a program that Ctrl-C ends, in shells.
	case err != nil:
		fmt.Fprintln(os.Stderr, "error:", inspect.Printable(err.Error()))
		return 1
	}
	return 0
}
