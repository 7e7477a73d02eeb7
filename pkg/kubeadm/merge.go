package kubeadm

import (
	"errors"
	"fmt"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/protocol"
)

const (
	kind  = "KubeSchedulerConfiguration"
	group = "kubescheduler.config.k8s.io/"
)

// Merge returns the configuration for kube-scheduler: ours, or the one that it has with our extender added. kubeconfig is
// the one that the scheduler is started with; it wins over ours, since --config makes kube-scheduler ignore the flag.
func Merge(theirs, ours []byte, kubeconfig string) ([]byte, error) {
	add, err := configuration(ours)
	if err != nil {
		return nil, fmt.Errorf("the configuration to install: %w", err)
	}
	extenders, _ := add["extenders"].([]any)
	if len(extenders) != 1 || !ofOurs(extenders[0]) {
		return nil, fmt.Errorf("the configuration to install: it must have one extender, one that manages %s", protocol.ResourceMemory)
	}
	if theirs == nil {
		connection, _ := add["clientConnection"].(map[string]any)
		if kubeconfig == "" || connection["kubeconfig"] == kubeconfig {
			return ours, nil
		}
		if connection == nil {
			connection = map[string]any{}
			add["clientConnection"] = connection
		}
		connection["kubeconfig"] = kubeconfig
		return yaml.Marshal(add)
	}
	base, err := configuration(theirs)
	if err != nil {
		return nil, fmt.Errorf("the configuration that kube-scheduler has: %w", err)
	}
	if base["apiVersion"] != add["apiVersion"] {
		return nil, fmt.Errorf("the configuration that kube-scheduler has is %v, ours is %v: give both one version", base["apiVersion"], add["apiVersion"])
	}
	kept := []any{}
	existing, _ := base["extenders"].([]any)
	for _, extender := range existing {
		fields, _ := extender.(map[string]any)
		switch verb, _ := fields["bindVerb"].(string); {
		case ofOurs(extender): // An older one of ours, or another gpushare's.
		case verb != "":
			return nil, fmt.Errorf("the configuration that kube-scheduler has names an extender that binds, %v; only one may", fields["urlPrefix"])
		default:
			kept = append(kept, extender)
		}
	}
	base["extenders"] = append(kept, extenders[0])
	for _, key := range []string{"percentageOfNodesToScore", "podMaxBackoffSeconds"} {
		if _, set := base[key]; !set && add[key] != nil {
			base[key] = add[key]
		}
	}
	return yaml.Marshal(base)
}

func configuration(data []byte) (map[string]any, error) {
	var config map[string]any
	if err := yaml.UnmarshalStrict(data, &config); err != nil {
		return nil, err
	}
	version, _ := config["apiVersion"].(string)
	if config["kind"] != kind || !strings.HasPrefix(version, group) {
		return nil, errors.New("it is no " + kind + " of " + strings.TrimSuffix(group, "/"))
	}
	return config, nil
}

func ofOurs(extender any) bool {
	fields, _ := extender.(map[string]any)
	managed, _ := fields["managedResources"].([]any)
	for _, resource := range managed {
		if fields, _ := resource.(map[string]any); fields["name"] == string(protocol.ResourceMemory) {
			return true
		}
	}
	return false
}
