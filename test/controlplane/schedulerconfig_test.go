package controlplane

import (
	"os"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/test/check"
)

func shippedConfig(t *testing.T) string {
	t.Helper()
	data, err := os.ReadFile("../../config/scheduler-config.yaml")
	must(t, err)
	return string(data)
}

func decode(t *testing.T, data string) (config map[string]any) {
	t.Helper()
	must(t, yaml.Unmarshal([]byte(data), &config))
	return config
}

func TestSchedulerConfig(t *testing.T) {
	shipped := shippedConfig(t)
	got, err := schedulerConfig([]byte(shipped), "/k", SchedulerOptions{
		ExtenderURL: "http://127.0.0.1:4711/", Edits: []ConfigEdit{ClientLimits(500, 600)},
	})
	must(t, err)
	want := decode(t, shipped)
	want["clientConnection"] = map[string]any{"kubeconfig": "/k", "qps": 500.0, "burst": 600.0}
	want["extenders"].([]any)[0].(map[string]any)["urlPrefix"] = "http://127.0.0.1:4711/gpushare-scheduler"
	check.Equal(t, "the result", want, decode(t, string(got)))
}

func TestSchedulerConfigNoExtender(t *testing.T) {
	shipped := shippedConfig(t)
	got, err := schedulerConfig([]byte(shipped), "/k", SchedulerOptions{})
	must(t, err)
	want := decode(t, shipped)
	want["clientConnection"] = map[string]any{"kubeconfig": "/k"}
	delete(want, "extenders")
	check.Equal(t, "the result", want, decode(t, string(got)))
}

func TestSchedulerConfigMissingKey(t *testing.T) {
	for _, key := range []string{"clientConnection:", "kubeconfig:", "extenders:", "urlPrefix:"} {
		t.Run(key, func(t *testing.T) {
			renamed := strings.Replace(shippedConfig(t), key, "renamed"+key, 1)
			if strings.Count(renamed, "renamed") != 1 {
				t.Fatalf("the shipped configuration doesn't have exactly one %s", key)
			}
			_, err := schedulerConfig([]byte(renamed), "/k", SchedulerOptions{ExtenderURL: "http://127.0.0.1:1"})
			if err == nil || !strings.Contains(err.Error(), "missing") {
				t.Errorf("got %v, want an error", err)
			}
		})
	}
}
