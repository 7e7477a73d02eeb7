// kubectl-inspect-gpushare is the kubectl plugin behind `kubectl inspect gpushare`. Called by the name
// kubectl_complete-inspect-gpushare, which a link gives it, it completes that command's arguments for kubectl.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/gpushare/gpushare/pkg/inspect"
	"github.com/gpushare/gpushare/pkg/version"

	// kubeconfigs of cloud providers name these.
	_ "k8s.io/client-go/plugin/pkg/client/auth"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // A second Ctrl-C ends at once.

	streams := genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr}
	cmd := inspect.NewCommand(streams, version.Get().String())
	if strings.HasPrefix(filepath.Base(os.Args[0]), "kubectl_complete-") {
		cmd.SetArgs(inspect.CompletionArgs(os.Args[1:]))
	}
	if err := cmd.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "error:", inspect.Printable(err.Error()))
		return 1
	}
	return 0
}
