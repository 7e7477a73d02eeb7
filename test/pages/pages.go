// Package pages reads the commands in the documents, so that tests run exactly those.
package pages

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpushare/gpushare/test/controlplane"
)

// Commands returns the indented command blocks under a heading of a page, up to the next heading.
func Commands(page, heading string) ([]string, error) {
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(root, page))
	if err != nil {
		return nil, fmt.Errorf("reading a page: %w", err)
	}
	blocks := commands(string(text), heading)
	if len(blocks) == 0 {
		return nil, fmt.Errorf("%s shows no commands under %q", page, heading)
	}
	return blocks, nil
}

const indent = "    "

// commands treats indented lines as commands, unless they continue a paragraph.
func commands(text, heading string) (blocks []string) {
	var block strings.Builder
	end := func() {
		if block.Len() > 0 {
			blocks = append(blocks, block.String())
			block.Reset()
		}
	}
	here, paragraph := false, false
	for line := range strings.Lines(text) {
		command, indented := strings.CutPrefix(line, indent)
		switch {
		case strings.HasPrefix(line, "#"):
			end()
			here, paragraph = strings.TrimLeft(strings.TrimSpace(line), "# ") == heading, false
		case strings.TrimSpace(line) == "":
			paragraph = false
		case indented && !paragraph:
			if here {
				block.WriteString(command)
			}
		default:
			end()
			paragraph = true
		}
	}
	end()
	return blocks
}
