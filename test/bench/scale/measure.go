package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// result is the result of one start.
type result struct {
	// ready is the time from the start of the process until it was ready.
	ready time.Duration
	// atReady, steady and peak are resident memory in bytes.
	atReady, steady, peak int64
	// heap is the allocated heap at the time of steady, in bytes.
	heap float64
	// rebuild is the extender's own metric of its start time, in seconds.
	rebuild float64
}

func measure(ctx context.Context, o options) (err error) {
	dir, err := os.MkdirTemp("", "gpushare-scale-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	plane, err := controlplane.Start(ctx, controlplane.Options{Dir: filepath.Join(dir, "control-plane"), WithoutScheduler: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, plane.Stop()) }()
	start := time.Now()
	if err := populate(ctx, plane, o); err != nil {
		return err
	}
	fmt.Printf("%d nodes of %d cards, %d bound pods, %d of which request no GPU memory (created in %s)\n",
		o.nodes, o.cards, o.pods, o.plain, time.Since(start).Round(time.Second))
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return err
	}
	if err := plane.Apply(ctx, filepath.Join(root, "deploy", "manifests", "extender.yaml")); err != nil {
		return err
	}
	kubeconfig, err := plane.ServiceAccountKubeconfig(ctx, "kube-system", "gpushare-extender")
	if err != nil {
		return err
	}
	fmt.Printf("%8s %14s %14s %14s %14s %14s\n", "ready", "rebuild", "rss at ready", "rss steady", "rss peak", "heap")
	for range o.turns {
		t, err := coldStart(ctx, o, kubeconfig, filepath.Join(dir, "extender.log"))
		if err != nil {
			return err
		}
		fmt.Printf("%6.1f s %12.1f s %11d MB %11d MB %11d MB %11.0f MB\n",
			t.ready.Seconds(), t.rebuild, t.atReady>>20, t.steady>>20, t.peak>>20, t.heap/(1<<20))
	}
	return nil
}

// coldStart starts an extender, reads the figures and kills it.
func coldStart(ctx context.Context, o options, kubeconfig, log string) (t result, err error) {
	port, err := controlplane.ReservePort()
	if err != nil {
		return t, err
	}
	defer port.Release()
	url := port.URL("http")
	path, err := filepath.Abs(o.extender)
	if err != nil {
		return t, err
	}
	process := &controlplane.Process{
		Name: "gpushare-extender", Path: path,
		Args:    append([]string{"--kubeconfig=" + kubeconfig, "--listen-address=" + port.Address()}, o.args...),
		LogPath: log,
		Ready:   controlplane.HTTPReady(url + "/readyz"),
	}
	start := time.Now()
	if err := process.Start(ctx); err != nil {
		return t, err
	}
	defer func() { err = errors.Join(err, process.Kill()) }()
	t.ready = time.Since(start)
	if t.atReady, err = resident(process.Pid(), "VmRSS"); err != nil {
		return t, err
	}
	select {
	case <-time.After(o.settle):
	case <-ctx.Done():
		return t, ctx.Err()
	}
	if t.steady, err = resident(process.Pid(), "VmRSS"); err != nil {
		return t, err
	}
	if t.peak, err = resident(process.Pid(), "VmHWM"); err != nil {
		return t, err
	}
	const heap, rebuild = "go_memstats_heap_alloc_bytes", "gpushare_extender_cache_sync_seconds"
	values, err := framework.Scrape(ctx, url+"/metrics", heap, rebuild)
	t.heap, t.rebuild = values[heap], values[rebuild]
	return t, err
}

// resident returns a value of /proc/PID/status in bytes.
func resident(pid int, field string) (int64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			n, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return n << 10, err
		}
	}
	return 0, fmt.Errorf("process %d has no %s", pid, field)
}
