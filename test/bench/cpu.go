package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// ticks is the clock ticks per second of the times in /proc, on every Linux that Go supports.
const ticks = 100

// spending is processor time by process name.
type spending map[string]time.Duration

// spent returns the processor time that this process and its children have used so far: kube-apiserver, etcd,
// kube-scheduler, the extender, and the creation of pods. It depends less on other work on the machine than any rate.
// Without /proc it is empty.
func spent() spending {
	self := strconv.Itoa(os.Getpid())
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	sum := spending{}
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // The process has ended.
		}
		pid := filepath.Base(filepath.Dir(path))
		name, parent, took, err := parseStat(string(text))
		if err == nil && (pid == self || parent == self) {
			sum[name] += took
		}
	}
	return sum
}

// since returns the difference to before.
func (s spending) since(before spending) spending {
	out := spending{}
	for name, took := range s {
		out[name] = took - before[name]
	}
	return out
}

func (s spending) total() (sum time.Duration) {
	for _, took := range s {
		sum += took
	}
	return sum
}

func (s spending) String() string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(s)) {
		parts = append(parts, fmt.Sprintf("%s %.1f", name, s[name].Seconds()))
	}
	return strings.Join(parts, ", ")
}

// parseStat parses a process's name, parent and processor time (proc_pid_stat(5)). The name, in parentheses, can
// contain any character and is truncated after 15 bytes.
func parseStat(text string) (name, parent string, took time.Duration, err error) {
	from, to := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if from < 0 || to < from {
		return "", "", 0, fmt.Errorf("no name: %q", text)
	}
	fields := strings.Fields(text[to+1:])
	const ppid, utime, stime = 1, 11, 12
	if len(fields) <= stime {
		return "", "", 0, fmt.Errorf("too few fields: %q", text)
	}
	for _, field := range []string{fields[utime], fields[stime]} {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return "", "", 0, err
		}
		took += time.Duration(n) * time.Second / ticks
	}
	return text[from+1 : to], fields[ppid], took, nil
}
