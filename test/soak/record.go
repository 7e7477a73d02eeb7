package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// Metrics of the extender besides those of test/framework.
const (
	metricOverfull   = "gpushare_extender_overfull_cards"
	metricWrites     = "gpushare_extender_api_writes_total"
	metricSeconds    = "gpushare_extender_request_duration_seconds_sum"
	metricCalls      = "gpushare_extender_request_duration_seconds_count"
	metricGoroutines = "go_goroutines"
)

// sample is a figure at a time since the start.
type sample struct {
	at    time.Duration
	value float64
}

// series is a figure over the week.
type series struct {
	name, unit string
	// judged is true if the series must not grow.
	judged  bool
	samples []sample
}

// record samples the programs and checks the cards.
type record struct {
	*week
	started time.Time
	all     []*series
	// totals are the last values of counters by replica and series.
	totals map[string]float64
	// wrong counts for how many checks a container has had other cards than its pod's annotation says.
	wrong map[string]int
	// overfull is the number of checks in a row at which the leader has found a card over its size.
	overfull int
	// pods is the number of bound pods since the last sample with metrics.
	pods int
}

func newRecord(w *week) *record {
	return &record{week: w, started: time.Now(), totals: map[string]float64{}, wrong: map[string]int{}}
}

// run takes samples until the week is over.
func (r *record) run(ctx context.Context) error {
	ticker := time.NewTicker(max(r.length/500, 5*time.Second))
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		sampling, cancel := context.WithTimeout(ctx, 10*time.Second)
		err := r.check(sampling)
		r.sample(sampling)
		cancel()
		if err != nil && ctx.Err() == nil {
			return err
		}
	}
}

// check returns an error if a card has allocated more than its memory, or a container keeps having other cards than its pod's
// annotation says. The plugin corrects an annotation soon after the container has started.
func (r *record) check(ctx context.Context) error {
	allocations, err := r.cluster.Allocations(ctx)
	if err != nil {
		return err
	}
	if cards := allocations.Overfull(); len(cards) > 0 {
		return errors.New(strings.Join(cards, "; "))
	}
	// The leader also counts cores and containers. Its watch can be behind, so that one value alone shows nothing.
	if values, err := r.cluster.Metrics(ctx, metricOverfull); err == nil && values[metricOverfull] > 0 {
		if r.overfull++; r.overfull > 3 {
			return fmt.Errorf("%s is %v", metricOverfull, values[metricOverfull])
		}
	} else {
		r.overfull = 0
	}
	pods, err := r.cluster.Client.CoreV1().Pods(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	annotated := map[string]string{}
	for i := range pods.Items {
		if pod := &pods.Items[i]; pod.Status.Phase == corev1.PodRunning {
			annotated[string(pod.UID)] = pod.Annotations[protocol.AnnotationIndex]
		}
	}
	wrong := map[string]int{}
	for _, node := range r.running {
		for _, c := range node.Kubelet.Containers() {
			want, running := annotated[string(c.PodUID)]
			if got := c.Env[protocol.AnnotationIndex]; running && got != "" && got != want {
				name := string(c.PodUID) + "/" + c.Container
				if wrong[name] = r.wrong[name] + 1; wrong[name] > 6 {
					return fmt.Errorf("container %s on %s has cards %s, but its pod's annotation says %s", name, node.Name, got, want)
				}
			}
		}
	}
	r.wrong = wrong
	return nil
}

// sample takes a sample of each series. One that can't be read, such as of a frozen replica, is left out.
func (r *record) sample(ctx context.Context) {
	watched, plugin := r.cluster.Replicas[watchedReplica], r.running[watchedNode].Plugin
	r.process("extender", watched.Pid())
	r.process("device plugin", plugin.Pid())

	waits, waiting := r.load.takeWaits()
	r.add("pods waiting", "", false, float64(waiting))
	r.add("pods bound", "per s", false, float64(len(waits))/max(r.length/500, 5*time.Second).Seconds())
	if len(waits) > 0 {
		slices.Sort(waits)
		r.add("wait until bound, median", "s", false, waits[len(waits)/2].Seconds())
	}
	if used := r.used(ctx); used >= 0 {
		r.add("memory allocated", "%", false, used)
	}
	r.pods += len(waits)
	grown := map[string]float64{}
	for i, url := range r.cluster.ReplicaURLs {
		values, err := framework.Scrape(ctx, url+"/metrics", metricWrites, metricSeconds, metricCalls, metricGoroutines)
		if err != nil {
			continue // It is frozen, or starts.
		}
		if i == watchedReplica {
			r.add("extender, goroutines", "", true, values[metricGoroutines])
		}
		for name, value := range values {
			key := strconv.Itoa(i) + name
			before := r.totals[key]
			if before > value { // The replica was restarted.
				before = 0
			}
			r.totals[key] = value
			grown[name] += value - before
		}
	}
	r.rates(grown)
}

// rates adds the series of what was counted since the last sample.
func (r *record) rates(grown map[string]float64) {
	for _, verb := range []string{"filter", "bind"} {
		sum, count := 0.0, 0.0
		for name, value := range grown {
			if strings.Contains(name, strconv.Quote(verb)) {
				switch {
				case strings.HasPrefix(name, metricSeconds):
					sum += value
				case strings.HasPrefix(name, metricCalls):
					count += value
				}
			}
		}
		if count > 0 {
			r.add(verb+", mean", "ms", verb == "filter", 1000*sum/count)
		}
	}
	writes := 0.0
	for name, value := range grown {
		if strings.HasPrefix(name, metricWrites) {
			writes += value
		}
	}
	if r.pods > 0 && len(grown) > 0 {
		r.add("writes to the API server", "per bound pod", true, writes/float64(r.pods))
		r.pods = 0
	}
}

// used returns the allocated part of all memory in percent, negative if it can't be read.
func (r *record) used(ctx context.Context) float64 {
	allocations, err := r.cluster.Allocations(ctx)
	if err != nil {
		return -1
	}
	var used, total int64
	for _, cards := range allocations {
		for _, card := range cards {
			used, total = used+card.Used, total+card.Total
		}
	}
	return 100 * float64(used) / float64(total)
}

// process adds the memory and the open files of a program.
func (r *record) process(name string, pid int) {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	text, err := os.ReadFile(filepath.Join(dir, "statm"))
	fields := strings.Fields(string(text))
	if err != nil || len(fields) < 2 {
		return
	}
	pages, err := strconv.ParseInt(fields[1], 10, 64)
	files, err2 := os.ReadDir(filepath.Join(dir, "fd"))
	if err != nil || err2 != nil {
		return
	}
	r.add(name+", memory", "MiB", true, float64(pages)*float64(os.Getpagesize())/(1<<20))
	r.add(name+", open files", "", true, float64(len(files)))
}

// add adds a sample to a series.
func (r *record) add(name, unit string, judged bool, value float64) {
	i := slices.IndexFunc(r.all, func(s *series) bool { return s.name == name })
	if i < 0 {
		i = len(r.all)
		r.all = append(r.all, &series{name: name, unit: unit, judged: judged})
	}
	r.all[i].samples = append(r.all[i].samples, sample{time.Since(r.started), value})
}

const (
	// judgedFrom is the shortest run in which growth is judged.
	judgedFrom = time.Hour
	// maxGrowth is the growth in a simulated day that is taken for noise, as a part of the mean.
	maxGrowth = 0.01
)

// judge returns an error if a judged series grows.
func (r *record) judge() error {
	if r.length < judgedFrom {
		return nil
	}
	var errs []error
	for _, s := range r.all {
		if g := s.growth(r.day()); s.judged && g > maxGrowth {
			errs = append(errs, fmt.Errorf("%s grows by %.1f%% a day", s.name, 100*g))
		}
	}
	return errors.Join(errs...)
}

// growth returns by how much of the mean the series rises per simulated day, by the line through the means of the days (least
// squares). Whole days are compared, because the load follows the time of day. The first day is the time to warm up.
func (s *series) growth(day time.Duration) float64 {
	sums, counts := map[int]float64{}, map[int]float64{}
	for _, p := range s.samples {
		d := int(p.at / day)
		sums[d] += p.value
		counts[d]++
	}
	var n, x, y, xx, xy float64
	for d := 1; d < 7; d++ {
		if counts[d] > 0 {
			mean, at := sums[d]/counts[d], float64(d)
			n, x, y, xx, xy = n+1, x+at, y+mean, xx+at*at, xy+at*mean
		}
	}
	if n < 2 || y == 0 {
		return 0
	}
	return (n*xy - x*y) / (n*xx - x*x) / (y / n)
}

// mean returns the mean of all samples.
func (s *series) mean() (mean float64) {
	for _, p := range s.samples {
		mean += p.value / float64(len(s.samples))
	}
	return mean
}
