package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/dispatch"
)

const longHelp = `Show the GPU memory that the nodes of a cluster share: the allocated memory of each card, the pods that use it, and
why other pods are pending.

The command reads from the API server only, so it also works without the scheduler extender; --usage also asks the nodes'
device plugins, by port-forward. A pod holds its memory from its binding until it has ended; a pod that is being deleted still
holds it.

Columns:
  GPUn(Allocated/Total)  allocated and total memory of card n. Nodes with different cards are in separate tables
  PENDING(Allocated)     memory of pods that are bound to the node and count on none of its cards
  GPU Memory(unit)       allocated and total memory of the node; the unit applies to all columns
  GPUn(Cores)            allocated and total computing of card n, in percent; only if pods ask for some
  LARGEST FREE(unit)     the largest request that fits a card of the node now (on terminals, and with -o wide)
  STRANDED               free memory that no kind of the present pods can use, because the node lacks CPU or memory (with -o wide)

On a terminal that is wide enough, a bar for each card follows; the bar of an unhealthy card is crossed out. On a narrow
terminal the cards' headers are shortened. Output to a file or a pipe never depends on the terminal.

The request of a pending pod that asks for several cards is their number and the memory on each (2x8), followed by the
computing of each if it asks for some (2x8,50%).

With -o json or -o yaml, it prints the whole report. Fields keep their meaning within an apiVersion.`

const examples = `  # All nodes that share GPU memory, and their sum
  kubectl inspect gpushare

  # The pods on each card of two nodes
  kubectl inspect gpushare gpu-1 gpu-2 -d

  # Why are pods pending?
  kubectl inspect gpushare --pending

  # The same with rights in one namespace only
  kubectl inspect gpushare --pending -n team-a

  # The memory that containers really use, those above their request first
  kubectl inspect gpushare --usage

  # The share of each tenant and what its pods have, if tenants share the cluster fairly
  kubectl inspect gpushare --shares

  # For scripts
  kubectl inspect gpushare -o json | jq '.nodes[] | {name, largestFree, unit}'`

// The values of --output. The default is a table.
const (
	outputWide = "wide"
	outputJSON = "json"
	outputYAML = "yaml"
	outputName = "name"
)

// ErrInterrupted is the command's error if its context ended before the result was printed.
var ErrInterrupted = errors.New("interrupted")

// options are the values of the flags and arguments.
type options struct {
	streams    genericiooptions.IOStreams
	connection *genericclioptions.ConfigFlags
	scope      scope
	output     string
	color      string
	details    bool
	pending    bool
	groups     bool
	usage      bool
	shares     bool
	shareBy    string
	watch      bool
	// pause is the least time between two readings with --watch.
	pause         time.Duration
	noHeaders     bool
	allNamespaces bool
}

// NewCommand returns the command, ready to be executed.
func NewCommand(streams genericiooptions.IOStreams, version string) *cobra.Command {
	return newCommand(streams, version, watchPause)
}

func newCommand(streams genericiooptions.IOStreams, version string, pause time.Duration) *cobra.Command {
	o := &options{streams: streams, connection: genericclioptions.NewConfigFlags(true), pause: pause}
	cmd := &cobra.Command{
		Use:           "kubectl-inspect-gpushare [NODE...]",
		Short:         "Show which pods use the shared GPU memory of a cluster",
		Long:          longHelp,
		Example:       examples,
		Version:       version,
		Annotations:   map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl inspect gpushare"},
		SilenceErrors: true, // main prints them.
		SilenceUsage:  true,
		RunE:          func(cmd *cobra.Command, args []string) error { return o.execute(cmd.Context(), args) },
	}
	cmd.SetIn(streams.In)
	cmd.SetOut(streams.Out)
	cmd.SetErr(streams.ErrOut)
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w\nSee '%s -h' for help", err, cmd.DisplayName())
	})

	flags := cmd.Flags()
	flags.SortFlags = false
	flags.BoolVarP(&o.details, "details", "d", false, "Show the pods on each card of each node.")
	flags.BoolVar(&o.pending, "pending", false, "Show the pods that are pending and ask for GPU memory, and why, instead of the nodes.")
	flags.BoolVar(&o.groups, "groups", false, "Show the groups of pods (bound all together or not at all) instead of the nodes.")
	flags.BoolVar(&o.usage, "usage", false, "Show the GPU memory that containers really use, as the nodes' device plugins measure it, instead of the nodes.")
	flags.BoolVar(&o.shares, "shares", false, "Show the tenants that share the cluster, their weights, shares and use, instead of the nodes.")
	flags.StringVar(&o.shareBy, "fair-share-by", "", "What a tenant is, with --shares: namespace or label:KEY. The default is the value of the "+
		"extender's flag, if the extender runs in a pod.")
	flags.StringVarP(&o.output, "output", "o", "", "Output format: wide, json, yaml or name. The default is a table; JSON and YAML always "+
		"contain everything.")
	flags.BoolVarP(&o.watch, "watch", "w", false, "Keep running, read again every few seconds, and print what has changed, until Ctrl-C.")
	flags.StringVarP(&o.scope.selector, "selector", "l", "", "Show only the nodes with these labels (for example pool=a100,zone!=b).")
	flags.BoolVarP(&o.allNamespaces, "all-namespaces", "A", false, "List the pods of all namespaces, which is the default; overrides -n.")
	flags.BoolVar(&o.noHeaders, "no-headers", false, "Print only the rows of the table, for scripts.")
	flags.StringVar(&o.color, "color", colorAuto, "When to use colors and bars: auto (on terminals; NO_COLOR turns off colors), always (also in "+
		"pipes) or never (no colors).")
	o.connection.AddFlags(flags)
	flags.Bool("version", false, "Print the version and exit.") // Defined here without -v, which is the log level in kubectl.
	// Cards belong to no namespace, so unlike other commands this one ignores the context's namespace.
	flags.Lookup("namespace").Usage = "List only the pods of this namespace; with --pending and --groups, rights in it are enough. The sums " +
		"always include all pods."
	if err := o.addCompletion(cmd); err != nil {
		panic(err) // Unreachable: the flags were defined above.
	}
	return cmd
}

// execute checks the options, and runs the command for the arguments.
func (o *options) execute(ctx context.Context, args []string) (err error) {
	if o.scope.nodes, err = nodeNames(args); err != nil {
		return err
	}
	if o.allNamespaces {
		*o.connection.Namespace = ""
	}
	if err := o.validate(); err != nil {
		return err
	}
	// client-go logs requests that Ctrl-C cancels as errors. This logger discards them; what matters is returned.
	ctx = klog.NewContext(ctx, klog.Logger{})
	err = o.run(ctx)
	if err != nil && ctx.Err() != nil {
		return ErrInterrupted
	}
	return o.advise(err)
}

func (o *options) validate() error {
	if !slices.Contains([]string{"", outputWide, outputJSON, outputYAML, outputName}, o.output) {
		return fmt.Errorf("--output %q: want wide, json, yaml or name", o.output)
	}
	if !slices.Contains([]string{colorAuto, colorAlways, colorNever}, o.color) {
		return fmt.Errorf("--color %q: want auto, always or never", o.color)
	}
	if o.noHeaders && (o.details || o.structured()) {
		return errors.New("--no-headers applies to tables only: it can't be used with --details, -o json or -o yaml")
	}
	if o.pending && (o.details || !o.scope.all()) {
		return errors.New("--pending shows pods that have no node: it can't be used with --details, node names or --selector")
	}
	if o.groups && (o.details || o.pending || o.watch || o.output == outputName || !o.scope.all()) {
		return errors.New("--groups shows groups of pods: it can't be used with --details, --pending, --watch, -o name, node names or --selector")
	}
	if o.usage && (o.details || o.pending || o.groups || o.output == outputName) {
		return errors.New("--usage shows measured memory: it can't be used with --details, --pending, --groups or -o name")
	}
	if o.shares && (o.details || o.pending || o.groups || o.usage || o.watch || o.output == outputName || !o.scope.all()) {
		return errors.New("--shares shows tenants: it can't be used with --details, --pending, --groups, --usage, --watch, -o name, node names or --selector")
	}
	if o.shareBy != "" && !o.shares {
		return errors.New("--fair-share-by needs --shares")
	}
	if _, err := dispatch.TenantLabel(cmp.Or(o.shareBy, dispatch.ByNamespace)); err != nil {
		return err
	}
	if o.scope.selector != "" && len(o.scope.nodes) > 0 {
		return errors.New("nodes can be selected by name or by --selector, not by both")
	}
	if _, err := labels.Parse(o.scope.selector); err != nil {
		return fmt.Errorf("--selector: %w", err)
	}
	return nil
}

// connect returns a client of the API server.
func (o *options) connect() (kubernetes.Interface, error) {
	config, err := o.connection.ToRESTConfig()
	if err != nil {
		return nil, err
	}
	// A list of a large cluster has hundreds of pages. With the default of five requests per second it would take a minute.
	config.QPS, config.Burst = 50, 300
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	return kubernetes.NewForConfig(config)
}
