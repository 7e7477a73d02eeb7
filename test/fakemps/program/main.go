// The stub of NVIDIA's Multi-Process Service: by its name it is nvidia-cuda-mps-control, nvidia-cuda-mps-server (started by the
// former) or a CUDA program (cuda-client). README.md has its rules and files.
package main

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	run := map[string]func() error{
		"nvidia-cuda-mps-control": runControl, "nvidia-cuda-mps-server": runServer, "cuda-client": runClient,
	}[filepath.Base(os.Args[0])]
	if run == nil {
		fmt.Fprintln(os.Stderr, "unknown name:", os.Args[0])
		os.Exit(2)
	}
	if err := run(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// pipeDirectory returns the directory of the sockets, with MPS's default.
func pipeDirectory() string {
	if dir := os.Getenv("CUDA_MPS_PIPE_DIRECTORY"); dir != "" {
		return dir
	}
	return "/tmp/nvidia-mps"
}

// journal adds a line to the journal, which all processes share.
func journal(words ...any) {
	file, err := os.OpenFile(filepath.Join(os.Getenv("FAKE_MPS"), "journal"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o666)
	if err != nil {
		return
	}
	defer file.Close()
	_, _ = fmt.Fprintln(file, words...) // In one write.
}

// faulty reports whether a test has created this fault of a card.
func faulty(card, fault string) bool {
	_, err := os.Stat(filepath.Join(os.Getenv("FAKE_MPS"), "faults", card+"."+fault))
	return err == nil
}

// knows reports whether the driver has the card.
func knows(card string) bool {
	file, err := os.Open(os.Getenv("FAKE_NVML_CARDS"))
	if err != nil {
		return false
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		if name, _, _ := strings.Cut(lines.Text(), ","); name == card {
			return true
		}
	}
	return false
}
