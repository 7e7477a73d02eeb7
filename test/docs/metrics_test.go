package docs

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/features"
	featurestesting "k8s.io/client-go/features/testing"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/deviceplugin"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/metrics"
	"github.com/gpushare/gpushare/pkg/mps"
	"github.com/gpushare/gpushare/pkg/usage"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/controlplane"
	testfake "github.com/gpushare/gpushare/test/fake"
)

// series are the labels of metrics by name.
type series map[string][]string

// described is a Registerer that records the descriptions of collectors, including metrics without a series yet.
type described struct {
	prometheus.Registerer
	found series
}

var description = regexp.MustCompile(`fqName: "([^"]+)".*variableLabels: \{([^}]*)\}`)

func (d described) MustRegister(collectors ...prometheus.Collector) {
	for _, collector := range collectors {
		ch := make(chan *prometheus.Desc)
		go func() {
			defer close(ch)
			collector.Describe(ch)
		}()
		for desc := range ch {
			parts := description.FindStringSubmatch(desc.String())
			if parts == nil {
				panic("unknown form of a description: " + desc.String())
			}
			d.found[parts[1]] = slices.DeleteFunc(strings.Split(parts[2], ","), func(s string) bool { return s == "" })
		}
	}
}

// extenderSeries returns the metrics of the extender's own collectors.
func extenderSeries() series {
	d := described{prometheus.NewRegistry(), series{}}
	metrics.NewExtender(d)
	metrics.NewLeader(d)
	ready := func() error { return nil }
	metrics.NewLedger(d, ledger.New(), ready, func() bool { return true })
	metrics.NewCluster(d, nil)
	metrics.NewPending(d, ready, 0, func() metrics.PendingPods { return metrics.PendingPods{} })
	metrics.NewFairShare(d).Tenants(ready, nil, nil)
	metrics.NewGangs(d).Count(func() map[string]int { return nil })
	return d.found
}

var sample = regexp.MustCompile(`^(\w+)(?:\{([^}]*)\})? `)

// pluginMetrics returns the metrics of a running device plugin.
func pluginMetrics(t *testing.T) string {
	t.Helper()
	address := controlplane.ReservePortForTest(t).Address()
	api := fake.NewClientset()
	featurestesting.SetFeatureDuringTest(t, features.WatchListClient, false) // api can't send a list as a watch.
	client := deviceplugin.Client{
		Pods: func(namespace string) deviceplugin.Objects[*corev1.Pod, *corev1.PodList] {
			return api.CoreV1().Pods(namespace)
		},
		Nodes: api.CoreV1().Nodes(), Slices: testfake.Slices(),
	}
	plugin, err := deviceplugin.New(deviceplugin.Options{
		Client: client, Events: &record.FakeRecorder{}, NodeName: "n1",
		Directory: t.TempDir(), ListenAddress: address,
	})
	check.Must(t, err)
	plugin.SetCards(gpu.GiB, []gpu.Card{{Index: 0, Memory: 16}}, nil, nil, "")
	await.Run(t, plugin.Run)
	var text []byte
	await.True(t, "the plugin has its cards", func() bool {
		response, err := http.Get("http://" + address + "/metrics")
		if err != nil {
			return false
		}
		defer response.Body.Close()
		text, err = io.ReadAll(response.Body)
		return err == nil && strings.Contains(string(text), "gpushare_device_plugin_cards")
	})
	return string(text)
}

// pluginSeries parses the metrics of a scrape. The plugin initializes all label values, so every metric has a series.
func pluginSeries(text string) series {
	found := series{}
	for line := range strings.Lines(text) {
		parts := sample.FindStringSubmatch(line)
		if parts == nil || !strings.HasPrefix(parts[1], "gpushare_") {
			continue
		}
		labels := []string{}
		for pair := range strings.SplitSeq(parts[2], ",") {
			if name, _, ok := strings.Cut(pair, "="); ok && name != "le" {
				labels = append(labels, name)
			}
		}
		found[base(parts[1])] = labels
	}
	return found
}

// base returns a histogram's name without the suffixes that Prometheus adds.
func base(name string) string {
	for _, suffix := range []string{"_bucket", "_sum", "_count"} {
		if stem, ok := strings.CutSuffix(name, suffix); ok && strings.HasSuffix(stem, "_seconds") {
			return stem
		}
	}
	return name
}

func allSeries(t *testing.T) series {
	all := extenderSeries()
	maps.Copy(all, pluginSeries(pluginMetrics(t)))
	d := described{prometheus.NewRegistry(), all}
	d.MustRegister(usage.NewCollector(nil, true))
	mps.NewMetrics(d)
	if len(all) < 20 {
		t.Fatalf("too few metrics: %d: %v", len(all), all)
	}
	return all
}

func TestPluginMetricsLint(t *testing.T) {
	problems, err := promlint.New(strings.NewReader(pluginMetrics(t))).Lint()
	check.Must(t, err)
	for _, p := range problems {
		if strings.HasPrefix(p.Metric, "gpushare_") {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}

var metricRow = regexp.MustCompile("^\\| `(gpushare_[a-z_]+)` \\| \\w+ \\|([^|]*)\\|")

func TestMetricsDocumented(t *testing.T) {
	documented := series{}
	for line := range strings.Lines(read(t, "docs/metrics.md")) {
		if parts := metricRow.FindStringSubmatch(line); parts != nil {
			documented[parts[1]] = nil
			// Values are in parentheses after the label's name.
			for label := range strings.SplitSeq(regexp.MustCompile(`\([^)]*\)`).ReplaceAllString(parts[2], ""), ",") {
				if label = strings.Trim(label, " `"); label != "" {
					documented[parts[1]] = append(documented[parts[1]], label)
				}
			}
		}
	}
	if diff := cmp.Diff(sorted(allSeries(t)), sorted(documented)); diff != "" {
		t.Errorf("metrics (-code +docs/metrics.md):\n%s", diff)
	}
}

// TestCountersStartAtZero checks that the extender's counters have a series for each documented value of their label from the start:
// of a series that appears with the first event, Prometheus sees no increase.
func TestCountersStartAtZero(t *testing.T) {
	registry := prometheus.NewRegistry()
	metrics.NewExtender(registry)
	metrics.NewFairShare(registry)
	metrics.NewGangs(registry)
	families, err := registry.Gather()
	check.Must(t, err)
	found, documented := map[string][]string{}, map[string][]string{}
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			if labels := metric.GetLabel(); family.GetType() == dto.MetricType_COUNTER && len(labels) == 1 {
				found[family.GetName()] = append(found[family.GetName()], labels[0].GetValue())
			}
		}
	}
	for _, row := range counterRow.FindAllStringSubmatch(read(t, "docs/metrics.md"), -1) {
		for _, value := range backquoted.FindAllStringSubmatch(row[2], -1) {
			documented[row[1]] = append(documented[row[1]], value[1])
		}
		slices.Sort(documented[row[1]])
		documented[row[1]] = slices.Compact(documented[row[1]])
	}
	if diff := cmp.Diff(documented, found); diff != "" {
		t.Errorf("values of labels (-docs/metrics.md +code):\n%s", diff)
	}
}

var (
	// counterRow is the row of one of the extender's counters. The values of its label are in parentheses.
	counterRow = regexp.MustCompile("(?m)^\\| `(gpushare_extender_[a-z_]+)` \\| counter \\| `[a-z]+` (.*)$")
	backquoted = regexp.MustCompile("`([a-z_]+)`")
)

func sorted(s series) map[string]string {
	out := map[string]string{}
	for name, labels := range s {
		out[name] = strings.Join(slices.Sorted(slices.Values(labels)), ",")
	}
	return out
}

var (
	usedMetric  = regexp.MustCompile(`(gpushare_[a-z_]+)(\{[^}]*\})?`)
	usedMatcher = regexp.MustCompile(`(\w+)\s*(?:=~|!~|!=|=)`)
)

// checkExpression returns a message for each metric and label in the expression that doesn't exist.
func checkExpression(all series, expression string) (problems []string) {
	for _, use := range usedMetric.FindAllStringSubmatch(expression, -1) {
		labels, known := all[base(use[1])]
		if !known {
			problems = append(problems, "no metric "+use[1])
			continue
		}
		for _, matcher := range usedMatcher.FindAllStringSubmatch(use[2], -1) {
			if !slices.Contains(labels, matcher[1]) {
				problems = append(problems, fmt.Sprintf("%s has no label %s", use[1], matcher[1]))
			}
		}
	}
	return problems
}

// expressions returns all values of the keys "expr" and "query".
func expressions(value any) (out []string) {
	switch v := value.(type) {
	case map[string]any:
		for key, inner := range v {
			if text, ok := inner.(string); ok && (key == "expr" || key == "query") {
				out = append(out, text)
			}
			out = append(out, expressions(inner)...)
		}
	case []any:
		for _, inner := range v {
			out = append(out, expressions(inner)...)
		}
	}
	return out
}

func TestDashboardAndAlertMetrics(t *testing.T) {
	all := allSeries(t)
	for _, file := range []string{"deploy/helm/gpushare/files/dashboard.json", "deploy/helm/gpushare/files/rules.yaml"} {
		var content any
		if err := yaml.Unmarshal([]byte(read(t, file)), &content); err != nil {
			t.Fatal(file, err)
		}
		uses := 0
		for _, expression := range expressions(content) {
			uses += len(usedMetric.FindAllString(expression, -1))
			for _, problem := range checkExpression(all, expression) {
				t.Errorf("%s: %s in %s", file, problem, expression)
			}
		}
		if uses < 8 {
			t.Errorf("%s uses too few metrics: %d", file, uses)
		}
	}
	if problems := checkExpression(all, `rate(gpushare_nothing[1m]) + gpushare_extender_allocations{node="a"}`); len(problems) != 2 {
		t.Errorf("unknown names not found: %v", problems)
	}
	var dashboard map[string]any
	if err := json.Unmarshal([]byte(read(t, "deploy/helm/gpushare/files/dashboard.json")), &dashboard); err != nil {
		t.Errorf("the dashboard is not JSON: %v", err)
	}
}

// TestPageMetrics checks that the metrics and labels that the pages name exist. A name before "…" is a prefix.
func TestPageMetrics(t *testing.T) {
	all := allSeries(t)
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil || len(pages) == 0 {
		t.Fatal(pages, err)
	}
	prefix := regexp.MustCompile(`gpushare_[a-z_]*…`)
	for _, page := range pages {
		text := prefix.ReplaceAllString(read(t, "docs/"+filepath.Base(page)), "")
		for _, problem := range checkExpression(all, text) {
			t.Errorf("%s: %s", page, problem)
		}
	}
}

func TestAlertsDocumented(t *testing.T) {
	var rules struct {
		Groups []struct {
			Rules []struct {
				Alert       string
				Annotations struct{ Runbook string }
			}
		}
	}
	check.Must(t, yaml.Unmarshal([]byte(read(t, "deploy/helm/gpushare/files/rules.yaml")), &rules))
	var alerts []string
	for _, rule := range rules.Groups[0].Rules {
		alerts = append(alerts, rule.Alert)
		if want := "docs/monitoring.md#" + strings.ToLower(rule.Alert); rule.Annotations.Runbook != want {
			t.Errorf("%s: runbook %s, want %s", rule.Alert, rule.Annotations.Runbook, want)
		}
	}
	var documented []string
	for _, heading := range regexp.MustCompile(`(?m)^### (\w+)$`).FindAllStringSubmatch(read(t, "docs/monitoring.md"), -1) {
		documented = append(documented, heading[1])
	}
	if diff := cmp.Diff(alerts, documented); diff != "" {
		t.Errorf("alerts (-rules.yaml +headings of docs/monitoring.md):\n%s", diff)
	}
}

// read returns the content of a file of the repository.
func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", name))
	check.Must(t, err)
	return string(text)
}
