package inspect

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/transport"

	"github.com/gpushare/gpushare/pkg/protocol"
)

const longHelp = `Show the GPU memory that the nodes of a cluster share: the allocated memory of each card, the pods that use it, and
why other pods are pending.

The command reads from the API server only, so it also works without the scheduler extender. A pod holds its memory
from its binding until it has ended; a pod that is being deleted still holds it.

Columns:
  GPUn(Allocated/Total)  allocated and total memory of card n; 0/0 if the node has no such card
  PENDING(Allocated)     memory of pods that are bound to the node and whose card is unknown
  GPU Memory(unit)       allocated and total memory of the node; the unit applies to all columns
  LARGEST FREE(unit)     the largest request that fits a card of the node now (on terminals, and with -o wide)

On a terminal, a bar for each card follows; the bar of an unhealthy card is crossed out. If the terminal is too narrow,
the bars replace the cards' numbers, and addresses are omitted. Output to a file or a pipe never depends on the
terminal.

With --pending, the command lists the pending pods instead, each with the reason.

With --groups, it lists the groups of pods, which are bound all together or not at all, and what each is waiting for.

With -o json or -o yaml, it prints the whole report. Fields keep their meaning within an apiVersion.`

const examples = `  # All nodes that share GPU memory, and their sum
  kubectl inspect gpushare

  # The pods on each card of two nodes
  kubectl inspect gpushare gpu-1 gpu-2 -d

  # Keep running, and show each change
  kubectl inspect gpushare -w

  # Why are pods pending?
  kubectl inspect gpushare --pending

  # Which groups of pods are waiting, and for what?
  kubectl inspect gpushare --groups

  # For scripts
  kubectl inspect gpushare -o json | jq '.nodes[] | {name, largestFree, unit}'`

// The values of --output.
const (
	outputTable = ""
	outputWide  = "wide"
	outputJSON  = "json"
	outputYAML  = "yaml"
	outputName  = "name"
)

// options are the values of the flags and arguments.
type options struct {
	streams       genericiooptions.IOStreams
	connection    *genericclioptions.ConfigFlags
	scope         Scope
	output        string
	color         string
	details       bool
	pending       bool
	groups        bool
	watch         bool
	noHeaders     bool
	allNamespaces bool
}

// NewCommand returns the command, ready to be executed.
func NewCommand(streams genericiooptions.IOStreams, version string) *cobra.Command {
	o := &options{streams: streams, connection: genericclioptions.NewConfigFlags(true)}
	cmd := &cobra.Command{
		Use:           "kubectl-inspect-gpushare [NODE...]",
		Short:         "Show which pods use the shared GPU memory of a cluster",
		Long:          longHelp,
		Example:       examples,
		Version:       version,
		Annotations:   map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl inspect gpushare"},
		SilenceErrors: true, // main prints them.
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, args []string) error {
			// A node that is named twice is shown and counted once.
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
	flags.BoolVar(&o.pending, "pending", false, "Show the pods that are pending and ask for GPU memory, and why, instead of the nodes.")
	flags.BoolVar(&o.groups, "groups", false, "Show the groups of pods (bound all together or not at all) instead of the nodes.")
	flags.StringVarP(&o.output, "output", "o", "", "Output format: wide, json, yaml or name. The default is a table; JSON and YAML always contain everything.")
	flags.BoolVarP(&o.watch, "watch", "w", false, "Keep running and show every change, until Ctrl-C.")
	flags.StringVarP(&o.scope.Selector, "selector", "l", "", "Show only the nodes with these labels (for example pool=a100,zone!=b).")
	flags.BoolVarP(&o.allNamespaces, "all-namespaces", "A", false, "List the pods of all namespaces, which is the default; overrides -n.")
	flags.BoolVar(&o.noHeaders, "no-headers", false, "Print only the rows of the table, for scripts.")
	flags.StringVar(&o.color, "color", colorAuto, "When to use colors and bars: auto (on terminals; NO_COLOR turns off colors), always (also in pipes) or never (no colors).")
	o.connection.AddFlags(flags)
	flags.Bool("version", false, "Print the version and exit.") // Defined here without -v, which is the log level in kubectl.
	// Cards belong to no namespace, so unlike other commands this one ignores the context's namespace.
	flags.Lookup("namespace").Usage = "List only the pods of this namespace. The sums always include all pods."
	if err := o.addCompletion(cmd); err != nil {
		panic(err) // Unreachable: the flags were defined above.
	}
	return cmd
}

func (o *options) validate() error {
	switch o.output {
	case outputTable, outputWide, outputJSON, outputYAML, outputName:
	default:
		return fmt.Errorf("--output %q: want wide, json, yaml or name", o.output)
	}
	switch o.color {
	case colorAuto, colorAlways, colorNever:
	default:
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
	if o.scope.Selector != "" {
		if len(o.scope.Nodes) > 0 {
			return errors.New("nodes can be selected by name or by --selector, not by both")
		}
		if _, err := labels.Parse(o.scope.Selector); err != nil {
			return fmt.Errorf("--selector: %w", err)
		}
	}
	return nil
}

// client returns a client of the API server, and the server's address.
func (o *options) client(wrap transport.WrapperFunc) (client kubernetes.Interface, host string, err error) {
	config, err := o.connection.ToRESTConfig()
	if err != nil {
		return nil, "", err
	}
	config.Wrap(wrap)
	// A list of a large cluster has hundreds of pages. With the default of five requests per second it would take a minute.
	config.QPS, config.Burst = 50, 300
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	client, err = kubernetes.NewForConfig(config)
	if err != nil {
		return nil, "", fmt.Errorf("connecting to the API server: %w", err)
	}
	return client, config.Host, nil
}

func (o *options) run(ctx context.Context) error {
	reachability := NewReachability()
	client, host, err := o.client(reachability.Wrap)
	if err != nil {
		return o.advise(err, host)
	}
	if o.groups {
		if err := o.showGroups(ctx, client); err != nil {
			return o.advise(err, host)
		}
		return nil
	}
	// Also before a watch, which retries forever: a failure at the start should be an error.
	objects, err := Gather(ctx, client, o.scope)
	if err != nil {
		return o.advise(err, host)
	}
	if o.watch {
		return o.keepShowing(ctx, client, reachability, objects)
	}
	report := o.report(objects)
	if err := o.write(o.streams.Out, report); err != nil {
		return err
	}
	_, err = io.WriteString(o.streams.ErrOut, o.remarks(report, objects))
	return err
}

// keepShowing shows the objects and their changes until ctx ends.
func (o *options) keepShowing(ctx context.Context, client kubernetes.Interface, reachability *Reachability, objects Objects) (err error) {
	forScripts := o.structured() || o.noHeaders || o.output == outputName
	separator := "\n========\n\n"
	if forScripts {
		separator = "" // YAML documents have their own; JSON documents and rows need none.
	}
	// A dumb terminal supports no escape sequences. It gets one text after the other, as a pipe does.
	screen := newScreen(o.streams.Out, !forScripts && os.Getenv("TERM") != "dumb", separator)
	defer func() { err = cmp.Or(err, screen.close()) }()
	lastAside := ""
	draw := func(objects Objects) error {
		report := o.report(objects)
		var text bytes.Buffer
		if err := o.write(&text, report); err != nil {
			return err
		}
		aside := o.remarks(report, objects)
		if problem := reachability.Problem(); problem != "" {
			aside += fmt.Sprintf("Warning: the API server can't be read, this may be old: %s\n", oneLine(problem))
		}
		if forScripts {
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
	resizes, stop := resized()
	defer stop()
	if err := draw(objects); err != nil {
		return err
	}
	return Watch(ctx, client, o.scope, reachability.Changed(), resizes, draw)
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
	look := lookFor(o.streams.Out, o.color, os.Getenv)
	switch {
	case o.output == outputJSON:
		return WriteJSON(out, report)
	case o.output == outputYAML:
		return WriteYAML(out, report)
	case o.output == outputName:
		return WriteNames(out, report, o.pending)
	case o.pending:
		return WritePending(out, report, PendingOptions{Wide: wide, RowsOnly: o.noHeaders, Look: look})
	case o.details:
		return WriteDetails(out, report, wide, look)
	}
	return WriteTable(out, report, TableOptions{Wide: wide, RowsOnly: o.noHeaders, Look: look})
}

func (o *options) structured() bool { return o.output == outputJSON || o.output == outputYAML }

// remarks returns a line for each object that was requested and is not in the report.
func (o *options) remarks(report Report, objects Objects) string {
	scope := o.scope
	var out strings.Builder
	if o.pending {
		if len(report.PendingPods) == 0 {
			return "No pod waits for GPU memory.\n"
		}
		return ""
	}
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
