package inspect

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// UsageKind is the kind of the JSON and YAML output of --usage. Its apiVersion is ReportAPIVersion.
const UsageKind = "GPUShareUsageReport"

// UsageReport is the measured GPU memory of the nodes, sorted by name. All amounts are bytes.
type UsageReport struct {
	APIVersion string           `json:"apiVersion"`
	Kind       string           `json:"kind"`
	Nodes      []protocol.Usage `json:"nodes"`

	// unreached is true if none of the nodes could be asked.
	unreached bool
}

const (
	// usageAtOnce is how many device plugins are asked at the same time, usageTimeout how long one may take.
	usageAtOnce  = 16
	usageTimeout = 15 * time.Second
	// staleIntervals is after how many missed measurements a node's figures are called old.
	staleIntervals = 3
)

// errNoUsage is returned if no device plugin serves its measured use.
var errNoUsage = errors.New("no running device plugin of these nodes serves measured use (--usage-listen-address, which the chart sets)")

// errUnreached is returned if no device plugin could be asked. The report has the reasons.
var errUnreached = errors.New("no device plugin could be asked for the measured use")

// usageSource asks the device plugins of the nodes.
type usageSource struct {
	client kubernetes.Interface
	scope  scope
	// fetch asks one device plugin at its port.
	fetch func(ctx context.Context, plugin *corev1.Pod, port int) (protocol.Usage, error)
	now   func() time.Time
}

// runUsage prints the measured use.
func (o *options) runUsage(ctx context.Context, client kubernetes.Interface) error {
	config, err := o.connection.ToRESTConfig()
	if err != nil {
		return err
	}
	return o.printUsage(ctx, usageSource{client: client, scope: o.scope, now: time.Now, fetch: forwarder{client, config}.Usage})
}

// printUsage prints the measured use. Without --watch it is an error if no node could be asked.
func (o *options) printUsage(ctx context.Context, source usageSource) error {
	unreached := false
	next := func(ctx context.Context) (page, error) {
		report, err := source.Read(ctx)
		if err != nil {
			return page{}, err
		}
		unreached = report.unreached
		return o.drawUsage(report)
	}
	if o.watch {
		return o.repeat(ctx, next)
	}
	if err := o.print(next(ctx)); err != nil || !unreached {
		return err
	}
	return errUnreached
}

// Read asks the device plugin of each node of the scope. A node that can't be asked has the reason as its problem.
func (s usageSource) Read(ctx context.Context) (UsageReport, error) {
	report := UsageReport{APIVersion: ReportAPIVersion, Kind: UsageKind, Nodes: []protocol.Usage{}}
	plugins, err := s.plugins(ctx)
	if err != nil {
		return report, err
	}
	report.Nodes = make([]protocol.Usage, len(plugins))
	var reached atomic.Bool
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(usageAtOnce)
	for i, plugin := range plugins {
		group.Go(func() error {
			usage, err := s.ask(ctx, plugin)
			report.Nodes[i] = usage
			if err == nil {
				reached.Store(true)
			}
			return nil
		})
	}
	err = group.Wait()
	report.unreached = !reached.Load()
	return report, err
}

// ask returns the measured use of the plugin's node. If the plugin can't be asked, the use has the reason as its problem, and err is not nil.
func (s usageSource) ask(ctx context.Context, plugin *corev1.Pod) (usage protocol.Usage, err error) {
	ctx, cancel := context.WithTimeout(ctx, usageTimeout)
	defer cancel()
	usage, err = s.fetch(ctx, plugin, usagePort(plugin))
	if err != nil {
		return protocol.Usage{
			APIVersion: protocol.UsageAPIVersion, Kind: protocol.UsageKind, Node: plugin.Spec.NodeName,
			Problems: []string{fmt.Sprintf("asking the device plugin (pod %s/%s): %v", plugin.Namespace, plugin.Name, err)},
			Cards:    []protocol.CardUsage{}, Containers: []protocol.ContainerUsage{},
		}, err
	}
	if age := s.now().Sub(usage.Time); !usage.Time.IsZero() && age.Seconds() > staleIntervals*usage.IntervalSeconds {
		usage.Problems = append(usage.Problems, fmt.Sprintf("measured %s ago: the driver doesn't answer, or the clocks differ", age.Round(time.Second)))
	}
	return usage, nil
}

// plugins returns the pods of the device plugins that serve their measured use, by node, one for each.
func (s usageSource) plugins(ctx context.Context) ([]*corev1.Pod, error) {
	covers, err := s.coverage(ctx)
	if err != nil {
		return nil, err
	}
	var plugins []*corev1.Pod
	options := metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=device-plugin", FieldSelector: "status.phase=Running"}
	err = each(ctx, "pods", s.client.CoreV1().Pods(metav1.NamespaceAll).List, options, func(pod *corev1.Pod) {
		if usagePort(pod) != 0 && covers(pod.Spec.NodeName) && pod.DeletionTimestamp == nil {
			plugins = append(plugins, pod)
		}
	})
	switch {
	case err != nil:
		return nil, err
	case len(plugins) == 0:
		return nil, errNoUsage
	}
	node := func(a, b *corev1.Pod) int { return cmp.Compare(a.Spec.NodeName, b.Spec.NodeName) }
	slices.SortFunc(plugins, func(a, b *corev1.Pod) int { return cmp.Or(node(a, b), cmp.Compare(a.Name, b.Name)) })
	return slices.CompactFunc(plugins, func(a, b *corev1.Pod) bool { return node(a, b) == 0 }), nil
}

// coverage returns a function that reports whether the scope covers the node of a name.
func (s usageSource) coverage(ctx context.Context) (func(string) bool, error) {
	if s.scope.selector == "" {
		return s.scope.coversNode, nil
	}
	selected := map[string]bool{}
	err := each(ctx, "nodes", s.client.CoreV1().Nodes().List, s.scope.nodeOptions(), func(node *corev1.Node) { selected[node.Name] = true })
	return func(name string) bool { return selected[name] }, err
}

// usagePort returns the port at which the plugin serves its measured use; 0 if it doesn't.
func usagePort(plugin *corev1.Pod) int {
	for i := range plugin.Spec.Containers {
		for _, port := range plugin.Spec.Containers[i].Ports {
			if port.Name == protocol.PortUsage {
				return int(port.ContainerPort)
			}
		}
	}
	return 0
}

func (o *options) drawUsage(report UsageReport) (page, error) {
	if namespace := *o.connection.Namespace; namespace != "" {
		for i := range report.Nodes {
			node := &report.Nodes[i]
			node.Containers = slices.DeleteFunc(slices.Clone(node.Containers),
				func(c protocol.ContainerUsage) bool { return c.Namespace != namespace })
		}
	}
	page, err := o.pageOf(report, func(out *bytes.Buffer) { writeUsage(out, report, o.format()) })
	for _, name := range o.scope.nodes {
		if !slices.ContainsFunc(report.Nodes, func(n protocol.Usage) bool { return n.Node == name }) {
			page.remarks += fmt.Sprintf("Node %q has no running device plugin that serves measured use.\n", name)
		}
	}
	return page, err
}

// writeUsage writes a row for each container on each card, those above their request first, then what else uses the cards, and what
// could not be measured.
func writeUsage(out *bytes.Buffer, report UsageReport, f format) {
	containers := usageRows(report)
	if f.rowsOnly {
		containers.writeAlone(out, f)
		return
	}
	switch {
	case len(containers) > 1:
		containers.write(out, f.look)
	case slices.ContainsFunc(report.Nodes, func(n protocol.Usage) bool { return len(n.Problems) > 0 }):
		fmt.Fprintln(out, "No container is known to use GPU memory: not all nodes could be measured.")
	default:
		fmt.Fprintln(out, "No container uses GPU memory or has a card.")
	}
	otherRows(report, f.wide).writeSection(out, f.look, "Other Use:")
	problems := rows{{bold, []string{"NODE", "PROBLEM"}}}
	for _, node := range report.Nodes {
		for _, problem := range node.Problems {
			problems.add(red, node.Node, problem)
		}
		for _, c := range node.Containers {
			if c.NotInForce != "" {
				problems.add(red, node.Node, fmt.Sprintf("container %s of pod %s/%s: %s", c.Container, c.Namespace, c.Pod, c.NotInForce))
			}
		}
		for _, card := range node.Cards {
			if card.Problem != "" {
				problems.add(red, node.Node, fmt.Sprintf("GPU%d: %s", card.Index, card.Problem))
			}
		}
	}
	problems.writeSection(out, f.look, "Problems:")
}

// usageRows returns the containers, those above their limit first, then those that borrow most.
func usageRows(report UsageReport) rows {
	type row struct {
		node string
		protocol.ContainerUsage
	}
	var list []row
	for _, node := range report.Nodes {
		for _, c := range node.Containers {
			list = append(list, row{node.Node, c})
		}
	}
	excess := func(c row) uint64 { return c.Used - min(c.Used, c.Allowance()) }
	slices.SortStableFunc(list, func(a, b row) int {
		return cmp.Or(cmp.Compare(excess(b), excess(a)), cmp.Compare(b.Borrowed(), a.Borrowed()), cmp.Compare(b.Used, a.Used))
	})
	table := rows{{bold, []string{"NAMESPACE", "POD", "CONTAINER", "NODE", "CARD", "USED(MiB)", "REQUESTED(MiB)", "LIMIT(MiB)", "OVER(MiB)", "BORROWED(MiB)"}}}
	for _, c := range list {
		style, over, limit, borrowed := plain, "-", "-", "-"
		if c.ExceedsAllowance() {
			style, over = red, "+"+mebibytes(excess(c))
		}
		if c.Borrowed() > 0 {
			borrowed = mebibytes(c.Borrowed())
		}
		switch {
		case c.Limit != nil:
			limit = mebibytes(*c.Limit)
		case c.Allowed > 0: // Not enforced.
			limit = mebibytes(c.Allowed)
		}
		if c.NotInForce != "" {
			style, limit = red, "not held"
		}
		used := mebibytes(c.Used)
		if c.Incomplete {
			used += "+?"
		}
		table.add(style, cmp.Or(c.Namespace, "-"), cmp.Or(c.Pod, "uid:"+c.UID), cmp.Or(c.Container, "-"), c.node, fmt.Sprintf("GPU%d", c.Card),
			used, mebibytes(c.Requested), limit, over, borrowed)
	}
	return table
}

// otherRows returns the cards that something else than pods uses, or with all of them every card.
func otherRows(report UsageReport, all bool) rows {
	table := rows{{bold, []string{"NODE", "CARD", "USED(MiB)", "PODS(MiB)", "HOST(MiB)", "UNRESOLVED(MiB)", "MPS(MiB)"}}}
	for _, node := range report.Nodes {
		for _, card := range node.Cards {
			if all || card.Host > 0 || card.Unresolved > 0 || card.MPS > 0 {
				table.add(plain, node.Node, fmt.Sprintf("GPU%d", card.Index), mebibytes(card.Used), mebibytes(card.Pods),
					mebibytes(card.Host), mebibytes(card.Unresolved), mebibytes(card.MPS))
			}
		}
	}
	return table
}

// mebibytes returns an amount in MiB, rounded up: what is in use is never shown as 0.
func mebibytes(bytes uint64) string {
	const mebibyte = 1 << 20
	n := bytes / mebibyte
	if bytes%mebibyte > 0 {
		n++
	}
	return fmt.Sprint(n)
}
