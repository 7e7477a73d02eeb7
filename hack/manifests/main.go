// The plain manifests in deploy, and kube-scheduler's configurations in config, are rendered from the Helm chart by this
// program, so that there is one source of each. It runs in the repository's root; --check compares instead of writing.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

const chart = "deploy/helm/gpushare"

// manifest is a file made of some of the chart's templates.
type manifest struct {
	path, header string
	templates    []string
	// values are given by --set; replace changes what comes out.
	values  []string
	replace [][2]string
}

// address is a placeholder for the Service's address, which the manifest leaves to the API server.
const address = "10.96.0.15"

var (
	onHost    = []string{"extender.reach=host", "extender.replicas=1"}
	withTLS   = []string{"extender.tls.mode=secret", "extender.tls.secretName=gpushare-extender-tls", "extender.service.clusterIP=" + address}
	manifests = []manifest{{
		path: "deploy/manifests/extender.yaml",
		header: `The extender, on the control-plane node beside kube-scheduler, which reaches it at http://127.0.0.1:12345 (see
config/scheduler-config.yaml). One replica: a second one would not see the first one's latest allocations.`,
		templates: []string{"extender-account", "extender-evictions", "extender-deployment"},
		values:    onHost,
	}, {
		path:      "deploy/manifests/device-plugin.yaml",
		header:    "The device plugin, on every node labelled gpushare=true.",
		templates: []string{"device-plugin-account", "device-plugin-daemonset"},
		values:    onHost,
	}, {
		path: "deploy/replicas/extender.yaml",
		header: `Two extenders, one of which answers. Replaces deploy/manifests/extender.yaml. kube-scheduler reaches the leader at the
Service's address with config/scheduler-config-replicas.yaml. Both sides use certificates; the extender's are in the Secret
gpushare-extender-tls. docs/replicas.md has the commands.`,
		templates: []string{"extender-account", "extender-election", "extender-evictions", "extender-service", "extender-deployment"},
		values:    withTLS,
		replace: [][2]string{{`  clusterIP: "` + address + `"
`, `  # Set an address, or let the API server choose one.
  # clusterIP: ` + address + `
`}},
	}, {
		path: "deploy/second-scheduler/scheduler.yaml",
		header: `A second kube-scheduler with the extender in its pod, for control planes that can't be changed. Replaces
deploy/manifests/extender.yaml. Set your cluster's version in the scheduler's image.`,
		templates: []string{"extender-account", "extender-election", "extender-evictions", "second-scheduler-account", "second-scheduler-deployment"},
		values:    []string{"mode=secondScheduler"},
	}, {
		path:      "deploy/second-scheduler/policy.yaml",
		header:    "Refuses pods that request GPU memory and name another scheduler (Kubernetes 1.30 and later).",
		templates: []string{"second-scheduler-policy"},
		values:    []string{"mode=secondScheduler"},
	}, {
		path: "deploy/guard/guard.yaml",
		header: `Only gpushare sets the annotations that name cards (Kubernetes 1.30 and later). To allow another client, such as a backup
tool, add it to the list of users below.`,
		templates: []string{"guard"},
		values:    onHost,
	}, {
		path:      "deploy/monitoring/prometheusrule.yaml",
		header:    "Alerts for the Prometheus operator.",
		templates: []string{"prometheus-rule"},
		values:    append([]string{"monitoring.prometheusRule.enabled=true"}, withTLS...),
	}}
)

func main() {
	check := flag.Bool("check", false, "say what differs, and change nothing")
	helm := flag.String("helm", "", "path of helm; the pinned one where empty")
	flag.Parse()
	if err := run(*helm, *check); err != nil {
		fmt.Fprintln(os.Stderr, "manifests:", err)
		os.Exit(1)
	}
}

func run(helm string, check bool) error {
	if helm == "" {
		path, err := exec.Command("go", "-C", "hack/helm", "tool", "-n", "helm").Output()
		if err != nil {
			return fmt.Errorf("building helm: %w", err)
		}
		helm = strings.TrimSpace(string(path))
	}
	files := map[string][]byte{}
	for _, m := range manifests {
		text, err := m.render(helm)
		if err != nil {
			return fmt.Errorf("%s: %w", m.path, err)
		}
		files[m.path] = text
	}
	config, err := schedulerConfig(helm, onHost)
	if err != nil {
		return err
	}
	withReplicas, err := schedulerConfig(helm, withTLS)
	if err != nil {
		return err
	}
	// The certificate is made before the Service has its address.
	files["config/scheduler-config-replicas.yaml"] = bytes.ReplaceAll(withReplicas,
		[]byte(`serverName: "`+address+`"`), []byte("serverName: gpushare-extender.kube-system.svc"))
	files["config/scheduler-config.yaml"] = config
	var errs []error
	for path, text := range files {
		if check {
			have, err := os.ReadFile(path)
			if err != nil || !bytes.Equal(have, text) {
				errs = append(errs, fmt.Errorf("%s isn't what the chart renders: run `make manifests`", path))
			}
			continue
		}
		errs = append(errs, os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, text, 0o644))
	}
	return errors.Join(errs...)
}

// template renders one of the chart's templates.
func template(helm, name string, values []string) (string, error) {
	// These manifests can be applied without the guard, which nominations need.
	args := []string{"template", "gpushare", chart, "--set=scheduler.percentageOfNodesToScore=100", "--namespace=kube-system", "--kube-version=v1.37.2", "--show-only=templates/" + name + ".yaml"}
	for _, value := range values {
		args = append(args, "--set="+value)
	}
	command := exec.Command(helm, args...)
	var stderr bytes.Buffer
	command.Stderr = &stderr
	out, err := command.Output()
	if err != nil {
		return "", fmt.Errorf("rendering %s: %w: %s", name, err, stderr.String())
	}
	return string(out), nil
}

func (m manifest) render(helm string) ([]byte, error) {
	var documents []string
	for _, name := range m.templates {
		text, err := template(helm, name, m.values)
		if err != nil {
			return nil, err
		}
		for document := range strings.SplitSeq("\n"+text, "\n---\n") {
			if _, after, found := strings.Cut(document, ".yaml\n"); found && strings.HasPrefix(document, "# Source: ") {
				document = after
			}
			if document = strings.TrimSpace(document); document != "" {
				documents = append(documents, document)
			}
		}
	}
	text := "# Rendered from " + chart + " by `make manifests`.\n#\n# " + strings.ReplaceAll(m.header, "\n", "\n# ") + "\n" +
		strings.Join(documents, "\n---\n") + "\n"
	for _, r := range m.replace {
		if !strings.Contains(text, r[0]) {
			return nil, fmt.Errorf("nothing to replace: %q", r[0])
		}
		text = strings.ReplaceAll(text, r[0], r[1])
	}
	return []byte(text), nil
}

// schedulerConfig returns kube-scheduler's configuration for an extender that is installed with the values.
func schedulerConfig(helm string, values []string) ([]byte, error) {
	text, err := template(helm, "scheduler-config", values)
	if err != nil {
		return nil, err
	}
	var object struct {
		Data map[string]string `json:"data"`
	}
	if err := yaml.Unmarshal([]byte(text), &object); err != nil {
		return nil, fmt.Errorf("reading the scheduler's configuration: %w", err)
	}
	return []byte(object.Data["scheduler-config.yaml"]), nil
}
