package nodee2e

import (
	"fmt"
	"math"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/test/framework"
)

// TestFigures logs the plugin's time per Allocate call and its memory on a full node with eight cards. It checks no limits,
// because the figures mean little on a machine that also does other work.
func TestFigures(t *testing.T) {
	r := startRig(t, cardMiB, cardMiB, cardMiB, cardMiB, cardMiB, cardMiB, cardMiB, cardMiB)
	defer r.report(t)
	r.play(t, "a hundred pods, forty of them of one size at once", func(s *scene) {
		for range 3 {
			s.burst(times(14, func() *corev1.Pod { return s.shaped(1) })...)
			s.burst(times(6, func() *corev1.Pod { return s.shaped(2) })...)
			s.settle()
		}
		s.burst(times(40, func() *corev1.Pod { return s.pod(1) })...)
		s.settle()
		metrics, err := framework.Fetch(s.Context(), s.node.metrics.URL("http")+"/metrics")
		must(s, err)
		calls := histogram(string(metrics), "gpushare_device_plugin_allocation_duration_seconds")
		s.Logf("%.0f calls of Allocate: half took %s at most, 99%% took %s at most", calls.count(), calls.quantile(0.5), calls.quantile(0.99))
		s.Logf("the plugin has %s resident", s.node.resident())
	})
}

// resident returns the plugin's resident memory.
func (n *node) resident() string {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", n.plugin.Pid()))
	if err != nil {
		return err.Error()
	}
	for line := range strings.SplitSeq(string(status), "\n") {
		if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			return strings.TrimSpace(value)
		}
	}
	return "nothing"
}

// buckets are the buckets of a histogram in ascending order: count observations were at most atMost.
type buckets []struct{ atMost, count float64 }

var bucketLine = regexp.MustCompile(`_bucket\{le="([^"]+)"\} (\S+)$`)

// histogram parses a histogram without labels.
func histogram(metrics, name string) (out buckets) {
	for line := range strings.SplitSeq(metrics, "\n") {
		rest, ok := strings.CutPrefix(line, name)
		if !ok {
			continue
		}
		if match := bucketLine.FindStringSubmatch(rest); match != nil {
			atMost, err := strconv.ParseFloat(match[1], 64)
			if err != nil {
				continue
			}
			count, _ := strconv.ParseFloat(match[2], 64)
			out = append(out, struct{ atMost, count float64 }{atMost, count})
		}
	}
	return out
}

func (b buckets) count() float64 {
	if len(b) == 0 {
		return 0
	}
	return b[len(b)-1].count
}

// quantile returns the upper bound of the bucket that contains the quantile.
func (b buckets) quantile(q float64) string {
	for _, bucket := range b {
		if bucket.count >= q*b.count() && !math.IsInf(bucket.atMost, 1) {
			return time.Duration(bucket.atMost * float64(time.Second)).String()
		}
	}
	return "more than that can be told"
}
