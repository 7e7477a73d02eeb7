package inspect

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// CompletionArgs converts the arguments of a plugin's kubectl_complete-… program, the previous words and the one to
// complete, into the arguments with which the command prints the completions in the format that kubectl expects
// (k8s.io/kubectl/pkg/cmd/plugin/plugin_completion.go, pluginCompletion).
func CompletionArgs(words []string) []string {
	return append([]string{cobra.ShellCompRequestCmd}, words...)
}

// addCompletion adds completion of nodes and namespaces from the cluster, and of contexts from the kubeconfig.
func (o *options) addCompletion(cmd *cobra.Command) error {
	cmd.ValidArgsFunction = o.complete(sharingNodes)
	for flag, complete := range map[string]cobra.CompletionFunc{
		"output":    cobra.FixedCompletions([]string{outputWide, outputJSON, outputYAML, outputName}, cobra.ShellCompDirectiveNoFileComp),
		"color":     cobra.FixedCompletions([]string{colorAuto, colorAlways, colorNever}, cobra.ShellCompDirectiveNoFileComp),
		"namespace": o.complete(namespaces),
		"context":   o.completeContext,
	} {
		if err := cmd.RegisterFlagCompletionFunc(flag, complete); err != nil {
			return fmt.Errorf("completing --%s: %w", flag, err)
		}
	}
	return nil
}

// complete returns a function that lists names from the cluster, without those that are already on the command line. Shells
// omit names that don't begin with the word.
func (o *options) complete(list func(context.Context, kubernetes.Interface) ([]string, error)) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		ctx, cancel := context.WithTimeout(cmd.Context(), 3*time.Second) // The shell waits meanwhile.
		defer cancel()
		client, _, err := o.connect()
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		names, _ := list(ctx, client) // A shell can't show an error.
		names = slices.DeleteFunc(names, func(name string) bool { return slices.Contains(args, name) })
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

func (o *options) completeContext(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	config, _ := o.connection.ToRawKubeConfigLoader().RawConfig() // It has no contexts if it can't be read.
	return slices.Sorted(maps.Keys(config.Contexts)), cobra.ShellCompDirectiveNoFileComp
}

// sharingNodes returns the nodes that share GPU memory.
func sharingNodes(ctx context.Context, client kubernetes.Interface) (names []string, err error) {
	err = each(ctx, "nodes", client.CoreV1().Nodes().List, metav1.ListOptions{}, func(node *corev1.Node) {
		if len(protocol.ParseNode(node).Cards) > 0 {
			names = append(names, node.Name)
		}
	})
	return names, err
}

func namespaces(ctx context.Context, client kubernetes.Interface) (names []string, err error) {
	err = each(ctx, "namespaces", client.CoreV1().Namespaces().List, metav1.ListOptions{}, func(namespace *corev1.Namespace) {
		names = append(names, namespace.Name)
	})
	return names, err
}
