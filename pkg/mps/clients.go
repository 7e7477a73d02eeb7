package mps

import (
	"bufio"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// usesDirectory reports whether a process has this directory mounted: a container that was given a share of the card, whether or not
// it uses the card at the moment. The supervisor itself has a directory above it.
func usesDirectory(proc, dir string) bool {
	tables, _ := filepath.Glob(filepath.Join(proc, "[0-9]*", "mountinfo")) // The pattern is valid.
	return slices.ContainsFunc(tables, func(table string) bool { return mounted(table, dir) })
}

// mounted reports whether a process's table of mounts (proc_pid_mountinfo(5)) has one at this path. A table that can't be read is that of
// a process that has ended.
func mounted(table, path string) bool {
	file, err := os.Open(table)
	if err != nil {
		return false
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		if fields := strings.Fields(lines.Text()); len(fields) > 4 && fields[4] == path {
			return true
		}
	}
	return false
}
