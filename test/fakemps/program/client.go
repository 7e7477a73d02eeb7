package main

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// runClient is a CUDA program that uses the first card that it sees, until it is killed or its server ends.
func runClient() error {
	card, _, _ := strings.Cut(os.Getenv("NVIDIA_VISIBLE_DEVICES"), ",")
	log := func(words ...any) { journal(append([]any{"client", os.Getpid(), card}, words...)...) }
	server, err := connect()
	switch {
	case errors.Is(err, errNoDaemon): // It runs without MPS, if the compute mode lets it.
		if err := openContext(card); err != nil {
			log("refused", err)
			return err
		}
		log("runs", "unlimited")
		fmt.Println("runs")
		select {}
	case err != nil:
		log("refused", err)
		return err
	}
	log("runs", pinnedLimit(os.Getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), card))
	fmt.Println("runs")
	_, _ = server.Read(make([]byte, 1))
	log("lost its server")
	return errors.New("CUDA_ERROR_MPS_RPC_FAILURE")
}

var errNoDaemon = errors.New("no daemon")

// connect returns the connection to the daemon's server.
func connect() (net.Conn, error) {
	dir := pipeDirectory()
	answer, err := send(filepath.Join(dir, "control"), "client "+strconv.Itoa(os.Getuid()))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNoDaemon, err)
	}
	kind, value, _ := strings.Cut(answer, " ")
	if kind != "server" {
		return nil, errors.New(value)
	}
	pid, err := strconv.Atoi(value)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(sharedFile(pid)); err != nil {
		return nil, errors.New("CUDA_ERROR_MPS_CONNECTION_FAILED")
	}
	conn, err := net.Dial("unix", serverSocket(dir, pid))
	if err != nil {
		return nil, errors.New("CUDA_ERROR_MPS_CONNECTION_FAILED")
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil || line != "ok\n" {
		return nil, errors.New("CUDA_ERROR_MPS_CONNECTION_FAILED: " + strings.TrimSpace(line))
	}
	return conn, nil
}

// pinnedLimit returns the limit on the card, in the variable's words. The process sees one card, which has the ordinal 0. An entry
// for another one invalidates all.
func pinnedLimit(value, card string) string {
	limit := "unlimited"
	for entry := range strings.SplitSeq(value, ",") {
		key, size, ok := strings.Cut(entry, "=")
		if !ok || key != "0" && key != card {
			return "unlimited"
		}
		limit = size
	}
	return limit
}
