// recordenv is the program in the containers of the node's tests. It writes its environment to a new file in /records. Then
// it runs until it gets a signal or for a set time, or becomes another program.
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

const folder = "/records"

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	flags := flag.NewFlagSet("recordenv", flag.ContinueOnError)
	pause := flags.Bool("pause", false, "write no file: the process of a pod's sandbox")
	ignore := flags.Bool("ignore-sigterm", false, "ignore SIGTERM")
	duration := flags.Duration("for", 0, "end after this time; 0 means never")
	program := flags.String("exec", "", "program to run instead of waiting")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT)
	if *ignore {
		signal.Ignore(syscall.SIGTERM)
	} else {
		signal.Notify(signals, syscall.SIGTERM)
	}
	if !*pause {
		if err := record(); err != nil {
			fmt.Fprintln(os.Stderr, "recordenv:", err)
			return 1
		}
	}
	if *program != "" {
		fmt.Fprintln(os.Stderr, "recordenv:", syscall.Exec(*program, []string{*program}, os.Environ()))
		return 1
	}
	var end <-chan time.Time
	if *duration > 0 {
		end = time.After(*duration)
	}
	select {
	case <-signals:
	case <-end:
	}
	return 0
}

// record writes one file per start. It renames the file when it is complete, so that a reader never sees a partial file.
func record() error {
	name := os.Getenv("POD_UID") + "." + os.Getenv("CONTAINER") + "." + strconv.FormatInt(time.Now().UnixNano(), 10)
	temporary := filepath.Join(folder, "."+name)
	if err := os.WriteFile(temporary, []byte(strings.Join(os.Environ(), "\x00")), 0o644); err != nil {
		return err
	}
	return os.Rename(temporary, filepath.Join(folder, name))
}
