package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/pages"
)

// elsewhere marks a command that needs a real node.
const elsewhere = "not in the demo"

// userPages creates the objects that the pages for users show, runs the commands, and compares their output with what the pages show.
func (d *demo) userPages(ctx context.Context, kubectl string) (err error) {
	title("The commands of the pages for users")
	all, err := pages.OfUsers()
	if err != nil {
		return err
	}
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return err
	}
	tools, err := os.MkdirTemp("", "gpushare-demo-tools-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tools)) }()
	if err := os.Symlink(kubectl, filepath.Join(tools, "kubectl")); err != nil {
		return err
	}
	shell := controlplane.Shell{Dir: root, Path: tools + ":" + filepath.Join(root, "bin"), Home: os.Getenv("HOME"), Kubeconfig: d.cluster.KubeconfigPath}
	placeholders := strings.NewReplacer( // What pages write for names of the reader's cluster.
		"NODE", "n1", "POD", "n1-a", "APP", "binpack-1", "JOB", "train", "USER", "alice", "OPERATOR", "bob", "NAMESPACE", "default",
		"EXTENDER", strings.TrimPrefix(d.cluster.ExtenderURL, "http://"),
	)
	for _, example := range all {
		command := placeholders.Replace(example.Command)
		switch {
		case strings.Contains(example.Object, "kind: PodGroup"): // The demo's API server doesn't serve it.
		case strings.Contains(command, elsewhere):
		case example.Object != "":
			if _, err := shell.Run(ctx, "kubectl apply -f -", example.Object); err != nil {
				return err
			}
		case strings.Contains(command, " -w"): // It doesn't end by itself.
			if _, err := shell.Run(ctx, "set +e\ntimeout 2 "+command+"\n[ $? = 124 ]", ""); err != nil {
				return err
			}
		default:
			say("    $ %s", command)
			if err := d.matches(ctx, func(ctx context.Context) (string, error) { return shell.Run(ctx, command, "") }, example.Output); err != nil {
				return err
			}
		}
	}
	return nil
}

// matches runs a command, again until its output has all lines if some are expected.
func (d *demo) matches(ctx context.Context, run func(context.Context) (string, error), want []string) error {
	deadline := time.Now().Add(patience)
	for {
		out, err := run(ctx)
		if err != nil {
			return err
		}
		missing := ""
		for _, line := range want {
			if line != "…" && !strings.Contains(comparable(out), comparable(line)) { // The page leaves lines out there.
				missing = line
			}
		}
		if missing == "" {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the output lacks a line that the page shows:\n%s\nIt is:\n%s", missing, out)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

var (
	// UIDs, times in RFC 3339 and in nanoseconds, generated names of a Deployment's pods, and ages, with how often an Event came.
	varying = regexp.MustCompile(`\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}|\b\d{4}-\d\d-\d\dT[\d:]{8}Z|\b\d{19}\b|` +
		`-[0-9a-f]{8,10}-[a-z0-9]{5}\b|\b(\d+m)?\d+s\b( \(x\d+ over \w+\))?`)
	spaces = regexp.MustCompile(`[ -]{2,}`)
)

// comparable returns a text without what differs each time, and without the widths of columns.
func comparable(text string) string {
	return spaces.ReplaceAllString(varying.ReplaceAllString(text, "…"), " ")
}
