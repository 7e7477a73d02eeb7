package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

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
		fairShare+"gate_writes_total", fairShare+"charges_expired_total", fairShare+"useless_reclaims_total")
	if err != nil {
		return err
	}
	t.cpu += time.Duration(values["process_cpu_seconds_total"] * float64(time.Second))
	t.memory += int64(values["process_resident_memory_bytes"])
	t.conflicts += int(values[framework.Series(framework.MetricBinds, "result", "no_room")])
	t.gates += int(values[framework.Series(fairShare+"gate_writes_total", "result", "opened")])
	t.expired += int(values[fairShare+"charges_expired_total"])
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
