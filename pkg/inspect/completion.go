package inspect

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/kubernetes"
)

// completionTimeout limits how long a shell waits after the Tab key if the API server is not reachable.
const completionTimeout = 3 * time.Second

// CompletionArgs converts the arguments of a plugin's kubectl_complete-… program, the previous words and the one to
// complete, into the arguments with which the command prints the completions in the format that kubectl expects
// (k8s.io/kubectl/pkg/cmd/plugin/plugin_completion.go, pluginCompletion).
func CompletionArgs(words []string) []string {
	return append([]string{cobra.ShellCompRequestCmd}, words...)
}

// addCompletion adds completion of nodes and namespaces from the cluster, and of contexts, clusters and users from the
// kubeconfig.
func (o *options) addCompletion(cmd *cobra.Command) error {
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		return o.complete(cmd.Context(), begun, args, sharingNodes)
	}
	fromKubeconfig := func(names func(*genericclioptions.ConfigFlags) ([]string, error)) cobra.CompletionFunc {
		return func(_ *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
			found, err := names(o.connection)
			if err != nil {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return beginning(begun, found), cobra.ShellCompDirectiveNoFileComp
		}
	}
	oneOf := func(values ...string) cobra.CompletionFunc {
		return func(_ *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
			return beginning(begun, values), cobra.ShellCompDirectiveNoFileComp
		}
	}
	for flag, complete := range map[string]cobra.CompletionFunc{
		"output": oneOf(outputWide, outputJSON, outputYAML, outputName),
		"color":  oneOf(colorAuto, colorAlways, colorNever),
		"namespace": func(cmd *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
			return o.complete(cmd.Context(), begun, nil, namespaces)
		},
		"context": fromKubeconfig(contexts), "cluster": fromKubeconfig(clusters), "user": fromKubeconfig(users),
	} {
		if err := cmd.RegisterFlagCompletionFunc(flag, complete); err != nil {
			return fmt.Errorf("completing --%s: %w", flag, err)
		}
	}
	return nil
}

// complete lists names from the cluster, without those that are already on the command line. A name can be followed by a tab
// and a description, which shells show or ignore.
func (o *options) complete(
	ctx context.Context, begun string, have []string, list func(context.Context, kubernetes.Interface) ([]string, error),
) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(ctx, completionTimeout)
	defer cancel()
	client, _, err := o.client(nil)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	names, err := list(ctx, client)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	names = slices.DeleteFunc(names, func(name string) bool {
		name, _, _ = strings.Cut(name, "\t")
		return slices.Contains(have, name)
	})
	return beginning(begun, names), cobra.ShellCompDirectiveNoFileComp
}

// beginning returns the words with the prefix begun, because not every shell filters them.
func beginning(begun string, words []string) []string {
	return slices.DeleteFunc(slices.Clone(words), func(word string) bool { return !strings.HasPrefix(word, begun) })
}

// sharingNodes returns the nodes that share GPU memory, each with a description of its cards.
func sharingNodes(ctx context.Context, client kubernetes.Interface) (names []string, err error) {
	err = eachNode(ctx, client, "", func(object *corev1.Node) {
		node := buildNode(object, nil)
		if len(node.Cards) > 0 {
			names = append(names, fmt.Sprintf("%s\t%s, %s", node.Name, count(len(node.Cards), "card", "cards"), oneLine(models(node.Cards))))
		}
	})
	slices.Sort(names)
	return names, err
}

func namespaces(ctx context.Context, client kubernetes.Interface) (names []string, err error) {
	list, err := client.CoreV1().Namespaces().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range list.Items {
		names = append(names, list.Items[i].Name)
	}
	return names, nil
}

func contexts(flags *genericclioptions.ConfigFlags) ([]string, error) {
	config, err := flags.ToRawKubeConfigLoader().RawConfig()
	return slices.Sorted(maps.Keys(config.Contexts)), err
}

func clusters(flags *genericclioptions.ConfigFlags) ([]string, error) {
	config, err := flags.ToRawKubeConfigLoader().RawConfig()
	return slices.Sorted(maps.Keys(config.Clusters)), err
}

func users(flags *genericclioptions.ConfigFlags) ([]string, error) {
	config, err := flags.ToRawKubeConfigLoader().RawConfig()
	return slices.Sorted(maps.Keys(config.AuthInfos)), err
}
