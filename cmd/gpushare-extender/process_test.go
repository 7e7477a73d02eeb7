package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpushare/gpushare/test/check"
)

// asExtender makes the test binary run as the extender, so that the tests use a real process.
const asExtender = "GPUSHARE_TEST_AS_EXTENDER"

func TestMain(m *testing.M) {
	if os.Getenv(asExtender) != "" {
		main()
	}
	os.Exit(m.Run())
}

func command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	for _, variable := range os.Environ() {
		if !strings.HasPrefix(variable, "KUBE") { // No kubeconfig and no service account of a pod.
			cmd.Env = append(cmd.Env, variable)
		}
	}
	cmd.Env = append(cmd.Env, asExtender+"=1")
	return cmd
}

// extenderProcess is the real binary with the addresses that it logged.
type extenderProcess struct {
	verbs, page string
	cmd         *exec.Cmd
	// wait waits for the end of the process, kills it after a minute, and returns what it logged.
	wait func() string
}

// loggedAddress matches both log formats.
var loggedAddress = regexp.MustCompile(`"(Serving kube-scheduler's calls|Serving the web page)".*address"?[=:]"([^"]+)"`)

// startExtender runs the binary until the test ends, and waits until it has logged the number of addresses. There is no API
// server, unless args set one: the page is served without it.
func startExtender(t *testing.T, addresses int, args ...string) extenderProcess {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defaults := []string{"--listen-address=127.0.0.1:0", "--kubeconfig=" + writeKubeconfig(t, "http://127.0.0.1:1")}
	p := extenderProcess{cmd: command(ctx, append(defaults, args...)...)}
	stderr, err := p.cmd.StderrPipe()
	check.Must(t, err)
	check.Must(t, p.cmd.Start())
	found, ended := make(chan []string, addresses+1), make(chan string, 1)
	go func() {
		var all strings.Builder
		for scanner := bufio.NewScanner(stderr); scanner.Scan(); {
			all.WriteString(scanner.Text() + "\n")
			if match := loggedAddress.FindStringSubmatch(scanner.Text()); match != nil && len(found) < cap(found) {
				found <- match
			}
		}
		_ = p.cmd.Wait() // ProcessState has the result.
		ended <- all.String()
	}()
	p.wait = sync.OnceValue(func() string {
		defer time.AfterFunc(time.Minute, cancel).Stop()
		return <-ended
	})
	t.Cleanup(func() {
		cancel()
		p.wait()
	})
	for range addresses {
		select {
		case match := <-found:
			if match[1] == "Serving kube-scheduler's calls" {
				p.verbs = match[2]
			} else {
				p.page = match[2]
			}
		case logs := <-ended:
			ended <- logs
			t.Fatalf("the process ended:\n%s", logs)
		case <-time.After(time.Minute):
			t.Fatal("the process doesn't log its addresses")
		}
	}
	return p
}

func get(client *http.Client, url string) (code int, body string, err error) {
	response, err := client.Get(url)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, string(text), err
}

func writeKubeconfig(t *testing.T, server string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q}}]
contexts: [{name: c, context: {cluster: c}}]
current-context: c
`, server)
	check.Must(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}
