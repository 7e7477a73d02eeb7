package inspect

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// CompletionArgs converts the arguments of a plugin's kubectl_complete-… program, the previous words and the one to
// complete, into the arguments with which the command prints the completions in the format that kubectl expects
// (k8s.io/kubectl/pkg/cmd/plugin/plugin_completion.go, pluginCompletion).
func CompletionArgs(words []string) []string {
	return append([]string{cobra.ShellCompRequestCmd}, words...)
}

// addCompletion adds completion of nodes from the cluster, and of output formats.
func (o *options) addCompletion(cmd *cobra.Command) error {
	cmd.ValidArgsFunction = o.completeNodes
	for flag, complete := range map[string]cobra.CompletionFunc{
		"output": cobra.FixedCompletions([]string{outputWide, outputJSON, outputYAML, outputName}, cobra.ShellCompDirectiveNoFileComp),
		"color":  cobra.FixedCompletions([]string{colorAuto, colorAlways, colorNever}, cobra.ShellCompDirectiveNoFileComp),
	} {
		if err := cmd.RegisterFlagCompletionFunc(flag, complete); err != nil {
			return fmt.Errorf("completing --%s: %w", flag, err)
		}
	}
	return nil
}

// completeNodes lists the nodes that share GPU memory, without those that are already on the command line. Shells omit names that don't begin with
// the word.
func (o *options) completeNodes(cmd *cobra.Command, args []string, _ string) (names []string, _ cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), 3*time.Second) // The shell waits meanwhile.
	defer cancel()
	client, err := o.connect()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	_ = each(ctx, "nodes", client.CoreV1().Nodes().List, metav1.ListOptions{}, func(node *corev1.Node) { // A shell can't show an error.
		if len(protocol.ParseNode(node).Cards) > 0 && !slices.Contains(args, node.Name) {
			names = append(names, node.Name)
		}
	})
	return names, cobra.ShellCompDirectiveNoFileComp
}
