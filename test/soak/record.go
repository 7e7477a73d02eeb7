package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// Metrics of the programs besides those of test/framework.
const (
	metricOverfull   = "gpushare_extender_overfull_cards"
	metricWrites     = "gpushare_extender_api_writes_total"
	metricSeconds    = "gpushare_extender_request_duration_seconds_sum"
	metricCalls      = "gpushare_extender_request_duration_seconds_count"
	metricGoroutines = "go_goroutines"
)

// scrapeTimeout is how long an answer of a program may take. A frozen one doesn't answer.
const scrapeTimeout = 2 * time.Second

// record samples the programs, and checks what containers got.
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
	// pods is the number of bound pods since the last sample with metrics, and last the time of the last sample.
	pods int
	last time.Time
}

func newRecord(w *week) *record {
	now := time.Now()
	return &record{week: w, started: now, last: now, totals: map[string]float64{}, wrong: map[string]int{}}
}

// run takes samples until the week is over.
func (r *record) run(ctx context.Context) error {
	ticker, day := time.NewTicker(r.interval), time.NewTicker(r.day())
	defer ticker.Stop()
	defer day.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-day.C:
			fmt.Printf("%v: %d pods created, %d faults and updates\n", time.Since(r.started).Round(time.Second), r.load.totals().created, r.trouble.count())
			continue
		case <-ticker.C:
		}
		err := r.check(ctx)
		r.sample(ctx)
		if err != nil && ctx.Err() == nil {
			return err
		}
	}
}

// check returns an error if the leader keeps finding a card over its size, or a container keeps having other cards than its pod's
// annotation says. The plugin corrects an annotation soon after the container has started.
func (r *record) check(ctx context.Context) error {
	// The leader counts also cores and containers. Its watch can be behind, so that one value alone shows nothing.
	if values, err := scrape(ctx, r.cluster.ExtenderURL, metricOverfull); err == nil && values[metricOverfull] > 0 {
		if r.overfull++; r.overfull > 3 {
			return fmt.Errorf("%s is %v", metricOverfull, values[metricOverfull])
		}
	} else {
		r.overfull = 0
	}
	annotated := r.load.cardsOfRunning()
	wrong := map[string]int{}
	for _, node := range r.running {
		for _, c := range node.Kubelet.Containers() {
			want, running := annotated[c.PodUID]
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

func scrape(ctx context.Context, url string, metrics ...string) (map[string]float64, error) {
	ctx, cancel := context.WithTimeout(ctx, scrapeTimeout)
	defer cancel()
	return framework.Scrape(ctx, url+"/metrics", metrics...)
}

// sample takes a sample of each series. One that can't be read, such as of a frozen replica, is left out.
func (r *record) sample(ctx context.Context) {
	r.process("extender", r.cluster.Replicas[watchedReplica].Pid())
	r.process("device plugin", r.running[watchedNode].Plugin.Pid())
	if values, err := scrape(ctx, r.pluginURL, metricGoroutines); err == nil {
		r.add("device plugin, goroutines", "", always, values[metricGoroutines])
	}
	r.samplePods()
	grown := map[string]float64{}
	for i, url := range r.cluster.ReplicaURLs {
		values, err := scrape(ctx, url, metricWrites, metricSeconds, metricCalls, metricGoroutines)
		if err != nil {
			continue // It is frozen, or starts.
		}
		if i == watchedReplica {
			r.add("extender, goroutines", "", always, values[metricGoroutines])
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

// samplePods adds the series of the load.
func (r *record) samplePods() {
	s := r.load.takeSample()
	since := time.Since(r.last)
	r.last = time.Now()
	r.pods += len(s.waits)
	r.add("memory allocated", "%", never, 100*float64(s.allocated)/float64(r.nodes*r.cards*cardMemory))
	r.add("pods waiting", "", never, float64(s.waiting))
	r.add("pods bound", "per s", never, float64(len(s.waits))/since.Seconds())
	if len(s.waits) > 0 {
		r.add("wait until bound, median", "s", inLongRuns, median(s.waits))
		r.add("wait until bound, 99th percentile", "s", never, s.waits[len(s.waits)*99/100])
	}
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
			r.add(verb+", mean", "ms", inLongRuns, 1000*sum/count)
		}
	}
	writes := 0.0
	for name, value := range grown {
		if strings.HasPrefix(name, metricWrites) {
			writes += value
		}
	}
	if r.pods > 0 && len(grown) > 0 {
		r.add("writes to the API server", "per bound pod", always, writes/float64(r.pods))
		r.pods = 0
	}
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
	r.add(name+", memory", "MiB", always, float64(pages)*float64(os.Getpagesize())/(1<<20))
	r.add(name+", open files", "", always, float64(len(files)))
}

// add adds a sample to a series.
func (r *record) add(name, unit string, judged judgement, value float64) {
	i := slices.IndexFunc(r.all, func(s *series) bool { return s.name == name })
	if i < 0 {
		i = len(r.all)
		r.all = append(r.all, &series{name: name, unit: unit, judged: judged})
	}
	r.all[i].samples = append(r.all[i].samples, sample{time.Since(r.started), value})
}
