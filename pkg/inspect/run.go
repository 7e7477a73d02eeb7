// Package inspect implements `kubectl inspect gpushare`: it shows the cards that a cluster shares, the pods that use them,
// and why other pods are pending.
//
// It reads from the API server only, so it also works while the extender is down. The function run is its table of contents: read the nodes and pods
// (read.go), Build a Report from them without side effects (build.go), write it as a table, in detail, or as JSON and YAML (table.go, details.go,
// structured.go), and repeat this with --watch. Groups of pods (groups.go, group_state.go) and the memory that containers really use (usage.go) have
// reports of their own. The latter asks the nodes' device plugins, through the API server.
package inspect

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// run reads the cluster, builds the report and prints it.
func (o *options) run(ctx context.Context) error {
	client, err := o.connect()
	if err != nil {
		return err
	}
	if o.usage {
		return o.runUsage(ctx, client)
	}
	if o.shares {
		return o.runShares(ctx, client)
	}
	if o.groups {
		pods, podGroups, err := readGroupPods(ctx, client, *o.connection.Namespace)
		if err != nil {
			return err
		}
		return o.print(o.drawGroups(BuildGroups(pods, podGroups, time.Now())))
	}
	o.scope.others = !o.pending && (o.output == outputWide || o.structured())
	again := false
	next := func(ctx context.Context) (page, error) {
		objects, err := read(ctx, client, o.scope)
		if o.pending && apierrors.IsForbidden(err) && o.scope.onlyNamespace == "" && *o.connection.Namespace != "" {
			o.scope.onlyNamespace = *o.connection.Namespace
			objects, err = read(ctx, client, o.scope)
		}
		if err == nil && !again { // A node can be deleted during a watch.
			err = o.scope.checkNodes(objects)
		}
		if err != nil {
			return page{}, err
		}
		again = true
		return o.draw(objects)
	}
	if o.watch {
		return o.repeat(ctx, next)
	}
	return o.print(next(ctx))
}

// page is what the command prints: text to stdout, remarks, which are whole lines, to stderr.
type page struct{ text, remarks string }

// draw builds the report of the objects and formats it.
func (o *options) draw(objects Objects) (page, error) {
	objects.Now = time.Now()
	report := Build(objects)
	if namespace := *o.connection.Namespace; namespace != "" {
		report.keepNamespace(namespace)
	}
	page, err := o.pageOf(report, func(out *bytes.Buffer) {
		switch {
		case o.output == outputName:
			writeNames(out, report, o.pending)
		case o.pending:
			writePending(out, report, o.format())
		case o.details:
			writeDetails(out, report, o.format())
		default:
			writeTable(out, report, o.format())
		}
	})
	page.remarks = o.remarks(report, objects)
	return page, err
}

// pageOf returns the page with the value if the output is for programs, otherwise with what write writes.
func (o *options) pageOf(value any, write func(*bytes.Buffer)) (page, error) {
	var text bytes.Buffer
	if o.structured() {
		err := writeStructured(&text, o.output, value)
		return page{text: text.String()}, err
	}
	write(&text)
	return page{text: text.String()}, nil
}

func (o *options) drawGroups(groups Groups) (page, error) {
	page, err := o.pageOf(groups, func(out *bytes.Buffer) { writeGroups(out, groups, o.format()) })
	if len(groups.Groups) == 0 && !o.structured() {
		page.remarks = "No pod belongs to a group.\n"
	}
	return page, err
}

func (o *options) structured() bool { return o.output == outputJSON || o.output == outputYAML }

// forScripts reports whether the output is read by programs, also on a terminal.
func (o *options) forScripts() bool { return o.structured() || o.noHeaders || o.output == outputName }

func (o *options) format() format {
	f := format{wide: o.output == outputWide, rowsOnly: o.noHeaders, scope: o.scope.name()}
	if !o.forScripts() {
		f.look = lookFor(o.streams.Out, o.color)
	}
	return f
}

func (o *options) print(page page, err error) error {
	if err != nil {
		return err
	}
	if _, err := io.WriteString(o.streams.Out, page.text); err != nil {
		return err
	}
	_, err = io.WriteString(o.streams.ErrOut, page.remarks)
	return err
}

// watchPause is the least time between two readings with --watch. In a large cluster a list takes seconds: the pause is readingShare times as long, up to
// longestPause. With --usage a single node that doesn't answer takes usageTimeout, and must not make the others' figures old.
const (
	watchPause   = 2 * time.Second
	readingShare = 10
	longestPause = 30 * time.Second
)

func (o *options) pauseAfter(reading time.Duration) time.Duration {
	return max(o.pause, min(readingShare*reading, longestPause))
}

// repeat prints the pages that next returns, each if it differs from the last one, until ctx ends. On terminals a page replaces the last one, elsewhere a
// separator is between them. An error of the first call ends it. After a later one it tries again.
func (o *options) repeat(ctx context.Context, next func(context.Context) (page, error)) error {
	var last page
	failed := false
	for first := true; ; first = false {
		begun := time.Now()
		current, err := next(ctx)
		switch {
		case err != nil && first:
			return err
		case ctx.Err() != nil:
			return nil
		case err != nil && failed:
			current = last
		case err != nil:
			current = page{last.text, fmt.Sprintf("Warning: this may be old: %s\n", oneLine(err.Error()))}
		}
		failed = err != nil
		shown := current
		switch {
		case o.forScripts() && current.text == last.text: // Only the remarks have changed.
			shown.text = ""
		case o.forScripts():
		case o.format().look.clear:
			shown.text = clearScreen + current.text
		case !first:
			shown.text = "\n========\n\n" + current.text
		}
		if current != last {
			if err := o.print(shown, nil); err != nil {
				return err
			}
		}
		last = current
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(o.pauseAfter(time.Since(begun))):
		}
	}
}

// remarks returns a line for each object that was requested and is not in the report.
func (o *options) remarks(report Report, objects Objects) string {
	var out strings.Builder
	if o.pending {
		if len(report.PendingPods) == 0 {
			fmt.Fprintln(&out, "No pod waits for GPU memory.")
		}
		if report.NotSeen != "" {
			fmt.Fprintln(&out, report.NotSeen)
		}
		return out.String()
	}
	for _, name := range o.scope.nodes {
		switch {
		case slices.ContainsFunc(report.Nodes, func(n Node) bool { return n.Name == name }):
		case !objects.hasNode(name):
			fmt.Fprintf(&out, "Node %q is gone.\n", name)
		default:
			fmt.Fprintf(&out, "Node %q shares no GPU memory: it does not offer %s.\n", name, protocol.ResourceMemory)
		}
	}
	if len(o.scope.nodes) == 0 && len(report.Nodes) == 0 {
		which := "node"
		if o.scope.selector != "" {
			which = "selected node"
		}
		fmt.Fprintf(&out, "No %s shares GPU memory: none offers %s.\n", which, protocol.ResourceMemory)
	}
	return out.String()
}
