package inspect

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/kubernetes"

	"github.com/gpushare/gpushare/pkg/protocol"
)

const longHelp = `Show the GPU memory that the nodes of a cluster share: how much of each card is promised to pods, which pods
hold it, and which pods wait for some and why.

Only the API server is asked, so this works without the scheduler extender too. Pods hold their memory from
their binding until they have ended; a pod that is being deleted still holds it.

Columns:
  GPUn(Allocated/Total)  memory promised of card n, and what it has; 0/0 where the node has no such card
  PENDING(Allocated)     memory of pods that are bound to the node while their card isn't known
  GPU Memory(unit)       the whole node; the unit holds for all columns

With -o json or -o yaml the whole report is printed, in a structure that keeps its meaning within its apiVersion.`

const examples = `  # Every node that shares GPU memory, and the sum
  kubectl inspect gpushare

  # The pods on each card of two nodes
  kubectl inspect gpushare gpu-1 gpu-2 -d

  # Stay, and show each change
  kubectl inspect gpushare -w

  # For scripts
  kubectl inspect gpushare -o json | jq '.nodes[] | {name, largestFree, unit}'`

// The values of --output.
const (
	outputTable = ""
	outputWide  = "wide"
	outputJSON  = "json"
	outputYAML  = "yaml"
)

// options are what the command line says.
type options struct {
	streams       genericiooptions.IOStreams
	connection    *genericclioptions.ConfigFlags
	scope         Scope
	output        string
	details       bool
	watch         bool
	noHeaders     bool
	allNamespaces bool
}

// NewCommand returns the command, ready to be executed.
func NewCommand(streams genericiooptions.IOStreams, version string) *cobra.Command {
	o := &options{streams: streams, connection: genericclioptions.NewConfigFlags(true)}
	cmd := &cobra.Command{
		Use:           "kubectl-inspect-gpushare [NODE...]",
		Short:         "Show who holds the GPU memory of a cluster",
		Long:          longHelp,
		Example:       examples,
		Version:       version,
		Annotations:   map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl inspect gpushare"},
		SilenceErrors: true, // main prints them, once.
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, args []string) error {
			// A node that is named twice is shown, and counted, once.
			o.scope.Nodes = slices.Compact(slices.Sorted(slices.Values(args)))
			if err := o.validate(); err != nil {
				return err
			}
			return o.run(cmd.Context())
		},
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
	flags.StringVarP(&o.output, "output", "o", "", "Output format: wide, json or yaml. The last two always hold the details.")
	flags.BoolVarP(&o.watch, "watch", "w", false, "Stay and show every change; end with Ctrl-C.")
	flags.StringVarP(&o.scope.Selector, "selector", "l", "", "Show only the nodes with these labels (for example pool=a100,zone!=b).")
	flags.BoolVarP(&o.allNamespaces, "all-namespaces", "A", false, "List the pods of all namespaces, as without -n.")
	flags.BoolVar(&o.noHeaders, "no-headers", false, "Print the rows of the node table and nothing else.")
	o.connection.AddFlags(flags)
	flags.Bool("version", false, "Print the version and end.") // Defined here to have no -v: kubectl's -v is another thing.
	// Cards are the cluster's: unlike other commands this one doesn't keep to the context's namespace.
	flags.Lookup("namespace").Usage = "List the pods of this namespace only. The sums count all pods all the same."
	return cmd
}

func (o *options) validate() error {
	switch o.output {
	case outputTable, outputWide, outputJSON, outputYAML:
	default:
		return fmt.Errorf("--output %q: want wide, json or yaml", o.output)
	}
	if o.noHeaders && (o.details || o.structured()) {
		return errors.New("--no-headers is for the table of nodes: it goes neither with --details nor with -o json or yaml")
	}
	if o.scope.Selector != "" {
		if len(o.scope.Nodes) > 0 {
			return errors.New("nodes are asked for either by name or by --selector, not both")
		}
		if _, err := labels.Parse(o.scope.Selector); err != nil {
			return fmt.Errorf("--selector: %w", err)
		}
	}
	return nil
}

func (o *options) run(ctx context.Context) error {
	config, err := o.connection.ToRESTConfig()
	if err != nil {
		return err
	}
	reachability := NewReachability()
	config.Wrap(reachability.Wrap)
	// A large cluster's list is hundreds of pages, which the default of five requests a second would spread over a minute.
	config.QPS, config.Burst = 50, 300
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("connecting to the API server: %w", err)
	}

	// Asked once even for a watch: what is wrong at the start is an error, while a watch tries for ever.
	objects, err := Gather(ctx, client, o.scope)
	if err != nil {
		return err
	}
	if o.watch {
		return o.keepShowing(ctx, client, reachability, objects)
	}
	report := o.report(objects)
	if err := o.write(o.streams.Out, report); err != nil {
		return err
	}
	_, err = io.WriteString(o.streams.ErrOut, remarks(report, objects, o.scope))
	return err
}

// keepShowing shows the objects and whatever becomes of them until ctx ends.
func (o *options) keepShowing(ctx context.Context, client kubernetes.Interface, reachability *Reachability, objects Objects) error {
	separator := "\n========\n\n"
	if o.structured() || o.noHeaders {
		separator = "" // YAML brings its own, JSON and rows need none.
	}
	screen := newScreen(o.streams.Out, separator)
	lastAside := ""
	draw := func(objects Objects) error {
		report := o.report(objects)
		var text bytes.Buffer
		if err := o.write(&text, report); err != nil {
			return err
		}
		aside := remarks(report, objects, o.scope)
		if problem := reachability.Problem(); problem != "" {
			aside += fmt.Sprintf("Warning: the API server can't be read, this may be old: %s\n", oneLine(problem))
		}
		if o.structured() || o.noHeaders {
			if aside != lastAside {
				if _, err := io.WriteString(o.streams.ErrOut, aside); err != nil {
					return err
				}
			}
			lastAside = aside
		} else if aside != "" {
			if text.Len() > 0 {
				text.WriteString("\n")
			}
			text.WriteString(aside)
		}
		return screen.show(text.Bytes())
	}
	if err := draw(objects); err != nil {
		return err
	}
	return Watch(ctx, client, o.scope, reachability.Changed(), draw)
}

func (o *options) report(objects Objects) Report {
	report := Build(objects)
	if namespace := *o.connection.Namespace; namespace != "" && !o.allNamespaces {
		report = report.InNamespace(namespace)
	}
	return report
}

func (o *options) write(out io.Writer, report Report) error {
	wide := o.output == outputWide
	switch {
	case o.output == outputJSON:
		return WriteJSON(out, report)
	case o.output == outputYAML:
		return WriteYAML(out, report)
	case o.details:
		return WriteDetails(out, report, wide)
	}
	return WriteTable(out, report, TableOptions{Wide: wide, RowsOnly: o.noHeaders})
}

func (o *options) structured() bool { return o.output == outputJSON || o.output == outputYAML }

// remarks says, a line each, what isn't in the report although it was asked for.
func remarks(report Report, objects Objects, scope Scope) string {
	var out strings.Builder
	for _, name := range scope.Nodes {
		exists := false
		for _, node := range objects.Nodes {
			exists = exists || node.Name == name
		}
		switch {
		case !exists:
			fmt.Fprintf(&out, "Node %q is gone.\n", name)
		case report.node(name) == nil:
			fmt.Fprintf(&out, "Node %q shares no GPU memory: it does not offer %s.\n", name, protocol.ResourceMemory)
		}
	}
	if len(scope.Nodes) == 0 && len(report.Nodes) == 0 {
		which := "No node"
		if scope.Selector != "" {
			which = "No selected node"
		}
		fmt.Fprintf(&out, "%s shares GPU memory: none offers %s.\n", which, protocol.ResourceMemory)
	}
	return out.String()
}
