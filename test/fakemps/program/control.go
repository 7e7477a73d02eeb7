package main

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// runControl is nvidia-cuda-mps-control: with -f the daemon, in the foreground; without arguments it sends what it reads from its
// standard input to the daemon.
func runControl() error {
	switch args := os.Args[1:]; {
	case slices.Contains(args, "-h"):
		fmt.Println("usage: nvidia-cuda-mps-control [-d | -f] [-multiuser-server]")
		return nil
	case slices.Contains(args, "-f"):
		return (&control{dir: pipeDirectory(), card: os.Getenv("CUDA_VISIBLE_DEVICES"), multiuser: slices.Contains(args, "-multiuser-server")}).run()
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		answer, err := send(filepath.Join(pipeDirectory(), "control_privileged"), lines.Text())
		if err != nil {
			return errors.New("cannot find MPS control daemon process")
		}
		fmt.Print(answer)
	}
	return lines.Err()
}

// send returns the answer to a line, which ends with the connection.
func send(socket, line string) (string, error) {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	fmt.Fprintln(conn, line)
	var answer strings.Builder
	_, err = bufio.NewReader(conn).WriteTo(&answer)
	return answer.String(), err
}

// control is the daemon of one card.
type control struct {
	dir, card string
	multiuser bool
	log       *os.File

	// mu guards the server.
	mu     sync.Mutex
	server *exec.Cmd
	uid    int
	// ready is true once the server takes clients.
	ready bool
}

func (c *control) run() error {
	if faulty(c.card, "start") {
		return errors.New("the daemon fails, as the test wants it")
	}
	logs := os.Getenv("CUDA_MPS_LOG_DIRECTORY")
	if err := errors.Join(os.MkdirAll(c.dir, 0o755), os.MkdirAll(logs, 0o755)); err != nil {
		return err
	}
	pid, err := os.OpenFile(filepath.Join(c.dir, "nvidia-cuda-mps-control.pid"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	if syscall.Flock(int(pid.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		return errors.New("an instance of this daemon is already running")
	}
	fmt.Fprintln(pid, os.Getpid())
	if c.log, err = os.OpenFile(filepath.Join(logs, "control.log"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644); err != nil {
		return err
	}
	c.printf("Starting control daemon using socket %s/control", c.dir)
	journal("control", os.Getpid(), c.card, "starts")
	privileged, err := c.listen("control_privileged", 0o600)
	if err != nil {
		return err
	}
	clients, err := c.listen("control", 0o666)
	if err != nil {
		return err
	}
	go c.serve(privileged, c.command)
	c.serve(clients, c.client)
	return nil
}

func (c *control) printf(format string, args ...any) {
	line := fmt.Sprintf("Control %d] "+format, append([]any{os.Getpid()}, args...)...)
	fmt.Println(line)
	fmt.Fprintln(c.log, line)
}

func (c *control) listen(name string, mode os.FileMode) (net.Listener, error) {
	path := filepath.Join(c.dir, name)
	_ = os.Remove(path)
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	return listener, os.Chmod(path, mode)
}

// serve answers each connection's line. A daemon that hangs takes connections and never answers.
func (c *control) serve(listener net.Listener, answer func(words []string) string) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			line, err := bufio.NewReader(conn).ReadString('\n')
			for faulty(c.card, "hang") {
				time.Sleep(time.Millisecond)
			}
			if words := strings.Fields(line); err == nil && len(words) > 0 {
				fmt.Fprint(conn, answer(words))
			}
		}()
	}
}

// command is a line on the daemon's standard input.
func (c *control) command(words []string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	journal("control", os.Getpid(), c.card, "command", strings.Join(words, " "))
	switch words[0] {
	case "get_server_list":
		if c.ready {
			return strconv.Itoa(c.server.Process.Pid) + "\n"
		}
	case "get_server_status":
		if faulty(c.card, "fault") {
			return "FAULT\n"
		}
		return "ACTIVE\n"
	case "start_server":
		if len(words) == 3 && words[1] == "-uid" {
			uid, _ := strconv.Atoi(words[2])
			c.start(uid)
		}
	case "quit":
		// Without -t it would wait for its clients.
		c.printf("Exiting")
		if c.server != nil {
			_ = c.server.Process.Kill()
		}
		go func() { time.Sleep(time.Millisecond); os.Exit(0) }()
	default:
		return "Unknown command\n"
	}
	return ""
}

// start starts a server. Its context on the card is made in the background. The caller holds mu.
func (c *control) start(uid int) {
	if c.server != nil {
		return
	}
	self, err := os.Executable()
	if err != nil {
		return
	}
	server := exec.Command(self)
	server.Args = []string{"nvidia-cuda-mps-server"}
	out, err := server.StdoutPipe()
	if err != nil || server.Start() != nil {
		return
	}
	c.printf("Starting new server %d for user %d", server.Process.Pid, uid)
	c.server, c.uid = server, uid
	go func() {
		line, _ := bufio.NewReader(out).ReadString('\n')
		c.mu.Lock()
		if c.ready = line == "Ready\n"; c.ready {
			c.printf("NEW SERVER %d: Ready", server.Process.Pid)
		} else {
			c.printf("Server %d fails: %s", server.Process.Pid, strings.TrimSpace(line))
		}
		c.mu.Unlock()
		_ = server.Wait()
		c.mu.Lock()
		defer c.mu.Unlock()
		c.server, c.ready = nil, false
		c.printf("Server %d exited", server.Process.Pid)
		if !knows(c.card) {
			os.Exit(1)
		}
	}()
}

// client answers a client: with the socket of its server, or with an error. A client of another user waits for the server's user
// unless the daemon has one server for all.
func (c *control) client(words []string) string {
	if len(words) != 2 || words[0] != "client" {
		return "error CUDA_ERROR_UNKNOWN"
	}
	uid, _ := strconv.Atoi(words[1])
	for range 1000 {
		c.mu.Lock()
		if c.server == nil {
			c.start(uid)
		}
		ready, own, pid := c.ready, c.uid, 0
		if ready {
			pid = c.server.Process.Pid
		}
		c.mu.Unlock()
		switch {
		case ready && own != uid && (!c.multiuser || os.Getuid() != 0):
			return "error CUDA_ERROR_NOT_PERMITTED"
		case ready:
			return fmt.Sprintf("server %d", pid)
		}
		time.Sleep(time.Millisecond)
	}
	return "error CUDA_ERROR_MPS_SERVER_NOT_READY"
}
