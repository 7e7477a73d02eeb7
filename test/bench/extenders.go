package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/test/controlplane"
)

// startNoop serves an extender without state: it returns the nodes that pass chooses, scores nothing and binds.
func (s *bench) startNoop(pass func(names []string) []string) func(context.Context) (running, error) {
	return func(context.Context) (running, error) { return s.serveNoop(pass) }
}

func everyNode(names []string) []string { return names }

// roundRobin returns a single node, the next one for each call, so that kube-scheduler has nothing to score.
func roundRobin() func(names []string) []string {
	var calls atomic.Int64
	return func(names []string) []string {
		if len(names) == 0 {
			return names
		}
		at := int(calls.Add(1)) % len(names)
		return names[at : at+1]
	}
}

func (s *bench) serveNoop(pass func(names []string) []string) (running, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return running{}, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/gpushare-scheduler/filter", func(w http.ResponseWriter, r *http.Request) {
		answer(w, r, func(args *extenderv1.ExtenderArgs) any {
			passed := pass(*args.NodeNames) // Not nil: nodeCacheCapable is set, as shipped.
			return &extenderv1.ExtenderFilterResult{NodeNames: &passed}
		})
	})
	mux.HandleFunc("/gpushare-scheduler/prioritize", func(w http.ResponseWriter, r *http.Request) {
		answer(w, r, func(*extenderv1.ExtenderArgs) any { return extenderv1.HostPriorityList{} })
	})
	mux.HandleFunc("/gpushare-scheduler/bind", func(w http.ResponseWriter, r *http.Request) {
		answer(w, r, func(args *extenderv1.ExtenderBindingArgs) any {
			err := s.plane.Client.CoreV1().Pods(args.PodNamespace).Bind(r.Context(), &corev1.Binding{
				ObjectMeta: metav1.ObjectMeta{Namespace: args.PodNamespace, Name: args.PodName, UID: args.PodUID},
				Target:     corev1.ObjectReference{Kind: "Node", Name: args.Node},
			}, metav1.CreateOptions{})
			if err != nil {
				return &extenderv1.ExtenderBindingResult{Error: err.Error()}
			}
			return &extenderv1.ExtenderBindingResult{}
		})
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(listener) }()
	return running{
		url:    "http://" + listener.Addr().String(),
		finish: func(context.Context, *result) error { return server.Close() },
	}, nil
}

func answer[A any](w http.ResponseWriter, r *http.Request, reply func(*A) any) {
	args := new(A)
	if err := json.NewDecoder(r.Body).Decode(args); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	_ = json.NewEncoder(w).Encode(reply(args))
}

// startOurs starts the extender as in its manifest, with additional arguments.
func (s *bench) startOurs(args ...string) func(context.Context) (running, error) {
	return func(ctx context.Context) (running, error) { return s.serveOurs(ctx, args) }
}

func (s *bench) serveOurs(ctx context.Context, args []string) (running, error) {
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return running{}, err
	}
	if err := s.plane.Apply(ctx, filepath.Join(root, "deploy", "manifests", "extender.yaml")); err != nil {
		return running{}, err
	}
	kubeconfig, err := s.plane.ServiceAccountKubeconfig(ctx, "kube-system", "gpushare-extender")
	if err != nil {
		return running{}, err
	}
	port, err := controlplane.ReservePort()
	if err != nil {
		return running{}, err
	}
	url := port.URL("http")
	process := &controlplane.Process{
		Name: "gpushare-extender", Path: filepath.Join(root, "bin", "gpushare-extender"),
		Args:    append([]string{"--kubeconfig=" + kubeconfig, "--listen-address=" + port.Address()}, args...),
		LogPath: filepath.Join(s.dir, "extender.log"),
		Ready:   controlplane.HTTPReady(url + "/readyz"),
	}
	start := time.Now()
	if err := process.Start(ctx); err != nil {
		return running{}, err
	}
	return running{url: url, ready: time.Since(start), finish: func(ctx context.Context, t *result) error {
		defer port.Release()
		return errors.Join(readMetrics(ctx, url, t), process.Kill())
	}}, nil
}

// readMetrics adds the metrics of one extender to the result.
func readMetrics(ctx context.Context, url string, t *result) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/metrics", nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		name, text, ok := strings.Cut(lines.Text(), " ")
		if !ok || strings.HasPrefix(name, "#") {
			continue
		}
		value, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return fmt.Errorf("metric %s: %w", name, err)
		}
		if strings.HasPrefix(name, "gpushare_extender_binds_total{") {
			t.binds += int(value)
		}
		switch name {
		case "process_cpu_seconds_total":
			t.cpu += time.Duration(value * float64(time.Second))
		case "process_resident_memory_bytes":
			t.memory += int64(value)
		case `gpushare_extender_binds_total{result="no_room"}`:
			t.conflicts += int(value)
		case `gpushare_extender_fair_share_gate_writes_total{result="opened"}`:
			t.gates += int(value)
		case "gpushare_extender_fair_share_charges_expired_total":
			t.expired += int(value)
		case `gpushare_extender_fair_share_reclaims_total{result="evicted"}`:
			t.attempts += int(value)
		case "gpushare_extender_fair_share_reclaimed_unneeded_units_total":
			t.unneeded += int(value)
		}
	}
	return lines.Err()
}
