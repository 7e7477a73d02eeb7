// witness is the program in the containers of the node's tests. It writes its environment to a new file in /testimony. Then
// it runs until it gets a signal or for a set time. With -stubborn it ignores SIGTERM.
//
// With -pause it is the process of a pod's sandbox and writes no file.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const folder = "/testimony"

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	flags := flag.NewFlagSet("witness", flag.ContinueOnError)
	pause := flags.Bool("pause", false, "bear no witness")
	stubborn := flags.Bool("stubborn", false, "ignore SIGTERM")
	lasting := flags.Duration("for", 0, "end by itself after so long; 0: don't")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGINT)
	if *stubborn {
		signal.Ignore(syscall.SIGTERM)
	} else {
		signal.Notify(told, syscall.SIGTERM)
	}
	if !*pause {
		if err := testify(); err != nil {
			fmt.Fprintln(os.Stderr, "witness:", err)
			return 1
		}
	}
	var over <-chan time.Time
	if *lasting > 0 {
		over = time.After(*lasting)
	}
	select {
	case <-told:
	case <-over:
	}
	return 0
}

// testify writes one file per start. It renames the file when it is complete, so that a reader never sees a partial file.
func testify() error {
	name := os.Getenv("POD_UID") + "." + os.Getenv("CONTAINER") + "." + strconv.FormatInt(time.Now().UnixNano(), 10)
	temporary := filepath.Join(folder, "."+name)
	if err := os.WriteFile(temporary, []byte(strings.Join(os.Environ(), "\x00")), 0o644); err != nil {
		return err
	}
	return os.Rename(temporary, filepath.Join(folder, name))
}
