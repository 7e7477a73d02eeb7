package pages

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/gpushare/gpushare/test/controlplane"
)

// Example is a command or an object that a page shows.
type Example struct {
	// Command is a shell command, with what continues it; empty for an object.
	Command string
	// Output are the lines that the page shows as the command's output. A command without "$ " before it has none.
	Output []string
	// Ignored are indented lines directly after a command without "$ " before it: nothing compares them.
	Ignored []string
	// Object is YAML for kubectl apply; empty for a command.
	Object string
}

var (
	userPages = regexp.MustCompile(`(?s)\*\*You run pods.*?\n\n`)
	pageLink  = regexp.MustCompile(`\]\(([a-z-]+\.md)\)`)
	// program is the start of a command for a cluster. Other indented lines are output, or commands for administrators.
	program = regexp.MustCompile(`^(kubectl|sed|curl) `)
)

// OfUsers returns the examples of the pages for users, in the order in which docs/README.md lists these.
func OfUsers() ([]Example, error) {
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return nil, err
	}
	read := func(page string) string {
		text, readErr := os.ReadFile(filepath.Join(root, "docs", page))
		if readErr != nil {
			err = fmt.Errorf("reading a page: %w", readErr)
		}
		return string(text)
	}
	var all []Example
	for _, link := range pageLink.FindAllStringSubmatch(userPages.FindString(read("README.md")), -1) {
		all = append(all, examples(read(link[1]))...)
	}
	return all, err
}

// examples returns the examples of a page.
func examples(text string) []Example {
	var all []Example
	var fence []string // The lines of a code block of YAML.
	fenced, output, commands, paragraph := false, false, false, false
	for line := range strings.SplitSeq(text, "\n") {
		indented, isIndented := strings.CutPrefix(line, indent)
		switch {
		case strings.HasPrefix(line, "```"):
			if fenced = !fenced; !fenced {
				if object := strings.Join(fence, "\n"); strings.HasPrefix(object, "apiVersion: ") {
					all = append(all, Example{Object: object})
				}
			}
			fence, output, commands = nil, false, false
		case fenced:
			fence = append(fence, line)
		case strings.TrimSpace(line) == "":
			paragraph = false
		case !isIndented || paragraph:
			paragraph, output, commands = true, false, false
		default:
			command, prompt := strings.CutPrefix(indented, "$ ")
			last := len(all) - 1
			switch {
			case last >= 0 && strings.HasSuffix(all[last].Command, "\\"):
				all[last].Command += "\n" + indented
			case prompt || program.MatchString(command):
				all, output, commands = append(all, Example{Command: command}), prompt, true
			case output:
				all[last].Output = append(all[last].Output, indented)
			case commands:
				all[last].Ignored = append(all[last].Ignored, indented)
			}
		}
	}
	return all
}
