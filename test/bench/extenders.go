package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
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
	const fairShare = "gpushare_extender_fair_share_"
	values, err := framework.Scrape(ctx, url+"/metrics", "process_cpu_seconds_total", "process_resident_memory_bytes", framework.MetricBinds,
		fairShare+"gate_writes_total", fairShare+"charges_expired_total", fairShare+"reclaims_total", fairShare+"useless_reclaims_total")
	if err != nil {
		return err
	}
	for series, value := range values {
		if strings.HasPrefix(series, framework.MetricBinds) {
			t.binds += int(value)
		}
	}
	t.cpu += time.Duration(values["process_cpu_seconds_total"] * float64(time.Second))
	t.memory += int64(values["process_resident_memory_bytes"])
	t.conflicts += int(values[framework.Series(framework.MetricBinds, "result", "no_room")])
	t.gates += int(values[framework.Series(fairShare+"gate_writes_total", "result", "opened")])
	t.expired += int(values[fairShare+"charges_expired_total"])
	t.attempts += int(values[framework.Series(fairShare+"reclaims_total", "result", "evicted")])
	t.useless += int(values[fairShare+"useless_reclaims_total"])
	return nil
}

// cycles are the scheduling cycles of kube-scheduler that found a node: their number and their time. kube-scheduler runs one at a
// time, so it schedules at most 1/mean pods per second, however many cores the other processes have.
type cycles struct {
	count int
	took  time.Duration
}

func (c cycles) since(before cycles) cycles {
	return cycles{c.count - before.count, c.took - before.took}
}

func (c cycles) mean() time.Duration { return c.took / time.Duration(max(c.count, 1)) }

// readCycles returns the cycles since kube-scheduler's start.
func (s *bench) readCycles(ctx context.Context) (cycles, error) {
	text, err := s.plane.SchedulerMetrics(ctx)
	if err != nil {
		return cycles{}, fmt.Errorf("reading kube-scheduler's metrics: %w", err)
	}
	const metric = "scheduler_scheduling_algorithm_duration_seconds"
	series, err := framework.ParseMetrics(text, metric+"_count", metric+"_sum")
	return cycles{int(series[metric+"_count"]), time.Duration(series[metric+"_sum"] * float64(time.Second))}, err
}
