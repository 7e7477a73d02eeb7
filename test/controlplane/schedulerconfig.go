package controlplane

import (
	"errors"
	"fmt"
	"net/url"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// SchedulerOptions configure kube-scheduler.
type SchedulerOptions struct {
	// ExtenderURL is the address of the extender, such as "http://127.0.0.1:12345"; only scheme, host and port are
	// used. If it is empty, the scheduler runs without an extender.
	ExtenderURL string
	// ConfigFile is the configuration to start from; by default config/scheduler-config.yaml of this repository.
	ConfigFile string
	// Edits are further changes of the configuration.
	Edits []ConfigEdit
}

// ConfigEdit changes a decoded KubeSchedulerConfiguration.
type ConfigEdit func(config map[string]any) error

// ClientLimits sets the rate limit of the scheduler's API client. The scheduler's default is 50 requests per second.
func ClientLimits(qps float64, burst int64) ConfigEdit {
	return func(config map[string]any) error {
		return errors.Join(
			unstructured.SetNestedField(config, qps, "clientConnection", "qps"),
			unstructured.SetNestedField(config, burst, "clientConnection", "burst"))
	}
}

// NodesToScore sets the percentage of feasible nodes at which the scheduler stops looking for more, 0 for its own default.
func NodesToScore(percentage int64) ConfigEdit {
	return func(config map[string]any) error {
		return unstructured.SetNestedField(config, percentage, "percentageOfNodesToScore")
	}
}

// ExtenderTimeout sets how long the scheduler waits for an answer of the extenders. In a test in which an extender hangs,
// it is the time that the scheduler hangs too.
func ExtenderTimeout(timeout time.Duration) ConfigEdit {
	return func(config map[string]any) error {
		for _, extender := range config["extenders"].([]any) {
			extender.(map[string]any)["httpTimeout"] = timeout.String()
		}
		return nil
	}
}

// MaxBackoff bounds the time after which the scheduler retries a pod whose attempt failed. The default is 10 s.
func MaxBackoff(seconds int64) ConfigEdit {
	return func(config map[string]any) error {
		config["podMaxBackoffSeconds"] = seconds
		return nil
	}
}

// schedulerConfig returns the shipped configuration with other addresses and paths. Each changed key must exist in the
// shipped file, so that a renamed key is an error.
func schedulerConfig(shipped []byte, kubeconfig string, o SchedulerOptions) ([]byte, error) {
	var config map[string]any
	if err := yaml.UnmarshalStrict(shipped, &config); err != nil {
		return nil, fmt.Errorf("decoding: %w", err)
	}
	if _, found, err := unstructured.NestedString(config, "clientConnection", "kubeconfig"); err != nil || !found {
		return nil, errors.Join(errors.New("clientConnection.kubeconfig is missing"), err)
	}
	if err := unstructured.SetNestedField(config, kubeconfig, "clientConnection", "kubeconfig"); err != nil {
		return nil, err
	}
	if err := pointExtenders(config, o.ExtenderURL); err != nil {
		return nil, err
	}
	for _, edit := range o.Edits {
		if err := edit(config); err != nil {
			return nil, fmt.Errorf("editing: %w", err)
		}
	}
	return yaml.Marshal(config)
}

func pointExtenders(config map[string]any, to string) error {
	extenders, ok := config["extenders"].([]any)
	if !ok || len(extenders) == 0 {
		return errors.New("extenders are missing")
	}
	if to == "" {
		delete(config, "extenders")
		return nil
	}
	target, err := url.Parse(to)
	if err != nil || target.Host == "" {
		return errors.Join(fmt.Errorf("the extender's URL %q has no host", to), err)
	}
	for i, entry := range extenders {
		extender, _ := entry.(map[string]any)
		prefix, ok := extender["urlPrefix"].(string)
		if !ok {
			return fmt.Errorf("extenders[%d].urlPrefix is missing", i)
		}
		parsed, err := url.Parse(prefix)
		if err != nil {
			return fmt.Errorf("extenders[%d].urlPrefix: %w", i, err)
		}
		parsed.Scheme, parsed.Host = target.Scheme, target.Host
		extender["urlPrefix"] = parsed.String()
	}
	return nil
}
