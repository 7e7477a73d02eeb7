package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
)

func serverSocket(dir string, pid int) string {
	return filepath.Join(dir, "server-"+strconv.Itoa(pid))
}

// sharedFile is what server and clients share in /dev/shm.
func sharedFile(pid int) string {
	dir := os.Getenv("FAKE_MPS_SHM")
	if dir == "" {
		dir = "/dev/shm"
	}
	return filepath.Join(dir, "cuda.mps."+strconv.Itoa(pid))
}

// runServer is nvidia-cuda-mps-server: it has the only context on the card, and takes clients until it is killed.
func runServer() error {
	card := os.Getenv("CUDA_VISIBLE_DEVICES")
	if faulty(card, "server") {
		return errors.New("the server fails, as the test wants it")
	}
	if err := openContext(card); err != nil {
		return err
	}
	if err := os.WriteFile(sharedFile(os.Getpid()), nil, 0o666); err != nil {
		return err
	}
	listener, err := net.Listen("unix", serverSocket(pipeDirectory(), os.Getpid()))
	if err != nil {
		return err
	}
	if err := os.Chmod(listener.Addr().String(), 0o666); err != nil {
		return err
	}
	journal("server", os.Getpid(), card, "starts")
	fmt.Println("Ready")
	var clients atomic.Int32
	for {
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		if clients.Add(1) > 48 {
			clients.Add(-1)
			fmt.Fprintln(conn, "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED")
			_ = conn.Close()
			continue
		}
		go func() {
			fmt.Fprintln(conn, "ok")
			_, _ = conn.Read(make([]byte, 1)) // Until the client ends.
			_ = conn.Close()
			clients.Add(-1)
		}()
	}
}
