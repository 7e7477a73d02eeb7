package kubeadm

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Processes finds kube-scheduler among this machine's processes, and asks its /healthz. The kubelet goes on serving the
// old one for a moment after the static pod has changed: only the process's own arguments tell which one answers.
func Processes(procfs string) func(context.Context, string) (string, error) {
	client := &http.Client{
		Timeout: 2 * time.Second,
		Transport: &http.Transport{
			// Its certificate is made by itself; what is asked is whether it runs, on this machine.
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // See above.
			DisableKeepAlives: true,
		},
	}
	return func(ctx context.Context, file string) (string, error) {
		pid, args, err := findScheduler(procfs, file)
		if err != nil {
			return "", err
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+healthAddress(args)+"/healthz", nil)
		if err != nil {
			return "", err
		}
		response, err := client.Do(request)
		if err != nil {
			return "", fmt.Errorf("asking for its health: %w", err)
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return "", fmt.Errorf("asking for its health: %s", response.Status)
		}
		return strconv.Itoa(pid), nil
	}
}

// findScheduler returns the kube-scheduler that was started with --config=file.
func findScheduler(procfs, file string) (pid int, args []string, err error) {
	entries, err := os.ReadDir(procfs)
	if err != nil {
		return 0, nil, fmt.Errorf("looking at processes: %w", err)
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		line, err := os.ReadFile(filepath.Join(procfs, entry.Name(), "cmdline"))
		if err != nil {
			continue // It has ended.
		}
		var args []string
		for word := range bytes.SplitSeq(bytes.TrimSuffix(line, []byte{0}), []byte{0}) {
			args = append(args, string(word))
		}
		if filepath.Base(args[0]) == "kube-scheduler" && argument(args, "--config") == file {
			return pid, args, nil
		}
	}
	if file == "" {
		return 0, nil, errors.New("no kube-scheduler runs without --config")
	}
	return 0, nil, fmt.Errorf("no kube-scheduler runs with --config=%s", file)
}

func argument(args []string, name string) (value string) {
	for i, arg := range args {
		if rest, found := strings.CutPrefix(arg, name+"="); found {
			value = rest
		} else if arg == name && i+1 < len(args) {
			value = args[i+1]
		}
	}
	return value
}

func healthAddress(args []string) string {
	host, port := argument(args, "--bind-address"), argument(args, "--secure-port")
	if ip := net.ParseIP(host); ip == nil || ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	if port == "" {
		port = "10259"
	}
	return net.JoinHostPort(host, port)
}
